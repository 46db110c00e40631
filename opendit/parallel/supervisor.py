"""End a program on all ranks at once, with one line that gives the reason.

:class:`RankWatch` notifies every rank at once if another rank failed or was lost. In every rank, a thread keeps a
connection to rank 0, and rank 0 forwards messages. A run ends if a rank reports a failure, or if a connection closes
without a farewell message. Slow or stopped ranks only cause a warning.

:class:`Supervisor` is the context in which a program runs. The last line of a failed run begins with ``error:``. A
traceback is printed before this line, unless a user can fix the error.

exit code  meaning
0          success
1          the run failed: data, disk, memory, gradients that are not finite, a defect of the program
2          the run could not start: a flag, a file, the environment
3          another rank failed or was lost; the line names this rank
130        the run was interrupted before it could save anything
"""

import contextlib
import itertools
import json
import logging
import os
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from opendit.config.parallel_sizes import Place, find_place
from opendit.parallel.mesh import close_mesh, meet

logger = logging.getLogger(__name__)

FAREWELL = 2.0  # seconds to wait for answers to a farewell message
JOIN = 30.0  # seconds until all ranks must be connected to rank 0
PING = 5.0  # seconds between two pings
SILENT = 30.0  # seconds without a message before a warning
SUSPECT = 2.0  # seconds to wait, after a communication error, for a report of its cause
LONGEST = 4000  # maximum number of characters of an error message

_numbers = itertools.count()  # index of the next watch, equal on all ranks
_alive: "weakref.WeakSet[RankWatch]" = weakref.WeakSet()


@dataclass(frozen=True)
class Ending:
    """Reason for the end of a run: the rank that failed first, and its error. ``text`` is None if the rank was lost."""

    rank: int
    host: str
    pid: int
    text: str | None = None

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.host}, pid {self.pid})"
        return f"{who} was lost: killed, crashed or cut off" if self.text is None else f"{who} failed: {self.text}"


@dataclass
class _Peer:
    connection: socket.socket
    rank: int | None = None  # None until the peer has sent its rank
    host: str = ""
    pid: int = 0
    received: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    named: bool = False


