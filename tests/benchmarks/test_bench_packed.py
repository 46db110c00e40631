"""benchmarks/bench_packed_attention.py and bench_packed_modulation.py on a CPU: their counts and rows."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_packed_attention import forward_flop, lognormal, main, mixed

ROOT = Path(__file__).parents[2]


def test_mixes_have_as_many_tokens():
    assert mixed(8192) == [8192] * 4 + [4096] * 4 + [1024] * 8 + [256] * 32
    lengths = lognormal(8192)
    assert sum(lengths) == sum(mixed(8192)) == 65536
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > len(lengths) // 2
    assert forward_flop([3, 5], 72) == 16 * 72 * 2 * 2 * (9 + 25)  # q k^T, and scores times v


def test_ways_are_checked_and_measured_and_one_that_fails_is_named(tmp_path, capsys):
    short = ["--longest", "64", "--short", "32", "--head_dims", "8", "--rounds", "1", "--device", "cpu"]
    ways = ["--ways", "runs", "dense runs", "varlen"]
    main([*short, *ways, "--results", str(tmp_path / "rows.csv")])
    out = capsys.readouterr().out
    assert "one call a run: varlen kernels need a CUDA GPU" in out and "varlen, head size 8 failed:" in out
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    speeds = [row for row in rows if row["metric"].startswith("TFLOP/s")]
    assert len(speeds) == 2 * 2 * 2 and all(float(row["ratio"]) > 0 for row in speeds)
    off = [float(row["value"]) for row in rows if row["metric"].startswith("relative error")]
    assert len(off) == 8 and max(off) < 2e-2


@pytest.mark.skipif(sys.platform == "win32", reason="needs Triton")
def test_operations_are_measured_on_packs_and_dense(tmp_path):
    operators = ["--operators", "layernorm_modulate", "--mixes", "mix"]
    tiny = ["--longest", "32", "--width", "64", "--rounds", "1", "--dtype", "fp32", "--device", "cpu"]
    command = [sys.executable, "benchmarks/bench_packed_modulation.py", *operators, *tiny]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "rows.csv")], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert len(rows) == 2 and all(float(row["ratio"]) > 0 for row in rows)
    assert {row["baseline"] for row in rows} == {"samples of 32 tokens"}
