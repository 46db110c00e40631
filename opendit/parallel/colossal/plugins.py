"""Training with Colossal-AI: the Booster, and corrections of Gemini and DDP.

Import this module with ``opendit.parallel.colossal.load()``. The imports below fail otherwise.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from colossalai import accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.amp.naive_amp.mixed_precision_mixin import BF16MixedPrecisionMixin
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    low_level_zero_plugin,
)
from colossalai.zero import LowLevelZeroOptimizer
from colossalai.zero.gemini import gemini_optimizer
from colossalai.zero.gemini.chunk import chunk as gemini_chunk
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from opendit.parallel.muon import Muon
from opendit.parallel.optimizer import FusedAdamW, OnePassAdamW
from opendit.parallel.tensor import ReplicatedGradients

ALIGNMENT = 8  # elements; every shard in a bucket starts at a multiple
GATHER_BYTES = 128 << 20  # minimum bytes of working weights in one gather


class ZeroOptimizer(LowLevelZeroOptimizer):
    """ZeRO-2 optimizer with few passes over memory. The host waits for the device only in fp16, once per step.

    Differences from Colossal-AI's optimizer:

    - On one rank nothing is reduced or copied. The step reads ``p.grad``.
    - On several ranks, buckets of gradients are reduce-scattered during the backward pass. A rank stores only its
      shard.
    - :class:`OnePassAdamW` updates one bucket of parameters after another. A bucket's working weights are gathered in
      place during the next bucket's update.

    After a step, ``grad_norm`` (float64, unscaled and before clipping) and ``finite`` (bool) are 0-dim tensors on the
    device.
    """

    grad_norm: Tensor
    finite: Tensor
    replicated: ReplicatedGradients | None = None
    muon: Muon | None = None
    pg_to_param_list: dict[dist.ProcessGroup, list[nn.Parameter]]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        ((self._group, self._params),) = self.pg_to_param_list.items()
        self._params = [p for p in self._params if p.requires_grad]
        self.masters: list[Tensor] = [self.working_to_master_param[id(p)] for p in self._params]
        self._world, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        # This rank's shard of every working weight. The last ranks' shards end with padding.
        self._padded = [self._working_param_to_padded_working_param[p] for p in self._params]
        self._working = [w.view(self._world, -1)[self._rank] for w in self._padded]
        self._shards: dict[int, Tensor] = {}  # this rank's gradient shards, by id(parameter)
        self._bucket: list[nn.Parameter] = []
        self._in_flight: list[tuple[Any, list[nn.Parameter], Tensor]] = []
        self._adamw = OnePassAdamW(cast(Any, self.optim), self.masters, self.own_sizes(), self._working)
        if self._world == 1:
            for hook in self.grad_handles:
                hook.remove()

    # ---------------------------------------------------------------- gradients

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Accumulate the gradients of a loss. In fp16, scale the loss first; the scale stays on the device."""
        scaler = self.scaler
        scaled = loss if scaler is None else loss * scaler.scale.view(())
        scaled.backward(inputs=inputs, retain_graph=retain_graph)
        self._reduce_bucket()
        self._collect(keep=0)

    def backward_from(self, output: Tensor | GradientEdge, gradient: Tensor) -> None:
        """Run a backward pass from ``output`` and its scaled ``gradient``. The gradients are accumulated."""
        torch.autograd.backward(output, gradient)
        self._reduce_bucket()
        self._collect(keep=0)

    def _add_to_bucket(self, param: nn.Parameter, group_id: int) -> None:
        self._bucket.append(param)
        if sum(p.numel() for p in self._bucket) >= self._reduce_bucket_size:
            self._reduce_bucket()
            self._collect(keep=1)

    def _reduce_bucket(self) -> None:
        """Start to average the bucket's gradients over all ranks. Each rank receives a shard."""
        if not self._bucket:
            return
        rows = []
        for param in self._bucket:
            grad = _padded(cast(Tensor, param.grad).reshape(-1), self.get_param_padding_size(param)).view(
                self._world, -1
            )
            rows.append(_padded(grad, -grad.shape[1] % ALIGNMENT))
            param.grad = None
        flat = torch.cat(rows, dim=1).div_(self._world)
        shard = flat.new_empty(flat.shape[1])
        work = dist.reduce_scatter_tensor(shard, flat.view(-1), group=self._group, async_op=True)
        self._in_flight.append((work, self._bucket, shard))
        self._bucket = []

    def _collect(self, keep: int) -> None:
        """Store the gradient shards of all reductions except the last ``keep``. Only the device waits, not the host."""
        while len(self._in_flight) > keep:
            work, params, received = self._in_flight.pop(0)
            work.wait()
            widths = [self.working_to_master_param[id(p)].numel() for p in params]
            shards = received.split([width + -width % ALIGNMENT for width in widths])
            for param, shard, width in zip(params, shards, widths, strict=True):
                if id(param) in self._shards:  # not the first micro-batch of the step
                    self._shards[id(param)] += shard[:width]
                else:
                    self._shards[id(param)] = shard[:width]

    @property
    def gradients(self) -> list[Tensor | None]:
        """Gradients that this rank has accumulated since the last step, in the order of the parameters."""
        if self._world == 1:
            return [p.grad for p in self._params]
        return [self._shards.get(id(p)) for p in self._params]

    @gradients.setter
    def gradients(self, gradients: list[Tensor | None]) -> None:
        for param, gradient in zip(self._params, gradients, strict=True):
            if self._world == 1:
                param.grad = gradient
            elif gradient is not None:
                self._shards[id(param)] = gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._shards.clear()
        for param in self._params:
            param.grad = None

    # ---------------------------------------------------------------- the step

    def attach_averages(
        self, averages: Sequence[Sequence[Tensor]], decays: Callable[[Tensor], Tensor], updates: Tensor
    ) -> None:
        """Let later steps update these averages, too. Averages have this rank's shards without padding. See
        :meth:`opendit.kernels.adamw_ema.FusedStep.attach`."""
        self._adamw.attach_averages(averages, decays, updates)

    def step(self, closure: Any = None) -> None:
        """Clip, update masters, moments, averages and working weights, and clear the gradients. No rank updates if any
        rank has a gradient that is not finite."""
        self._adamw.counted = self.replicated and self.replicated.counted
        fused, scaler, gradients = self._adamw.fused(), self.scaler, self.gradients
        if self.replicated is not None:
            self.replicated.sum(gradients)
        grads = zip(gradients, fused.masters, strict=True)
        total = fused.square_sum([g if g is None or self._world == 1 else g[: m.numel()] for g, m in grads])
        if self._world > 1:
            dist.all_reduce(total, group=self._group)
        if self.replicated is not None:
            self.replicated.total(total)
        scale = 1.0 if scaler is None else scaler.scale
        self.grad_norm, self.finite = fused.decide(total, scale=scale, clip=self._clip_grad_norm)
        if self.muon is not None:
            self.muon.direct(fused)
        settings = self.optim.param_groups[0]
        gathers = []
        for start, stop in self._buckets():
            fused.update(lr=settings["lr"], weight_decay=settings["weight_decay"], start=start, stop=stop)
            gathers += self._start_gather(start, stop)
        for work in gathers:
            work.wait()
        self.zero_grad()
        if scaler is not None:
            scale = scaler._scale
            scaler.update(not self.finite.item())
            scaler._scale = scale.copy_(scaler._scale)  # keep the address of the scale, because CUDA graphs read it

    @property
    def scaler(self) -> Any:
        return getattr(self.mixed_precision_mixin, "grad_scaler", None)

    def own_sizes(self) -> list[int]:
        widths = [master.numel() for master in self.masters]
        pairs = zip(self._params, widths, strict=True)
        return [min(max(p.numel() - self._rank * width, 0), width) for p, width in pairs]

    # ---------------------------------------------------------------- working weights

    def _buckets(self) -> list[tuple[int, int]]:
        """Divide the parameters into ranges (start, stop) with at least GATHER_BYTES of working weights, except in the
        last range. Return a single range on one rank."""
        edges, size = [0], 0
        for i, working in enumerate(self._padded, start=1):
            size += working.numel() * working.element_size()
            if (size >= GATHER_BYTES and self._world > 1) or i == len(self._padded):
                edges.append(i)
                size = 0
        return list(zip(edges, edges[1:], strict=False))

    def _start_gather(self, start: int, stop: int) -> list[Any]:
        """Start to gather the working weights ``start`` to ``stop`` - 1 from all ranks, in place."""
        if self._world == 1:
            return []
        with dist._coalescing_manager(group=self._group, async_ops=True) as work:
            for whole, part in zip(self._padded[start:stop], self._working[start:stop], strict=True):
                dist.all_gather_into_tensor(whole, part, group=self._group)
        return [work]

    @torch.no_grad()
    def gather_working_params(self) -> None:
        torch._foreach_copy_(self._working, self.masters)
        for work in self._start_gather(0, len(self._padded)):
            work.wait()


