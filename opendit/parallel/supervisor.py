"""End a program of one or more ranks: at once, on all of them, and with one line that tells why.

:class:`RankWatch` lets every rank learn at once that another one failed or was lost. A thread of every rank holds a
connection to rank 0, which forwards what it receives. A run ends when a connection closes without a farewell (its
process is gone) or when a rank reports a failure, never because something takes long. A rank that is stopped or slow is
only named.

:class:`Supervisor` is the context in which a program runs. A user sees ``error: ...`` as the last line of a failed run,
and an exit code that is not 0. Errors that a user can fix are that line alone; a traceback precedes it where the
program itself is wrong.

exit code  meaning
0          success
1          the run failed: data, disk, memory, gradients that are not finite, a defect of the program
2          the run could not start: a flag, a file, the environment
3          another rank failed or was lost, which the line names
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
from opendit.parallel.mesh import close_mesh
from opendit.parallel.rendezvous import meet

logger = logging.getLogger(__name__)

FAREWELL = 2.0  # seconds that a farewell may take
JOIN = 30.0  # seconds that the ranks have to connect to rank 0
PING = 5.0  # seconds between two signs of life
SILENT = 30.0  # seconds without one after which a rank is named
SUSPECT = 2.0  # seconds that a failed communication waits for the failure that may be its cause
LONGEST = 4000  # characters of an error that travel

_numbers = itertools.count()  # the watches of a process, which its ranks make in the same order
_alive: "weakref.WeakSet[RankWatch]" = weakref.WeakSet()


@dataclass(frozen=True)
class Ending:
    """Reason why a run ends: the rank that failed first, with its error, or that was lost (text None)."""

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
    rank: int | None = None  # None until it has identified itself
    host: str = ""
    pid: int = 0
    received: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    named: bool = False


class RankWatch:
    """One rank's watch over the others. Make it on every rank, in the same order, and ``close`` it after success. It
    logs ranks that give no sign of life, and when they are back.

    Args:
        place: of this process.
        store: shared by all ranks, for rank 0's address.
        on_end: called by the watch's thread when another rank ends the run, unless this one has reported first.
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
        self._peers: dict[int, _Peer] = {}  # by rank
        self._suspect: tuple[Ending, float] | None = None
        self._all_here, self._listener = threading.Event(), None
        self._leaving: float | None = None  # until when this rank waits for answers to its farewell
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
        """Tell all ranks that this one failed. Return why the run ends, which may be an earlier failure.

        suspect: the error is one of communication, which another rank's end may have caused.
        """
        with self._lock:
            self._reported = True
        if self.ending is None and self._thread.is_alive():
            self._order(report=asdict(self.me(text)), suspect=suspect)
            self._known.wait(SUSPECT + 3.0)
        return self.ending or self.me(text)

    def me(self, text: str) -> Ending:
        """Return this rank's own failure."""
        return Ending(self._me.rank, self._me.host, self._me.pid, text[:LONGEST])

    def close(self) -> None:
        """Send a farewell. Does not return if another rank has ended the run."""
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
            probe.connect((self.place.address, self.place.port))  # sends nothing: which way it would go
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
        if len(peer.received) > 65536:  # nobody of ours
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
        """Handle a rank's report that it failed (rank 0 only)."""
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
        """Send and check signs of life every few seconds."""
        now = time.monotonic()
        if now - looked < PING:
            return looked
        if now - looked > 3 * PING:  # this process itself was stopped
            for peer in self._peers.values():
                peer.heard = now
        for peer in self._peers.values():
            if self.place.rank == 0 and not peer.named:  # what a stopped process does not read would pile up
                self._send(peer, ping=True)
            if now - peer.heard > SILENT and not peer.named and self.place.rank <= 1:
                peer.named = True
                logger.warning(
                    f"note: rank {peer.rank} ({peer.host}, pid {peer.pid}) has given no sign of life for "
                    f"{now - peer.heard:.0f} s: it may be stopped, or its machine overloaded or cut off; the run waits"
                )
        return now

    def _send(self, peer: _Peer, **message) -> None:
        with contextlib.suppress(OSError):  # its end is noticed where it is read
            peer.connection.send(json.dumps(message).encode() + b"\n")

    def _release(self) -> None:
        """Close everything; also in a forked process, which would keep the connections of a dead one open."""
        for peer in self._peers.values():
            peer.connection.close()
        for one in (self._listener, self._wake, self._woken, self._selector):
            if one is not None:
                one.close()


