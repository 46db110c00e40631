"""Standard output and standard error that never end a program: no encoding, full disk or closed pipe stops it."""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator

PATIENCE_S = 10.0  # that a stream which takes nothing more (a pipe set to non-blocking) is waited for


def prepare_console() -> None:
    """Call first in every program. From then on

    - a character that the stream's encoding does not have is written as an escape (``\\xe9``), not an error;
    - what can't be written, to a full disk or to a pipe that nobody reads any more, is dropped; the program goes on;
    - a stream that the program was started without is the null device, and no file of the program's takes its place;
    - a line is written when it is whole, also to a file.
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
        elif hasattr(stream, "reconfigure"):  # somebody else's, such as a test's
            stream.reconfigure(errors="backslashreplace")


_commands: list[str] = []  # the one of the console command ``opendit`` that is running


@contextlib.contextmanager
def started_as(command: str) -> Iterator[None]:
    """Inside, programs call themselves ``opendit COMMAND``, as they were started."""
    _commands.append(command)
    try:
        yield
    finally:
        _commands.pop()


def name_of(program: str) -> str:
    """How a program (train.py, python -m opendit.export) was started: itself, or ``opendit COMMAND``."""
    return f"opendit {_commands[-1]}" if _commands else program


def print_block(title: str, rows: dict[str, str]) -> None:
    """Prints aligned `name  value` rows under a title."""
    print(title)
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}")
    print(flush=True)


def _open_if_closed(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
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
    """An open descriptor whose writes always succeed; the first that did not is told on the other stream."""

    def __init__(self, descriptor: int):
        self._descriptor, self._told = descriptor, False

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
            self._tell(error)
            return len(data)

    def _write_when_ready(self, data) -> int:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        try:
            return os.write(self._descriptor, data) if poll.poll(PATIENCE_S * 1000) else len(data)
        except OSError:
            return len(data)

    def _tell(self, error: OSError) -> None:
        if self._told or error.errno == errno.EPIPE or self._descriptor != 1:  # who closes a pipe knows
            return
        self._told = True
        with contextlib.suppress(OSError):
            os.write(2, f"note: standard output can't be written ({error.strerror}); the program goes on\n".encode())