def _padded(rows: Tensor, more: int) -> Tensor:
    """Append ``more`` zeros to every row. Return ``rows`` without a copy if ``more`` is 0."""
    return functional.pad(rows, (0, more)) if more else rows


def register() -> None:
    gemini_optimizer._AVAIL_OPTIM_LIST.add(FusedAdamW)
    low_level_zero_plugin.LowLevelZeroOptimizer = ZeroOptimizer
    if not torch.cuda.is_available():
        _stand_in_for_a_gpu()


# ------------------------------------------------------------------------------------------ Gemini


class _FiniteBF16(BF16MixedPrecisionMixin):
    """Precision mixin for bf16 without loss scaling. All ranks skip a step if any rank has a gradient that is not
    finite."""

    def __init__(self, manager):
        self.manager = manager

    def should_skip_step(self) -> bool:
        count = self.manager.overflow_counter.clone()
        dist.all_reduce(count, group=dist.group.WORLD)
        return count.item() > 0

    def pre_zero_grad(self) -> None:
        self.manager.overflow_counter.zero_()


# ------------------------------------------------------------------------------------------ Booster


def boost(
    plugin: str,
    precision: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    grad_clip: float,
    accumulate: bool,
    group: dist.ProcessGroup | None = None,
    initial_scale: float = 2.0**16,
    bucket: int | None = None,
) -> tuple[Any, Any]:
    """Wrap ``module`` and ``optimizer`` for ``plugin`` and return both.

    The module's parameters become the plugin's working weights on this process's device.

    Args:
        plugin: zero2, ddp or gemini.
        grad_clip: bound of the gradient norm; 0 for none. Ignored by ddp.
        accumulate: True if a step has several micro-batches.
        group: ranks over which zero2 and ddp average gradients, and zero2 divides state.
        bucket: number of gradient elements in one reduction of zero2; None for Colossal-AI's default.
    """
    on_gpu = torch.cuda.is_available()
    built: Any  # Any, because each plugin has different arguments
    if plugin == "zero2":
        built = LowLevelZeroPlugin(
            stage=2,
            precision=precision,
            max_norm=grad_clip,
            initial_scale=initial_scale,
            overlap_communication=False,  # ZeroOptimizer overlaps communication in another way
            cast_inputs=False,
        )
    elif plugin == "gemini":
        size = sum(p.numel() for p in module.parameters()) / 2**20
        built = GeminiPlugin(
            precision=precision,
            # Gemini computes the norm only if it clips. Without clipping, pass a bound that no gradient exceeds.
            max_norm=grad_clip or 1e30,
            initial_scale=initial_scale,
            enable_gradient_accumulation=accumulate,
            # Use smaller chunks for small models, because a single chunk is never sharded.
            min_chunk_size_m=min(32.0, max(0.005, size / 16)),
            search_range_m=32 if size > 64 else 1,
            placement_policy="static",
            pin_memory=on_gpu,  # asynchronous reduction requires pinned memory
            enable_async_reduce=on_gpu,
        )
        # Only offloaded chunks need pinned copies. For a 7B model, making the copies would take minutes.
        built.gemini_config["pin_memory"] = False
    elif plugin == "ddp":
        built = TorchDDPPlugin(broadcast_buffers=False, gradient_as_bucket_view=True)
    else:
        raise ValueError(f"--plugin {plugin}: none of Colossal-AI's; choose zero2, ddp or gemini")
    if bucket is not None and plugin == "zero2":
        built.zero_optim_kwargs["reduce_bucket_size"] = bucket
    if group is not None and plugin == "zero2":
        built.zero_optim_kwargs["dp_process_group"] = group
    elif group is not None:
        built.ddp_kwargs["process_group"] = group
    with warnings.catch_warnings():  # torch warns about DDP arguments that TorchDDPPlugin passes
        warnings.simplefilter("ignore")
        model, boosted, *_ = cast(Any, Booster(plugin=built).boost(module, optimizer))
    if plugin == "gemini" and precision == "bf16":
        boosted.mix_precision_mixin = _FiniteBF16(model.chunk_manager)
    if plugin == "ddp":
        _fix_buckets(model.module)
    return model, boosted


