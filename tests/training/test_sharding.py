"""What --reshard auto and accumulation become, by the memory of the card."""

import pytest
import torch

from opendit.models import model_config
from opendit.training.memory import GIB, Setup
from opendit.training.sharding import choose_sharding

CONFIG = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=1000)  # 675 M weights


def chosen(capacity: float | None, reshard: str = "auto", reduce_dtype: torch.dtype = torch.float32, world: int = 8):
    found = choose_sharding(CONFIG, Setup("fsdp", "bf16", world=world), 1, capacity, reshard, reduce_dtype)
    assert found.reduce_dtype == reduce_dtype
    return found.keep_gathered, found.keep_gradients


@pytest.mark.parametrize("world", [2, 8])
def test_what_fits_is_kept_weights_first(world):
    capacities = [0.1 * GIB * tenths for tenths in range(10, 200)]
    wide, narrow = ([chosen(c, reduce_dtype=t, world=world) for c in capacities] for t in (torch.float32, torch.half))
    for found in (wide, narrow):
        assert found[0] == (False, False) and found[-1] == (True, True) and found == sorted(found)
    # Whole fp32 gradients are 2.5 GiB more than the whole bf16 weights, fp16 ones half of that.
    first = wide.index((True, False))
    assert (wide.index((True, True)) - first) * 0.1 * 0.94 == pytest.approx(4 * CONFIG.parameters() / GIB, abs=0.2)
    assert (narrow.index((True, True)) - first) * 0.1 * 0.94 == pytest.approx(2 * CONFIG.parameters() / GIB, abs=0.2)
    assert chosen(None) == (True, True)


def test_what_is_asked_for_is_done():
    assert chosen(None, "after_forward") == (False, True)
    assert chosen(5 * GIB, "never") == (True, False)
