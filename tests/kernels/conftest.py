"""test_operators.py needs TRITON_INTERPRET=1 from before triton's import, which would also turn the kernels of every
other test in the process into interpreted ones. So it runs in a process of its own (test_interpreter.py starts it)."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_operators.py"]
