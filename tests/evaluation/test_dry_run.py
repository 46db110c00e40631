"""``opendit evaluate --dry_run`` estimates the time of all samples from a few batches and keeps none of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import opendit
from opendit.config.evaluate import EvaluateConfig
from opendit.config.parallel_sizes import ParallelDims
from opendit.evaluation.extract import Extractor, Features
from opendit.evaluation.media import MediaOptions
from opendit.evaluation.program import NoNetwork, dry_run, measure
from opendit.evaluation.samples import Samples
from opendit.parallel.mesh import Mesh
from tests.evaluation.small import pictures
from tests.ranks import run_ranks
from tests.sampling.small import write

CPU = torch.device("cpu")


class TwoFeatures(Extractor):
    def __call__(self, pixels):
        return {"pool": torch.zeros(len(pixels), 12), "spatial": torch.zeros(len(pixels), 3, 4)}


def timed(count: int, asked: list) -> Samples:
    """Return samples that take 0.4 s to draw and 0.1 s more for features, and ten times as long in the first batch."""

    def extract(extractor, first, output):
        asked.append((type(extractor), first, output.name))
        seconds = first * (0.4 if isinstance(extractor, NoNetwork) else 0.5)
        return Features(first, {}, seconds * (10 if output.name == "first" else 1), first)

    return Samples(count, (8, 8, 3), None, {}, MediaOptions(8, 1, 1), None, extract, drawn=True)


def test_the_time_of_all_is_that_of_the_few(capsys):
    asked = []
    dry_run(timed(1000, asked), TwoFeatures(CPU), 8, 4, Mesh(0, 1, 0, CPU))
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:3])
    assert asked == [(TwoFeatures, 8, "first"), (TwoFeatures, 32, "measured"), (NoNetwork, 32, "drawn")]
    assert told["tried"] == "32 samples: drawn in 12.80 s; drawn and measured in 16.00 s, 1.250 times as long"
    # 1,000 x 0.5 s / 4, and 1,000 x 0.4 s / 4
    assert told["all"] == "1,000 samples on 4 processes: 0:02:05, 0:01:40 without features"


def test_files_are_read_for_their_features_alone(capsys):
    asked = []
    dry_run(replace(timed(1 << 20, asked), drawn=False), TwoFeatures(CPU), 8, 0, Mesh(0, 1, 0, CPU))
    out = capsys.readouterr().out
    assert [name for _, _, name in asked] == ["first", "measured"]
    assert "32 samples: features in 16.00 s" in out and "1,048,576 samples on 1 process: 6 days, 1:38:08\n" in out
    assert f"features of {4 * 24:,} MiB" in out


def test_fewer_samples_than_batches(capsys):
    asked = []
    dry_run(timed(5, asked), TwoFeatures(CPU), 8, 0, Mesh(0, 1, 0, CPU))
    assert [count for _, count, _ in asked] == [5, 5, 5] and "5 samples on 1 process: 2.5 s" in capsys.readouterr().out


def test_groups_that_draw_together_are_not_divided():
    with pytest.raises(ValueError, match="--dry_run 3: 2 GPUs draw together; take a multiple of 2"):
        dry_run(timed(5, []), TwoFeatures(CPU), 8, 3, Mesh(0, 2, 0, CPU, ParallelDims(sp=2)))


RUN = dict(ckpt="run.safetensors", reference="reference.npz", features="net.pt", num_sampling_steps=2, batch_size=4)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("run.safetensors"))
    pictures(tmp_path / "net.pt")
    np.savez("reference.npz", arr_0=np.random.default_rng(0).integers(0, 256, (90, 8, 8, 3), np.uint8))


def test_nothing_of_it_stays(here, capsys):
    assert opendit.evaluate(EvaluateConfig(**RUN, num_samples=37, cfg_scale=[1.0, 1.5], dry_run=2, output="out")) == []
    out = capsys.readouterr().out
    assert out.count("37 samples on 2 processes") == 2 and "16 samples: drawn in" in out
    assert {path.name for path in Path("out").rglob("*.jsonl")} == set()
    kept = [path for path in Path("out/features").iterdir()]
    assert len(kept) == 1, "the features of the reference alone"
    found = opendit.evaluate(EvaluateConfig(**RUN, num_samples=37, output="out"))  # a real evaluation can follow
    assert {row.count for row in found} == {37}


def plan(mesh: Mesh, folder: str) -> None:
    asked = {"num_samples": 37, "dry_run": 4, "output": f"{folder}/out"}
    assert measure(EvaluateConfig(**RUN, **asked, given=frozenset({*RUN, *asked})), mesh) == []


def test_two_ranks(here, tmp_path, capfd):
    run_ranks(2, plan, str(tmp_path))
    out = capfd.readouterr().out
    assert out.count("37 samples on 4 processes") == 1 and "32 samples: drawn in" in out
