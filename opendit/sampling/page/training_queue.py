"""Start runs of train.py from the page. The runs continue when the page ends.

The folder of ``--allow_train`` is ROOT. For every run, ROOT/page_runs/0001/ contains:

- ``job.json``: the :class:`Job`
- ``config.yaml``: the flags, for ``train.py --config``
- ``output.txt``: the program's output
- ``run``: path of the run's folder, written by train.py when training begins

A restarted page reads these files, finds the running runs, and starts the waiting runs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from opendit.checkpoint.run_folders import ENDED, FolderLock, boot, start_time
from opendit.common.json_file import MIB, read_bounded, read_json
from opendit.common.json_models import Count, FileKind, JsonObject, Word, read_file
from opendit.common.safe_files import make_folder, open_to_append, remove, remove_tree, write_whole
from opendit.common.yaml_file import read_yaml
from opendit.config.recipes import RECIPES
from opendit.sampling.page.catalog import Catalog

FOLDER = "page_runs"
JOB, CONFIG, OUTPUT, RUN = "job.json", "config.yaml", "output.txt", "run"
MOST_WAITING = 32  # waiting jobs, at most
MOST_SHOWN = 200  # newest jobs in the list
TICK_S = 1.0  # seconds between two checks of the running jobs
PROGRAM_S = 300  # seconds for a plan or a look at data, at most
TAIL_BYTES = 16 * 1024  # bytes to show from a program's output
# As in opendit/training/interrupt.py. Don't import that module here.
RUN_FOLDER_FILE = "OPENDIT_RUN_FOLDER_FILE"
ENDINGS = {"done": "done", "failed": "failed", "hours_up": "stopped", "stopped": "stopped"}


class Job(JsonObject):
    """A run that a user has requested on the page.

    Attributes:
        state: "waiting", "started" or "dropped" (from the queue).
        pid, started, boot: identify the process: process ID, start time in ticks since boot, and boot ID.
        began: clock time of the last start.
        gpu: the GPU that the process uses; None for the CPU.
        stopped: True if the user has stopped the run.
    """

    title: Word
    state: Word
    pid: Count = 0
    started: Count = 0
    boot: Word = ""
    began: float = 0.0
    gpu: Word | None = None
    stopped: bool = False


JOB_FILE = FileKind(Job, 64 * 1024)


class TrainingQueue:
    """Queue of training runs. A GPU has at most one run at a time. When the queue closes, running runs continue.

    root: the folder of ``--allow_train``. gpus: names of the GPUs for CUDA_VISIBLE_DEVICES; (None,) for the CPU. Raises
    ValueError if another page uses the folder, and OSError."""

    def __init__(self, root: Path, catalog: Catalog, gpus: Sequence[str | None] | None = None):
        self.root, self._catalog = root.resolve(strict=True), catalog
        self._gpus = find_gpus() if gpus is None else gpus
        self._folder = self.root / FOLDER
        make_folder(self._folder, root=self.root)
        self._owner = FolderLock(self._folder, f"--allow_train {root}", "close that page first")
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._children: list[subprocess.Popen[bytes]] = []
        self._program: subprocess.Popen[bytes] | None = None
        self._program_lock = threading.Lock()
        self._jobs = self._read_all()
        self._thread = threading.Thread(target=self._work, name="training-queue", daemon=True)
        self._thread.start()

    def __enter__(self) -> "TrainingQueue":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if (program := self._program) is not None:
            _end(program)
        self._owner.release()

    @property
    def has_gpu(self) -> bool:
        return None not in self._gpus

    def add(self, title: str, config: dict[str, Any]) -> str:
        """Add a run to the queue and return the job's name. Raises ValueError if the queue is full, and OSError."""
        with self._lock:
            if sum(job.state == "waiting" for job in self._jobs.values()) >= MOST_WAITING:
                raise ValueError(f"{MOST_WAITING} runs wait already: drop one of them first")
            name = f"{max(map(int, self._jobs), default=0) + 1:04d}"
            while (self._folder / name).exists():  # the folder of a job that can't be read
                name = f"{int(name) + 1:04d}"
            self._write_config(name, config)
            self._keep(name, Job(title=title[:64], state="waiting"))
        return name

    def stop(self, name: str) -> str:
        """Stop a run, and return a message for the user. A running run gets SIGTERM, saves a checkpoint and ends. A
        waiting run is dropped. Raises ValueError for other runs."""
        with self._lock:
            job = self._job(name)
            if job.state == "waiting":
                self._keep(name, job.model_copy(update={"state": "dropped"}))
                return "dropped from the queue"
            if job.stopped and alive(job):  # a second signal would end the run before it has saved
                raise ValueError(f"{name} is stopping already: it saves and ends; kill {job.pid} ends it at once")
            if not send(job, signal.SIGTERM):
                raise ValueError(f"{name} does not run")
            self._keep(name, job.model_copy(update={"stopped": True}))
        return "it saves and ends"

    def go_on(self, name: str) -> str:
        """Queue an ended run again, and return a message for the user. The run resumes from its newest checkpoint.
        Without a checkpoint, it starts over. Raises OSError, and ValueError if the run is running, waiting or done."""
        with self._lock:
            job = self._job(name)
            if (now := self.status(name)) in ("running", "stopping", "waiting", "done"):
                raise ValueError(f"{name}: it can't go on, for it is {now}")
            config = self.config(name)
            config.pop("load", None)
            if (run := self.run_of(name)) is not None and self._catalog.has_checkpoint(run):
                config["load"] = str(self._catalog.run(run).resolve())
                if not trains_lora(config):  # checkpoints of a LoRA run lack the base weights
                    config.pop("pretrained", None)
            self._write_config(name, config)
            self._keep(name, job.model_copy(update={"state": "waiting", "stopped": False}))
        return "continues, or waits until other runs end"

    def program(self, words: Sequence[str]) -> tuple[int, str]:
        """Run a program of OpenDiT to its end. Return the exit code and the end of the output. words: the command line.
        Raises ValueError if another program is running, or after ``PROGRAM_S`` seconds."""
        if not self._program_lock.acquire(blocking=False):
            raise ValueError("another plan is being made: try again in a moment")
        try:
            remove(self._folder / "plan.txt", root=self.root)
            with self._appending("plan.txt") as output:
                self._program = _start(words, output)
            try:
                code = self._program.wait(PROGRAM_S)
            except subprocess.TimeoutExpired:
                raise ValueError(f"it took more than {PROGRAM_S} seconds, and was ended") from None
            return code, tail(self._folder / "plan.txt", self.root)
        finally:
            program, self._program = self._program, None
            if program is not None:
                _end(program)
            self._program_lock.release()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield the path of a folder that a program may create for its files. Delete the folder on exit."""
        folder = self._folder / f"look-{os.getpid()}-{threading.get_ident()}"
        try:
            yield folder
        finally:
            remove_tree(folder, root=self.root)

    def plan_config(self, config: dict[str, Any]) -> Path:
        """Write a configuration for a plan, and return the path of its file."""
        path = self._folder / "plan.yaml"
        write_whole(path, _yaml(config), root=self.root)
        return path

    def names(self) -> list[str]:
        """Return the names of the jobs, newest first, at most MOST_SHOWN."""
        with self._lock:
            return sorted(self._jobs, reverse=True)[:MOST_SHOWN]

    def title(self, name: str) -> str:
        return self._job(name).title

    def status(self, name: str) -> str:
        """Return "waiting", "dropped", "running", "stopping", "stopped", "done" or "failed"."""
        job = self._job(name)
        if job.state != "started":
            return job.state
        if alive(job):
            return "stopping" if job.stopped else "running"
        run = self.run_of(name)
        ended = None if run is None else self._catalog.file(run, ENDED)
        with contextlib.suppress(OSError, ValueError):
            if ended is not None and ended.stat().st_mtime >= job.began - 1:
                how = read_json(ended, MIB)
                return next((word for key, word in ENDINGS.items() if how.get(key) is True), "failed")
        return "stopped" if job.stopped else "failed"

    def run_of(self, name: str) -> str | None:
        """Return the name of the job's run; None if training has not begun."""
        try:
            content = read_bounded(self._folder / self._known(name) / RUN, 4096).decode()
        except (OSError, ValueError):
            return None
        run = Path(content.strip()).name
        return run if run in self._catalog.runs() else None

    def config(self, name: str) -> dict[str, Any]:
        """Return the job's flags. Raises ValueError or OSError."""
        found = read_yaml(self._folder / self._known(name) / CONFIG, CONFIG)
        if not isinstance(found, dict):
            raise ValueError(f"{name}: {CONFIG} has no flags")
        return found

    def output(self, name: str) -> str:
        """Return the end of the output of the job's program."""
        return tail(self._folder / self._known(name) / OUTPUT, self.root)

    def _known(self, name: Any) -> str:
        with self._lock:
            if not isinstance(name, str) or name not in self._jobs:
                raise ValueError("no such run: choose one of the list")
        return name

    def _job(self, name: Any) -> Job:
        with self._lock:
            return self._jobs[self._known(name)]

    def _read_all(self) -> dict[str, Job]:
        found = {}
        for folder in self._folder.iterdir():
            if folder.name.isascii() and folder.name.isdecimal() and not folder.is_symlink():
                with contextlib.suppress(OSError, ValueError):  # skip a job with damaged files
                    found[folder.name] = Job(**read_file(folder / JOB, JOB_FILE))
        return found

    def _keep(self, name: str, job: Job) -> None:
        write_whole(self._folder / name / JOB, job.model_dump_json().encode(), root=self.root, make=True)
        self._jobs[name] = job

    def _write_config(self, name: str, config: dict[str, Any]) -> None:
        write_whole(self._folder / name / CONFIG, _yaml(config), root=self.root, make=True)

    @contextlib.contextmanager
    def _appending(self, name: str) -> Iterator[int]:
        """Open a file to append a program's output. Yield the descriptor, and close the file on exit."""
        file = open_to_append(self._folder / name, root=self.root, make=True)
        try:
            yield file
        finally:
            os.close(file)

    def _work(self) -> None:
        while not self._ended.wait(TICK_S):
            self._children = [child for child in self._children if child.poll() is None]
            with self._lock:
                self._start_next()

    def _start_next(self) -> None:
        waiting = [name for name, job in sorted(self._jobs.items()) if job.state == "waiting"]
        if not waiting:
            return
        taken = {job.gpu for job in self._jobs.values() if job.state == "started" and alive(job)}
        for name, gpu in zip(waiting, [gpu for gpu in self._gpus if gpu not in taken], strict=False):
            job = self._jobs[name].model_copy(update={"state": "started", "gpu": gpu, "began": time.time(), "pid": 0})
            try:
                self._keep(name, job)  # written before the start, so that no page starts the run twice
                folder = self._folder / name
                more = {RUN_FOLDER_FILE: str(folder / RUN)} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
                with self._appending(f"{name}/{OUTPUT}") as output:
                    child = _start(["train", "--config", str(folder / CONFIG)], output, **more)
                self._children.append(child)
                # Nothing has waited for the child, so no other process can have its process ID.
                of_process = {"pid": child.pid, "started": start_time(child.pid) or 0, "boot": boot()}
                self._keep(name, job.model_copy(update=of_process))
            except OSError as error:  # such as a full disk; the job's status is then "failed"
                self._jobs[name] = job
                print(f"{name}: {error}", file=sys.stderr)


