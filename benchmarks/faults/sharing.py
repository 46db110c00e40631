"""Faults: two programs that write to one folder, and files that earlier programs left there."""

import os
import shutil
import signal
from pathlib import Path

from benchmarks.faults.endings import trained
from benchmarks.faults.lab import RUN, Lab, fault
from opendit.training.interrupt import AGAIN

LONG = ("--max_steps", 4000)


def ended_well(lab: Lab, program, what: str) -> None:
    lab.programs.wait(lambda: program.code() is not None, 120 * lab.shared.patience, what)
    lab.require(program.code() == 0, f"{what} ended with {program.code()}: {program.last_line()}")


@fault("a second train.py --load latest while the first one trains in that folder")
def second_trainer(lab: Lab) -> None:
    first = trained(lab, *LONG)
    second = lab.train("--load", "latest")
    lab.programs.wait(lambda: second[0].code() is not None, 60 * lab.shared.patience, "the second one's end")
    code, said = second[0].code(), second[0].last_line()
    lab.require(code == 2 and str(first[0].pid) in said, f"the second one: exit code {code}, {said}")
    lab.now()
    first[0].send(signal.SIGTERM)
    lab.ends(first, {AGAIN})
    lab.outcome.codes, lab.outcome.message = [code], said
    lab.untouched()


def killed(lab: Lab) -> None:
    """Start a run and kill it during training."""
    first = trained(lab, *LONG)
    first[0].send(signal.SIGKILL)
    lab.programs.wait(lambda: first[0].code() is not None, 30, "the kill")


@fault("a third train.py, after the first was killed (kill -9): its lock is stale")
def stale_lock(lab: Lab) -> None:
    killed(lab)
    lab.goes_on(lab.train("--load", "latest"), 0)
    lab.same_weights()


@fault("the process of a stale lock is stopped, not dead, and then killed")
def stopped_owner(lab: Lab) -> None:
    first = trained(lab, *LONG)
    os.kill(first[0].pid, signal.SIGSTOP)
    second = lab.train("--load", "latest")
    lab.programs.wait(lambda: second[0].code() is not None, 60 * lab.shared.patience, "the second one's end")
    lab.require(second[0].code() == 2, f"the second one: exit code {second[0].code()}")
    os.kill(first[0].pid, signal.SIGKILL)
    lab.programs.wait(lambda: first[0].code() is not None, 30, "the kill")
    lab.goes_on(lab.train("--load", "latest"), 0)
    lab.same_weights()


@fault("two train.py start at once and both make a run folder")
def two_starts(lab: Lab) -> None:
    both = [lab.train()[0] for _ in range(2)]
    lab.goes_on(both, 0)
    lab.require(len(list(lab.outputs.glob("[0-9]*"))) == 2, "they do not have a folder each")
    lab.same_weights()


@fault("two train.py --load latest start at once")
def two_resumes(lab: Lab) -> None:
    lab.prepared()
    both = [lab.train("--load", "latest")[0] for _ in range(2)]
    lab.ends(both, {0, 2}, within=None)
    lab.require(sorted(map(str, lab.outcome.codes)) == ["0", "2"], f"one must win: exit codes {lab.outcome.codes}")
    lab.same_weights()


@fault("two sample.py at once in one output folder")
def two_samplers(lab: Lab) -> None:
    ckpt, output = lab.prepared(), lab.folder / "samples"
    both = [lab.sample(ckpt, "--seed", seed, "--num_samples", 40, "--output", output) for seed in (1, 2)]
    lab.ends(both, {0, 2}, within=60)
    lab.require(0 in lab.outcome.codes, "neither has drawn")
    lab.require(not list(output.glob(".part*")), "parts are left")
    alone = lab.folder / "alone"
    winners = [seed for seed, code in zip((1, 2), lab.outcome.codes, strict=True) if code == 0]
    matches = False
    for seed in winners:
        program = lab.sample(ckpt, "--seed", seed, "--num_samples", 40, "--output", alone / str(seed))
        ended_well(lab, program, "a sampler alone")
        matches |= pictures(alone / str(seed)) == pictures(output)
    lab.require(matches, "the pictures are a mixture")


