"""Apply all forms of parallelism to a model, in the only order that works."""

from typing import Any

from opendit.config.names import BUT_ATTENTION
from opendit.kernels.recompute import recompute_in
from opendit.models.attention import local_attention
from opendit.models.dit import DiT
from opendit.models.layers import Attend, BlockOps
from opendit.models.segments import Varlen
from opendit.parallel.collectives import Group
from opendit.parallel.experts import divide_among
from opendit.parallel.host_memory import spread_numbers
from opendit.parallel.pipeline import PipelineStages, keep_stages
from opendit.parallel.sequence import SequenceParallel
from opendit.parallel.tensor import divide


def apply_parallel(
    model: DiT,
    *,
    ops: BlockOps | None = None,
    attend: Attend = local_attention,
    varlen: Varlen | None = None,
    sequence: SequenceParallel | None = None,
    tensor: Group | None = None,
    experts: Group | None = None,
    stages: PipelineStages | None = None,
    recompute: str = "none",
    grad_checkpoint: bool = False,
    recompute_blocks: int | None = None,
    compiled: bool = False,
    **compile_options: Any,
) -> DiT:
    """Prepare ``model`` for a run, in place, and return it. The engine later wraps or shards the parameters.

    Stages, experts and tensor first reduce the model to this rank's weights. ``model.use`` then replaces all
    operations, and the recomputation policy wraps them. torch.compile comes last.

    Args:
        ops, attend, varlen: kernels or their references, see ``opendit.kernels.select``.
        sequence, tensor, experts: groups of ranks that divide tokens, layers and experts; None without such a division.
        stages: this rank's stages of a pipeline; None for the full model.
        recompute: none, norms, cheap, half or mlp, see ``opendit.kernels.recompute``; or but_attention.
        grad_checkpoint: True to recompute complete blocks in the backward pass.
        recompute_blocks: number of blocks for grad_checkpoint or but_attention, evenly spaced; None for all.
        compile_options: options of torch.compile for the blocks and the final layer, if ``compiled``.
    """
    if stages is not None:
        keep_stages(model, stages)
    if experts is not None:
        divide_among(model, experts)
    shared = sequence if tensor is None else divide(model, tensor, sequence)
    model.use(ops=ops, attend=attend, varlen=varlen, sequence=shared)
    but_attention = recompute == BUT_ATTENTION
    recompute_in(model, "none" if but_attention else recompute)
    model.grad_checkpoint = BUT_ATTENTION if but_attention else grad_checkpoint
    if recompute_blocks is not None:
        numbers = spread_numbers(len(model.blocks), recompute_blocks)
        for number, block in enumerate(model.blocks):
            block.recomputed = number in numbers
    if compiled:
        model.compile_blocks(**compile_options)
    return model
