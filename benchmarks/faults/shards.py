"""Faults: damaged sharded checkpoints (two ranks, --plugin fsdp), and kills during their saves.

If the newest checkpoint is damaged, ``--load PATH`` must refuse it and name the file. ``--load latest`` must continue
from the checkpoint before it and end bit-identical to an undisturbed run.
"""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.checkpoints import empty, flip, seal, truncate
from benchmarks.faults.lab import Lab, add, fault

WORLD, FSDP = 2, ("--plugin", "fsdp")  # saves shards by default
MODEL, FIRST = (f"{name}-shard-00000-of-00002.safetensors" for name in ("model", "exp_avg"))
EMA, SECOND = (f"{name}-shard-00001-of-00002.safetensors" for name in ("ema", "exp_avg_sq"))
INDEX = "model.shards.json"


def before(newest: Path) -> Path:
    """Return the checkpoint before this one."""
    return sorted(newest.parent.glob("step_*"))[-2]


def damaged(file: str, harm: Callable[[Path], None], sealed: bool = False) -> Callable[[Lab], None]:
    """Return a fault in which ``harm`` changes a file of the newest checkpoint. sealed: update the manifest, too."""

    def make(lab: Lab) -> None:
        newest = lab.prepared(WORLD, *FSDP)
        harm(newest / file)
        if sealed:
            seal(newest)
        lab.refused(lab.train("--load", newest, *FSDP, world=WORLD), f"error: .*{file}")
        lab.goes_on(lab.train("--load", "latest", *FSDP, world=WORLD), 0, f"step_0000012.*{file}")
        lab.same_weights(WORLD, *FSDP)

    return make


def of_the_step_before(path: Path) -> None:
    shutil.copy(before(path.parent) / path.name, path)


def of_another_set(path: Path) -> None:
    shutil.copy(path.with_name(path.name.replace("exp_avg_sq", "exp_avg")), path)


def in_index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Return a function that changes the entry of one tensor with a shard on each rank."""

    def harm(path: Path) -> None:
        index = json.loads(path.read_text())
        change(index["tensors"]["blocks.0.mlp.fc1.weight"]["shards"])
        path.write_text(json.dumps(index))

    return harm


def swapped(shards: dict) -> None:
    shards.update(dict(zip(shards, list(shards.values())[::-1], strict=True)))


def without_one(shards: dict) -> None:
    shards.popitem()


DAMAGED = {
    "truncated": ("half of a shard of the weights is there", MODEL, truncate),
    "empty": ("a shard of the moments is empty", FIRST, empty),
    "flipped": ("a bit of a shard of the moments is flipped", SECOND, flip),
    "missing": ("a shard of the average is missing", EMA, Path.unlink),
    "of_before": ("a shard is that of the step before", SECOND, of_the_step_before),
    "index_truncated": ("half of an index is there", INDEX, truncate),
    "index_flipped": ("a bit of an index is flipped", INDEX, flip),
    "index_missing": ("an index is missing", INDEX, Path.unlink),
}
SEALED = {
    "shard_of_before": ("a shard is that of the step before", SECOND, of_the_step_before),
    "shard_of_another_set": ("a shard of exp_avg stands for exp_avg_sq's", SECOND, of_another_set),
    "index_of_before": ("an index is that of the step before", INDEX, of_the_step_before),
    "index_swapped": ("an index takes one rank's shard for the other's", INDEX, in_index(swapped)),
    "index_incomplete": ("an index leaves a shard out", INDEX, in_index(without_one)),
}
for _name, (_what, _file, _harm) in DAMAGED.items():
    add(f"sharded_{_name}", "shards", f"the newest checkpoint: {_what}", damaged(_file, _harm))
for _name, (_what, _file, _harm) in SEALED.items():
    _judge = damaged(_file, _harm, sealed=True)
    add(f"sealed_{_name}", "shards", f"the newest checkpoint: {_what}, under a manifest that fits", _judge)


@fault("the newest checkpoint: all shards of rank 1 are missing, as where they lay on a disk of its own")
def shards_of_a_rank_missing(lab: Lab) -> None:
    newest = lab.prepared(WORLD, *FSDP)
    for path in newest.glob("*-shard-00001-*"):
        path.unlink()
    lab.refused(
        lab.train("--load", newest, *FSDP, world=WORLD), "error: .*-shard-00001-of-00002.safetensors is missing"
    )
    lab.goes_on(lab.train("--load", "latest", *FSDP, world=WORLD), 0, "step_0000012.*-shard-00001")
    lab.same_weights(WORLD, *FSDP)


@fault("the newest checkpoint: a shard of the average is truncated; sample.py and --pretrained take the one before")
def average_truncated(lab: Lab) -> None:
    newest = lab.prepared(WORLD, *FSDP)
    truncate(newest / EMA)
    lab.refused(lab.sample(newest), f"error: .*{EMA}.*{before(newest).name}")
    lab.goes_on(lab.sample(lab.run), 0, f"{EMA}.*{before(newest).name}")
    elsewhere = ("--outputs", lab.folder / "elsewhere", "--max_steps", 1)
    lab.goes_on(lab.train("--pretrained", lab.run, *FSDP, *elsewhere, world=WORLD), 0, f"{EMA}.*{before(newest).name}")


def killed_in_a_save(rank: int) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        programs = lab.train("--ckpt_every", 1, *FSDP, world=WORLD)
        lab.reach(4, programs)
        lab.programs.wait(lambda: any(lab.run.glob("checkpoints/.step_*.incomplete")), 30, "a save")
        lab.now()
        programs[rank].send(signal.SIGKILL)
        lab.ends(programs, {3, -9}, f"error: .*rank {rank}", first=1 - rank)
        lab.loses_nothing(WORLD, *FSDP)

    return make


for _rank in range(WORLD):
    add(f"killed_in_a_save_{_rank}", "shards", f"kill -9 of rank {_rank} of two in a save", killed_in_a_save(_rank))
