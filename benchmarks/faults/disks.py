"""Faults: disks without space or inodes, read-only folders, and outputs that can't be written any more."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.endings import trained
from benchmarks.faults.lab import STEPS, TRAIN, Lab, fault, mount
from benchmarks.faults.materials import random_vae
from benchmarks.faults.processes import ROOT

GRIDS = "--sample_every 8 --sample_steps 2 --sample_cfg_scale 1".split()  # flags that do not change weights
FULL, READ_ONLY = "No space left", "Read-only"


def fill(folder: Path) -> Path:
    """Use up all free space of a disk, and return the file that occupies it."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return path


# ------------------------------------------------------------------------------------------ training


@fault("the disk takes two checkpoints and a half; with more room the run is resumed")
def full_in_a_checkpoint(lab: Lab) -> None:
    lab.outputs = lab.disk("size=50m")
    lab.goes_on(lab.train(), 1, f"NOT SAVED.*{FULL}")
    mount("-o", "remount,size=1g", lab.outputs)
    lab.loses_nothing()


@fault("the same with two ranks")
def full_for_two_ranks(lab: Lab) -> None:
    lab.outputs = lab.disk("size=50m")
    lab.goes_on(lab.train(world=2), 1, f"NOT SAVED.*{FULL}")
    mount("-o", "remount,size=1g", lab.outputs)
    lab.loses_nothing(2)


@fault("the disk is filled by somebody else in mid-run: no checkpoint, grid, log or curve")
def filled_by_others(lab: Lab) -> None:
    lab.outputs = lab.disk("size=500m")
    programs = trained(lab, *GRIDS)
    lab.now()
    filler = fill(lab.outputs)
    lab.goes_on(programs, 1, f"NOT SAVED.*{FULL}")
    filler.unlink()
    lab.loses_nothing()


@fault("the disk runs out of inodes")
def no_inodes(lab: Lab) -> None:
    lab.outputs = lab.disk("size=1g,nr_inodes=30")
    lab.goes_on(lab.train(*GRIDS), 1, f"NOT SAVED.*{FULL}")
    mount("-o", "remount,nr_inodes=1000", lab.outputs)
    lab.loses_nothing()


@fault("no room for grids alone")
def full_in_a_grid(lab: Lab) -> None:
    lab.prepared()
    lab.disk("size=4k", lab.run / "samples")
    lab.goes_on(lab.train("--load", "latest", *GRIDS), 1, FULL)
    lab.same_weights()


@fault("the folder of grids is a file")
def grids_in_a_file(lab: Lab) -> None:
    lab.prepared()
    (lab.run / "samples").touch()
    lab.goes_on(lab.train("--load", "latest", *GRIDS), 1, "samples")
    lab.same_weights()


@fault("no room for TensorBoard alone")
def full_in_tensorboard(lab: Lab) -> None:
    lab.prepared()
    lab.disk("size=4k", lab.run / "tensorboard")
    lab.goes_on(lab.train("--load", "latest"), 1, FULL)
    lab.same_weights()


def without_room_for(lab: Lab, file: str, says: str) -> None:
    """Check a resume that can't write one file of the run's folder: it must report this and lose nothing else."""
    lab.prepared()
    mount("--bind", "/dev/full", lab.run / file)
    lab.goes_on(lab.train("--load", "latest"), 1, says)
    lab.same_weights()


@fault("no room for log.jsonl alone")
def full_in_the_log(lab: Lab) -> None:
    without_room_for(lab, "log.jsonl", "log")


@fault("config.json can't be written")
def full_in_the_config(lab: Lab) -> None:
    without_room_for(lab, "config.json", "config")


@fault("the run folder becomes read-only in mid-run; a resume when it no longer is")
def read_only_in_mid_run(lab: Lab) -> None:
    programs = trained(lab, *GRIDS)
    lab.now()
    mount("--bind", lab.run, lab.run)
    mount("-o", "remount,bind,ro", lab.run)
    lab.goes_on(programs, 1, f"NOT SAVED.*{READ_ONLY}")
    mount("-o", "remount,bind,rw", lab.run)
    lab.loses_nothing()


@fault("a run folder that is read-only when the run is resumed")
def read_only_at_the_start(lab: Lab) -> None:
    lab.prepared()
    mount("--bind", lab.run, lab.run)
    mount("-o", "remount,bind,ro", lab.run)
    lab.refused(lab.train("--load", "latest"), f"error: .*{READ_ONLY}")
    lab.untouched()


@fault("checkpoints/latest is a folder, as in a copy that knew no links")
def latest_is_a_folder(lab: Lab) -> None:
    newest = lab.prepared()
    latest = newest.parent / "latest"
    latest.unlink()
    shutil.copytree(newest, latest)
    lab.goes_on(lab.train("--load", "latest"), 0)
    lab.require(os.readlink(latest) == f"step_{STEPS:07d}", "latest does not lead to the last checkpoint")
    lab.same_weights()


