"""--reshard auto and gradient accumulation choose what to keep by the GPU's memory."""

import pytest
import torch

from opendit.models.zoo import model_config
from opendit.training.memory import GIB, Setup
from opendit.training.model_plan import choose_sharding

CONFIG = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=1000)  # 675 M weights


def chosen(capacity: float | None, reshard: str = "auto", reduce_dtype: str = "fp32", world: int = 8):
    setup = Setup("fsdp", "bf16", world=world, accumulate=True, reshard=reshard, reduce_dtype=reduce_dtype)
    found = choose_sharding(CONFIG, setup, 1, capacity)
    assert found.reduce_dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[reduce_dtype]
    return found.keep_gathered, found.keep_gradients


@pytest.mark.parametrize("world", [2, 8])
def test_what_fits_is_kept_weights_first(world):
    capacities = [0.1 * GIB * tenths for tenths in range(10, 200)]
    wide, narrow = ([chosen(c, reduce_dtype=t, world=world) for c in capacities] for t in ("fp32", "bf16"))
    for found in (wide, narrow):
        assert found[0] == (False, False) and found[-1] == (True, True) and found == sorted(found)
    # Full fp32 gradients replace the shards and the buffers of reduced gradients.
    saved = 4 * CONFIG.parameters() * (1 - 1 / world) / GIB
    first = wide.index((True, False))
    assert (wide.index((True, True)) - first) * 0.1 * 0.94 == pytest.approx(saved, abs=0.3)
    apart = wide.index((True, True)) - narrow.index((True, True))  # bf16 gradients need half as much
    assert apart * 0.1 * 0.94 == pytest.approx(2 * CONFIG.parameters() / GIB, abs=0.2)
    assert chosen(None) == (True, True)


def test_what_is_asked_for_is_done():
    assert chosen(None, "after_forward") == (False, True)
    assert chosen(5 * GIB, "never") == (True, False)
