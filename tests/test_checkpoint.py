"""Checkpoints under faults: damaged files, full disks, killed processes, signals."""

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import opendit.saving
import train
from opendit.models.pretrained import read_info
from opendit.saving import OPTIMIZER, share_out
from opendit.state_files import damage, write_tensors
from tests.ranks import run_ranks
from tests.test_resume import assert_same_bits

ROOT = Path(__file__).resolve().parents[1]
ARGV = "--model DiT-Ti/2 --image_size 8 --vae none --num_workers 0 --log_every 1 --sample_every 0".split()
ARGV += "--mixed_precision fp32 --sample_steps 1 --sample_cfg_scale 1 --batch_size 4".split()


def run_to(outputs: Path, steps: int, *more: str) -> Path:
    """Trains in this process; returns the folder of checkpoints."""
    train.main([*ARGV, "--max_steps", str(steps), "--ckpt_every", "1", "--outputs", str(outputs), *more])
    return outputs / "000-DiT-Ti-2" / "checkpoints"


def steps_in(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))


# ------------------------------------------------------------------------------------------ files


def test_our_safetensors_are_what_the_library_reads(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(7).bfloat16(),
        "strided": torch.randn(6, 4).t(),
        "long": torch.arange(3),
    }
    entry = write_tensors(tmp_path / "x.safetensors", tensors, {"opendit": '{"n": "é"}'})
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    assert read_info(tmp_path / "x.safetensors") == {"n": "é"}
    digest = subprocess.run(["sha256sum", tmp_path / "x.safetensors"], capture_output=True, text=True).stdout.split()[0]
    assert entry == {"bytes": (tmp_path / "x.safetensors").stat().st_size, "sha256": digest}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_write_about_as_much(ranks):
    sizes = {f"p{i}": size for i, size in enumerate([1000, 1000, 1000, 900, 700, 300, 70, 7, 1] * 12)}
    owner = share_out(sizes, ["model", "ema"], ranks)
    assert len(owner) == 3 * len(sizes) and set(owner.values()) == set(range(ranks))
    for file in ("model", "ema"):
        assert len({rank for (name, _), rank in owner.items() if name == file}) == 1
    load = [0] * ranks
    for (file, name), rank in owner.items():
        load[rank] += sizes[name] * (2 if file == OPTIMIZER else 1)
    # A weights file is not cut up: from 4 ranks on it is the biggest share.
    assert max(load) <= max(4 * sum(sizes.values()) / ranks, sum(sizes.values())) + 2000


# ------------------------------------------------------------------------------------------ damage


def test_damage_is_named_before_a_weight_is_touched(tmp_path, no_ranks, capsys, monkeypatch):
    checkpoints = run_to(tmp_path, 2)
    newest, earlier = checkpoints / "step_0000002", checkpoints / "step_0000001"
    monkeypatch.setattr(train, "build_model_and_engine", lambda job: pytest.fail("weights were made"))

    def refused() -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_to(tmp_path, 3, "--load", "latest")
        assert stop.value.code == 2
        return capsys.readouterr().err

    names = [path.name for path in newest.iterdir()]
    assert sorted(names) == ["ema.safetensors", "manifest.json", "model.safetensors", "optimizer_000.safetensors",
                             "state.json"]  # fmt: skip
    for name in names:
        content = (newest / name).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (content[:-1], flipped, None):
            if damaged is None and name == "state.json":
                continue  # without it the folder is no checkpoint: --load latest takes the one before
            (newest / name).unlink()
            if damaged is not None:
                (newest / name).write_bytes(damaged)
            message = refused()
            assert str(newest / name) in message, (name, message)
            assert f"intact is --load {earlier}" in message, (name, message)
            (newest / name).write_bytes(content)
    (earlier / "ema.safetensors").write_bytes(b"")
    (newest / "model.safetensors").unlink()
    assert "there is no intact checkpoint before it" in refused()


def test_another_version_is_refused(tmp_path, no_ranks, capsys):
    checkpoints = run_to(tmp_path, 1)
    state = json.loads((checkpoints / "latest/state.json").read_text())
    (checkpoints / "latest/state.json").write_text(json.dumps({**state, "version": 1}))
    with pytest.raises(SystemExit):
        run_to(tmp_path, 2, "--load", "latest")
    assert "has checkpoint version 1, this program reads 2" in capsys.readouterr().err


