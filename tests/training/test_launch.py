"""Training on several nodes: two torchrun agents with one rendezvous, and the Slurm script with fake Slurm commands."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DIGITS = "--recipe digits --global_batch_size 8 --log_every 1 --sample_every 0 --sample_steps 2 --ckpt_every 0".split()
# Slurm on one machine: a node is a process with its SLURM_NODEID, and signals to a step go to all processes.
STAND_INS = {
    "srun": """
echo "srun $1 $2${SRUN_CPUS_PER_TASK:+, CPUs: $SRUN_CPUS_PER_TASK}" >> "$CALLS"
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & pids="${pids:-} $!"; done
echo $pids > "$CALLS.step"
code=0
for pid in $pids; do wait $pid || code=$?; done
exit $code
""",
    "scontrol": """
if [ "$1" = show ]; then echo 127.0.0.1; echo other; else echo "scontrol $*" >> "$CALLS"; fi
""",
    "scancel": f"""
echo "scancel $*" >> "$CALLS"
{sys.executable} - "$1" $(cat "$CALLS.step") <<'PY'
import os, psutil, signal, sys
for pid in map(int, sys.argv[2:]):
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        process.send_signal(signal.Signals["SIG" + sys.argv[1].removeprefix("--signal=")])
PY
""",
}
TORCHRUN = """
printf '%s' "$SLURM_NODEID" >> "$CALLS.$SLURM_NODEID"
for word; do printf '|%s' "$word" >> "$CALLS.$SLURM_NODEID"; done
mkdir -p "$LOG_DIR/node-$SLURM_NODEID/0"
echo "node $SLURM_NODEID broke" > "$LOG_DIR/node-$SLURM_NODEID/0/stderr.log"
exit "${FAKE_CODE:-0}"
"""


def free_job_number() -> int:
    """Return a job number whose port, as the script computes it, is free."""
    for number in range(os.getpid() % 10000, 20000):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", 20000 + number)) != 0:
                return number
    raise AssertionError("no free port")


def job(folder: Path, argv: list[str], number: int, tools: dict[str, str], **environment: str) -> subprocess.Popen:
    """Run a copy of the script as Slurm would, with the variables of a job with two nodes."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {**STAND_INS, **tools}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (folder / "bin" / name).chmod(0o755)
    script = folder / "slurm_script"
    script.write_text((ROOT / "scripts/slurm/train.sh").read_text())
    python = Path(sys.executable).parent
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        "PATH": f"{folder / 'bin'}:{python}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(python.parent),
        "CALLS": str(folder / "calls"),
        "LOGS": str(folder / "logs"),
        "OMP_NUM_THREADS": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        **environment,
    }
    with open(folder / "log", "a") as log:
        return subprocess.Popen(["bash", str(script), *argv], env=environment, stdout=log, stderr=log)


def losses(outputs: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (outputs / "000-DiT-Ti-2" / "log.jsonl").read_text().splitlines()]


def test_each_node_runs_torchrun_with_the_same_rendezvous(tmp_path):
    argv = ["--recipe", "pretrain_xl", "--data_path", "a b.csv"]
    done = job(tmp_path, argv, 4711, {"torchrun": TORCHRUN}, SLURM_GPUS_ON_NODE="8", SLURM_CPUS_PER_TASK="64")
    assert done.wait(60) == 0
    for node in ("0", "1"):
        words = (tmp_path / f"calls.{node}").read_text().split("|")
        flags = dict(zip(words[1:], words[2:], strict=False))
        assert (flags["--nnodes"], flags["--nproc-per-node"], flags["--rdzv-id"]) == ("2", "8", "4711")
        assert (flags["--rdzv-backend"], flags["--rdzv-endpoint"]) == ("c10d", "127.0.0.1:24711")
        assert flags["--rdzv-conf"] == f"is_host={1 - int(node)}"
        assert flags["--log-dir"] == str(tmp_path / "logs/slurm-4711/attempt-0" / f"node-{node}")
        program = words[words.index("train.py") :]
        assert program == ["train.py", "--outputs", "outputs/slurm-4711", "--load", "latest", *argv]
    assert (tmp_path / "calls").read_text() == "srun --kill-on-bad-exit=1 bash, CPUs: 64\n"  # nothing is queued again


def test_a_failure_shows_what_the_ranks_wrote_and_is_not_queued_again(tmp_path):
    done = job(tmp_path, [], 4712, {"torchrun": TORCHRUN}, FAKE_CODE="3", SLURM_RESTART_COUNT="2")
    assert done.wait(60) == 3
    log = (tmp_path / "log").read_text()
    assert (tmp_path / "calls").read_text() == "srun --kill-on-bad-exit=1 bash\n"  # the job requested no CPUs
    assert "exit code 3" in log and "node 0 broke" in log and "node 1 broke" in log and "attempt 2" in log


def training(mesh, argv: list[str]) -> None:
    train.main(argv)


@pytest.mark.timeout(600)
def test_two_agents_train_as_one_and_a_job_that_nears_its_limit_goes_on(tmp_path):
    """Two agents with a process each, stopped by USR1 and queued again, match an undisturbed run of two processes."""
    steps = 40
    argv = [*DIGITS, "--max_steps", str(steps)]
    outputs = tmp_path / "one"
    run_ranks(2, training, [*argv, "--outputs", str(outputs)])

    two, number = tmp_path / "two", free_job_number()
    argv += ["--outputs", str(two)]
    first = job(tmp_path, argv, number, {}, NPROC="1")
    log = two / "000-DiT-Ti-2" / "log.jsonl"
    deadline = time.monotonic() + 200
    while not (log.is_file() and len(log.read_text().splitlines()) >= 3):
        assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.02)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(200) == 75, (tmp_path / "log").read_text()[-3000:]
    stopped_at = len(losses(two))
    assert 3 <= stopped_at < steps
    asked = (tmp_path / "calls").read_text().splitlines()
    assert asked[1:] == [f"scancel --signal=USR1 {number}", f"scontrol requeue {number}"]
    assert "SIGUSR1: finishing the step and saving" in (tmp_path / "log").read_text()

    again = job(tmp_path, argv, number, {}, NPROC="1", SLURM_RESTART_COUNT="1")
    assert again.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
    assert f"steps       {stopped_at} to {steps}, resumed from" in (tmp_path / "log").read_text()
    assert losses(two) == losses(outputs) and len(losses(two)) == steps
    ranks = sorted((tmp_path / "logs" / f"slurm-{number}").glob("attempt-1/node-*/**/stdout.log"))
    assert len(ranks) == 2 and "Done: step 40" in ranks[0].read_text()
