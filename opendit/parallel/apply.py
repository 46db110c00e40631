"""A model becomes the parallel model, in the one order in which its changes may come."""

from opendit.kernels.recompute import recompute_in
from opendit.models import DiT
from opendit.models.attention import local_attention
from opendit.models.layers import Attend, BlockOps
from opendit.parallel.sequence import SequenceParallel


def apply_parallel(
    model: DiT,
    *,
    ops: BlockOps | None = None,
    attend: Attend = local_attention,
    sequence: SequenceParallel | None = None,
    recompute: str = "none",
    grad_checkpoint: bool = False,
    compiled: bool = False,
    **compile_options,
) -> DiT:
    """``model`` with everything that a run puts into it, in place; returns it. What the engine then does to its
    parameters (shards) comes last.

    tensor -> expert -> sequence -> recompute -> compile -> shards:

    1. operations, attention and how ranks share sequences (``model.use``), which sets all operations anew, and so would
       undo 2;
    2. the rematerialization policy, which wraps those operations; or whole blocks that are recomputed;
    3. compile, which traces what is there by then, policy included; it begins with the first call;
    4. shards: they hang hooks on the blocks, and cut the stack as compile does (``opendit.models.blocks``).

    Args:
        ops, attend: kernels or their references, see ``opendit.kernels.select``.
        sequence: how ranks share every sample, None: they do not.
        recompute: none, norms, cheap, half or mlp, see ``opendit.kernels.recompute``.
        grad_checkpoint: recompute blocks in the backward pass.
        compiled: torch.compile for blocks and final layer; ``compile_options`` are its.
    """
    model.use(ops=ops, attend=attend, sequence=sequence)
    recompute_in(model, recompute)
    model.grad_checkpoint = grad_checkpoint
    if compiled:
        model.compile_blocks(**compile_options)
    return model
