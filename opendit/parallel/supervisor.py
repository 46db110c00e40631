"""End a program of one or more ranks: at once, on all of them, and with one line that says why.

What the user sees of an error: ``error: ...`` as the last line, and an exit code that is not 0. Errors that a user can
do something about are that line alone; a traceback stands before it where the program itself is wrong.

exit code  what happened
0          all went well
1          the run failed: data, disk, memory, gradients that are not finite, a defect of the program
2          it could not start: a flag, a file, the environment
3          another rank failed or was lost, which the line names
130        it was interrupted before it could save anything
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.distributed as dist

from opendit.config.parallel_sizes import Place, find_place
from opendit.parallel.mesh import close_mesh
from opendit.parallel.rank_watch import Ending, RankWatch
from opendit.parallel.rendezvous import meet

FAILED, NOT_STARTED, OTHER_RANK, INTERRUPTED = 1, 2, 3, 130
CLOSING = 8.0  # seconds for what must be put away when the run fails: a checkpoint that is being written
CLOSING_LOST = 2.0  # the same when a rank is gone, without which none gets complete
# Seconds after which a failed rank of several ends, whatever its main thread still waits for; when a rank is gone.
LAST, LAST_LOST = 12.0, 4.0
ALWAYS = (OSError, MemoryError, torch.OutOfMemoryError)  # need no traceback anywhere
# Of communication whose other end is gone: gloo's, NCCL's, the store's.
SUSPECTS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "process group", "store", "socket")


class Supervisor:
    """The context in which one rank of a program runs. Its end is that of the program unless all went well.

    With one process, an error ends the program by SystemExit; with several, ``os._exit`` does, on every rank: others
    may wait inside a collective for ever, and so would whatever shuts communication down.

    Args:
        user_errors: classes of exceptions whose message is all that a user needs.

    Attributes:
        place: which of the processes this is.
    """

    def __init__(self, user_errors: tuple[type[Exception], ...]):
        self.user_errors = (*user_errors, *ALWAYS)
        self.place = Place()
        self._code = NOT_STARTED
        self._watch: RankWatch | None = None
        self._closers: list[Callable[[float], None]] = []
        self._ending: Ending | None = None  # which this rank has reported, or found out by doing so
        self._one_leaves = threading.Lock()  # held by the thread that ends the process
        self._silent = threading.Lock()  # held by the thread that has said why

    def __enter__(self) -> "Supervisor":
        try:
            self.place = find_place()
            store = meet(self.place)
            if self.place.world_size > 1:
                self._watch = RankWatch(self.place, store, self._other_ended, _note)
        except ValueError as error:
            self._print_error(str(error))
            sys.exit(NOT_STARTED)
        return self

    def started(self, user_errors: tuple[type[Exception], ...]) -> None:
        """From now on an error is one of the run, no more one of its flags."""
        self.user_errors, self._code = (*user_errors, *ALWAYS), FAILED

    def closes(self, close: Callable[[float], None]) -> None:
        """Calls ``close(seconds)``, from another thread and the last first, when this process must end while its main
        thread is stuck: to put away in that time what would be lost."""
        self._closers.append(close)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """An error that leaves it is told to the other ranks before anything is closed, which may wait for them."""
        try:
            yield
        except Exception as error:
            self._announce(error)
            raise

    def fail(self, text: str) -> None:
        """Ends the run from a thread beside the main one, which hangs."""
        ending = self._watch.report(text) if self._watch else self._me(text)
        self._leave(ending, FAILED if ending == self._me(text) else OTHER_RANK)

    # ---------------------------------------------------------------- the end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, SystemExit):
            if self._watch is not None:
                self._watch.close()
            close_mesh()
            return
        ending, text = self._announce(error), self._text(error)
        mine, same = ending.rank == self.place.rank, ending.text == text
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else self._code if mine or same else OTHER_RANK
        if mine and not isinstance(error, (*self.user_errors, KeyboardInterrupt)):
            traceback.print_exception(error)
        if self._watch is None:
            with contextlib.suppress(Exception):
                close_mesh()
        if mine:
            _tell_torchrun(text)
        if (mine or not same) and self._silent.acquire(blocking=False):
            self._print_error(self._named(text) if mine else str(ending))
        if self._watch is None:
            sys.exit(code)
        for stream in (sys.stdout, sys.stderr):  # os._exit would lose what a file has not got yet
            with contextlib.suppress(Exception):
                stream.flush()
        self._exit(code)

    def _announce(self, error: BaseException) -> Ending:
        """Why the run ends, as the ranks agree: this error, or an earlier one of another rank."""
        if self._ending is None:
            text = self._text(error)
            self._ending = self._me(text)
            if self._watch is not None:
                communication = isinstance(error, RuntimeError) and not isinstance(error, self.user_errors)
                suspect = communication and any(word in str(error).lower() for word in SUSPECTS)
                suspect |= isinstance(error, dist.DistError)
                self._ending = self._watch.report(text, suspect)
                if not self._one_leaves.acquire(blocking=False):
                    threading.Event().wait()  # the watch's thread ends this process
                threading.Thread(target=self._exit_after, args=(self._ending,), daemon=True).start()
        return self._ending

    def _other_ended(self, ending: Ending) -> None:
        """The watch's thread: another rank ended the run while this one's main thread may wait for it for ever."""
        self._leave(ending, OTHER_RANK)

    def _leave(self, ending: Ending, code: int) -> None:
        if ending.text is not None:
            time.sleep(1.0)  # what is wrong there may be wrong here, too: this rank finds it itself, and says nothing
        if not self._one_leaves.acquire(blocking=False):
            return  # the main thread is at it
        seconds = CLOSING_LOST if ending.text is None else CLOSING
        closing = threading.Thread(target=self._close, args=(seconds,), daemon=True)
        closing.start()
        closing.join(seconds + 1.0)  # what is closed may wait for a device that waits for the lost rank
        if code == FAILED:
            _tell_torchrun(cast(str, ending.text))
        self._write_error(self._named(cast(str, ending.text)) if code == FAILED else str(ending))
        self._exit(code)

    def _close(self, seconds: float) -> None:
        for close in reversed(self._closers):
            with contextlib.suppress(Exception):
                close(seconds)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    def _exit_after(self, ending: Ending) -> None:
        """Ends a process whose main thread is at it, but may wait for a device that waits for another rank."""
        time.sleep(LAST_LOST if ending.text is None else LAST)
        mine = ending.rank == self.place.rank
        if self._silent.acquire(blocking=False):
            self._write_error(self._named(cast(str, ending.text)) if mine else str(ending))
        self._exit(self._code if mine else OTHER_RANK)

    def _exit(self, code: int) -> None:
        if self.place.rank == 0:
            time.sleep(0.3)  # for what it has just told the others to be on its way
        end_process(code)

    # ---------------------------------------------------------------- words

    def _me(self, text: str) -> Ending:
        return self._watch.me(text) if self._watch else Ending(self.place.rank, "", os.getpid(), text)

    def _named(self, text: str) -> str:
        several = self.place.world_size > 1 and self._code != NOT_STARTED
        return f"rank {self.place.rank}: {text}" if several else text

    def _text(self, error: BaseException) -> str:
        """One line."""
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split()))
        if isinstance(error, KeyboardInterrupt):
            return "interrupted before anything was done"
        if isinstance(error, torch.OutOfMemoryError):
            return f"the GPU's memory is too small: {text.partition(' Of the allocated')[0]}; lower --batch_size"
        if isinstance(error, MemoryError):
            return f"out of memory{f' ({text})' if text else ''}; lower --batch_size or --num_workers"
        return text if isinstance(error, self.user_errors) and text else f"{type(error).__name__}: {text}"

    def _write_error(self, text: str) -> None:
        """Not by print: the main thread may be inside one, with its lock."""
        os.write(2, f"\nerror: {text}\n".encode(errors="backslashreplace"))

    def _print_error(self, text: str) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            print(f"error: {text}", file=sys.stderr, flush=True)


def end_process(code: int) -> None:
    """Ends this process at once, whatever its threads wait for."""
    os._exit(code)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tell_torchrun(text: str) -> None:
    """torchrun's report of a failed run shows what its processes leave in this file."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