class RankWatch:
    """One rank's watch over all other ranks. Ranks must create watches in the same order, and call ``close`` after
    success. Ranks 0 and 1 log which ranks fall silent, and when these ranks resume.

    Args:
        place: place of this process in the run.
        store: store of all ranks, for rank 0's address.
        on_end: called by the watch's thread if the run ends, unless this rank has reported a failure.
    """

    def __init__(self, place: Place, store: dist.Store, on_end: Callable[[Ending], None]):
        self.place, self.on_end = place, on_end
        self.ending: Ending | None = None
        self._known, self._lock, self._reported = threading.Event(), threading.Lock(), False
        self._me = Ending(place.rank, socket.gethostname(), os.getpid())
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: dict[int, _Peer] = {}  # connections to other ranks, by rank
        self._suspect: tuple[Ending, float] | None = None
        self._all_here, self._listener = threading.Event(), None
        self._leaving: float | None = None  # time until which to wait for answers to the farewell message
        _alive.add(self)
        key = f"watch/{next(_numbers)}"
        if place.rank == 0:
            self._listen(store, key)
        else:
            self._connect(store, key)
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._thread.start()
        if not self._all_here.wait(JOIN):
            missing = ", ".join(map(str, sorted(set(range(1, place.world_size)) - self._peers.keys())))
            logger.warning(f"note: rank {missing} can't reach rank 0: its loss would not be noticed")

    # ---------------------------------------------------------------- called by the program

    def report(self, text: str, suspect: bool = False) -> Ending:
        """Report to all ranks that this rank failed. Return the reason for the end of the run: this failure, or an
        earlier failure of another rank. suspect: True if another rank may have caused the error."""
        with self._lock:
            self._reported = True
        if self.ending is None and self._thread.is_alive():
            self._order(report=asdict(self.me(text)), suspect=suspect)
            self._known.wait(SUSPECT + 3.0)
        return self.ending or self.me(text)

    def me(self, text: str) -> Ending:
        return Ending(self._me.rank, self._me.host, self._me.pid, text[:LONGEST])

    def close(self) -> None:
        """Send a farewell message and end the watch. This method does not return if another rank has ended the run."""
        self._order(bye=True)
        self._thread.join(60.0)
        self._release()

    def _order(self, **what) -> None:
        self._orders.put(what)
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # ---------------------------------------------------------------- making the connections

    def _listen(self, store: dist.Store, key: str) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        addresses = [self.place.address, socket.gethostname()]
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # for datagrams, connect() sends nothing, but selects this machine's address
            probe.connect((self.place.address, self.place.port))
            addresses.insert(0, probe.getsockname()[0])
        where = {"addresses": addresses, "port": self._listener.getsockname()[1], "token": self._token}
        store.set(key, json.dumps(where | asdict(self._me)))
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _connect(self, store: dist.Store, key: str) -> None:
        where = json.loads(store.get(key))
        same = where["host"] == self._me.host
        for address in ["127.0.0.1"] * same + where["addresses"]:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((address, where["port"]), timeout=5)
                peer = _Peer(_configured(connection), 0, where["host"], where["pid"])
                self._send(peer, token=where["token"], hello=asdict(self._me))
                self._peers[0] = peer
                self._selector.register(connection, selectors.EVENT_READ, peer)
                return
        logger.warning(
            f"note: rank {self.place.rank} can't reach rank 0's watch at {where['addresses']}, port {where['port']}"
        )
        self._all_here.set()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        looked = time.monotonic()
        while self._leaving is None or (self._peers and time.monotonic() < self._leaving):
            for key, _ in self._selector.select(timeout=0.25 if self._suspect else 1.0):
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            while not self._orders.empty() and self.ending is None:
                self._obey(self._orders.get())
            if self._suspect and time.monotonic() >= self._suspect[1]:
                self._end(self._suspect[0])
            if self.ending is not None:
                with self._lock:
                    mine = not self._reported
                self._known.set()
                if mine:
                    self.on_end(self.ending)
                return
            looked = self._look(looked)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            assert self._listener is not None, "what was selected"
            connection, _ = self._listener.accept()
            self._selector.register(_configured(connection), selectors.EVENT_READ, _Peer(connection))

    def _receive(self, peer: _Peer) -> None:
        try:
            received = peer.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._drop(peer, lost=True)
            return
        *lines, peer.received = (peer.received + received).split(b"\n")
        if len(peer.received) > 65536:  # the peer is not a process of this run
            self._drop(peer, lost=False)
            return
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = {}
            self._hear(peer, message if isinstance(message, dict) else {})

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.rank is None:
            hello = message.get("hello")
            if not secrets.compare_digest(str(message.get("token")), self._token) or not isinstance(hello, dict):
                self._drop(peer, lost=False)
                return
            rank: int = hello["rank"]
            peer.rank, peer.host, peer.pid = rank, hello["host"], hello["pid"]
            self._peers[rank] = peer
            if len(self._peers) == self.place.world_size - 1:
                self._all_here.set()
                for each in self._peers.values():
                    self._send(each, welcome=True)
            return
        peer.heard = time.monotonic()
        if peer.named:
            peer.named = False
            logger.warning(f"note: rank {peer.rank} ({peer.host}, pid {peer.pid}) gives signs of life again")
        if "welcome" in message:
            self._all_here.set()
        elif "ping" in message:
            self._send(peer, pong=True)
        elif "end" in message:
            self._end(Ending(**message["end"]))
        elif "report" in message:
            self._consider(Ending(**message["report"]), message.get("suspect", False))
        elif "bye" in message:
            if self.place.rank == 0:
                self._send(peer, bye=True)
            self._drop(peer, lost=False)

    def _obey(self, order: dict[str, Any]) -> None:
        if "bye" in order:
            for peer in self._peers.values():
                self._send(peer, bye=True)
            self._leaving = time.monotonic() + FAREWELL
        elif self.place.rank == 0:
            self._consider(Ending(**order["report"]), order["suspect"])
        elif 0 in self._peers:
            self._send(self._peers[0], **order)

    def _consider(self, ending: Ending, suspect: bool) -> None:
        """End the run because of a report. If the report is suspect, first wait for another one. Only rank 0 calls
        this method."""
        if not suspect:
            self._end(ending)
        elif self._suspect is None:
            self._suspect = ending, time.monotonic() + SUSPECT

    def _drop(self, peer: _Peer, lost: bool) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is None or self._peers.pop(peer.rank, None) is None or not lost or self._leaving:
            return
        if self._suspect is None or self._suspect[0].rank != peer.rank:
            self._end(Ending(peer.rank, peer.host, peer.pid))

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
            for peer in self._peers.values():
                if self.place.rank == 0:
                    self._send(peer, end=asdict(ending))

    def _look(self, looked: float) -> float:
        """Every PING seconds, send pings and look for silent peers. ``looked`` and the result: time of the last
        check."""
        now = time.monotonic()
        if now - looked < PING:
            return looked
        if now - looked > 3 * PING:  # this process itself was stopped, so peers may not have been silent
            for peer in self._peers.values():
                peer.heard = now
        for peer in self._peers.values():
            # after the warning (``named``), send no more pings, because a stopped process would not read them
            if self.place.rank == 0 and not peer.named:
                self._send(peer, ping=True)
            if now - peer.heard > SILENT and not peer.named and self.place.rank <= 1:
                peer.named = True
                logger.warning(
                    f"note: rank {peer.rank} ({peer.host}, pid {peer.pid}) has given no sign of life for "
                    f"{now - peer.heard:.0f} s: it may be stopped, or its machine overloaded or cut off; the run waits"
                )
        return now

    def _send(self, peer: _Peer, **message) -> None:
        with contextlib.suppress(OSError):  # _receive detects that a peer is gone
            peer.connection.send(json.dumps(message).encode() + b"\n")

    def _release(self) -> None:
        """Close all sockets. Forked processes also call this method, because open copies would hide a parent's
        death."""
        for peer in self._peers.values():
            peer.connection.close()
        for one in (self._listener, self._wake, self._woken, self._selector):
            if one is not None:
                one.close()


