"""Test that a run ends within seconds if a rank is killed while the others wait inside NCCL collectives."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ROOT = Path(__file__).resolve().parents[2]
SOON = 15.0
ARGV = "--model DiT-S/2 --image_size 32 --vae none --data_path digits --batch_size 32 --mixed_precision bf16".split()
ARGV += "--num_workers 2 --log_every 5 --sample_every 0 --ckpt_every 0 --max_steps 1000000".split()


def test_a_run_whose_graph_holds_collectives_ends(tmp_path):
    """The recorded graph includes NCCL's collectives and copies between ranks that share sequences."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    argv = [*torchrun, *ARGV, "--max_steps", "8", "--enable_cuda_graph", "--sequence_parallel_size", "2"]
    done = subprocess.run([*argv, "--outputs", tmp_path / "out"], cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0 and "Done: step 8" in done.stdout, done.stdout + done.stderr


def ended(agent: subprocess.Popen, left: psutil.Process, log: Path) -> int:
    """Return the agent's exit code. If it does not end soon, raise an error with the stacks of the remaining rank."""
    try:
        return agent.wait(SOON)
    except subprocess.TimeoutExpired:
        state = left.status() if left.is_running() else "gone"
        with contextlib.suppress(psutil.Error):
            left.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER, prints the stacks of all threads
        time.sleep(2)
        raise AssertionError(f"still there after {SOON:g} s, the other rank {state}\n{log.read_text()}") from None


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_lost_inside_nccl_ends_the_run(tmp_path, victim, graph):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    log, outputs = tmp_path / "log", tmp_path / "out"
    argv = [*torchrun, *ARGV, *(["--enable_cuda_graph"] if graph else []), "--outputs", str(outputs)]
    env = os.environ | {"PYTHONFAULTHANDLER": "1"}
    with open(log, "w") as file:
        agent = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file, env=env)
    family: list[psutil.Process] = []
    try:
        lines = outputs / "000-DiT-S-2" / "log.jsonl"
        end = time.monotonic() + 120
        while not (lines.is_file() and len(lines.read_text().splitlines()) >= 3):
            assert agent.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        family = psutil.Process(agent.pid).children(recursive=True)
        ranks = [each for each in psutil.Process(agent.pid).children() if "train.py" in each.cmdline()]
        lost, left = sorted(ranks, key=lambda each: each.environ()["RANK"] != victim)
        # The rank is stopped first, so that the other one hangs inside a collective when the rank is killed.
        lost.send_signal(signal.SIGSTOP)
        time.sleep(2)
        assert left.is_running()
        lost.kill()
        killed = time.monotonic()
        assert ended(agent, left, log) != 0
        assert not psutil.wait_procs(family, timeout=max(0.1, killed + SOON - time.monotonic()))[1]
        assert f"error: rank {victim} (" in log.read_text() and f"pid {lost.pid}) was lost" in log.read_text()
    finally:
        agent.kill()
        for each in family:
            with contextlib.suppress(psutil.Error):
                each.kill()
        agent.wait()
