"""Start, watch and kill programs under test, and check that all their processes have ended."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Variables by which torchrun describes ranks. Programs under test must not inherit the benchmark's.
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TimedOut(Exception):
    """Raised if an awaited event did not happen."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a program under test: one thread, offline, and the code of this checkout."""
    kept = {name: value for name, value in os.environ.items() if name not in RANKS}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | more


class Starter:
    """Starts programs by forking a process that has already imported their modules. Several threads may use it."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "benchmarks.faults.starter", str(theirs.fileno())]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), pass_fds=[theirs.fileno()], stdin=null, stdout=null
        )
        theirs.close()
        self._socket, self._stream, self._lock = ours, ours.makefile("rw"), threading.Lock()

    def __call__(self, request: dict) -> int:
        """Fork a process that runs the ``request`` (see ``starter.become``), and return its id."""
        with self._lock:
            if self._stream is not None and not getattr(self, "_ready", False):
                if self._stream.readline() != "ready\n":
                    raise RuntimeError("the process that starts the programs could not import them")
                self._ready = True
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
            return int(self._stream.readline())

    def close(self) -> None:
        self._stream.close()
        self._socket.close()
        self._process.wait()


@dataclass
class Program:
    """A started process, and the files that it prints to."""

    pid: int
    stdout: Path
    stderr: Path
    _code: Callable[[], int | None]

    def code(self) -> int | None:
        """Return the exit code, -N if signal N ended the process, or None while it runs."""
        return self._code()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def said(self) -> str:
        """Return all output, stderr first."""
        return self.stderr.read_text(errors="replace") + self.stdout.read_text(errors="replace")

    def last_line(self) -> str:
        """Return the last non-empty line of stderr as a terminal would show it after carriage returns."""
        lines = self.stderr.read_text(errors="replace").split("\n")
        shown = [line.split("\r")[-1].strip() for line in lines]
        return next((line for line in reversed(shown) if line), "")

    def workers(self) -> list[int]:
        """Return the ids of the process's children. In training, these read the data."""
        return children(self.pid)


def children(pid: int) -> list[int]:
    try:
        tasks = [int(task) for task in os.listdir(f"/proc/{pid}/task")]
        return [int(child) for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:  # the process has ended
        return []


def living_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is ``folder``, without zombies.

    All programs of a fault run in the fault's folder. Child processes inherit the folder, even in another session or
    with another parent."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                    found.append(int(entry))
            except OSError:  # the process has ended, is a zombie, or belongs to another user
                continue
    return found


class Programs:
    """Starts programs that run in one folder. Leaving the ``with`` block kills all remaining ones."""

    def __init__(self, starter: Starter, folder: Path):
        self.folder, self._starter, self._count = folder.resolve(), starter, 0
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_) -> None:
        self.kill_all()

    def kill_all(self) -> list[int]:
        """Kill the processes that still run, wait for them, and return their ids."""
        found = living = living_in(self.folder)
        end = time.monotonic() + 10
        while living and time.monotonic() < end:
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            living = living_in(self.folder)
        return found

    def start(
        self,
        script: str,
        *argv: object,
        prelude: str = "",
        file_limit: int | None = None,
        stdout: str | None = None,
        **variables: str,
    ) -> Program:
        """Start a script of this repository (``train.py``) or a module (``opendit.export``) by forking the starter."""
        paths = self._files()
        request = {
            "argv": [str(ROOT / script) if script.endswith(".py") else script, *map(str, argv)],
            "environment": environment(**variables),
            "folder": str(self.folder),
            "stdout": stdout or str(paths["stdout"]),
            "stderr": str(paths["stderr"]),
            "code": str(paths["code"]),
            "file_limit": file_limit,
            "prelude": prelude,
        }
        pid = self._starter(request)

        def code() -> int | None:
            return int(paths["code"].read_text()) if paths["code"].exists() else None

        return Program(pid, paths["stdout"], paths["stderr"], code)

    def run(self, *command: object, **variables: str) -> Program:
        """Start any command (an interpreter, torchrun, a shell)."""
        paths = self._files()
        with open(paths["stdout"], "wb") as output, open(paths["stderr"], "wb") as errors:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        return Program(process.pid, paths["stdout"], paths["stderr"], process.poll)

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until the condition holds. Raises TimedOut after ``seconds``."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimedOut(f"{what} took more than {seconds:.0f} s")
            time.sleep(0.003)

    def _files(self) -> dict[str, Path]:
        self._count += 1
        paths = {name: self.folder / f"{self._count}.{name}" for name in ("stdout", "stderr", "code")}
        paths["stdout"].touch()
        paths["stderr"].touch()
        return paths


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
