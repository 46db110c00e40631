"""Exponential moving averages of the fp32 master weights, sharded as the plugin shards them."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from opendit.parallel.engines import Engine

# What the decay of the update after n others is at most with a warm-up: 1 - RATE / (n + DELAY). Runs are begun with
# WARMUP; those of earlier versions that were given --ema_warmup keep FIRST_WARMUP, (1 + n) / (10 + n). 0 is no warm-up.
DELAY = 10
WARMUP, FIRST_WARMUP = 10, 9


class EMA:
    """Every rank averages its own shards of the masters: no communication in a step, and for each decay 4 bytes x
    parameters / ranks of memory.

    Args:
        engine: holds the masters; the averages start at their present values.
        decays: share of the old average kept by one update, one average each; the first is the one to sample from.
        warmup: the rate at which early updates forget: ``WARMUP`` of new runs, 0 for constant decays (see
            :meth:`decays_after`).
    """

    def __init__(self, engine: Engine, decays: float | Sequence[float], warmup: float = 0):
        self.engine, self.warmup = engine, warmup
        self.decays = tuple(decays) if isinstance(decays, Sequence) else (decays,)
        masters = engine.masters()
        device = next(iter(masters.values())).device
        self._averages = engine.new_averages(len(self.decays))
        for shards in self._averages:
            for name, shard in masters.items():
                shards[name].copy_(shard.detach())
        self.updates = torch.zeros((), dtype=torch.int64, device=device)  # earlier parts of a resumed run included
        self._decays = torch.tensor(self.decays, dtype=torch.float64).to(device)
        self._in_the_step = engine.attach_averages(self._averages, self.decays_after, self.updates)

    @property
    def averages(self) -> list[dict[str, Tensor]]:
        """Wait for the averages of the last step. Return this rank's shards by name, a dictionary for each decay."""
        self.engine.wait_for_averages()
        return self._averages

    def decays_after(self, updates: Tensor) -> Tensor:
        """The decays of the next update, (K,) float64.

        With a warm-up, after n updates (0-dim, skipped steps not counted) min(decay, 1 - 10 / (n + 10)). The first
        update, n = 0, copies the weights: nothing of the initial ones is left. The average of n updates spans about a
        tenth of them, until 10 / (n + 10) is less than 1 - decay.
        """
        if not self.warmup:
            return self._decays
        return torch.minimum(self._decays, 1 - self.warmup / (updates.double() + DELAY))

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """average += (1 - decay) * (master - average) if the step was taken; call after every step.

        Nothing is left to do where the optimizer's step itself does it (zero2). finite: of the StepResult.
        """
        if self._in_the_step or not finite:
            return
        masters = list(self.engine.masters().values())
        for decay, shards in zip(self.decays_after(self.updates).tolist(), self._averages, strict=True):
            torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage] torch has no public name for it
                list(shards.values()), masters, 1.0 - decay
            )
        self.updates += 1

    def bytes_per_rank(self) -> int:
        """Memory of this rank's shards of all averages."""
        return sum(shard.numel() * shard.element_size() for shards in self._averages for shard in shards.values())

    def gather(self, which: int = 0) -> Iterator[tuple[str, Tensor]]:
        """(name, full fp32 tensor) of every parameter of one average in turn; collective, the same on every rank."""
        for name, shard in self.averages[which].items():
            yield name, self.engine.layout.gather(name, shard)

    @torch.no_grad()
    def set(self, which: int, name: str, shard: Tensor) -> None:
        """Sets this rank's shard (``engine.layout``) of one average of one parameter."""
        self.averages[which][name].copy_(shard)

    @contextlib.contextmanager
    def at_work(self, which: int = 0) -> Iterator[None]:
        """Inside, the engine works with one average's weights, under every plugin; afterwards with its own again, bit
        for bit.

        Collective. The average and the masters change places, so it takes no memory; nothing may step or save inside.
        """
        self._exchange(which)
        try:
            yield
        finally:
            self._exchange(which)

    @torch.no_grad()
    def _exchange(self, which: int) -> None:
        """The masters become the average and the average the masters."""
        engine, average = self.engine, self.averages[which]
        for name, shard in average.items():
            master = engine.master(name)
            own = master.clone()
            engine.set_shard(name, shard)
            shard.copy_(own)
        engine.finish_loading()

    @contextlib.contextmanager
    def applied(self, model: nn.Module | None, which: int = 0) -> Iterator[nn.Module | None]:
        """Inside, ``model`` has one average's weights, in its own dtype; afterwards its own again, bit for bit.

        Collective: call it on every rank, with None where the rank only helps to gather. Of a model whose layers ranks
        divide, ``model`` is this rank's part. The replaced weights wait in
        host memory (2 bytes x parameters in half precision, 4 in fp32); the device needs room for one full parameter
        more. The training module itself will do where every rank holds its weights whole (``engine.whole``).
        """
        own: dict[str, Tensor] = {}
        try:
            for name, full in self.gather(which):
                if model is not None:
                    weight = model.get_parameter(name).data
                    own[name] = weight.to("cpu", copy=True)
                    weight.copy_(self.engine.parts.take(name, full))
            yield model
        finally:
            for name, weight in own.items():
                assert model is not None  # as where it was filled
                model.get_parameter(name).data.copy_(weight)
