"""Faults: untrusted folders with symbolic links. Nothing outside them may be written, and a line must name the link."""

import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.lab import Lab, add, fault
from benchmarks.faults.materials import pictures

OLD_NS = 10**18


def outside(lab: Lab) -> Path:
    """Create a folder with a file, a run's log and another run's checkpoint, all with the same old time."""
    folder = lab.folder / "outside"
    (folder / "deep").mkdir(parents=True)
    for name in ("file", "deep/file"):
        (folder / name).write_text('{"step": 99}\n')
    for path in (*folder.rglob("*"), folder):
        os.utime(path, ns=(OLD_NS, OLD_NS))
    return folder


def is_untouched(lab: Lab, folder: Path) -> None:
    paths = sorted([folder, *folder.rglob("*")])
    names = [str(path.relative_to(folder)) for path in paths]
    lab.require(names == [".", "deep", "deep/file", "file"], f"outside there is now {names}")
    for path in paths:
        lab.require(path.stat().st_mtime_ns == OLD_NS, f"{path} was changed")
        lab.require(path.is_dir() or path.read_text() == '{"step": 99}\n', f"{path} holds something else")


def planted(folder: Path, name: str, target: Path) -> None:
    """Replace a file or folder inside a folder by a link."""
    link = folder / name
    if link.is_dir() and not link.is_symlink():
        link.rename(folder.parent / "set aside")
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def in_a_run(name: str, target: str) -> Callable[[Lab], None]:
    """Return a fault: ``--load latest`` in a run where ``name`` is a link to a file outside."""

    def make(lab: Lab) -> None:
        lab.prepared()
        there = outside(lab)
        planted(lab.run, name, there / target)
        lab.refused(lab.train("--load", "latest", "--sample_every", 4), f"error: .*/{name} is a symbolic link")
        is_untouched(lab, there)
        (lab.run / name).unlink()
        lab.untouched()

    return make


for _name, _link, _target in (
    ("lock", ".lock", "file"), ("log", "log.jsonl", "file"), ("config", "config.json", "nothing"),
    ("samples", "samples", "deep"), ("tensorboard", "tensorboard", "deep"), ("wandb", "wandb", "deep"),
    ("evaluation", "evaluation", "deep"),
):  # fmt: skip
    add(f"linked_{_name}", "links", f"{_link} of a run is a link out of it", in_a_run(_link, _target))


@fault("a grid that a run comes to later is a link out of it")
def linked_grid(lab: Lab) -> None:
    lab.prepared()
    there = outside(lab)
    planted(lab.run, "samples/0000016.png", there / "file")
    says = "samples NOT WRITTEN, .*samples/0000016.png is a symbolic link"
    lab.goes_on(lab.train("--load", "latest", "--sample_every", 16), 1, says)
    is_untouched(lab, there)
    lab.same_weights()


@fault("the folder of the next save is a link out of the run")
def linked_save(lab: Lab) -> None:
    newest = lab.prepared()
    there = outside(lab)
    for step in (16, 20):
        planted(newest.parent, f".step_{step:07d}.incomplete", there / "deep")
        planted(newest.parent, f"step_{step:07d}", there / "deep")
    lab.goes_on(lab.train("--load", newest), 0)  # left-over links are removed, but not their targets
    is_untouched(lab, there)
    lab.same_weights()


@fault("latest leads to the checkpoint of another run")
def latest_of_another(lab: Lab) -> None:
    newest = lab.prepared()
    other = lab.outputs / "other" / "checkpoints"
    other.mkdir(parents=True)
    for name in (newest.name, "step_0000008"):
        os.rename(newest.parent / name, other / name)
    planted(newest.parent, "latest", Path("../../other/checkpoints") / newest.name)
    says = "latest names ../../other/checkpoints/step_0000012, which is no checkpoint beside it, and is not followed"
    lab.goes_on(lab.train("--load", "latest"), 0, says)
    lab.require("going on from" in lab.said and "step_0000004" in lab.said, "it did not go on from step 4")
    lab.same_weights()


@fault("the checkpoints of a run lie on another disk, behind a link: they are read, and not written to")
def linked_checkpoints(lab: Lab) -> None:
    newest = lab.prepared()
    disk = lab.folder / "disk"
    os.rename(newest.parent, disk)
    newest.parent.symlink_to(disk)
    before = sorted((path, path.stat().st_mtime_ns) for path in disk.rglob("*"))
    lab.ends(lab.sample(lab.run), {0}, within=60)
    lab.goes_on(lab.train("--load", "latest"), 0, "so the run goes on in .*001-")
    lab.require(
        sorted((path, path.stat().st_mtime_ns) for path in disk.rglob("*")) == before, "the disk was written to"
    )


def in_samples(name: str, target: str) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        ckpt, output = lab.prepared(), lab.folder / "samples"
        there = outside(lab)
        planted(output, name, there / target)
        program = lab.sample(ckpt, "--output", output, "--npz", output / "samples.npz")
        lab.refused(program, f"error: .*/{name} is a symbolic link")
        is_untouched(lab, there)

    return make


for _name, _link, _target in (
    ("list", ".samples.json", "file"), ("parts", ".parts", "deep"), ("grid", "grid.png", "nothing"),
    ("npz", "samples.npz", "file"),
):  # fmt: skip
    _what = f"{_link} where samples are drawn is a link out of the folder"
    add(f"linked_{_name}_of_samples", "links", _what, in_samples(_link, _target))


@fault("the index of a stranger's tar is a link, and so is the list of its classes")
def linked_index(lab: Lab) -> None:
    there, output = outside(lab), lab.folder / "tars"
    output.mkdir()
    planted(output, "class_names.json", there / "nothing")
    flags = ("--data_path", pictures(lab), "--output", output, "--num_workers", 1)
    lab.refused(lab.start("preprocess.py", "shards", *flags), "error: .*class_names.json is a symbolic link")
    (output / "class_names.json").unlink()
    lab.ends(lab.start("preprocess.py", "shards", *flags), {0}, within=60)
    (index,) = output.glob("*.tar.index")
    planted(output, index.name, there / "file")
    lab.refused(lab.start("preprocess.py", "index", output, "--force"), f"error: .*{index.name} is a symbolic link")
    is_untouched(lab, there)
