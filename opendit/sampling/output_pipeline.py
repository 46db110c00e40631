"""Decode latents and write files while the model draws the next batch.

On a GPU the VAE decodes on a side stream while the model draws the next batch on the main stream. The pictures are
copied to the host through pinned memory, and a few threads encode and write the files. On a CPU only these threads run
concurrently.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendit.encoders.pictures import to_bytes
from opendit.encoders.vae import Codec, FrozenVAE, Tiles
from opendit.encoders.video_vae import FrameCodec, frames_of
from opendit.parallel.collectives import Group, start_gather


class Writers:
    """Threads that run queued tasks. At most ``waiting`` tasks are in the queue.

    After a task fails, no further task is run, and the next call of :meth:`put` or :meth:`close` raises the error.

    As a context manager, this waits on exit for all tasks, or after an exception only for the running tasks.
    """

    def __init__(self, threads: int, waiting: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="writer")
        self._room = threading.Semaphore(threads + waiting)
        self._error: BaseException | None = None

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._pool.shutdown(cancel_futures=True)

    def put(self, task: Callable[..., None], *args: Any) -> None:
        """Queue a task; wait while the queue is full."""
        self._room.acquire()
        try:
            self._raise()
            self._pool.submit(self._run, task, args)
        except BaseException:
            self._room.release()
            raise

    def close(self) -> None:
        """Wait for all tasks."""
        self._pool.shutdown()
        self._raise()

    def _run(self, task: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            if self._error is None:
                task(*args)
        except BaseException as error:  # the next call of put or close raises the error
            self._error = self._error or error
        finally:
            self._room.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass
class _Batch:
    """A batch that is being decoded.

    Attributes:
        index: numbers of the samples, (B,).
        rows: number of pictures, frames or tiles in the batch.
        tiles: the division of pictures into tiles, if ranks share the tiles of a picture.
        pixels: the decoded rows. First these are this rank's share, on the device; after the exchange between ranks,
            all rows; in the end, all rows on the host.
        ready: event on the side stream, recorded after the last operation on ``pixels``; None on a CPU.
    """

    index: Tensor
    rows: int
    tiles: Tiles | None
    pixels: Tensor
    ready: torch.cuda.Event | None


class OutputPipeline:
    """Decodes batches of latents and passes the pictures to ``deliver``.

    Every rank of a replica calls :meth:`put` with the same batches and decodes a share of each batch. As a context
    manager, this delivers all batches on exit, but none after an exception.

    Args:
        codec: decodes the latents.
        device: device of the latents.
        deliver: function ``deliver(index, pictures)`` of the samples' numbers (B,) and uint8 pixels (B, H, W, 3) or (B,
            T, H, W, 3). :meth:`put` calls ``deliver`` for a batch that was put one or two calls earlier.
        ranks: the ranks of the replica, which have the same latents; None for a single rank.
        leads: True if this rank calls ``deliver``.
    """

    def __init__(
        self,
        codec: Codec,
        device: torch.device,
        deliver: Callable[[Tensor, np.ndarray], None],
        ranks: Group | None = None,
        leads: bool = True,
    ):
        self._ranks, self._leads, self._deliver = ranks, leads, deliver
        # A picture codec decodes frames independently, so ranks can divide the frames of a single clip.
        self._frames = isinstance(codec, FrameCodec)
        self._codec = codec.codec if isinstance(codec, FrameCodec) else codec
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight: deque[_Batch] = deque()

    def __enter__(self) -> "OutputPipeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

    def put(self, index: Tensor, latents: Tensor) -> None:
        """Start to decode a batch, and deliver an earlier batch. Raises the errors of ``deliver``.

        index: (B,) on the CPU. latents: (B, C, ...).
        """
        batch = self._start(index, latents)
        if self._ranks is not None and self._in_flight:
            self._gather(self._in_flight[-1])
        self._in_flight.append(batch)
        # Wait for a batch before the one that the GPU is working on, so that the GPU stays busy during the wait. With
        # several ranks, their exchange delays delivery by one more batch.
        while len(self._in_flight) > (1 if self._ranks is None else 2):
            self._deliver_batch(self._in_flight.popleft())

    def finish(self) -> None:
        """Deliver all remaining batches."""
        if self._ranks is not None and self._in_flight:
            self._gather(self._in_flight[-1])
        while self._in_flight:
            self._deliver_batch(self._in_flight.popleft())

    def _start(self, index: Tensor, latents: Tensor) -> _Batch:
        """Launch the decoding of this rank's share."""
        latents = latents.clone()  # the CUDA graph of the next batch may overwrite this memory
        rows = frames_of(latents) if self._frames else latents
        decode, form, tiles = self._codec.decode_in_slices, to_bytes, None
        if self._ranks is not None and (tiles := self._codec.tiles(rows)) is not None:
            # Cut into tiles, which ranks exchange before rounding to bytes, because blending bytes would round twice.
            rows, codec = tiles.cut(rows), self._codec
            assert isinstance(codec, FrozenVAE)  # no other codec has tiles
            decode, form = codec.decode_whole, lambda part: part.to(codec.dtype)
        count, mine = len(rows), rows
        if self._ranks is not None:
            share = -(-count // self._ranks.size)
            first = self._ranks.rank * share
            mine = rows[torch.arange(first, first + share, device=rows.device).clamp(max=count - 1)]
        with self._on_side(after=mine):
            pixels = torch.cat([form(part) for part in decode(mine)])
            if self._ranks is None:
                pixels = self._to_host(pixels)
            return _Batch(index, count, tiles, pixels, self._record())

    def _gather(self, batch: _Batch) -> None:
        """Exchange the ranks' shares. This runs on the main stream, so that all ranks communicate in the same order."""
        assert self._ranks is not None
        if self._side is not None and batch.ready is not None:
            main = torch.cuda.current_stream()
            main.wait_event(batch.ready)
            batch.pixels.record_stream(main)
        pixels = start_gather(batch.pixels, self._ranks).wait().flatten(0, 1)[: batch.rows]
        with self._on_side(after=pixels):
            if batch.tiles is not None and self._leads:
                samples = pixels.split(batch.tiles.count)
                pixels = torch.cat([to_bytes(batch.tiles.join(some, self._codec.downscale)) for some in samples])
            batch.pixels = self._to_host(pixels) if self._leads else pixels
            batch.ready = self._record()

    def _deliver_batch(self, batch: _Batch) -> None:
        if batch.ready is not None:
            batch.ready.synchronize()
        if not self._leads:
            return
        pictures = batch.pixels.numpy()
        if self._frames:
            pictures = pictures.reshape(len(batch.index), -1, *pictures.shape[1:])
        self._deliver(batch.index, pictures)

    # ------------------------------------------------------------------------------------ CUDA streams, no-ops on a CPU

    def _on_side(self, after: Tensor):
        """Return a context whose work runs on the side stream, after the work that is on the main stream so far.

        after: tensor from the main stream that the side stream will read.
        """
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        after.record_stream(self._side)
        return torch.cuda.stream(self._side)

    def _record(self) -> torch.cuda.Event | None:
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(self._side)
        return event

    @staticmethod
    def _to_host(pixels: Tensor) -> Tensor:
        """Start a copy to pinned memory. The caller records an event after this call to know when the copy is done."""
        if pixels.device.type == "cpu":
            return pixels
        host = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
        return host.copy_(pixels, non_blocking=True)
