"""Environment for testing faults: folders and processes, undisturbed runs for comparison, and the verdict."""

import importlib
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.faults import GROUPS
from benchmarks.faults.processes import Program, Programs, Starter, TimedOut, free_port, living_in
from opendit.checkpoint.run_folders import newest_checkpoint
from opendit.checkpoint.tensor_set import damage

STEPS, HALF = 40, 12  # steps of an undisturbed run, and of a prepared run
RUN = "000-DiT-Ti-2"
TRAIN = f"--model DiT-Ti/2 --image_size 8 --vae none --batch_size 4 --mixed_precision fp32 --max_steps {STEPS}".split()
TRAIN += "--ckpt_every 4 --log_every 1 --sample_every 0 --num_workers 1".split()
SAMPLE = "--num_samples 3 --num_sampling_steps 2 --cfg_scale 1 --mixed_precision fp32".split()
ENDS_WITHIN = 15.0  # seconds from an error to the end of the last process
FOREVER = 90.0  # seconds after which a program that should continue counts as hanging
MEMORY_GIB = 4.0  # maximum for any program; torch and the model take 1


class NotHere(Exception):
    """Raised if this machine can't cause the fault."""


@dataclass
class Outcome:
    """The outcome of a fault. problems: deviations from the expected outcome. left_out: why the fault was not tried."""

    seconds: float | None = None
    goes_on: bool = False
    codes: list[int | None] = field(default_factory=list)
    message: str = ""
    lost: str = "nothing"
    problems: list[str] = field(default_factory=list)
    left_out: str = ""

    @property
    def as_it_should(self) -> bool:
        return not self.problems and not self.left_out

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        return f"left out: {self.left_out}" if self.left_out else "; ".join(self.problems) or "as it should be"


@dataclass(frozen=True)
class Fault:
    """A fault. ``make`` causes it in a lab and checks the consequences."""

    name: str
    group: str
    what: str
    make: Callable[["Lab"], None]


FAULTS: dict[str, Fault] = {}


def fault(what: str, *, name: str | None = None) -> Callable:
    """Register a function as a fault of its module's group. The fault's name is ``name`` or the function's name."""

    def register(make: Callable[["Lab"], None]) -> Callable[["Lab"], None]:
        add(name or make.__name__, make.__module__.rsplit(".", 1)[-1], what, make)
        return make

    return register


def add(name: str, group: str, what: str, make: Callable[["Lab"], None]) -> None:
    if name in FAULTS:
        raise ValueError(f"two faults are called {name}")
    FAULTS[name] = Fault(name, group, what, make)


def register_all() -> None:
    """Fill FAULTS with the faults of all classes, in order."""
    for group in GROUPS:
        importlib.import_module(f"benchmarks.faults.{group}")


