"""How --plugin fsdp divides a run's model: what --reshard auto means here, and how gradients accumulate."""

from dataclasses import replace

import torch

from opendit.models import DiTConfig
from opendit.parallel.apply import Sharding
from opendit.training.memory import USABLE, Setup, estimate


def choose_sharding(
    config: DiTConfig, setup: Setup, batch: int, capacity: float | None, reshard: str, reduce_dtype: torch.dtype
) -> Sharding:
    """What the flags ask for, and where they leave it open, what saves traffic and still fits.

    Args:
        batch: samples of a micro-batch on a rank.
        capacity: bytes of a card; None on a CPU, where everything is taken to fit.
        reshard: auto, after_forward or never, as --reshard.
    """
    trained = setup.trained or config.parameters()

    def fits(gathered: bool, more: float) -> bool:
        like = replace(setup, plugin="zero2" if gathered else "gemini")  # whole working weights, or shards of them
        return capacity is None or estimate(config, like, batch).total + more <= USABLE * capacity

    shards = 4 * trained / setup.world  # of fp32 gradients
    kept = reshard == "never" or (reshard == "auto" and fits(True, shards))
    whole = reduce_dtype.itemsize * trained
    return Sharding(reduce_dtype=reduce_dtype, keep_gathered=kept, keep_gradients=fits(kept, shards + whole))
