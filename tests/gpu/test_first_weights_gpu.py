"""Test --pretrained and --lora on GPUs: the loaded values, and the memory under fsdp."""

from pathlib import Path

import pytest
import torch

from opendit.checkpoint.pretrained import read_newest
from opendit.parallel.mesh import Mesh
from opendit.training.build import build_model_and_engine
from tests.ranks import run_ranks
from tests.training.test_first_weights import CASES, LARGE, WIDE, built, digest, expected, specification, stored

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NAMES = ("other classes", "a clip model from a picture model", "LoRA", "LoRA on half precision")
RUNS = [(name, plugin, "bf16") for name in NAMES for plugin in ("fsdp", "zero2")]


def on_gpus(mesh: Mesh, files: dict[str, Path], large: Path) -> tuple[list, int, int]:
    """Build all cases, then a larger model. Returns the cases, the bytes of this rank's trained weights in the larger
    model, and the peak memory of building it."""
    found = built(mesh, files, RUNS)
    spec = specification(mesh, LARGE["whole"], read_newest(large, mesh=mesh), "fsdp", "fp32")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = build_model_and_engine(spec)
    return found, sum(4 * master.numel() for master in engine.masters().values()), _peak() - before


def _peak() -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_shards_are_those_of_a_whole_model_and_nothing_is_whole(tmp_path):
    files = {name: stored(CASES[name], tmp_path / str(number)) for number, name in enumerate(NAMES)}
    world = min(2, torch.cuda.device_count())
    for found, trained, peak in run_ranks(world, on_gpus, files, stored(LARGE["whole"], tmp_path / "large")):
        for (name, plugin, _), (values, trainable, _) in zip(RUNS, found, strict=True):
            wanted, also = expected(CASES[name], files[name])
            frozen = {n for n in wanted.keys() - also if n.endswith((".weight", ".bias"))}
            wanted = {n: digest(v.bfloat16() if n in frozen else v) for n, v in wanted.items()}
            assert trainable == also and values == wanted, (name, plugin)
        # LoRA's weights, and this rank's share of the frozen ones.
        held = trained + 4 * WIDE.parameters() / world
        assert world == 1 or peak < 1.02 * held + (1 << 20), (held, peak)
