"""Apply all forms of parallelism to a model, in the only order that works."""

from dataclasses import dataclass
from typing import Any

import torch

from opendit.config.names import BUT_ATTENTION
from opendit.kernels.recompute import recompute_in
from opendit.models.attention import local_attention
from opendit.models.dit import DiT
from opendit.models.layers import Attend, BlockOps
from opendit.models.parameter_names import fits
from opendit.models.segments import Varlen
from opendit.models.zoo import plan_of
from opendit.parallel.collectives import Group
from opendit.parallel.experts import divide_among, shard_experts
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline import PipelineStages, keep_stages
from opendit.parallel.rules import shard_units
from opendit.parallel.sequence import SequenceParallel
from opendit.parallel.streamed_blocks import AHEAD, spread_numbers
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
    """Prepare ``model`` for a run, in place, and return it. The engine changes the parameters afterwards; for
    --plugin fsdp it shards them with :func:`apply_shards`.

    The order is stages -> tensor -> experts -> sequence -> recompute -> compile -> shards:

    1. Remove the blocks of other pipeline stages, and replace the layers and experts that ranks divide. All later
       changes work on this rank's part of the model.
    2. Set operations, attention and sequence parallelism (``model.use``). This replaces all operations, so it must come
    before step 3.
    3. Apply the rematerialization policy, which wraps these operations; or let whole blocks be recomputed.
    4. Compile. At the first call, torch.compile traces the model with all previous changes, including the policy.
    5. Shard. This adds hooks to the blocks, and divides the stack at the same places as compile
       (``opendit.models.blocks``).

    Args:
        ops, attend, varlen: kernels or their references, see ``opendit.kernels.select``.
        sequence: sequence parallelism of the ranks that share every sample; None without it.
        tensor: ranks that divide every layer, see ``opendit.parallel.tensor``; None without tensor parallelism.
        experts: ranks that have different experts, see ``opendit.parallel.experts``; None if every rank has all
            experts.
        stages: this rank's stages of a pipeline, see ``opendit.parallel.pipeline``; None for the full model.
        recompute: none, norms, cheap, half or mlp, see ``opendit.kernels.recompute``; or but_attention to recompute
            all of a block except its attention.
        grad_checkpoint: True to recompute complete blocks in the backward pass.
        recompute_blocks: number of blocks, evenly spaced, that are recomputed completely; None for all.
        compiled: True to compile blocks and the final layer with torch.compile.
        compile_options: options of torch.compile.
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

PREFETCHED = 1  # number of units that are gathered ahead of the unit that runs


@dataclass(frozen=True)
class Sharding:
    """Settings by which ``fully_shard`` divides a model.

    Attributes:
        dtype: dtype of the gathered weights. The dtype of the shards does not change.
        reduce_dtype: dtype in which gradients are summed over ranks.
        keep_gathered: True to keep gathered weights from the forward to the backward pass (the traffic of ZeRO-2).
            Otherwise they are freed after the forward pass and gathered again.
        keep_gradients: True to accumulate unreduced gradients over several micro-batches and to reduce them only in the
            last backward pass. Otherwise every backward pass reduces gradients.
        gather_float8: True to gather the weights of :func:`float8_weights` in float8
            (opendit/parallel/float8_gather.py). Otherwise they are gathered in ``dtype``, and operations cast them. The
            values are the same.
        hosted: number of blocks whose shards lie in host memory (opendit/parallel/host_shards.py).
    """

    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    keep_gathered: bool = True
    keep_gradients: bool = True
    gather_float8: bool = False
    hosted: int = 0


def apply_shards(model: DiT, mesh: Mesh, sharding: Sharding) -> None:
    """Shard the parameters of ``model`` with ``fully_shard``, in place.

    The ranks of the group ``fsdp`` divide every parameter along dimension 0, and each of ``dp_replicate`` such groups
    has a copy of the model. Parameters become DTensors. Each unit of the plan gathers its weights when it is called,
    and frees them afterwards. While a unit computes, the next unit's weights are gathered. Experts that ranks divide
    are gathered separately (``opendit.parallel.experts``). Frozen weights are stored in ``sharding.dtype``, because no
    optimizer needs their exact values.

    Afterwards, each block computes its modulation when it is called, because its weights exist only then.
    """
    # imported here, because the import takes 0.5 s, which sampling avoids
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    # Parameters outside of all units are used at both ends of the forward and backward pass, so they stay gathered.
    settings["reshard_after_forward"] = False
    fully_shard(model, **settings)
    ahead = AHEAD if sharding.hosted else PREFETCHED
    for place, module in enumerate(called):
        module.set_modules_to_forward_prefetch(called[place + 1 : place + 1 + ahead])
        module.set_modules_to_backward_prefetch(called[max(0, place - ahead) : place][::-1])


def float8_weights(model: DiT) -> list[str]:
    """Return the names of the weights that only float8 operations read. The list is empty if blocks are compiled,
    because torch's compiler can't handle weights that exist in float8 only."""

    def in_float8(operation: str) -> bool:
        kernel = model.ops.kernel(operation)
        return kernel is not None and kernel.float8

    if any(block._compiled_call_impl is not None for block in model.blocks):
        return []
    projections = plan_of(model.config).projections(model.config)
    patterns = [pattern for pattern, operations in projections.items() if all(map(in_float8, operations))]
    names = (name for name, _ in model.named_modules())
    return [f"{name}.weight" for name in names if any(fits(pattern, name) for pattern in patterns)]
