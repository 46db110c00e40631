"""The shell scripts start the right commands. install.sh and python are replaced by fakes that record their calls."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEED = "--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel".split()
FLAGS = ["--model", "DiT-B/4", "--data_path", "my pictures"]
TOOL = """#!/bin/bash
case "$*" in
    *device_count*) echo "$FAKE_GPUS" ;;
    *getaffinity*) echo 4 ;;
    *) { printf '%s' "$(basename "$0")"; for word; do printf '|%s' "$word"; done; echo; } >> calls
        echo "$OMP_NUM_THREADS" >> threads ;;
esac
case "$*" in *--run_folder_file*) echo ./outputs/007-run > "$4" ;; esac
"""


def calls(folder: Path, script: str, *argv: str, gpus: int = 0) -> list[list[str]]:
    """Run a copy of the script and return every call of the fakes, as words."""
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / script, folder)
    (folder / "install.sh").write_text(TOOL)
    tools = folder / "tools"
    tools.mkdir()
    for name in ("python", "ruff"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    environment = {
        k: v for k, v in os.environ.items() if k not in ("NPROC", "SETUP", "OUTPUTS", "VIDEOS", "OMP_NUM_THREADS")
    }
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "VIRTUAL_ENV": "active", "FAKE_GPUS": str(gpus)}
    subprocess.run(["bash", str(folder / script), *argv], env=environment, check=True, timeout=60)
    return [line.split("|") for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize("script", ["train_img.sh", "train_video.sh", "sample_img.sh", "sample_video.sh"])
@pytest.mark.parametrize("gpus", [0, 3])
def test_arguments_go_to_the_program_on_all_gpus(script, gpus, tmp_path):
    setup, run = calls(tmp_path, script, *FLAGS, gpus=gpus)
    assert setup == ["install.sh"]  # the user's flags are not passed to install.sh
    assert run[:3] == ["python", "scripts/launch.py", str(gpus or 2)]
    assert run[3] == ("train.py" if "train" in script else "sample.py")
    assert run[-len(FLAGS) :] == FLAGS
    speed = SPEED + ["--enable_cuda_graph"] * script.startswith("train")
    assert run[4 : -len(FLAGS)] == ["--use_video"] * ("video" in script) + speed * (gpus > 0)


@pytest.mark.parametrize("resumed", [[], ["--load", "latest"]])
@pytest.mark.parametrize(("script", "recipe"), [("train_img.sh", "digits"), ("train_video.sh", "digits_video")])
def test_the_demo_runs_and_goes_on(script, recipe, resumed, tmp_path):
    setup, *made, train, sample, evaluate = calls(tmp_path, script, *resumed)
    assert setup == ["install.sh"] and [call[:2] for call in made] == [["python", "preprocess.py"]] * len(made)
    assert [call[2] for call in made] == (["demo", "check"] if "video" in script else [])
    assert train[:3] == ["python", "scripts/launch.py", "2"] and train[train.index("--recipe") + 1] == recipe
    assert [word for word in train if word in ("--load", "latest")] == resumed
    assert sample[:2] == ["python", "sample.py"] and sample[sample.index("--ckpt") + 1].startswith("./outputs/007-")
    assert evaluate[:4] == ["python", "-m", "opendit", "evaluate"] and "digits" in evaluate
    # Two processes train on the 4 cores. Sampling and evaluation use one process with all cores.
    assert (tmp_path / "threads").read_text().split()[-3:] == ["2", "4", "4"]


TRAINS = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ.get("RANK", "0")
(folder / f"started{rank}").touch()
if sys.argv[2] == "fails":
    sys.exit(2 if rank == "1" else 0)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
if sys.argv[2] == "trains" and rank == "0":
    pathlib.Path(os.environ["OPENDIT_RUN_FOLDER_FILE"]).write_text(str(folder))
(folder / f"ready{rank}").touch()
while not stopped and not (folder / "stopped").exists():
    time.sleep(0.01)
(folder / "stopped").touch()
(folder / "ended.json").write_text('{"done": false}')
"""


@pytest.mark.parametrize(("program", "signals", "code"), [
    ("trains", [signal.SIGTERM], 75),  # saved: only rank 0 gets the signal, and both end
    ("imports", [signal.SIGINT], 130),
    ("imports", [signal.SIGTERM], 75),
    ("fails", [], 2),
])  # fmt: skip
def test_the_launcher_passes_a_signal_on_and_tells_how_it_ended(program, signals, code, tmp_path):
    (tmp_path / "program.py").write_text(TRAINS)
    argv = [sys.executable, ROOT / "scripts/launch.py", "2", tmp_path / "program.py", tmp_path, program]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore SIGINT
    launched = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    end = time.monotonic() + 60
    try:
        while len(list(tmp_path.glob("ready*" if signals else "started*"))) < 2:
            assert launched.poll() in (None, code) and time.monotonic() < end
            time.sleep(0.01)
        for number in signals:
            launched.send_signal(number)
        _, errors = launched.communicate(timeout=60)
    finally:
        while launched.poll() is None:  # the second signal also ends its processes
            launched.terminate()
            time.sleep(0.2)
    assert launched.returncode == code and "Traceback" not in errors
    assert (tmp_path / "ended.json").exists() == (program == "trains")


def test_the_tests_set_up_what_they_need(tmp_path):
    setup, *lint, tests = calls(tmp_path, "run_tests.sh", "-k", "nothing")
    assert setup == ["install.sh", "test"]
    assert [call[:2] for call in lint] == [["ruff", "check"], ["ruff", "format"], ["python", "scripts/check_pages.py"]]
    assert tests[:3] == ["python", "-m", "pytest"] and tests[-2:] == ["-k", "nothing"]


def test_install_in_an_environment_without_this_clone(tmp_path):
    """All packages but opendit are installed: -S hides what an editable installation adds to the path."""
    shutil.copy(ROOT / "install.sh", tmp_path)
    (tmp_path / "opendit").mkdir()
    (tmp_path / "opendit/__init__.py").touch()
    packages = f"PYTHONPATH={sysconfig.get_path('purelib')}"
    python = f'[ "$2" = pip ] && exit 7\n{packages} exec {sys.executable} -S "$@"\n'
    (tmp_path / "python").write_text(f"#!/bin/bash\n{python}")
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "VIRTUAL_ENV": "active"}
    environment["OPENDIT_LATEST"] = "1"  # without constraints.txt
    command = ["bash", str(tmp_path / "install.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7 and done.stderr == ""  # from pip, which is called for what is missing
    first, *others = done.stdout.splitlines()
    assert first == "setting up in the active environment active; missing: opendit of this folder"
    assert any("colossalai's pins" in line for line in others)


def test_install_refuses_what_it_does_not_know():
    done = subprocess.run(["bash", str(ROOT / "install.sh"), "--model"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "install.sh [test]" in done.stderr
