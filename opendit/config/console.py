"""Set up standard output and standard error.

A program continues if a stream can't encode a character, a disk is full or a pipe is closed. One process prints a
mistake, as one line with the flag, the value, the reason and the fix.
"""

import atexit
import contextlib
import errno
import io
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, cast

PATIENCE_S = 10.0  # seconds to wait for a stream without room, such as a full non-blocking pipe
LONGEST = 400  # characters of a message that are shown, at most


class OnThisMachine(ValueError):
    """Error for a mistake that may exist on this machine only, such as a missing folder."""


def should_print(error: Exception | str) -> bool:
    """Return True on the rank that should print: the first of the run, or of this machine for OnThisMachine."""
    rank = "LOCAL_RANK" if isinstance(error, OnThisMachine) else "RANK"
    return os.environ.get(rank, "0") == "0"


def print_error(error: Exception | str) -> None:
    print(one_line(f"error: {error}"), file=sys.stderr, flush=True)


def one_line(message: str) -> str:
    """Escape control characters, and cut the middle of a long message."""
    message = "".join(c if c.isprintable() or "\ud800" <= c <= "\udfff" else ascii(c)[1:-1] for c in message)
    if len(message) > LONGEST:
        half = LONGEST // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return message


def prepare_console() -> None:
    """Prepare both streams. Every program calls this first.

    Characters that a stream can't encode are escaped. Output is dropped if a disk is full or a pipe is closed. The null
    device replaces a closed stream, because the next opened file would otherwise get that stream's descriptor. Lines
    are written as soon as they are complete. The package's log records from level INFO on go to standard output, above
    any progress bar.
    """
    for descriptor in (0, 1, 2):
        _open_if_closed(descriptor)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _stream(descriptor, "utf-8"))
        elif stream is getattr(sys, f"__{name}__") and _is_descriptor(stream, descriptor):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            setattr(sys, name, _stream(descriptor, stream.encoding))
        elif hasattr(stream, "reconfigure"):  # tests replace streams by objects without ``reconfigure``
            stream.reconfigure(errors="backslashreplace")
    answer_interrupts()
    logger = logging.getLogger("opendit")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _AboveProgressBar) for handler in logger.handlers):
        logger.addHandler(_AboveProgressBar())


def run_program(main: Callable[..., int | None], *arguments: Any) -> NoReturn:
    """Call ``main(*arguments)`` and end the process with the exit code that it returns or raises.

    One of several ranks ends without finalising the interpreter. Threads of torch.distributed may still hold tensors,
    and would abort the process (pytorch/pytorch#190489).
    """
    try:
        code: Any = main(*arguments)
    except SystemExit as end:
        code = end.code
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    if not isinstance(code, int | None):  # a message
        print(code, file=sys.stderr)
        code = 1
    cast(Any, threading)._shutdown()  # waits for threads that are not daemons, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def answer_interrupts() -> None:
    """Make Ctrl-C end the program with one line instead of a traceback. Call this before slow imports."""
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("\nerror: interrupted", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


class _AboveProgressBar(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # imported late, so that errors about flags appear at once

        tqdm.write(self.format(record))


_commands: list[str] = []  # running commands of ``opendit``, innermost last


@contextlib.contextmanager
def started_as(command: str) -> Iterator[None]:
    """Make :func:`name_of` return ``opendit COMMAND`` within this context."""
    _commands.append(command)
    try:
        yield
    finally:
        _commands.pop()


def name_of(program: str) -> str:
    """Return the words that started a program: its name (train.py), or ``opendit COMMAND``."""
    return f"opendit {_commands[-1]}" if _commands else program


def print_block(title: str, rows: dict[str, str]) -> None:
    print(title)
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}")
    print(flush=True)


def _open_if_closed(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # open() returns the lowest free number, here ``descriptor``
        os.set_inheritable(descriptor, True)


def _is_descriptor(stream, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError, AttributeError):
        return False


def _stream(descriptor: int, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(descriptor)), encoding, errors="backslashreplace", line_buffering=True
    )


class _Descriptor(io.RawIOBase):
    """Descriptor that drops output that it can't write, and reports standard output's first failure."""

    def __init__(self, descriptor: int):
        self._descriptor, self._reported = descriptor, False

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            return self._write_when_ready(data)
        except OSError as error:
            self._report(error)
            return len(data)

    def _write_when_ready(self, data) -> int:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        try:
            return os.write(self._descriptor, data) if poll.poll(PATIENCE_S * 1000) else len(data)
        except OSError:
            return len(data)

    def _report(self, error: OSError) -> None:
        # A closed pipe is no error.
        if self._reported or error.errno == errno.EPIPE or self._descriptor != 1:
            return
        self._reported = True
        with contextlib.suppress(OSError):
            os.write(2, f"note: standard output can't be written ({error.strerror}); the program continues\n".encode())
