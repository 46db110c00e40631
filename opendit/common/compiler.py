"""torch's compiler, left alone until somebody compiles: importing it takes 2 s of CPU time."""

import torch

# torch.compiler.disable, as torch's optimizers have it: imports the compiler in the first call, not to decorate.
not_compiled = getattr(torch, "_disable_dynamo", torch.compiler.disable)
