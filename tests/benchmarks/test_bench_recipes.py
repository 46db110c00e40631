"""benchmarks/bench_recipes.py: its plans, its figures from a run's log, and a tiny model on two ranks."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks import bench_recipes
from benchmarks.bench_recipes import CASES, LARGEST_STEP, Case, figures, main, planned, reason, rows_of
from opendit.models.conditioning import TextConfig
from opendit.models.zoo import model_config
from opendit.training.memory import GIB

JOINT = model_config(
    "vDiT-7B/122",
    input_size=(32, 32),
    in_channels=4,
    frames=32,
    learn_sigma=False,
    text=TextConfig("t5", 1024, 120, True),
)


def test_every_case_is_a_run_that_can_be():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        batch, needed = planned(case.argv([]), 8, 130 * GIB)
        assert batch >= 1 and needed <= 130, case.name


def test_the_batch_is_the_largest_that_fits_up_to_a_limit_of_work():
    argv = ["--recipe", "mock_pretrain_7b_256p_joint"]
    batch, needed = planned(argv, 4, 130 * GIB)
    assert needed <= 130 and planned(argv, 4, needed * GIB)[0] == batch
    assert planned(argv, 4, 0.99 * needed * GIB)[0] < batch
    nothing, least = planned(argv, 1, 130 * GIB)
    assert nothing == 0 and least > 130
    many, _ = planned([*argv, "--grad_checkpoint"], 4, 130 * GIB)
    assert many == LARGEST_STEP // (3 * JOINT.forward_flops())


def a_run(folder: Path, skipped: int = 0) -> Path:
    """Write train.py's files after 10 steps on 4 ranks: two slow log lines, two good ones and an outlier."""
    flags = dict(
        model="vDiT-7B/122", plugin="zero2", mixed_precision="bf16", batch_size=3, grad_accumulation=2,
        sequence_parallel_size=2, grad_checkpoint=False, enable_cuda_graph=True, recompute="cheap",
    )  # fmt: skip
    folder.mkdir()
    stored = {"world_size": 4, "flags": flags, "model_config": JOINT.to_dict()}
    (folder / "config.json").write_text(json.dumps(stored))
    lines = [
        dict(step=step, samples_per_s=rate, tflops=10 * rate, memory_gib=memory, data_wait_s=wait, skipped=skipped)
        for step, rate, memory, wait in (
            (2, 0.1, 9, 60),
            (4, 1, 10, 3),
            (6, 6, 11, 0.5),
            (8, 7, 12, 0.1),
            (10, 2, 12, 0),
        )
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_figures_are_medians_after_the_warm_up(tmp_path):
    found = figures(a_run(tmp_path / "run"))
    assert found.case == "vDiT-7B/122 8192 tokens zero2 bf16 batch 3 graph recompute cheap"
    assert found.tokens == 6 * 8192 / 4 and found.executed == 60 and found.peak == 12
    assert found.ms == pytest.approx(1e3 * 3 * 2 * 2 / 6)  # 2 groups of 2 ranks, 2 micro-batches of 3
    assert found.six_n == pytest.approx(6 * 6.690e9 * found.tokens / 1e12, rel=1e-3)
    assert found.waited == pytest.approx(0.1 / (2 * 2.0))
    rows = {row["metric"]: row for row in rows_of(found, ("somebody's", 1000))}
    assert rows["tokens/s/GPU"]["value"] == "12288" and rows["tokens/s/GPU"]["baseline"] == "somebody's"
    assert rows["tokens/s/GPU"]["ratio"] == "" and "baseline" not in rows["ms"]
    with pytest.raises(RuntimeError, match="3 steps had gradients"):
        figures(a_run(tmp_path / "other", skipped=3))


def test_the_reason_of_a_failure():
    output = (
        "W1121 run.py: a warning\n[rank1]: Traceback (most recent call last):\n[rank1]:   raise ValueError(error: no)\n"
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert reason(output) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert reason("usage: train.py\nerror: --image_size 3: no\n") == "error: --image_size 3: no"
    assert "without naming" in reason("Killed\n")


def test_runs_on_two_ranks_and_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    tiny = "--model vDiT-Ti/122 --image_size 32 --max_text_tokens 5 --num_workers 0"
    cases = (
        Case("broken", "mock_pretrain_xl", f"{tiny} --image_size 33"),
        Case("tiny", "mock_pretrain_xl_256p_joint", f"{tiny} --num_frames 2", ("somebody's", 1000)),
    )
    monkeypatch.setattr(bench_recipes, "CASES", cases)
    monkeypatch.setattr(bench_recipes, "planned", lambda argv, gpus, capacity, batch: (batch, 1.0))
    results = tmp_path / "results.csv"
    main(["--gpus", "2", "--batch_size", "2", "--outputs", str(tmp_path / "out"), "--results", str(results)])
    shown = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert len(shown) == 3 and "failed: error: " in shown[1] and str(tmp_path / "out/broken-2/output.txt") in shown[1]
    rows = {row["metric"]: row for row in csv.DictReader(results.open())}
    assert set(rows) == {"tokens/s/GPU", "ms", "peak GiB", "TFLOP/s executed", "TFLOP/s 6 N"}
    assert {row["case"] for row in rows.values()} == {"vDiT-Ti/122 8 tokens zero2 fp32 batch 2"}
    # 2 x 2 samples with latents of 2 x 4 x 4 and patches of 1 x 2 x 2
    tokens = float(rows["tokens/s/GPU"]["value"])
    assert tokens == pytest.approx(2 * 8 / (float(rows["ms"]["value"]) / 1e3), rel=0.02)
    assert (rows["tokens/s/GPU"]["baseline_value"], rows["tokens/s/GPU"]["ratio"]) == ("1000", "")
    assert (rows["peak GiB"]["baseline"], rows["peak GiB"]["baseline_value"]) == ("estimated", "1.0")
    assert f"{tokens:,.0f}" in shown[2]
