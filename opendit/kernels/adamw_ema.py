"""An optimizer step in one pass over memory: AdamW on fp32 masters, averages of the masters (EMA), and working weights.

Working weights are copies of the masters in the forward pass's dtype. A ZeRO step with one average and bf16 weights
moves 36 bytes per parameter, half as many as separate operations. The gradients' norm, the clipping factor and the
decision to skip the step stay on the device, so the host never waits.

    step = FusedStep(masters, exp_avgs, exp_avg_sqs, working, count=count)
    total = step.square_sum(gradients)                            # several ranks add up their totals here
    norm, finite = step.decide(total, scale=loss_scale, clip=1.0)
    step.update(lr=1e-4, weight_decay=0.0)

Muon updates the tensors without second moments. Between ``decide`` and ``update``, :meth:`FusedStep.momentum` and
opendit.parallel.muon replace their gradients by update directions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from opendit.kernels.averages import averages_reference
from opendit.kernels.common import kernels_available
from opendit.kernels.eight_bit_moments import DecodedMoments, EightBits
from opendit.kernels.language import TRITON, tl, triton
from opendit.kernels.tensor_table import (
    AddressTable,
    BlockTable,
    InPlace,
    Staged,
    at,
    check_tensors_fit,
    device_of,
    triton_dtype,
)

# Elements and warps per program. Times of norm and update for DiT-XL/2 (675 M parameters) on an H200, in ms, for
# (elements, warps): (2048, 2) 6.35, (4096, 4) 6.55, (1024, 4) 6.71, (512, 4) 6.78, (2048, 4) 6.98. (4096, 2) takes 49,
# because registers spill.
BLOCK, WARPS = 2048, 2
FP16_MAX = 65504.0

# ------------------------------------------------------------------------------------------ reference


def adamw_ema_reference(
    masters: list[Tensor],
    gradients: list[Tensor | None],
    exp_avgs: list[Tensor],
    exp_avg_sqs: Sequence[Tensor | None],
    working: list[Tensor],
    averages: list[list[Tensor]],
    decays: list[float],
    *,
    count: float,
    coefficient: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Apply torch's AdamW to ``coefficient * gradient`` as step ``count``. Then update averages and working weights, in
    place.

    Without a gradient (None), master and moments do not change. A tensor without second moments is updated along its
    gradient: master = (1 - lr * weight_decay) * master - lr * gradient.
    """
    used = [i for i, g in enumerate(gradients) if g is not None and exp_avg_sqs[i] is not None]
    directed = [i for i, g in enumerate(gradients) if g is not None and exp_avg_sqs[i] is None]
    if directed:
        torch._foreach_mul_([masters[i] for i in directed], 1.0 - lr * weight_decay)
        directions = [cast(Tensor, gradients[i]).float().view_as(masters[i]) for i in directed]
        torch._foreach_add_([masters[i] for i in directed], directions, alpha=-lr)
    adamw(
        [masters[i] for i in used],
        [cast(Tensor, gradients[i]).float() * coefficient for i in used],
        [exp_avgs[i] for i in used],
        [cast(Tensor, exp_avg_sqs[i]) for i in used],
        [],
        [torch.full((), count - 1, device=masters[i].device) for i in used],  # adamw increments the count before use
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    averages_reference(masters, averages, decays)
    if working:
        torch._foreach_copy_(working, masters)


def momentum_reference(gradient: Tensor, exp_avg: Tensor, momentum: float, coefficient: float) -> None:
    """Apply Nesterov momentum, in place, with g = coefficient * gradient.

        exp_avg = momentum * exp_avg + (1 - momentum) * g
        gradient = ((1 - momentum) * g + momentum * exp_avg) / coefficient

    The division restores the gradient's scale. Muon uses only the direction.
    """
    own = coefficient * gradient.float()
    exp_avg.lerp_(own, 1.0 - momentum)
    gradient.copy_(_in_range(own.lerp_(exp_avg, momentum) / coefficient, gradient.dtype))


def _in_range(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp values to the range of fp16 if ``dtype`` is fp16. Momentum of large gradients can exceed this range."""
    return values.clamp_(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else values


# ------------------------------------------------------------------------------------------ kernels

# Rows of the address table. The averages have the rows AVERAGE, AVERAGE + 1, and so on. The address 0 means no tensor.
_constant = tl.constexpr if TRITON else int
SIZE, GRADIENT, WORKING_COPY, MASTER, EXP_AVG, EXP_AVG_SQ, AVERAGE = map(_constant, range(7))


@triton.jit
def _square_sum_block(address, offsets, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    gradient = tl.load(at(address, offsets, DTYPE, ALIGNED), mask=mask, other=0.0).to(tl.float32)
    return tl.sum(gradient * gradient, axis=0)


@triton.jit(do_not_specialize=("tensors",))
def _square_sum_kernel(table, blocks, partial, tensors, BLOCK: tl.constexpr, GRAD: tl.constexpr):
    """Compute partial[block] = sum of the block's squared gradients, in fp32."""
    block = tl.program_id(0)
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    size = tl.load(table + SIZE * tensors + tensor)
    address = tl.load(table + GRADIENT * tensors + tensor)
    if address == 0:
        tl.store(partial + block, 0.0)
    elif (start + BLOCK <= size) & (address % 16 == 0):
        everything = tl.full((BLOCK,), 1, tl.int1)
        tl.store(partial + block, _square_sum_block(address, offsets, everything, GRAD, True))
    else:
        tl.store(partial + block, _square_sum_block(address, offsets, offsets < size, GRAD, False))


@triton.jit
def _update_block(
    table, tensors, offsets, mask, scalars, lr, shrink, beta2, rest1, rest2, eps, shift, stride,
    GRAD: tl.constexpr, WORKING: tl.constexpr, AVERAGES: tl.constexpr, DIRECTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Update one block. ``table`` points to the column of the block's tensor. DIRECTED: the gradient is Muon's update
    direction.

    ``rest1`` and ``rest2`` are 1 - beta, and ``shrink`` is lr * weight_decay. They come from the host in double
    precision, because 1 - 0.999 in fp32 has a relative error of 1e-5.
    """
    coefficient = tl.load(scalars + 1)
    correction1 = tl.load(scalars + 2)
    correction2 = tl.load(scalars + 3)
    masters = at(tl.load(table + MASTER * tensors), offsets, tl.float32, ALIGNED)
    master = tl.load(masters, mask=mask, other=0.0)
    gradient_address = tl.load(table + GRADIENT * tensors)
    if gradient_address != 0:
        gradient = tl.load(at(gradient_address, offsets, GRAD, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        if DIRECTED:
            master -= shrink * master
            master -= lr * gradient
        else:
            exp_avgs = at(tl.load(table + EXP_AVG * tensors) + shift, offsets, tl.float32, ALIGNED)
            exp_avg_sqs = at(tl.load(table + EXP_AVG_SQ * tensors) + shift + stride, offsets, tl.float32, ALIGNED)
            gradient *= coefficient
            exp_avg = tl.load(exp_avgs, mask=mask, other=0.0)
            exp_avg_sq = tl.load(exp_avg_sqs, mask=mask, other=0.0)
            exp_avg += rest1 * (gradient - exp_avg)
            exp_avg_sq = beta2 * exp_avg_sq + rest2 * gradient * gradient
            master -= shrink * master
            master -= lr / correction1 * exp_avg / (tl.sqrt(exp_avg_sq) / correction2 + eps)
            tl.store(exp_avgs, exp_avg, mask=mask)
            tl.store(exp_avg_sqs, exp_avg_sq, mask=mask)
        tl.store(masters, master, mask=mask)
    working_address = tl.load(table + WORKING_COPY * tensors)
    if working_address != 0:
        tl.store(at(working_address, offsets, WORKING, ALIGNED), master.to(WORKING), mask=mask)
    for k in tl.static_range(AVERAGES):
        averages = at(tl.load(table + (AVERAGE + k) * tensors), offsets, tl.float32, ALIGNED)
        average = tl.load(averages, mask=mask, other=0.0)
        average += tl.load(scalars + 4 + k) * (master - average)
        tl.store(averages, average, mask=mask)


@triton.jit(do_not_specialize=("tensors", "first", "shift", "stride"))
def _update_kernel(
    table, blocks, scalars, tensors, first, lr, shrink, beta2, rest1, rest2, eps, shift, stride,
    BLOCK: tl.constexpr, GRAD: tl.constexpr, WORKING: tl.constexpr, AVERAGES: tl.constexpr, MIXED: tl.constexpr,
    DIRECTED: tl.constexpr,
):  # fmt: skip
    """Update moments, masters, averages and working weights of one block: number ``first`` + program id. Do nothing if
    scalars[0] is 0.

    First moments are ``shift`` bytes after their addresses in the table, second moments ``shift`` + ``stride`` bytes.
    MIXED: some tensors have no second moments. DIRECTED: True to update only these tensors, False to update all
    remaining tensors. One kernel for both would spill registers.
    """
    block = first + tl.program_id(0)
    table += tl.load(blocks + 2 * block)
    taken = tl.load(scalars) != 0.0
    if MIXED:
        taken = taken & ((tl.load(table + EXP_AVG_SQ * tensors) == 0) == DIRECTED)
    if taken:
        start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        size = tl.load(table + SIZE * tensors)
        low_bits = tl.load(table + GRADIENT * tensors)
        for row in tl.static_range(WORKING_COPY, AVERAGE + AVERAGES):
            low_bits |= tl.load(table + row * tensors)
        # most blocks are complete and aligned, and need no mask
        if (start + BLOCK <= size) & (low_bits % 16 == 0):
            everything = tl.full((BLOCK,), 1, tl.int1)
            _update_block(
                table, tensors, offsets, everything, scalars, lr, shrink, beta2, rest1, rest2, eps, shift,
                stride, GRAD, WORKING, AVERAGES, DIRECTED, True,
            )  # fmt: skip
        else:
            _update_block(
                table, tensors, offsets, offsets < size, scalars, lr, shrink, beta2, rest1, rest2, eps, shift,
                stride, GRAD, WORKING, AVERAGES, DIRECTED, False,
            )  # fmt: skip


@triton.jit
def _momentum_block(
    gradient_address, address, offsets, mask, coefficient, momentum, rest, LIMIT: tl.constexpr, GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    gradients = at(gradient_address, offsets, GRAD, ALIGNED)
    exp_avgs = at(address, offsets, tl.float32, ALIGNED)
    gradient = coefficient * tl.load(gradients, mask=mask, other=0.0).to(tl.float32)
    exp_avg = tl.load(exp_avgs, mask=mask, other=0.0)
    exp_avg += rest * (gradient - exp_avg)
    tl.store(exp_avgs, exp_avg, mask=mask)
    gradient = (gradient + momentum * (exp_avg - gradient)) / coefficient
    if GRAD == tl.float16:
        gradient = tl.minimum(tl.maximum(gradient, -LIMIT), LIMIT)
    tl.store(gradients, gradient.to(GRAD), mask=mask)


@triton.jit(do_not_specialize=("tensors",))
def _momentum_kernel(
    table, blocks, scalars, tensors, momentum, rest, LIMIT: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr
):
    """Compute momentum_reference for every tensor without second moments, unless scalars[0] is 0."""
    block = tl.program_id(0)
    table += tl.load(blocks + 2 * block)
    gradient_address = tl.load(table + GRADIENT * tensors)
    squares_address = tl.load(table + EXP_AVG_SQ * tensors)
    if (tl.load(scalars) != 0.0) & (gradient_address != 0) & (squares_address == 0):
        start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        size = tl.load(table + SIZE * tensors)
        address = tl.load(table + EXP_AVG * tensors)
        coefficient = tl.load(scalars + 1)
        if (start + BLOCK <= size) & ((gradient_address | address) % 16 == 0):
            everything = tl.full((BLOCK,), 1, tl.int1)
            _momentum_block(
                gradient_address, address, offsets, everything, coefficient, momentum, rest, LIMIT, GRAD, True
            )
        else:
            _momentum_block(
                gradient_address, address, offsets, offsets < size, coefficient, momentum, rest, LIMIT, GRAD, False
            )


# ------------------------------------------------------------------------------------------ the step


def constant_decays(decays: Sequence[float], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return constant decays as a function of the number of updates, for :meth:`FusedStep.attach`."""
    values = torch.tensor(decays, dtype=torch.float64).to(device)
    return lambda updates: values


class FusedStep:
    """AdamW over a rank's tensors, fused with the updates of averages and working weights.

    Triton kernels run the step where they are available. Elsewhere torch runs it, with equal results up to rounding.

    Args:
        masters, exp_avgs, exp_avg_sqs: fp32, contiguous, changed in place; tensor i has equal sizes in all three. If a
            master is on a GPU, moments, averages, gradients and other masters may be in pinned host memory. Moments may
            be in 8 bits, but not with Muon or host memory. A tensor that Muon updates has None in exp_avg_sqs.
        working: copies of the masters in the forward pass's dtype. Every step rewrites them.
        count: 0-dim fp32 tensor on the masters' device: number of steps that were not skipped; changed in place.
        counted: for each gradient, False if another rank includes it in :meth:`square_sum`. None: True for all.

    Attributes:
        scalars: result of the last :meth:`decide`, (4 + K,) fp32 on the device: 1, or 0 to skip the step; the factor of
            the gradients; two bias corrections; 1 - decay for K averages.

    Raises:
        ValueError: sizes, dtypes, layouts or devices don't fit.
    """

    scalars: Tensor

    def __init__(
        self,
        masters: Sequence[Tensor],
        exp_avgs: Sequence[Tensor | EightBits],
        exp_avg_sqs: Sequence[Tensor | EightBits | None],
        working: Sequence[Tensor] | None = None,
        *,
        count: Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        block: int = BLOCK,
        counted: Sequence[bool] | None = None,
    ):
        self.masters = [master.detach() for master in masters]
        self.count, self.betas, self.eps, self.block = count, betas, eps, block
        self.device = device_of(self.masters)
        self._decoded = None
        if any(isinstance(moment, EightBits) for moment in exp_avgs):
            pairs = cast(Any, list(zip(exp_avgs, exp_avg_sqs, strict=True)))
            self._decoded = DecodedMoments(pairs, block)
            exp_avgs, exp_avg_sqs = zip(*self._decoded.views, strict=True)
        exp_avgs, exp_avg_sqs = cast(list[Tensor], exp_avgs), cast(list[Tensor | None], exp_avg_sqs)
        squares = [m if square is None else square for square, m in zip(exp_avg_sqs, self.masters, strict=True)]
        self.exp_avgs = check_tensors_fit(exp_avgs, "exp_avgs", self.masters)
        squares = check_tensors_fit(squares, "exp_avg_sqs", self.masters)
        pairs = zip(exp_avg_sqs, squares, strict=True)
        self.exp_avg_sqs = [None if given is None else square for given, square in pairs]
        check_tensors_fit(self.masters, "masters", self.masters)
        self.working = []
        if working is not None:
            self.working = check_tensors_fit(working, "working", self.masters, working[0].dtype)
        self.attach([], constant_decays([], self.device), torch.zeros_like(count))
        self.kernels, self.why = kernels_available(self.device, torch.float32)
        sizes = [master.numel() for master in self.masters]
        self._addresses = AddressTable(sizes, self.device)
        self._blocks = BlockTable(sizes, block, self.device)
        self._counted = [1.0] * len(sizes) if counted is None else [float(yes) for yes in counted]
        # 1 for blocks that this rank counts, else 0. None: this rank counts all blocks.
        self._block_counts = None
        if not all(self._counted) and self.kernels:
            of_tensors = torch.tensor(self._counted, device=self.device)
            self._block_counts = of_tensors[self._blocks.blocks[:, 0].long()]
        self.access: InPlace | Staged = InPlace()

    def attach(self, averages: Sequence[Sequence[Tensor]], decays: Callable[[Tensor], Tensor], updates: Tensor) -> None:
        """Let later steps also compute average += (1 - decay) * (master - average). Skipped steps do not.

        Args:
            averages: for each average, its fp32 tensors, in the masters' sizes and order. Empty if
                :class:`opendit.kernels.averages.SeparateAverages` updates the averages.
            decays: function that returns the decays (K,), float64 on the device, for the number of updates so far
                (0-dim, on the device). The function must not wait for the device.
            updates: 0-dim tensor on the device that counts updates; changed in place.
        """
        self.averages = [check_tensors_fit(shards, "averages", self.masters) for shards in averages]
        self.decays, self.updates = decays, updates

    @torch.no_grad()
    def square_sum(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the sum of the squared gradients that this rank counts (``counted``), 0-dim float64 on the device. The
        summation order is fixed, so every run gives the same bits.

        Args:
            gradients: for each master, a gradient of its size or None; all bf16, all fp16 or all fp32. This object
                holds the gradients until :meth:`update`.
        """
        self._gradients = [None if g is None else g.detach().contiguous() for g in gradients]
        present = [g for g in self._gradients if g is not None]
        if len({g.dtype for g in present}) > 1:
            raise ValueError(f"gradients of several dtypes: {sorted({str(g.dtype) for g in present})}")
        for gradient, master in zip(self._gradients, self.masters, strict=True):
            if gradient is not None and gradient.numel() != master.numel():
                raise ValueError(f"a gradient of {gradient.numel()} elements for a master of {master.numel()}")
        self._gradient_dtype = present[0].dtype if present else torch.float32
        if not self.kernels:
            counts = (count for count, g in zip(self._counted, self._gradients, strict=True) if g is not None)
            norms = [torch.linalg.vector_norm(g, dtype=torch.float32).double() for g in present]
            squares = (count * n.square() for count, n in zip(counts, norms, strict=True))
            return sum(squares, torch.zeros((), dtype=torch.float64, device=self.device))
        self._refresh_table()
        blocks = self._blocks.blocks
        partial = torch.empty(len(blocks), dtype=torch.float32, device=self.device)
        if len(blocks):
            _square_sum_kernel[(len(blocks),)](
                self._addresses.table, blocks, partial, len(self.masters),
                BLOCK=self.block, GRAD=triton_dtype(self._gradient_dtype), num_warps=WARPS,
            )  # fmt: skip
        return (partial if self._block_counts is None else partial * self._block_counts).sum(dtype=torch.float64)

    @torch.no_grad()
    def decide(self, square_sum: Tensor, *, scale: Tensor | float = 1.0, clip: float = 0.0) -> tuple[Tensor, Tensor]:
        """Decide on the device whether to skip the step. Compute the step's factors, and count the step unless skipped.

        Args:
            square_sum: sum of the squared gradients of all ranks.
            scale: factor of the loss; a tensor of one element, or a number.
            clip: largest norm of the unscaled gradients; 0: no limit.

        Returns:
            The norm of the unscaled gradients before clipping (0-dim float64, with infinity instead of NaN), and True
            if the norm is finite (0-dim bool). If the norm is not finite, :meth:`update` changes nothing.
        """
        scale = scale.double().view(()) if isinstance(scale, Tensor) else scale
        norm = square_sum.sqrt() / scale
        finite = norm.isfinite()
        norm = torch.where(finite, norm, torch.inf)
        excess = ((norm + 1e-6) / clip).clamp(min=1.0) if clip > 0 else torch.ones_like(norm)
        decays = self.decays(self.updates).to(torch.float64)
        self.count += finite
        self.updates += finite
        steps = self.count.double()
        corrections = 1.0 - self.betas[0] ** steps, (1.0 - self.betas[1] ** steps).sqrt()
        factors = torch.stack([finite.double(), 1.0 / (scale * excess), *corrections])
        self.scalars = torch.cat([factors, 1.0 - decays]).float()
        return norm, finite

    @torch.no_grad()
    def momentum(self, momentum: float) -> list[Tensor | None]:
        """Apply momentum to the gradients of Muon's tensors. Call after :meth:`decide`.

        The tensors' first moments are updated, and their gradients become the matrices to orthogonalise. Returns all
        gradients. Muon then writes update directions into the gradients, for :meth:`update`.
        """
        if self.kernels:
            blocks = self._blocks.blocks
            if len(blocks):
                _momentum_kernel[(len(blocks),)](
                    self._addresses.table, blocks, self.scalars, len(self.masters), momentum, 1.0 - momentum,
                    LIMIT=FP16_MAX, BLOCK=self.block, GRAD=triton_dtype(self._gradient_dtype), num_warps=WARPS,
                )  # fmt: skip
        elif self.scalars[0]:
            coefficient = self.scalars[1].item()
            for gradient, exp_avg, squares in zip(self._gradients, self.exp_avgs, self.exp_avg_sqs, strict=True):
                if gradient is not None and squares is None:
                    momentum_reference(gradient.view(-1), exp_avg.view(-1), momentum, coefficient)
        return self._gradients

    @torch.no_grad()
    def update(self, *, lr: float, weight_decay: float = 0.0, start: int = 0, stop: int | None = None) -> None:
        """Update tensors ``start`` to ``stop`` - 1. Call after :meth:`square_sum` and :meth:`decide`. Several calls may
        divide the tensors; the last call must include the last tensor."""
        stop = len(self.masters) if stop is None else stop
        if self._decoded is None:
            self._update(lr, weight_decay, start, stop)
        else:
            for some in self._decoded.groups(start, stop):
                self._decoded.decode(*some, self.scalars)
                self._update(lr, weight_decay, *some)
                self._decoded.encode(*some, self.scalars)
        if stop == len(self.masters):
            self._gradients = []  # frees the gradients' memory for the next step

    def _update(self, lr: float, weight_decay: float, start: int, stop: int) -> None:
        if self.kernels:
            first, last = self._blocks.first[start], self._blocks.first[stop]
            if last > first:
                self.access.run(partial(self._launch, lr, weight_decay), first, last)
        else:
            self._update_with_torch(slice(start, stop), lr, weight_decay)

    def _launch(self, lr: float, weight_decay: float, first: int, last: int, shift: int, stride: int) -> None:
        beta1, beta2 = self.betas
        mixed = any(square is None for square in self.exp_avg_sqs)
        for directed in (False, True) if mixed else (False,):
            _update_kernel[(last - first,)](
                self._addresses.table, self._blocks.blocks, self.scalars, len(self.masters), first, float(lr),
                float(lr * weight_decay), beta2, 1.0 - beta1, 1.0 - beta2, self.eps, shift, stride,
                BLOCK=self.block, GRAD=triton_dtype(self._gradient_dtype),
                WORKING=triton_dtype(self.working[0].dtype if self.working else torch.float32),
                AVERAGES=len(self.averages), MIXED=mixed, DIRECTED=directed, num_warps=WARPS,
            )  # fmt: skip

    def stage(self, rows: Tensor, **options: Any) -> None:
        """Access the moments through the ring buffer of :class:`Staged`. The moments must be views of ``rows``."""
        squares = [square for square in self.exp_avg_sqs if square is not None]
        self.access = Staged(rows, [self.exp_avgs, squares], self._blocks, self.device, **options)

    def _update_with_torch(self, part: slice, lr: float, weight_decay: float) -> None:
        finite, coefficient, _, _, *weights = self.scalars.tolist()
        if not finite:
            return
        adamw_ema_reference(
            self.masters[part],
            self._gradients[part],
            self.exp_avgs[part],
            self.exp_avg_sqs[part],
            self.working[part],
            [shards[part] for shards in self.averages],
            [1.0 - weight for weight in weights[: len(self.averages)]],
            count=self.count.item(),
            coefficient=coefficient,
            lr=lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=weight_decay,
        )

    def _refresh_table(self) -> None:
        working = self.working or [None] * len(self.masters)
        rows = [self._gradients, working, self.masters, self.exp_avgs, self.exp_avg_sqs, *self.averages]
        self._addresses.refresh(rows)
