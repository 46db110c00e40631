"""Exponential moving averages of the fp32 master weights, with the same shards as the master weights."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from opendit.checkpoint.power_averages import exponent_of
from opendit.parallel.engines import Engine

# With a warm-up, the decay after n updates is at most 1 - rate / (n + DELAY). New runs use the rate WARMUP. A run that
# an earlier version began with --ema_warmup keeps FIRST_WARMUP, so that its decay is at most (1 + n) / (10 + n). The
# rate 0 means no warm-up.
DELAY = 10
WARMUP, FIRST_WARMUP = 10, 9


class EMA:
    """Moving averages of the fp32 master weights ("masters"), held as this rank's shards.

    A step needs no communication. Each average takes 4 bytes x parameters / ranks of memory.

    Args:
        engine: the engine with the masters. The averages start as copies of the masters.
        decays: the decay of each average. The first average is the one to sample from.
        warmup: the rate of the warm-up, ``WARMUP`` in new runs; 0 for constant decays (see :meth:`decays_after`).
        power: True if ``decays`` are the widths of power averages instead (opendit/checkpoint/power_averages.py).

    Attributes:
        snapshots: with power averages, the steps of the checkpoints that this run has saved.
    """

    def __init__(self, engine: Engine, decays: float | Sequence[float], warmup: float = 0, *, power: bool = False):
        self.engine, self.warmup, self.power = engine, 0 if power else warmup, power
        self.snapshots: list[int] = []
        self.decays = tuple(decays) if isinstance(decays, Sequence) else (decays,)
        masters = engine.masters()
        device = next(iter(masters.values())).device
        self._averages = engine.new_averages(len(self.decays))
        for shards in self._averages:
            for name, shard in masters.items():
                shards[name].copy_(shard.detach())
        # Number of updates, including those before a resume.
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        numbers = [exponent_of(width) + 1 for width in self.decays] if power else self.decays
        # decays; with power averages, exponents of 1 - 1 / t
        self._numbers = torch.tensor(numbers, dtype=torch.float64).to(device)
        self._in_the_step = engine.attach_averages(self._averages, self.decays_after, self.updates)

    @property
    def averages(self) -> list[dict[str, Tensor]]:
        """Wait for the last step's update, and return this rank's shards by name, one dictionary for each average."""
        self.engine.wait_for_averages()
        return self._averages

    def decays_after(self, updates: Tensor) -> Tensor:
        """Return the decays of the next update, (K,) float64.

        With a warm-up, the decay after n updates is min(decay, 1 - 10 / (n + 10)). The first update, n = 0, copies the
        weights, so that the average contains nothing of the initial weights. The average of n updates spans about the
        last n / 10 updates, until 10 / (n + 10) is less than 1 - decay.

        The decay of a power average is (1 - 1 / (n + 1)) ** (exponent + 1) (EDM2, eq. 123).

        Args:
            updates: n, 0-dim int64. Skipped steps do not count.
        """
        if self.power:
            return (1 - 1 / (updates.double() + 1)) ** self._numbers
        if not self.warmup:
            return self._numbers
        return torch.minimum(self._numbers, 1 - self.warmup / (updates.double() + DELAY))

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Update average += (1 - decay) * (master - average), unless the step was skipped. Call after every step.

        With zero2 and fsdp, the optimizer's step has already made this update.

        Args:
            finite: the field of the StepResult; False for a skipped step.
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
        """Return the memory of this rank's shards of all averages, in bytes."""
        return sum(shard.numel() * shard.element_size() for shards in self._averages for shard in shards.values())

    def gather(self, which: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full fp32 tensor) for every parameter of one average. Collective; every rank gets equal
        tensors."""
        for name, shard in self.averages[which].items():
            yield name, self.engine.layout.gather(name, shard)

    @torch.no_grad()
    def set(self, which: int, name: str, shard: Tensor) -> None:
        """Set this rank's shard (see ``engine.layout``) of one parameter in average number ``which``."""
        self.averages[which][name].copy_(shard)

    @contextlib.contextmanager
    def at_work(self, which: int = 0) -> Iterator[None]:
        """Exchange the engine's weights for one average's weights inside the context. Works with every plugin.
        Collective.

        Afterwards the engine has its own weights again, bit for bit. The average and the masters are swapped, so no
        extra copy of the weights is needed. Don't take a training step and don't save inside the context.
        """
        self._exchange(which)
        try:
            yield
        finally:
            self._exchange(which)

    @torch.no_grad()
    def _exchange(self, which: int) -> None:
        """Swap the masters and one average."""
        engine, average = self.engine, self.averages[which]
        for name, shard in average.items():
            master = engine.master(name)
            own = master.clone()
            engine.set_shard(name, shard)
            shard.copy_(own)
        engine.finish_loading()

    @contextlib.contextmanager
    def applied(self, model: nn.Module | None, which: int = 0) -> Iterator[nn.Module | None]:
        """Replace the weights of ``model`` by one average's weights, in the model's dtype, inside the context.

        Afterwards the model has its own weights again, bit for bit. Collective: call this on every rank, with None on
        ranks that only help to gather. With tensor parallelism, ``model`` is this rank's part of the model. The
        replaced weights are kept in host memory (2 bytes x parameters in half precision, 4 in fp32), and the device
        needs memory for one more full parameter. If every rank holds all weights (``engine.whole``), ``model`` may be
        the training module.
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
                assert model is not None  # a rank without a model does not fill ``own``
                model.get_parameter(name).data.copy_(weight)
