"""benchmarks/bench_trees.py: two sides take turns, and one side's failure stops both."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "benchmarks/bench_trees.py", "--turns", "2", "--steps", "3", "--warmup", "1"]
TINY = "--model DiT-Ti/8 --data_path mock --image_size 64 --batch_size 2 --num_workers 0 --sample_every 0 --no_save"


@pytest.mark.parametrize(("second", "code"), [("--plugin fsdp", 0), ("--plugin nothing", 1)])
def test_both_train_or_none(second, code):
    command = [*PROGRAM, f"--second={second}", "--", *TINY.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    if code:
        assert "--plugin nothing: not known; give one of" in done.stderr and not done.stdout
    else:
        assert "ratio " in done.stdout and ", of 2 from " in done.stdout