def _configured(connection: socket.socket) -> socket.socket:
    """Make a connection non-blocking, and enable keep-alive messages. They close a connection to a failed machine after
    a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
    connection.setblocking(False)
    return connection


def _release_in_child() -> None:
    for watch in list(_alive):
        watch._release()


os.register_at_fork(after_in_child=_release_in_child)


FAILED, NOT_STARTED, OTHER_RANK, INTERRUPTED = 1, 2, 3, 130
CLOSING = 8.0  # seconds to finish a checkpoint when the run fails
CLOSING_LOST = 2.0  # seconds if a rank was lost; no checkpoint can then be completed
# Seconds until a failed rank ends, even if its main thread is stuck. LAST_LOST applies if a rank was lost.
LAST, LAST_LOST = 12.0, 4.0
ALWAYS = (OSError, MemoryError, torch.OutOfMemoryError)  # errors that never show a traceback
# Words in errors of gloo, NCCL and the store. The end of another rank may cause such errors.
SUSPECTS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "process group", "store", "socket")


class Supervisor:
    """Context in which one rank of a program runs. An error inside the context ends the program on all ranks.

    A single process ends with SystemExit. Several ranks end with ``os._exit``, because a normal shutdown would wait for
    stuck ranks.

    Args:
        user_errors: classes of exceptions that are shown without a traceback.

    Attributes:
        place: place of this process in the run.
    """

    def __init__(self, user_errors: tuple[type[Exception], ...]):
        self.user_errors = (*user_errors, *ALWAYS)
        self.place = Place()
        self._code = NOT_STARTED
        self._watch: RankWatch | None = None
        self._closers: list[Callable[[float], None]] = []
        self._ending: Ending | None = None  # reason for the end of the run, after an error on this rank
        self._one_leaves = threading.Lock()  # held by the thread that ends the process
        self._silent = threading.Lock()  # held by the thread that prints the reason

    def __enter__(self) -> "Supervisor":
        try:
            self.place = find_place()
            store = meet(self.place)
            if self.place.world_size > 1:
                self._watch = RankWatch(self.place, store, self._other_ended)
        except ValueError as error:
            self._print_error(str(error))
            sys.exit(NOT_STARTED)
        return self

    def started(self, user_errors: tuple[type[Exception], ...]) -> None:
        """Mark the end of the start. Later errors have exit code 1 instead of 2."""
        self.user_errors, self._code = (*user_errors, *ALWAYS), FAILED

    def closes(self, close: Callable[[float], None]) -> None:
        """Register ``close(seconds)`` to save unsaved state within this time. If the main thread is stuck at the end,
        another thread calls the registered functions, the last one first."""
        self._closers.append(close)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Report errors inside this context to all ranks at once. Later cleanup may wait for other ranks."""
        try:
            yield
        except Exception as error:
            self._announce(error)
            raise

    def fail(self, text: str) -> None:
        """End the run from another thread because the main thread hangs."""
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
        for stream in (sys.stdout, sys.stderr):  # os._exit would lose buffered output
            with contextlib.suppress(Exception):
                stream.flush()
        self._exit(code)

    def _announce(self, error: BaseException) -> Ending:
        """Report an error to all ranks. Return the reason that all ranks print: this error, or an earlier error of
        another rank."""
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
        """End this rank because another rank ended the run. The watch's thread calls this method, because the main
        thread may be stuck."""
        self._leave(ending, OTHER_RANK)

    def _leave(self, ending: Ending, code: int) -> None:
        if ending.text is not None:
            time.sleep(1.0)  # meanwhile, the main thread may raise this error, so that nothing is printed twice
        if not self._one_leaves.acquire(blocking=False):
            return  # the main thread is already ending this process
        seconds = CLOSING_LOST if ending.text is None else CLOSING
        closing = threading.Thread(target=self._close, args=(seconds,), daemon=True)
        closing.start()
        # saving may wait for a device that waits for the lost rank
        closing.join(seconds + 1.0)
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
        """End the process after LAST or LAST_LOST seconds, if the main thread has not ended it before."""
        time.sleep(LAST_LOST if ending.text is None else LAST)
        mine = ending.rank == self.place.rank
        if self._silent.acquire(blocking=False):
            self._write_error(self._named(cast(str, ending.text)) if mine else str(ending))
        self._exit(self._code if mine else OTHER_RANK)

    def _exit(self, code: int) -> None:
        if self.place.rank == 0:
            time.sleep(0.3)  # time to send the last messages to all ranks
        end_process(code)

    # ---------------------------------------------------------------- messages

    def _me(self, text: str) -> Ending:
        return self._watch.me(text) if self._watch else Ending(self.place.rank, "", os.getpid(), text)

    def _named(self, text: str) -> str:
        several = self.place.world_size > 1 and self._code != NOT_STARTED
        return f"rank {self.place.rank}: {text}" if several else text

    def _text(self, error: BaseException) -> str:
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split()))
        if isinstance(error, KeyboardInterrupt):
            return "interrupted" + (" before anything was done" if self._code == NOT_STARTED else "")
        if isinstance(error, torch.OutOfMemoryError):
            return f"the GPU's memory is too small: {text.partition(' Of the allocated')[0]}; lower --batch_size"
        if isinstance(error, MemoryError):
            return f"out of memory{f' ({text})' if text else ''}; lower --batch_size or --num_workers"
        return text if isinstance(error, self.user_errors) and text else f"{type(error).__name__}: {text}"

    def _write_error(self, text: str) -> None:
        """Print an error without ``print``, because the main thread may hold the lock of ``print``."""
        os.write(2, f"\nerror: {text}\n".encode(errors="backslashreplace"))

    def _print_error(self, text: str) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            print(f"error: {text}", file=sys.stderr, flush=True)


def end_process(code: int) -> None:
    os._exit(code)


def _tell_torchrun(text: str) -> None:
    """Write the error to the file from which torchrun reports the failure of a process."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