def _fix_buckets(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Let torch arrange its gradient buckets before the first step, with a backward pass of zeros. Otherwise torch
    rearranges the buckets after the first step. Then a resumed run's first step would round differently."""
    params = [p for p in ddp.parameters() if p.requires_grad]
    ddp.reducer.prepare_for_backward([])
    cast(torch.Tensor, sum(p.sum() * 0 for p in params)).backward()
    ddp.zero_grad(set_to_none=True)


# ------------------------------------------------------------------------------------------ on a CPU


def _stand_in_for_a_gpu() -> None:
    accelerator.set_accelerator(_CpuAsCuda())
    _keep_chunks_in_one_memory()


class _Idle:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class _CpuAsCuda(CpuAccelerator):
    """Accelerator for the CPU with the name "cuda", because Colossal-AI's ZeRO and Gemini require this name."""

    def __init__(self):
        super().__init__()
        self._name = "cuda"

    def synchronize(self, device=None):
        return None

    def empty_cache(self):
        return None

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def memory_allocated(self, device=None):
        return 0

    max_memory_allocated = memory_allocated

    def _idle(self, *args, **kwargs):
        return _Idle()

    Stream = Event = current_stream = default_stream = stream = cast(Any, _idle)

    def set_stream(self, stream_):
        return None


def _keep_chunks_in_one_memory() -> None:
    """Prevent Gemini from moving shards between "cuda" and "cpu", because both names mean a CPU's memory here."""
    chunk: Any = gemini_chunk.Chunk
    close, paired_move = chunk.close_chunk, chunk._Chunk__paired_shard_move

    def close_chunk(self):
        self.shard_device = torch.device("cuda")  # only a name; nothing is allocated on this device
        close(self)

    def shard_move(self, device, force_copy=False, non_blocking=False):
        if not self.optim_sync_flag:
            paired_move(self, non_blocking=non_blocking)
            self.optim_sync_flag = True

    gemini_chunk.Chunk.close_chunk = close_chunk
    gemini_chunk.Chunk.shard_move = shard_move
