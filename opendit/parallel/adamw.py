"""AdamW on the shards that a rank holds, in as few passes over memory as there can be; needs no plugin."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from opendit.kernels.adamw_ema import FusedStep


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW on fp32 weights, with the ``div_scale`` that Gemini's optimizer passes.

    Gradients may be bf16 or fp16. (Colossal-AI's own CPU Adam ignores ``div_scale`` for bf16 gradients, so that
    gradient clipping would silently not happen; and its HybridAdam compiles two extensions by nvcc before the first
    step, which takes minutes.)
    """

    elements = 2**26  # of the parameters that are updated together, whose gradients are copied to fp32 at one time

    def __init__(self, params: Any, **kwargs: Any):
        super().__init__(params, fused=True, **kwargs)

    def init_state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None, div_scale: float = -1) -> None:
        for group in self.param_groups:
            for params in _by_size([p for p in group["params"] if p.grad is not None], self.elements):
                grads = [p.grad.to(p.dtype) for p in params if p.grad is not None]
                if div_scale > 0:
                    grads = [g if g is not p.grad else g.clone() for g, p in zip(grads, params, strict=True)]
                    torch._foreach_mul_(grads, 1.0 / div_scale)
                states = [self.init_state(p) for p in params]
                adamw(
                    [p.data for p in params],
                    grads,
                    [s["exp_avg"] for s in states],
                    [s["exp_avg_sq"] for s in states],
                    [],
                    [s["step"] for s in states],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )


def _by_size(params: list[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Lists of neighbouring parameters that together have ``elements`` or, by the last of them, more."""
    taken, size = [], 0
    for p in params:
        taken.append(p)
        size += p.numel()
        if size >= elements:
            yield taken
            taken, size = [], 0
    if taken:
        yield taken


class OnePassAdamW:
    """The step of a :class:`FusedAdamW` by :class:`FusedStep`: norm, moments, masters, averages and working weights in
    two passes over memory, for which the host does not wait.

    Args:
        adam: its only group of parameters has the settings; its state, keyed by ``keys``, is what the step works on.
        keys: the masters, in the order in which gradients will come, fp32 and 1-d or contiguous.
        sizes: elements of each that are to be stepped, from its first; None: all. (Beyond are paddings.)
        working: the masters' copies in the precision of the forward pass; None: there are none.

    Attributes:
        staged: rows in host memory of which the moments are views, to be copied through device memory; None: kernels
            read and write moments where they lie. To be set before the first step.
        counted: as that of :class:`FusedStep`. To be set before the first step.
    """

    staged: Tensor | None = None
    counted: Sequence[bool] | None = None

    def __init__(
        self,
        adam: FusedAdamW,
        keys: Sequence[Tensor],
        sizes: Sequence[int] | None = None,
        working: Sequence[Tensor] | None = None,
    ):
        self.adam, self._keys, self._working = adam, list(keys), working
        self._sizes = [key.numel() for key in keys] if sizes is None else sizes
        self._averages: tuple[Any, ...] | None = None
        self._fused: FusedStep | None = None

    def attach_averages(
        self, averages: Sequence[Sequence[Tensor]], decays: Callable[..., Any], updates: Tensor
    ) -> None:
        """The steps also update these averages; see :meth:`FusedStep.attach`."""
        self._averages = averages, decays, updates
        if self._fused is not None:
            self._fused.attach(*self._averages)

    def fused(self) -> FusedStep:
        """Made at the first call, when the moments have been loaded; all parameters share one count of steps."""
        (settings,) = self.adam.param_groups
        states = [self.adam.init_state(key) for key in self._keys]
        if self._fused is None:
            self._fused = FusedStep(
                self._own(self._keys),
                self._own([state["exp_avg"] for state in states]),
                self._own([state["exp_avg_sq"] for state in states]),
                None if self._working is None else self._own(self._working),
                count=torch.zeros((), dtype=torch.float32, device=self._keys[0].device),
                betas=settings["betas"],
                eps=settings["eps"],
                counted=self.counted,
            )
            if self._averages is not None:
                self._fused.attach(*self._averages)
            if self.staged is not None and self._fused.kernels:
                self._fused.stage(self.staged)
        if any(state["step"] is not self._fused.count for state in states):  # new, or loaded from a checkpoint
            self._fused.count.fill_(states[0]["step"])
            for state in states:
                state["step"] = self._fused.count
        return self._fused

    def finish(self) -> None:
        """The host waits for the moments that are still on their way back to host memory."""
        if self._fused is not None:
            self._fused.access.finish()

    def _own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(tensors, self._sizes, strict=True)
        return [tensor if tensor.numel() == size else tensor.view(-1)[:size] for tensor, size in pairs]
