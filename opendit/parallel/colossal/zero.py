"""Colossal-AI's ZeRO-2 optimizer with a new step that makes few passes over memory and does not block the host."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from colossalai.zero import LowLevelZeroOptimizer
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from opendit.parallel.muon import Muon
from opendit.parallel.optimizer import OnePassAdamW
from opendit.parallel.tensor import ReplicatedGradients

ALIGNMENT = 8  # every shard in a bucket begins at a multiple of this number of elements, which is 16 bytes
GATHER_BYTES = 128 << 20  # minimum number of bytes of working weights that are gathered together


class ZeroOptimizer(LowLevelZeroOptimizer):
    """ZeRO-2 optimizer with few passes over memory. The host never waits for the device, except once per step in fp16.

    Colossal-AI's optimizer computes the norm tensor by tensor in float64 on the host, and waits for the device after
    every backward pass. It copies gradients and weights into buckets and back, and keeps full gradients instead of this
    rank's shard. It does all of this even on a single rank. In contrast, in this class:

    - On one rank nothing is reduced, and the step reads ``p.grad``.
    - On several ranks, buckets of gradients are reduce-scattered during the backward pass, and a rank keeps only its
      shard of the result.
    - :class:`OnePassAdamW` updates one bucket of parameters after another. The working weights of a bucket are
      gathered, in place, while the next bucket is updated.

    Attributes:
        grad_norm: norm of the gradients of the last step, unscaled and before clipping, 0-dim float64 on the device.
        finite: True if ``grad_norm`` was finite, so that the step was taken, 0-dim bool on the device.
        replicated: sums the gradients of parameters that several ranks have; None if there are none.
        muon: computes the update directions of matrices; None if AdamW updates all parameters.
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
        # This rank's part of every working weight, including the padding at the end of the last ranks' parts.
        self._padded = [self._working_param_to_padded_working_param[p] for p in self._params]
        self._working = [w.view(self._world, -1)[self._rank] for w in self._padded]
        self._shards: dict[int, Tensor] = {}  # this rank's gradient shards, by the id of the parameter
        self._bucket: list[nn.Parameter] = []
        self._in_flight: list[tuple[Any, list[nn.Parameter], Tensor]] = []
        self._adamw = OnePassAdamW(cast(Any, self.optim), self.masters, self.own_sizes(), self._working)
        if self._world == 1:
            for hook in self.grad_handles:
                hook.remove()

    # ---------------------------------------------------------------- gradients

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Add the gradients of a loss to the accumulated gradients. In fp16, the loss is first scaled, without reading
        the scale on the host."""
        scaler = self.scaler
        scaled = loss if scaler is None else loss * scaler.scale.view(())
        scaled.backward(inputs=inputs, retain_graph=retain_graph)
        self._reduce_bucket()
        self._collect(keep=0)

    def backward_from(self, output: Tensor | GradientEdge, gradient: Tensor) -> None:
        """Run a backward pass that starts from ``output`` with its scaled gradient, ``gradient``. Add the resulting
        gradients."""
        torch.autograd.backward(output, gradient)
        self._reduce_bucket()
        self._collect(keep=0)

    def _add_to_bucket(self, param: nn.Parameter, group_id: int) -> None:
        """Add a parameter to the bucket. On several ranks, the parameter's hook calls this method when the parameter's
        gradient is complete."""
        self._bucket.append(param)
        if sum(p.numel() for p in self._bucket) >= self._reduce_bucket_size:
            self._reduce_bucket()
            self._collect(keep=1)

    def _reduce_bucket(self) -> None:
        """Start to average the gradients of the bucket over all ranks. Each rank receives a shard."""
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
        """Store the gradient shards of all reductions except the last ``keep``. Only the device waits for the
        reductions, not the host."""
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
        """Return this rank's gradients of the backward passes since the last step, in the order of the parameters."""
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
        """Make every later step also update these averages; see :meth:`opendit.kernels.adamw_ema.FusedStep.attach`.

        averages: list of tensors for each average, in the order of the trained parameters. A tensor has the size of
        this rank's shard without padding.
        """
        self._adamw.attach_averages(averages, decays, updates)

    def step(self, closure: Any = None) -> None:
        """Clip, update masters, moments, averages and working weights, and clear the gradients.

        If a gradient of any rank is not finite, nothing is changed.
        """
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
        """Colossal-AI's fp16 loss scaler; None in other precisions."""
        return getattr(self.mixed_precision_mixin, "grad_scaler", None)

    def own_sizes(self) -> list[int]:
        """Return the number of elements of this rank's shards, without the padding of the last ranks."""
        widths = [master.numel() for master in self.masters]
        pairs = zip(self._params, widths, strict=True)
        return [min(max(p.numel() - self._rank * width, 0), width) for p, width in pairs]

    # ---------------------------------------------------------------- working weights

    def _buckets(self) -> list[tuple[int, int]]:
        """Divide the parameters into ranges (start, stop) with at least GATHER_BYTES of working weights each. On one
        rank, return a single range."""
        edges, size = [0], 0
        for i, working in enumerate(self._padded, start=1):
            size += working.numel() * working.element_size()
            if (size >= GATHER_BYTES and self._world > 1) or i == len(self._padded):
                edges.append(i)
                size = 0
        return list(zip(edges, edges[1:], strict=False))

    def _start_gather(self, start: int, stop: int) -> list[Any]:
        """Start to gather the parts that other ranks hold of the working weights ``start`` to ``stop`` - 1, in
        place."""
        if self._world == 1:
            return []
        with dist._coalescing_manager(group=self._group, async_ops=True) as work:
            for whole, part in zip(self._padded[start:stop], self._working[start:stop], strict=True):
                dist.all_gather_into_tensor(whole, part, group=self._group)
        return [work]

    @torch.no_grad()
    def gather_working_params(self) -> None:
        """Round this rank's master shards to the working dtype, and gather all ranks' shards into the working
        weights."""
        torch._foreach_copy_(self._working, self.masters)
        for work in self._start_gather(0, len(self._padded)):
            work.wait()


def _padded(rows: Tensor, more: int) -> Tensor:
    """Pad each of ``rows`` with ``more`` zeros at its end. Return ``rows`` itself, without a copy, if ``more`` is 0."""
    return functional.pad(rows, (0, more)) if more else rows
