"""Choose how --plugin fsdp divides a run's model: the meaning of --reshard auto, and how gradients accumulate."""

from typing import cast

from opendit.models import DiTConfig
from opendit.parallel.apply import Sharding
from opendit.parallel.engines import PRECISIONS
from opendit.training.memory import USABLE, Setup, settle_sharding


def choose_sharding(config: DiTConfig, setup: Setup, batch: int, capacity: float | None) -> Sharding:
    """Choose the sharding that the flags ask for; where they leave it open, the one with the least traffic that fits by
    the estimate of the memory.

    Args:
        batch: samples of a micro-batch on a rank.
        capacity: bytes of a card; None on a CPU, where everything is taken to fit.
    """
    settled = settle_sharding(config, setup, batch, None if capacity is None else USABLE * capacity)
    return Sharding(
        reduce_dtype=PRECISIONS[settled.reduce_dtype],
        keep_gathered=settled.reshard == "never",
        keep_gradients=cast(bool, settled.keep_gradients),  # it is settled
        gather_float8=setup.gathers_float8,
    )