@fault("sample.py is killed (SIGKILL) while it draws, and started again")
def killed_sampler(lab: Lab) -> None:
    ckpt, output, alone = lab.prepared(), lab.folder / "samples", lab.folder / "alone"
    slow = ("--num_samples", 40, "--batch_size", 2, "--num_sampling_steps", 20)
    ended_well(lab, lab.sample(ckpt, *slow, "--output", alone), "a sampler that nobody kills")
    first = lab.sample(ckpt, *slow, "--output", output)
    begun = lambda: first.code() is not None or len(list(output.glob(".parts/0*.npy"))) > 5  # noqa: E731
    lab.programs.wait(begun, 60 * lab.shared.patience, "the first parts")
    first.send(signal.SIGKILL)
    lab.programs.wait(lambda: first.code() is not None, 10 * lab.shared.patience, "its end")
    again = lab.sample(ckpt, *slow, "--output", output)
    lab.ends(again, {0}, within=60)
    lab.require("of 40 samples are there from an earlier start" in again.said(), "it did not go on")
    lab.require(pictures(output) == pictures(alone), "the pictures are others")


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"))}


@fault("a small sample.py after a large one in the same folder")
def small_after_large(lab: Lab) -> None:
    ckpt, output = lab.prepared(), lab.folder / "samples"
    ended_well(lab, lab.sample(ckpt, "--num_samples", 40, "--output", output), "the large one")
    program = lab.sample(ckpt, "--num_samples", 3, "--output", output)
    lab.ends(program, {0, 2}, within=60)
    if program.code() == 0:
        lab.require(len(pictures(output)) == 4, f"{len(pictures(output))} pictures, not 3 and their grid")


@fault("sample.py while the run saves, keeps one checkpoint and deletes the others")
def sample_while_saving(lab: Lab) -> None:
    programs = trained(lab, *LONG, "--ckpt_every", 1, "--ckpt_keep", 1)
    for _ in range(4):
        sampler = lab.sample(lab.run)
        lab.programs.wait(lambda sampler=sampler: sampler.code() is not None, 60 * lab.shared.patience, "sample.py")
        said = sampler.last_line()
        lab.require(sampler.code() in (0, 2), f"sample.py: exit code {sampler.code()}, {said}")
        lab.require("Traceback" not in sampler.said(), "a traceback of sample.py")
    lab.now()
    programs[0].send(signal.SIGTERM)
    lab.ends(programs, {AGAIN})
    lab.untouched()


@fault("runs number 999 and 1000 are there")
def after_999(lab: Lab) -> None:
    lab.prepared()
    for number in (998, 999):
        shutil.copytree(lab.run, lab.outputs / RUN.replace("000", str(number)), symlinks=True)
    program = lab.train()
    lab.goes_on(program, 0)
    made = sorted(path.name for path in lab.outputs.iterdir())
    lab.require(any(name.startswith("1000-") for name in made), f"no run 1000: {made}")
    lab.goes_on(lab.train("--load", "latest"), 0, "1000-")


@fault("files of others between the run folders")
def strange_neighbours(lab: Lab) -> None:
    lab.prepared()
    (lab.outputs / "001-DiT-Ti-2").touch()  # a file
    (lab.outputs / "abc-DiT-Ti-2").mkdir()
    (lab.outputs / "99999999999999999999-DiT-Ti-2").mkdir()
    (lab.outputs / "-1-DiT-Ti-2").mkdir()
    (lab.outputs / "002-DiT-Ti-2").symlink_to("002-DiT-Ti-2")
    os.mkfifo(lab.outputs / "003-DiT-Ti-2")
    lab.goes_on(lab.train("--load", "latest"), 0)
    lab.same_weights()


@fault("lock files with nonsense in them")
def odd_locks(lab: Lab) -> None:
    """Fill every file that a killed run leaves beside its checkpoints and log with nonsense."""
    killed(lab)
    for path in lab.run.iterdir():
        if "lock" in path.name and path.is_file():
            path.write_text("[" * 1000 + "\0é")
    lab.goes_on(lab.train("--load", "latest"), 0)
    lab.same_weights()
