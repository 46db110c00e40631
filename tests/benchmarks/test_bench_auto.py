"""benchmarks/bench_auto.py: predictions compared with results.csv, and products of stacks on two ranks."""

import json

import pytest

from benchmarks import bench_auto
from benchmarks.bench_auto import KNOWN, PAIRS, add_stacks, key_of, main, measured, predicted, products, typed
from opendit.config.architectures import KINDS
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.parallel.hardware import H200

# Cases that docs/parallelism.md lists as worse than the aims of 12 % and 5 %: (time, memory), predicted / measured.
OFF = {
    "vDiT-7B/122 8192 tokens fsdp bf16 batch 2 fp8 gathered in bf16": (0.70, 0.95),
    "EC-DiT-1B/2 256 tokens zero2 bf16 batch 238 graph": (0.72, 0.95),
    "MovieGen-5B/122 8192 tokens zero2 bf16 batch 5 grad_checkpoint": (0.88, 0.90),
}


@pytest.fixture(autouse=True)
def no_stacks_left(monkeypatch):
    monkeypatch.setitem(KINDS, "vDiT", KINDS["vDiT"])
    before = dict(KINDS["vDiT"].sizes)
    yield
    KINDS["vDiT"].sizes.clear()
    KINDS["vDiT"].sizes.update(before)


def test_predictions_are_near_what_was_measured():
    for known in KNOWN:
        gpus = known.samples if known.bench == "sequence model" else known.gpus
        (took, peak), (ms, gib) = measured(known), predicted(known.flags, gpus)
        time, memory = OFF.get(known.case, (0.88, 0.95))
        assert time < ms / took < 1.12, known.case
        if peak:
            assert memory < gib / peak < 1.05, known.case


def test_six_products_of_every_pair_are_runs_that_can_be():
    add_stacks()
    for pair in PAIRS:
        for gpus in (2, 4):
            words, found = products(pair, gpus, H200)
            assert len(found) >= 4 + gpus // 2 and len({one.candidate.product for one in found}) == len(found)
            for one in found:
                flags = parse(TrainConfig, [*typed(words, one).split(), "--dry_run", str(gpus)])
                settled, _ = flags.resolve(gpus, has_gpu=True)
                assert settled.batch_size == one.candidate.batch_size
                assert settled.grad_checkpoint == one.candidate.grad_checkpoint
    assert len({key_of(pair, 4, one) for pair in PAIRS for one in products(pair, 4, H200)[1]}) >= 18


TINY = (
    "--model vDiT-Ti/122 --use_video --data_path mock --image_size 64 --num_frames 2 --vae ema --num_classes 3 "
    "--mixed_precision bf16 --sample_every 0 --no_save --num_workers 0"
)


def test_a_run_is_kept_and_not_done_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_auto, "PAIRS", {"tiny": (TINY, 4)})
    monkeypatch.setattr(bench_auto, "PRODUCTS", 2)
    monkeypatch.setattr(bench_auto.products, "__defaults__", (2,))
    words = ["--gpus", "2", "--outputs", str(tmp_path), "--limit", "240", "--seconds", "1000"]
    main(words)
    trials = json.loads((tmp_path / "trials.json").read_text())
    assert len(trials) == 2 and all(found["ms"] > 0 for found in trials.values()), trials
    first = capsys.readouterr().out
    assert first.count("predicted") >= 2 and "tiny, 2 GPUs" in first
    monkeypatch.setattr(bench_auto, "train", None)  # nothing may run now
    main(words)
    assert json.loads((tmp_path / "trials.json").read_text()) == trials
    main([*words[:-1], "1"])
    assert "1 s are over" not in capsys.readouterr().out