def _configured(connection: socket.socket) -> socket.socket:
    """Set the options of a connection: not blocking, and checked by keep-alive messages, because a machine that is gone
    closes no connection. The system gives up after a minute without an answer."""
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
CLOSING = 8.0  # seconds to finish writing a checkpoint when the run fails
CLOSING_LOST = 2.0  # the same if a rank is gone: no checkpoint can be completed
# Seconds after which a failed rank of several ends, whatever its main thread still waits for; when a rank is gone.
LAST, LAST_LOST = 12.0, 4.0
ALWAYS = (OSError, MemoryError, torch.OutOfMemoryError)  # need no traceback anywhere
# Of communication whose other end is gone: gloo's, NCCL's, the store's.
SUSPECTS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "process group", "store", "socket")


class Supervisor:
    """Context in which one rank of a program runs. When it ends with an error, so does the program.

    With one process, an error ends the program by SystemExit. With several, ``os._exit`` does, on every rank: others
    may wait inside a collective for ever, and so would whatever shuts communication down.

    Args:
        user_errors: classes of exceptions whose message is all that a user needs.

    Attributes:
        place: of this process.
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
                self._watch = RankWatch(self.place, store, self._other_ended)
        except ValueError as error:
            self._print_error(str(error))
            sys.exit(NOT_STARTED)
        return self

    def started(self, user_errors: tuple[type[Exception], ...]) -> None:
        """Treat errors from now on as errors of the run, not of its flags."""
        self.user_errors, self._code = (*user_errors, *ALWAYS), FAILED

    def closes(self, close: Callable[[float], None]) -> None:
        """Register ``close(seconds)``, to be called from another thread, the last one first, when this process must end
        while its main thread is stuck. It has that much time to save what would be lost."""
        self._closers.append(close)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Tell the other ranks of an error inside this context before anything is closed, which may wait for them."""
        try:
            yield
        except Exception as error:
            self._announce(error)
            raise

    def fail(self, text: str) -> None:
        """End the run from a thread beside the main one, which hangs."""
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
        """Return why the run ends, as the ranks agree: this error, or an earlier one of another rank."""
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
        """End this rank because another one ended the run. Called by the watch's thread, as this rank's main thread may
        wait for the other rank for ever."""
        self._leave(ending, OTHER_RANK)

    def _leave(self, ending: Ending, code: int) -> None:
        if ending.text is not None:
            time.sleep(1.0)  # the same may be wrong on this rank, which then finds it itself and prints nothing
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
        """End the process after a while: its main thread is about to, but may wait for a device that waits for another
        rank."""
        time.sleep(LAST_LOST if ending.text is None else LAST)
        mine = ending.rank == self.place.rank
        if self._silent.acquire(blocking=False):
            self._write_error(self._named(cast(str, ending.text)) if mine else str(ending))
        self._exit(self._code if mine else OTHER_RANK)

    def _exit(self, code: int) -> None:
        if self.place.rank == 0:
            time.sleep(0.3)  # for what it has just told the others to be on its way
        end_process(code)

    # ---------------------------------------------------------------- messages

    def _me(self, text: str) -> Ending:
        return self._watch.me(text) if self._watch else Ending(self.place.rank, "", os.getpid(), text)

    def _named(self, text: str) -> str:
        several = self.place.world_size > 1 and self._code != NOT_STARTED
        return f"rank {self.place.rank}: {text}" if several else text

    def _text(self, error: BaseException) -> str:
        """Describe an error in one line."""
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split()))
        if isinstance(error, KeyboardInterrupt):
            return "interrupted" + (" before anything was done" if self._code == NOT_STARTED else "")
        if isinstance(error, torch.OutOfMemoryError):
            return f"the GPU's memory is too small: {text.partition(' Of the allocated')[0]}; lower --batch_size"
        if isinstance(error, MemoryError):
            return f"out of memory{f' ({text})' if text else ''}; lower --batch_size or --num_workers"
        return text if isinstance(error, self.user_errors) and text else f"{type(error).__name__}: {text}"

    def _write_error(self, text: str) -> None:
        """Print without ``print``: the main thread may be inside one and hold its lock."""
        os.write(2, f"\nerror: {text}\n".encode(errors="backslashreplace"))

    def _print_error(self, text: str) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            print(f"error: {text}", file=sys.stderr, flush=True)


def end_process(code: int) -> None:
    """End this process at once, whatever its threads wait for."""
    os._exit(code)


def _tell_torchrun(text: str) -> None:
    """Write the error to the file from which torchrun reports a failed run."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
