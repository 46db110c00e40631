"""Every rank learns at once that another one failed or was lost.

A thread of every rank holds a connection to rank 0's, which passes on what it hears. What ends a run is that a
connection closes without a good-bye (its process is gone) or that a rank says that it failed: never the time that
something takes. A rank that is stopped or slow is only named.
"""

import contextlib
import itertools
import json
import os
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from opendit.config.parallel_sizes import Place

FAREWELL = 2.0  # seconds that a good-bye may take
JOIN = 30.0  # seconds that the ranks have to connect to rank 0
PING = 5.0  # seconds between two signs of life
SILENT = 30.0  # seconds without one after which a rank is named
SUSPECT = 2.0  # seconds that a failed communication waits for the failure that may be its cause
LONGEST = 4000  # characters of an error that travel

_numbers = itertools.count()  # the watches of a process, which its ranks make in the same order
_alive: "weakref.WeakSet[RankWatch]" = weakref.WeakSet()


@dataclass(frozen=True)
class Ending:
    """Why a run ends: the rank that failed first, with its error, or was lost (text None)."""

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
    rank: int | None = None  # None until it has said who it is
    host: str = ""
    pid: int = 0
    received: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    named: bool = False


class RankWatch:
    """One rank's watch over the others. Make it on every rank, in the same order; ``close`` it when all went well.

    Args:
        store: of all ranks, for rank 0's address.
        on_end: called by the watch's thread when another rank ends the run, unless this one has reported first.
        say: told of ranks that give no sign of life, and when they are back; called by the watch's thread.
    """

    def __init__(self, place: Place, store: dist.Store, on_end: Callable[[Ending], None], say: Callable[[str], None]):
        self.place, self.on_end, self.say = place, on_end, say
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
        self._leaving: float | None = None  # until when this rank waits for answers to its good-bye
        _alive.add(self)
        key = f"watch/{next(_numbers)}"
        if place.rank == 0:
            self._listen(store, key)
        else:
            self._connect(store, key)
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._thread.start()
        if not self._all_here.wait(JOIN):
            missing = sorted(set(range(1, place.world_size)) - self._peers.keys())
            self.say(f"note: rank {', '.join(map(str, missing))} can't reach rank 0: its loss would not be noticed")

    # ---------------------------------------------------------------- called by the program

    def report(self, text: str, suspect: bool = False) -> Ending:
        """Tells all ranks that this one failed; returns why the run ends, which an earlier failure may be.

        suspect: the error is one of communication, which another rank's end may have caused.
        """
        with self._lock:
            self._reported = True
        if self.ending is None and self._thread.is_alive():
            self._order(report=asdict(self.me(text)), suspect=suspect)
            self._known.wait(SUSPECT + 3.0)
        return self.ending or self.me(text)

    def me(self, text: str) -> Ending:
        """This rank's own failure."""
        return Ending(self._me.rank, self._me.host, self._me.pid, text[:LONGEST])

    def close(self) -> None:
        """Says good-bye. Does not return if another rank has ended the run."""
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
                peer = _Peer(_settled(connection), 0, where["host"], where["pid"])
                self._send(peer, token=where["token"], hello=asdict(self._me))
                self._peers[0] = peer
                self._selector.register(connection, selectors.EVENT_READ, peer)
                return
        self.say(
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
            self._selector.register(_settled(connection), selectors.EVENT_READ, _Peer(connection))

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
            self.say(f"note: rank {peer.rank} ({peer.host}, pid {peer.pid}) gives signs of life again")
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
        """Rank 0: a rank says that it failed."""
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
        """Signs of life, every few seconds."""
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
                self.say(
                    f"note: rank {peer.rank} ({peer.host}, pid {peer.pid}) has given no sign of life for "
                    f"{now - peer.heard:.0f} s: it may be stopped, or its machine overloaded or cut off; the run waits"
                )
        return now

    def _send(self, peer: _Peer, **message) -> None:
        with contextlib.suppress(OSError):  # its end is noticed where it is read
            peer.connection.send(json.dumps(message).encode() + b"\n")

    def _release(self) -> None:
        """Closes everything; also in a forked process, which would keep the connections of a dead one open."""
        for peer in self._peers.values():
            peer.connection.close()
        for one in (self._listener, self._wake, self._woken, self._selector):
            if one is not None:
                one.close()


def _settled(connection: socket.socket) -> socket.socket:
    """A machine that is gone closes no connection: the system asks it for signs of life and gives up after a minute."""
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