def alive(job: Job) -> bool:
    """Return True if the job's process is running. Another process with a reused process ID does not count."""
    return job.pid > 0 and job.started > 0 and job.boot == boot() and start_time(job.pid) == job.started


def send(job: Job, number: int) -> bool:
    """Send a signal to the job's process, and to no other one. Return False if the process has ended."""
    if job.pid <= 0:
        return False
    try:
        process = os.pidfd_open(job.pid)  # stays with this process even if the process ID is reused
    except OSError:
        return False
    try:
        if not alive(job):
            return False
        signal.pidfd_send_signal(process, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(process)


def trains_lora(config: dict[str, Any]) -> bool:
    """Return True if flags of train.py, with their recipe, train a LoRA."""
    recipe = RECIPES.get(str(config.get("recipe")))
    return "lora" in config or recipe is not None and "--lora" in recipe.flags


def find_gpus() -> Sequence[str | None]:
    """Return the names of the GPUs that this process may use; (None,) if there are none."""
    if not torch.cuda.is_available():
        return (None,)
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def tail(path: Path, root: Path) -> str:
    """Return the end of a text file below ``root``; "" if there is no such file."""
    try:
        if not path.resolve(strict=True).is_relative_to(root) or not path.is_file():
            return ""
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _start(words: Sequence[str], output: int, **more: str) -> subprocess.Popen[bytes]:
    """Start a program of OpenDiT in a new session, so that signals to the page do not reach it."""
    return subprocess.Popen(
        [sys.executable, "-m", "opendit", *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **more},
    )


def _end(program: subprocess.Popen[bytes]) -> None:
    """Kill a program and all processes that it has started."""
    with contextlib.suppress(OSError):
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def _yaml(config: dict[str, Any]) -> bytes:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode()
