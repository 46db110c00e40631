"""Turn a model into the parallel model, in the only order in which its changes work."""

from dataclasses import dataclass
from typing import Any

import torch

from opendit.config.names import BUT_ATTENTION
from opendit.kernels.recompute import recompute_in
from opendit.models import DiT, plan_of
from opendit.models.attention import local_attention
from opendit.models.layers import Attend, BlockOps
from opendit.models.parameter_names import fits
from opendit.models.segments import Varlen
from opendit.parallel.collectives import Group
from opendit.parallel.experts import divide_among, shard_experts
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline import PipelineStages, keep_stages
from opendit.parallel.rules import shard_units
from opendit.parallel.sequence import SequenceParallel
from opendit.parallel.streamed_blocks import spread_numbers
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
    """Prepare ``model`` for a run, in place, and return it. What the engine then does to its parameters (shards, for
    --plugin fsdp by :func:`apply_shards`) comes last.

    stages -> tensor -> expert -> sequence -> recompute -> compile -> shards:

    1. other ranks' blocks are left out, and the layers that ranks divide are replaced, experts among them: everything
       that follows works on a rank's part of the model;
    2. operations, attention and how ranks share sequences (``model.use``): sets all operations anew, and would undo 3;
    3. the rematerialization policy, which wraps those operations; or whole blocks that are recomputed;
    4. compile, which traces what exists by then, policy included, at the first call;
    5. shards, which hang hooks on the blocks, and cut the stack as compile does (``opendit.models.blocks``).

    Args:
        ops, attend, varlen: kernels or their references, see ``opendit.kernels.select``.
        sequence: how ranks share every sample; None if they do not.
        tensor: ranks that divide every layer, see ``opendit.parallel.tensor``; None if none do.
        experts: ranks that have different experts, see ``opendit.parallel.experts``; None if none do.
        stages: this rank's stages of a pipeline, see ``opendit.parallel.pipeline``; None for the full model.
        recompute: none, norms, cheap, half or mlp, see ``opendit.kernels.recompute``; or but_attention: all of a block
            but its attention.
        grad_checkpoint: recompute blocks in the backward pass.
        recompute_blocks: of whole blocks that are recomputed, recompute this many, evenly spread; None: all.
        compiled: torch.compile for blocks and final layer.
        compile_options: of torch.compile.
    """
    if stages is not None:
        keep_stages(model, stages)
    if experts is not None:
        divide_among(model, experts)
    shared = sequence if tensor is None else divide(model, tensor, sequence)
    model.use(ops=ops, attend=attend, varlen=varlen, sequence=shared)
    blocks = recompute == BUT_ATTENTION
    recompute_in(model, "none" if blocks else recompute)
    model.grad_checkpoint = recompute if blocks else grad_checkpoint
    if recompute_blocks is not None:
        numbers = spread_numbers(len(model.blocks), recompute_blocks)
        for number, block in enumerate(model.blocks):
            block.recomputed = number in numbers
    if compiled:
        model.compile_blocks(**compile_options)
    return model


# ------------------------------------------------------------------------------------------------------------- shards

PREFETCHED = 1  # units that are gathered ahead of the one that computes


@dataclass(frozen=True)
class Sharding:
    """Settings by which ``fully_shard`` divides a model.

    Attributes:
        dtype: of the gathered weights; the shards stay as they are.
        reduce_dtype: in which gradients are summed over ranks.
        keep_gathered: weights stay gathered from the forward to the backward pass (the traffic of ZeRO-2); otherwise
            they are freed in between and gathered again.
        keep_gradients: of several micro-batches, unreduced gradient sums are kept, and only the last backward pass
            reduces them; otherwise every backward pass does.
        gather_float8: :func:`float8_weights` are gathered in float8 (opendit/parallel/float8_gather.py); otherwise in
            ``dtype``, and operations cast them. The values are the same.
    """

    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    keep_gathered: bool = True
    keep_gradients: bool = True
    gather_float8: bool = False


def apply_shards(model: DiT, mesh: Mesh, sharding: Sharding) -> None:
    """Shard the parameters of ``model``, in place, by the units of its plan: along dimension 0 among the ranks of the
    group ``fsdp``; each of ``dp_replicate`` has a copy. They become DTensors, and calls of a unit gather and free its
    weights. Experts that ranks divide are gathered apart (``opendit.parallel.experts``). Frozen weights, which no
    optimizer needs exactly, are stored in ``sharding.dtype``.

    While a unit computes, the next one's weights are gathered. Blocks compute their modulation themselves from then on,
    because weights exist only while their unit is called.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a second, which sampling need not wait

    names = ("dp_replicate", "fsdp") if mesh.dims.dp_replicate > 1 else ("fsdp",)
    outer, inner = ("pp",) if mesh.pp_size > 1 else (), ("tp",) if mesh.tp_size > 1 else ()
    grid = mesh.device_mesh(*outer, *names, *inner)
    grid = grid[names] if outer or inner else grid
    settings: dict[str, Any] = dict(
        mesh=grid,
        mp_policy=MixedPrecisionPolicy(sharding.dtype, sharding.reduce_dtype, cast_forward_inputs=False),
        reshard_after_forward=not sharding.keep_gathered,
    )
    if experts := shard_experts(model, mesh, sharding.dtype, sharding.reduce_dtype):
        settings["ignored_params"] = experts
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(sharding.dtype)
    units = shard_units(plan_of(model.config), (name for name, _ in model.named_parameters()))
    called: list[Any] = [model.get_submodule(name) for name in units if name]
    for module in called:
        fully_shard(module, **settings)
    model.modulate_in_blocks = True
    # Parameters outside of all units are used at the beginning and at the end of both passes: they stay gathered.
    settings["reshard_after_forward"] = False
    fully_shard(model, **settings)
    for place, module in enumerate(called):
        module.set_modules_to_forward_prefetch(called[place + 1 : place + 1 + PREFETCHED])
        module.set_modules_to_backward_prefetch(called[max(0, place - PREFETCHED) : place][::-1])


def float8_weights(model: DiT) -> list[str]:
    """Return the names of the weights that only operations in float8 read. None if blocks are compiled: torch's
    compiler can't handle weights that exist in float8 alone."""

    def in_float8(operation: str) -> bool:
        kernel = model.ops.kernel(operation)
        return kernel is not None and kernel.float8

    if any(block._compiled_call_impl is not None for block in model.blocks):
        return []
    projections = plan_of(model.config).projections(model.config)
    patterns = [pattern for pattern, operations in projections.items() if all(map(in_float8, operations))]
    names = (name for name, _ in model.named_modules())
    return [f"{name}.weight" for name in names if any(fits(pattern, name) for pattern in patterns)]