@fault("checkpoints/latest can't be replaced")
def latest_is_stuck(lab: Lab) -> None:
    newest = lab.prepared()
    latest, text = newest.parent / "latest", lab.folder / "text"
    latest.unlink()
    for path in (latest, text):
        path.write_text(newest.name)
    mount("--bind", text, latest)
    lab.goes_on(lab.train("--load", "latest"), 1, "latest")
    lab.require("NOT SAVED" not in lab.said, "a complete checkpoint is called not saved")
    subprocess.run(["umount", latest], check=True)
    latest.unlink()
    lab.same_weights()


@fault("a limit of 1 MB for any file (ulimit -f)")
def file_size_limit(lab: Lab) -> None:
    lab.prepared()
    lab.goes_on(lab.train("--load", "latest", file_limit=1 << 20), 1, "NOT SAVED.*File too large")
    lab.loses_nothing()


# ------------------------------------------------------------------------------------------ where it prints


def printing_to(redirection: str) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        command = f'"$@" {redirection}'
        lab.now()
        train = [sys.executable, ROOT / "train.py", *TRAIN, "--outputs", lab.outputs]
        lab.ends(lab.programs.run("bash", "-c", command, "bash", *train), {0, 1}, within=None)
        lab.same_weights()

    return make


for _name, _redirection in {
    "stdout_full": "> /dev/full",
    "stderr_full": "2> /dev/full",
    "stdout_closed": ">&-",
    "stderr_closed": "2>&-",
    "nobody_reads": "2>&1 | head -n 3; exit ${PIPESTATUS[0]}",
}.items():
    fault(f"train.py {_redirection}", name=_name)(printing_to(_redirection))


@fault("a terminal of ASCII (PYTHONIOENCODING=ascii:strict, LC_ALL=C)")
def ascii_terminal(lab: Lab) -> None:
    lab.now()
    train = [sys.executable, ROOT / "train.py", *TRAIN, "--outputs", lab.outputs]
    lab.goes_on(lab.programs.run(*train, PYTHONIOENCODING="ascii:strict", LC_ALL="C"), 0)
    lab.same_weights()


# ------------------------------------------------------------------------------------------ the other programs


@fault("sample.py on a disk that has no room for its pictures")
def sample_full(lab: Lab) -> None:
    ckpt, disk = lab.prepared(), lab.disk("size=64k")
    lab.ends(lab.sample(ckpt, "--num_samples", 40, "--output", disk), {1, 2}, f"error: .*{FULL}")
    lab.untouched()


@fault("sample.py on a disk that has no room for the .npz")
def sample_npz_full(lab: Lab) -> None:
    ckpt, disk = lab.prepared(), lab.disk("size=64k")
    more = ("--num_samples", 500, "--no_save_png", "--output", disk, "--npz", disk / "a.npz")
    lab.ends(lab.sample(ckpt, *more), {1, 2}, f"error: .*{FULL}")
    lab.require(not (disk / "a.npz").exists(), "half an .npz is left under its name")
    lab.untouched()


@fault("the export to Meta's format on a disk without room")
def export_full(lab: Lab) -> None:
    ckpt, disk = lab.prepared(), lab.disk("size=1m")
    output = disk / "model.pt"
    lab.ends(lab.start("opendit.export", "meta", "--ckpt", ckpt, "--output", output), {1, 2}, f"error: .*{FULL}")
    lab.require(not list(disk.iterdir()), f"left {[path.name for path in disk.iterdir()]}")
    lab.untouched()


@fault("the export from Meta's format on a disk without room")
def import_full(lab: Lab) -> None:
    ckpt, disk = lab.prepared(), lab.disk("size=1m")
    meta, output = lab.folder / "model.pt", disk / "model.safetensors"
    program = lab.start("opendit.export", "meta", "--ckpt", ckpt, "--output", meta)
    lab.programs.wait(lambda: program.code() is not None, 60 * lab.shared.patience, "the export")
    argv = ("opendit", "--ckpt", meta, "--model", "DiT-Ti/2", "--output", output)
    lab.ends(lab.start("opendit.export", *argv), {1, 2}, f"error: .*{FULL}")
    lab.require(not list(disk.iterdir()), f"left {[path.name for path in disk.iterdir()]}")


@fault("preprocess.py demo on a disk without room")
def demo_full(lab: Lab) -> None:
    disk = lab.disk("size=100k")
    argv = ("demo", "--output", disk / "videos", "--clips", 50)
    lab.ends(lab.start("preprocess.py", *argv), {1, 2}, f"error: .*({FULL}|space)", within=60)


@fault("preprocess.py latents on a disk without room, then with room")
def latents_full(lab: Lab) -> None:
    disk = lab.disk("size=200k")
    argv = "latents --data_path digits --image_size 16 --num_workers 1 --batch_size 256 --shard_size 400".split()
    argv += ["--vae", random_vae(lab), "--output", disk / "latents"]
    lab.ends(lab.start("preprocess.py", *argv), {1, 2}, f"error: .*{FULL}", within=60)
    mount("-o", "remount,size=100m", disk)
    program = lab.start("preprocess.py", *argv)
    lab.programs.wait(lambda: program.code() is not None, 120, "preprocess.py with room")
    lab.require(program.code() == 0, f"with room again: {program.last_line()}")
