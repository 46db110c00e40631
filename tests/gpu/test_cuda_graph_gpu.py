"""Test that steps replayed as a CUDA graph have the same bits as steps without a graph."""

from dataclasses import replace

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels.recording import record
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from tests.ranks import run_ranks
from tests.training.test_runners import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LABELS = DiTConfig((16, 16), 2, 2, 144, 3, 2, num_classes=3)
CAPTIONS = DiTConfig((16, 16), 2, 2, 144, 2, 2, text=TextConfig("t5", 8, 5, cross_attention=True))
CASES = [  # configuration, sizes of the micro-batches of each step, precision
    (LABELS, [[4]] * 10, "bf16"),
    (LABELS, [[4, 4, 4]] * 5 + [[3, 4, 4], [4, 3, 4], [4, 4, 4]], "bf16"),
    (LABELS, [[4, 4]] * 8, "fp16"),
    (CAPTIONS, [[4]] * 8, "fp32"),
    (replace(LABELS, sprint=(1, 2)), [[4]] * 12, "bf16"),  # recorded again after five steps
]


def both(mesh) -> list[tuple[bool, float]]:
    """Return, for each case, whether the results are equal with and without graphs, and the last loss."""
    # warn_only, because not every attention kernel is deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for config, sizes, precision in CASES:
        speed = SpeedFlags(True, True, False)
        (masters, losses, _), (again, same, _) = (
            train(mesh, config, sizes, graph=graph, precision=precision, speed=speed) for graph in (False, True)
        )
        equal = torch.equal(losses, same) and all(torch.equal(again[name], m) for name, m in masters.items())
        found.append((equal, losses[-1].item()))
    return found


def test_replayed_steps_are_the_steps():
    for found in run_ranks(min(2, torch.cuda.device_count()), both):
        assert all(equal for equal, _ in found), found
        assert all(0 < loss < 100 for _, loss in found)


def failing(how: str, side: torch.cuda.Stream) -> torch.Tensor:
    found = torch.ones(1000, device="cuda") * 2
    if how == "waits for the device":
        return found * found.sum().item()
    if how == "another stream not joined":
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found.add_(1)
    raise RuntimeError("not to be recorded")


@pytest.mark.parametrize("how", ("raises", "waits for the device", "another stream not joined"))
def test_a_failed_recording_leaves_torch_as_it_was(how):
    side, stream = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.manual_seed(0)
    drawn, state = torch.randn(5, device="cuda"), torch.cuda.get_rng_state()
    said = "not permitted" if how == "waits for the device" else "not to be recorded"
    with pytest.raises(RuntimeError, match=said):
        record(lambda: failing(how, side), stream, torch.cuda.graph_pool_handle())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.manual_seed(0)
    assert torch.equal(torch.randn(5, device="cuda"), drawn)
    places = set()
    for _ in range(6):  # memory that is used on another stream, freed and allocated again
        block = torch.zeros(50 << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            block.add_(1)
        block.record_stream(side)
        places.add(block.data_ptr())
        torch.cuda.synchronize()
        del block
    assert len(places) < 6
    numbers = torch.arange(1000.0, device="cuda")
    threefold, replay = record(lambda: numbers * 3, stream, torch.cuda.graph_pool_handle())
    replay()
    assert torch.equal(threefold, numbers * 3)