class Shared:
    """State that the faults share: the starter, and undisturbed runs, each trained on first use."""

    def __init__(self, starter: Starter, folder: Path, patience: float):
        self.starter, self.folder, self.patience = starter, folder, patience
        self._lock, self._made = threading.RLock(), {}

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a folder that ``make`` fills on first use. All faults share it, and none may change it."""
        with self._lock:
            if name not in self._made:
                folder = self.folder / f"shared-{name}"
                folder.mkdir()
                try:
                    make(folder)
                except BaseException:  # the next fault that needs the folder tries again
                    shutil.rmtree(folder)
                    raise
                self._made[name] = folder
            return self._made[name]


class Lab:
    """One fault's folder and programs. Every deviation from the expected consequences becomes a problem."""

    def __init__(self, shared: Shared, name: str):
        self.shared, self.outcome = shared, Outcome()
        self.folder = shared.folder / name
        self.folder.mkdir()
        self.programs = Programs(shared.starter, self.folder / "cwd")
        self.outputs = self.folder / "outputs"
        self.said = ""  # output of the programs that ended last
        self._began = time.monotonic()

    # ---------------------------------------------------------------------------------------- programs

    @property
    def run(self) -> Path:
        """The run folder of this fault's training."""
        return self.outputs / RUN

    def train(self, *more: object, world: int = 1, **options) -> list[Program]:
        """Start train.py with the flags TRAIN, as one process or several ranks. options: see ``Programs.start``."""
        if world == 1:
            return [self.start("train.py", *TRAIN, "--outputs", self.outputs, *more, **options)]
        port = str(free_port())
        ranks = [
            dict(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            for r in range(world)
        ]
        return [self.train(*more, **{**options, **rank})[0] for rank in ranks]

    def sample(self, ckpt: Path, *more: object, **options) -> Program:
        output = () if "--output" in more else ("--output", self.folder / "samples")
        return self.start("sample.py", *SAMPLE, "--ckpt", ckpt, *output, *more, **options)

    def start(self, script: str, *argv: object, **options) -> Program:
        """Start a script or module of this project, and start the clock."""
        self.now()
        return self.programs.start(script, *argv, **options)

    def now(self) -> None:
        """Restart the clock, because the fault happens now."""
        self._began = time.monotonic()

    def reach(self, step: int, programs: list[Program]) -> None:
        """Wait until a checkpoint of this step or a later one exists."""

        def there() -> bool:
            if any(program.code() is not None for program in programs):
                raise TimedOut(f"the run ended before step {step}: {programs[0].last_line()}")
            return newest_step(self.run) >= step

        self.programs.wait(there, FOREVER * self.shared.patience, f"step {step}")

    # ---------------------------------------------------------------------------------------- what must follow

    def require(self, condition: object, problem: str) -> None:
        if not condition:
            self.outcome.problems.append(problem)

    def ends(
        self,
        programs: list[Program] | Program,
        codes: Collection[int],
        says: str = "",
        *,
        within: float | None = ENDS_WITHIN,
        anywhere: bool = False,
        first: int = 0,
        tracebacks: bool = False,
    ) -> None:
        """Check that all programs end with one of ``codes``, within ``within`` seconds after the fault. If ``within``
        is None, they should continue.

        Args:
            says: pattern for the last line of stderr of program number ``first``, or of any other program. With
                ``anywhere``, pattern for the whole output of that program.
            tracebacks: allow tracebacks, because the fault is a bug in the program's code.
        """
        programs = [programs] if isinstance(programs, Program) else programs
        limit, memory = (within or FOREVER) * self.shared.patience, 0.0

        def ended() -> bool:
            nonlocal memory
            memory = max([memory, *(peak_gib(program.pid) for program in programs)])
            return all(program.code() is not None for program in programs)

        outcome, timed_out = self.outcome, None
        try:
            self.programs.wait(ended, limit, "the end")
            self.programs.wait(lambda: not living_in(self.programs.folder), limit, "the end of its processes")
        except TimedOut as error:
            timed_out = str(error)
        outcome.seconds, outcome.goes_on = time.monotonic() - self._began, within is None
        outcome.codes = [program.code() for program in programs]
        speakers = [program for program in programs if re.search(says, program.last_line())] if says else []
        chosen = programs[first] if programs[first] in speakers or not speakers else speakers[0]
        self.said = "\n".join(program.said() for program in programs)
        lines = [line.split("\r")[-1] for line in chosen.said().split("\n")]
        matching = [line.strip() for line in lines if re.search(says, line)] if says else []
        outcome.message = matching[-1] if anywhere and matching else chosen.last_line()
        left = self.programs.kill_all()
        self.require(not timed_out, f"hung: {timed_out}")
        self.require(not left, f"{len(left)} processes left")
        self.require(set(outcome.codes) <= set(codes), f"exit codes {outcome.codes}, not {sorted(codes)}")
        shown = "\n".join(lines) if anywhere else outcome.message
        self.require(re.search(says, shown), f"did not say {says!r}")
        self.require(memory < MEMORY_GIB, f"took {memory:.1f} GiB")
        self.require(tracebacks or "Traceback (most recent" not in self.said, "a traceback")

    def goes_on(self, programs: list[Program] | Program, code: int, says: str = "", *, anywhere: bool = True) -> None:
        """Check that the programs continue to their end with this exit code, as if nothing had happened."""
        self.ends(programs, {code}, says, within=None, anywhere=anywhere)

    def refused(self, program: list[Program] | Program, says: str, *, code: int = 2) -> None:
        """Check that a program ends before it begins its work, and names the fault in the last line."""
        self.ends(program, {code}, says)

    def same_weights(self, world: int = 1, *more: object) -> None:
        """Check that the run ends bit-identical to an undisturbed run. more: flags of both runs."""
        self._lost(differing(self.undisturbed(world, *more) / RUN, self.run))

    def loses_nothing(self, world: int = 1, *more: object) -> None:
        """Check that the newest checkpoint is intact, and that a resume from it ends bit-identical to an undisturbed
        run."""
        newest = newest_checkpoint(self.run)
        self._lost("all: no checkpoint" if newest is None else damage(newest))
        if newest is None:
            return
        programs = self.train("--load", "latest", *more, world=world)
        end = FOREVER * self.shared.patience
        try:
            self.programs.wait(lambda: all(p.code() is not None for p in programs), end, "the resumed run")
        except TimedOut as error:
            self._lost(str(error))
        codes = [program.code() for program in programs]
        if any(codes):
            self._lost(f"a resume ended with {codes}: {programs[0].last_line()}")
        else:
            self.same_weights(world, *more)
        self.programs.kill_all()

    def untouched(self) -> None:
        """Check that the prepared run's newest checkpoint exists and is intact."""
        newest = newest_checkpoint(self.run)
        self._lost("all: no checkpoint" if newest is None else damage(newest))

    def _lost(self, what: str | None) -> None:
        if what:
            self.outcome.lost = what
            self.outcome.problems.append(f"lost: {what}")

    # ---------------------------------------------------------------------------------------- surroundings

    def undisturbed(self, world: int = 1, *more: object) -> Path:
        """Return the outputs of an undisturbed run with ``world`` ranks. more: flags in addition to TRAIN."""
        return self._trained("whole", STEPS, world, more)

    def prepared(self, world: int = 1, *more: object) -> Path:
        """Copy a run that was trained to step HALF for this fault, and return its newest checkpoint."""
        made = self._trained("half", HALF, world, more)
        shutil.copytree(made, self.outputs, symlinks=True)
        newest = newest_checkpoint(self.run)
        assert newest is not None and newest.name == f"step_{HALF:07d}"
        return newest

    def _trained(self, name: str, steps: int, world: int, more: Sequence[object]) -> Path:
        name = "-".join(map(str, (name, world, *(str(word).strip("-") for word in more))))
        return self.shared.once(name, lambda folder: self._train_in(folder, world, steps, more))

    def _train_in(self, folder: Path, world: int, steps: int, more: Sequence[object]) -> None:
        lab = Lab(self.shared, f"{folder.name}.made-{time.monotonic_ns()}")
        lab.outputs = folder
        programs = lab.train("--max_steps", steps, *more, world=world)
        end = FOREVER * self.shared.patience
        lab.programs.wait(lambda: all(program.code() is not None for program in programs), end, "an undisturbed run")
        if any(program.code() for program in programs):
            raise RuntimeError(f"a run that nobody disturbed failed: {programs[0].said()}")

    def disk(self, options: str, path: Path | None = None) -> Path:
        """Mount a small disk (``size=2m``, ``nr_inodes=50``) that only this benchmark sees, and return its path.

        Raises NotHere if that can't be done."""
        path = path or self.folder / "disk"
        path.mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", options, "tmpfs", path)
        return path

    def close(self) -> None:
        self.programs.kill_all()
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            place = line.split()[1]
            if place.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", place], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def mount(*options: object) -> None:
    done = subprocess.run(["mount", *map(str, options)], capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"no small disk can be mounted: {done.stderr.strip()}")


def peak_gib(pid: int) -> float:
    """Return the peak memory of a process so far, or 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM")), 0.0)


def newest_step(run: Path) -> int:
    """Return the newest complete checkpoint's step, or 0 if there is none."""
    return max((int(path.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*")), default=0)


def differing(one: Path, other: Path) -> str | None:
    """Return the first difference between the newest checkpoints of two runs, bit by bit, or None if they are equal."""
    first, second = newest_checkpoint(one), newest_checkpoint(other)
    assert first is not None
    if second is None or first.name != second.name:
        return f"{first.name} is not {second and second.name}"
    names = [{path.name for path in folder.glob("*.safetensors")} for folder in (first, second)]
    if names[0] != names[1]:
        return f"files {sorted(names[0] ^ names[1])} are in one run only"
    for name in sorted(names[0]):
        tensors = [load_file(folder / name) for folder in (first, second)]
        if tensors[0].keys() != tensors[1].keys():
            return f"{name} holds other tensors"
        for key, tensor in tensors[0].items():
            if not torch.equal(tensor.view(torch.uint8), tensors[1][key].view(torch.uint8)):
                return f"{name}: {key} is another"
    return None


def judge(fault: Fault, shared: Shared) -> Outcome:
    """Cause a fault, clean up after it, and return its outcome."""
    lab = Lab(shared, fault.name)
    try:
        fault.make(lab)
    except NotHere as error:
        lab.outcome.left_out = str(error)
    except TimedOut as error:
        lab.require(False, str(error))
    except Exception as error:  # an error of the benchmark itself; the other faults still run
        lab.require(False, f"the benchmark failed: {error!r}")
    finally:
        lab.close()
    return lab.outcome
