"""Record clocks and power of the GPUs, because a GPU at its power limit lowers its clock."""

import contextlib
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator

EVERY = 0.1  # seconds between two readings


class Clocks:
    """Readings of nvidia-smi until :meth:`close`, grouped by what was running. gpus: number of GPUs to read, from the
    first one that this process sees."""

    def __init__(self, gpus: int):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")[:gpus]
        fields = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", "-i", ",".join(seen), *fields, "-lms", str(int(1000 * EVERY))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._readings: list[tuple[float, float, float]] = []  # (time, MHz, W) of one GPU
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            megahertz, watts = map(float, line.split(","))
            self._readings.append((time.perf_counter(), megahertz, watts))

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Assign the readings inside the block to ``name``."""
        start = time.perf_counter()
        yield
        self._spans.setdefault(name, []).append((start, time.perf_counter()))

    def means(self) -> dict[str, tuple[float, float]]:
        """Return name -> (MHz, W), means over GPUs and readings. Names without readings are left out."""
        found = {}
        for name, spans in self._spans.items():
            # nvidia-smi and the card react late, so skip the first readings.
            inside = [r[1:] for r in self._readings if any(start + 2 * EVERY < r[0] < end for start, end in spans)]
            if inside:
                found[name] = tuple(map(statistics.fmean, zip(*inside, strict=True)))
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
