"""Find the rank that the others wait for.

All ranks take the same time for a step, since they wait for each other; what tells them apart is how long each works by
itself before it meets the others: the wait for its data, and the time from there to the end of the forward pass. (Where
the forward pass meets them too, in Gemini's gathers or a shared sequence, or is part of a CUDA graph, the wait for the
data is what is seen.) The host reads no GPU for it but at a log line, where it waits for the GPU anyway.
"""

import logging
import socket
import time
from collections import deque
from statistics import median
from typing import Any

import torch

from opendit.parallel.mesh import ControlGroup, Mesh

SLOW = 1.5  # times as long as the others' median
LOSS = 0.1  # at least this share of a step is lost by it
LEAST_S = 1.0  # and so many seconds since the last line
REPEAT = 20  # log lines after which it is said again
TIMED = 32  # micro-batches before a log line whose forward passes are timed

logger = logging.getLogger(__name__)


class Pace:
    """Times one rank's own work and compares it with the others'; with one rank it does nothing."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._channel = ControlGroup(mesh) if mesh.world_size > 1 else None
        self._on_gpu = mesh.device.type == "cuda"
        self._data, self._batches, self._since = 0.0, 0, time.perf_counter()
        self._begun: Any = None  # the host's clock in seconds, or on a GPU an event
        self._forwards: deque[Any] = deque(maxlen=TIMED)  # seconds, or two events
        self._named, self._lines = None, 0  # the rank named last, and the log lines since

    def begin(self, waited: float) -> None:
        """A micro-batch is there, after so many seconds."""
        if self._channel is None:
            return
        self._data += waited
        self._batches += 1
        self._begun = self._now()

    def end(self) -> None:
        """Its forward pass has ended, or on a GPU is enqueued."""
        if self._begun is None or (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        begun, now, self._begun = self._begun, self._now(), None
        self._forwards.append((begun, now) if self._on_gpu else now - begun)

    def log(self, step: int, steps: int) -> dict[str, Any]:
        """Return fields for the log line after ``steps`` steps, once the device is read: the slowest rank, and its time
        for its own work as a multiple of the others'. Collective."""
        if self._channel is None:
            return {}
        forwards = [begun.elapsed_time(end) / 1e3 for begun, end in self._forwards] if self._on_gpu else self._forwards
        forward = sum(forwards) / len(forwards) * self._batches if forwards else 0.0
        length = time.perf_counter() - self._since
        ranks = self._channel.gather((self._data / steps, forward / steps, socket.gethostname()))
        self._forwards.clear()
        self._data, self._batches, self._since, self._begun = 0.0, 0, time.perf_counter(), None
        own = [data + forward for data, forward, _ in ranks]
        slowest = max(range(len(own)), key=own.__getitem__)
        usual = median(own[:slowest] + own[slowest + 1 :])
        lost = own[slowest] - usual
        slow = own[slowest] > SLOW * usual and lost > LOSS * length / steps and lost * steps > LEAST_S
        self._lines += 1
        if slow and (self._named != slowest or self._lines >= REPEAT):
            data, _, host = ranks[slowest]
            logger.warning(
                f"step {step}: rank {slowest} ({host}) holds the others up: it works {own[slowest]:.2f} s a step "
                f"before it meets them, they {usual:.2f} s; {data:.2f} s of it is the wait for its data"
            )
            self._lines = 0
        self._named = slowest if slow else None
        return {"slowest_rank": slowest, "slowest_x": own[slowest] / usual if usual else None}

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
