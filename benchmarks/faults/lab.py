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
from opendit.checkpoint.files import damage
from opendit.checkpoint.run_folders import newest_checkpoint

STEPS, HALF = 40, 12  # of an undisturbed run; of a run that a fault finds prepared
RUN = "000-DiT-Ti-2"
TRAIN = f"--model DiT-Ti/2 --image_size 8 --vae none --batch_size 4 --mixed_precision fp32 --max_steps {STEPS}".split()
TRAIN += "--ckpt_every 4 --log_every 1 --sample_every 0 --num_workers 1".split()
SAMPLE = "--num_samples 3 --num_sampling_steps 2 --cfg_scale 1 --mixed_precision fp32".split()
ENDS_WITHIN = 15.0  # seconds from an error to the end of the last process
FOREVER = 90.0  # seconds after which something that goes on is called hanging
MEMORY_GIB = 4.0  # that no program here may take; torch and the model are 1


class NotHere(Exception):
    """This machine can't make the fault."""


@dataclass
class Outcome:
    """The outcome of a fault. ``problems``: its deviations from the expected outcome; ``left_out``: why it was not
    tried."""

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
        """In words."""
        return f"left out: {self.left_out}" if self.left_out else "; ".join(self.problems) or "as it should be"


@dataclass(frozen=True)
class Fault:
    """``make`` brings a fault about in a lab and judges what follows."""

    name: str
    group: str
    what: str
    make: Callable[["Lab"], None]


FAULTS: dict[str, Fault] = {}


def fault(what: str, *, name: str | None = None) -> Callable:
    """Register a function as a fault, under its own name, in its module's group."""

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
    """State that the faults share: the starter, and undisturbed runs, each trained when first asked for."""

    def __init__(self, starter: Starter, folder: Path, patience: float):
        self.starter, self.folder, self.patience = starter, folder, patience
        self._lock, self._made = threading.RLock(), {}

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that ``make`` fills, for all faults alike; nobody may change it."""
        with self._lock:
            if name not in self._made:
                folder = self.folder / f"shared-{name}"
                folder.mkdir()
                try:
                    make(folder)
                except BaseException:  # the next fault that needs it tries again
                    shutil.rmtree(folder)
                    raise
                self._made[name] = folder
            return self._made[name]


class Lab:
    """One fault's folder and programs. A fault says what it does and what must follow; what does not is a problem."""

    def __init__(self, shared: Shared, name: str):
        self.shared, self.outcome = shared, Outcome()
        self.folder = shared.folder / name
        self.folder.mkdir()
        self.programs = Programs(shared.starter, self.folder / "cwd")
        self.outputs = self.folder / "outputs"
        self.said = ""  # all that the programs printed which have ended last
        self._began = time.monotonic()

    # ---------------------------------------------------------------------------------------- programs

    @property
    def run(self) -> Path:
        """The run folder of this fault's training."""
        return self.outputs / RUN

    def train(self, *more: object, world: int = 1, **options) -> list[Program]:
        """train.py as STEPS says, as one process or several ranks; see ``Programs.start`` for the options."""
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
        """A script or module of this project; the clock starts."""
        self.now()
        return self.programs.start(script, *argv, **options)

    def now(self) -> None:
        """The fault happens now: the seconds count from here."""
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
        """All programs end, each with one of the exit codes, within so many seconds of the fault (None: it goes on).

        says: a pattern of the last line of stderr of program number ``first``, or of another one, which then speaks for
            all of them (``anywhere``: of all that it printed).
        tracebacks: they are allowed, for the fault is a bug in the program's own code.
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
        """The programs go on to their end, with this exit code; training ends as if nothing had happened."""
        self.ends(programs, {code}, says, within=None, anywhere=anywhere)

    def refused(self, program: list[Program] | Program, says: str, *, code: int = 2) -> None:
        """It ends before it has begun, the fault's name in the last line."""
        self.ends(program, {code}, says)

    def same_weights(self, world: int = 1, *more: object) -> None:
        """The run's end is the undisturbed one's, bit for bit; ``more``: flags of both."""
        self._lost(differing(self.undisturbed(world, *more) / RUN, self.run))

    def loses_nothing(self, world: int = 1, *more: object) -> None:
        """The newest checkpoint is intact, and a resume from it ends as the undisturbed run, bit for bit."""
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
        """The prepared run's newest checkpoint is there and intact."""
        newest = newest_checkpoint(self.run)
        self._lost("all: no checkpoint" if newest is None else damage(newest))

    def _lost(self, what: str | None) -> None:
        if what:
            self.outcome.lost = what
            self.outcome.problems.append(f"lost: {what}")

    # ---------------------------------------------------------------------------------------- surroundings

    def undisturbed(self, world: int = 1, *more: object) -> Path:
        """The outputs of a run of so many ranks that nobody disturbed; ``more``: its flags beside TRAIN."""
        return self._trained("whole", STEPS, world, more)

    def prepared(self, world: int = 1, *more: object) -> Path:
        """This fault's own copy of a run that was trained to step HALF; returns its newest checkpoint."""
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
        """A small disk (``size=2m``, ``nr_inodes=50``), mounted where only this benchmark sees it.

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
    """The most memory that a process held so far; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM")), 0.0)


def newest_step(run: Path) -> int:
    """Return the newest complete checkpoint's step, or 0 without any."""
    return max((int(path.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*")), default=0)


def differing(one: Path, other: Path) -> str | None:
    """The first tensor in which the newest checkpoints of two runs differ by a bit, or how else; None if they don't."""
    first, second = newest_checkpoint(one), newest_checkpoint(other)
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
    """Cause a fault and return its outcome; nothing of it is left afterwards."""
    lab = Lab(shared, fault.name)
    try:
        fault.make(lab)
    except NotHere as error:
        lab.outcome.left_out = str(error)
    except TimedOut as error:
        lab.require(False, str(error))
    except Exception as error:  # of the benchmark itself: the other faults are made all the same
        lab.require(False, f"the benchmark failed: {error!r}")
    finally:
        lab.close()
    return lab.outcome