def test_what_a_kill_left_is_found_and_tidied(tmp_path, no_ranks):
    checkpoints = run_to(tmp_path, 2)
    (checkpoints / ".step_0000003.incomplete").mkdir()
    (checkpoints / "step_0000002").rename(checkpoints / ".step_0000002.replaced")  # killed between two renames
    (checkpoints / "step_0000001").rename(tmp_path / "away")
    assert not (checkpoints / "latest").exists()
    run_to(tmp_path, 3, "--load", "latest")
    assert steps_in(checkpoints) == [2, 3] and not list(checkpoints.glob(".step*"))
    lines = [json.loads(line) for line in (checkpoints.parent / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


# ------------------------------------------------------------------------------------------ failing writes


def test_a_full_disk_leaves_the_last_checkpoint_and_fails_the_exit_code(tmp_path, no_ranks, capsys):
    checkpoints = run_to(tmp_path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # a real write fails in the middle of a file
    try:
        with pytest.raises(SystemExit) as stop:
            run_to(tmp_path, 4, "--load", "latest")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stop.value.code == 1
    output = capsys.readouterr()
    said = output.out + output.err
    assert "step 3: NOT SAVED, rank 0" in said and "safetensors" in said and os.strerror(errno.EFBIG) in said
    assert steps_in(checkpoints) == [1, 2] and not list(checkpoints.glob(".step*"))
    assert os.readlink(checkpoints / "latest") == "step_0000002" and damage(checkpoints / "latest") is None
    lines = [json.loads(line) for line in (checkpoints.parent / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # training went on
    run_to(tmp_path, 4, "--load", "latest")  # and with room again it resumes
    assert steps_in(checkpoints) == [1, 2, 3, 4]


def one_rank_fails(mesh, outputs: str) -> int | None:
    write = opendit.saving.write_tensors

    def full_at_step_1(path, *args):
        if mesh.rank == 1 and "step_0000001" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args)

    opendit.saving.write_tensors = full_at_step_1
    try:
        run_to(Path(outputs), 2)
    except SystemExit as stop:
        return stop.code
    return None


def test_a_failure_on_one_rank_is_every_ranks(tmp_path):
    assert run_ranks(2, one_rank_fails, str(tmp_path)) == [1, 1]
    checkpoints = tmp_path / "000-DiT-Ti-2" / "checkpoints"
    assert steps_in(checkpoints) == [2] and damage(checkpoints / "step_0000002") is None


# ------------------------------------------------------------------------------------------ what is kept


def test_keep_deletes_old_ones_only(tmp_path, no_ranks):
    checkpoints = run_to(tmp_path, 5, "--ckpt_keep", "2")
    assert steps_in(checkpoints) == [4, 5]
    run_to(tmp_path, 6, "--ckpt_keep", "1", "--load", "latest")
    assert steps_in(checkpoints) == [5, 6]  # 5 is the one in use
    # Back to 5: the later 6 of the attempt before is replaced, not counted.
    run_to(tmp_path, 6, "--ckpt_keep", "1", "--load", str(checkpoints / "step_0000005"))
    assert steps_in(checkpoints) == [5, 6] and os.readlink(checkpoints / "latest") == "step_0000006"


# ------------------------------------------------------------------------------------------ kills and signals


def launch(argv: list[str], world: int = 2) -> list[subprocess.Popen]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["OMP_NUM_THREADS"] = "1"
    return [
        subprocess.Popen(
            [sys.executable, "train.py", *argv],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]


def wait_for(condition, processes: list[subprocess.Popen]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.0005)


def kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)  # many processes that each import everything
def test_kills_in_a_save_and_a_sigterm_change_nothing(tmp_path):
    steps = 60
    argv = [*ARGV, "--max_steps", str(steps), "--ckpt_every", "1", "--ckpt_keep", "2"]
    whole = launch([*argv, "--outputs", str(tmp_path / "whole")])
    assert [process.wait(timeout=200) for process in whole] == [0, 0]
    outputs = tmp_path / "parts"
    checkpoints = outputs / "000-DiT-Ti-2" / "checkpoints"
    again = [*argv, "--outputs", str(outputs), "--load", "latest"]
    for victim, at_least in enumerate((3, 12, 21)):
        processes = launch(again)
        wait_for(lambda bar=at_least: max(steps_in(checkpoints), default=0) >= bar, processes)
        wait_for(lambda: any(checkpoints.glob(".step_*.incomplete")), processes)
        processes[victim % 2].kill()  # one rank, in the middle of a save; then, as torchrun does, the other
        kill(processes)
    processes = launch(again)
    wait_for(lambda: max(steps_in(checkpoints)) >= 30, processes)
    processes[1].send_signal(signal.SIGTERM)  # one rank hears of it, both stop after the same step
    assert [process.wait(timeout=100) for process in processes] == [0, 0]
    log = checkpoints.parent / "log.jsonl"
    stopped = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert stopped[-1] < steps and os.readlink(checkpoints / "latest") == f"step_{stopped[-1]:07d}"
    assert [process.wait(timeout=200) for process in launch(again)] == [0, 0]
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, steps + 1))
    undisturbed = tmp_path / "whole/000-DiT-Ti-2"
    assert_same_bits(undisturbed / "checkpoints/latest", checkpoints / "latest")
    curves = [
        [json.loads(line)["loss"] for line in open(run / "log.jsonl")] for run in (undisturbed, checkpoints.parent)
    ]
    assert curves[0] == curves[1]


TWO_SIGNALS = """
import os, signal, torch
from opendit.interrupt import Interrupt
from opendit.parallel.mesh import Mesh
with Interrupt(Mesh(0, 1, 0, torch.device("cpu"))) as interrupt:
    assert not interrupt.ask()()
    os.kill(os.getpid(), signal.SIGTERM)
    assert interrupt.ask()()
    print("noted", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
"""


def test_a_second_signal_quits_at_once():
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGINT and done.stdout == "noted\n", done
    assert "SIGTERM: finishing the step and saving" in done.stderr
    # Also where Python never gets to a handler, as inside a collective whose peer is gone.
    endless = "__import__('hashlib').pbkdf2_hmac('md5', b'', b'', 2**31 - 1)"
    stuck = TWO_SIGNALS.replace("os.kill(os.getpid(), signal.SIGINT)", endless)
    process = subprocess.Popen([sys.executable, "-c", stuck], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "noted\n"
    time.sleep(0.5)  # it is inside now
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == -signal.SIGINT
    # torchrun hands a Ctrl-C on to processes that have it already: the same signal within a second is one signal.
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "still here" in done.stdout, done
