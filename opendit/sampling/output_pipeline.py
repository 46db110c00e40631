"""From latents to files, beside the drawing of the next batch.

On a GPU the VAE decodes on a stream of its own while the model draws the next batch on the main one, and the pictures
come to the host through pinned memory; a few threads encode and write them. On a CPU it is the same, one after the
other, but for the threads.
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
from opendit.encoders.tiles import Tiles
from opendit.encoders.vae import Codec, FrozenVAE
from opendit.encoders.video_vae import FrameCodec, frames_of
from opendit.parallel.collectives import Group, start_gather


class Writers:
    """Threads that run tasks, at most ``waiting`` of which wait. The first error ends all: the tasks after it are not
    run, and it is raised by the next call.

    Use as a context manager: at its end all tasks are done; after an exception, what has begun."""

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
        """Hands a task over; waits while too many wait."""
        self._room.acquire()
        try:
            self._raise()
            self._pool.submit(self._run, task, args)
        except BaseException:
            self._room.release()
            raise

    def close(self) -> None:
        """Waits for all tasks."""
        self._pool.shutdown()
        self._raise()

    def _run(self, task: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            if self._error is None:
                task(*args)
        except BaseException as error:  # the thread has nobody else to tell
            self._error = self._error or error
        finally:
            self._room.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass
class _Batch:
    """Pictures on their way. rows: of the whole batch, pictures, frames or tiles; pixels: this rank's, then all of
    them; last on the host. tiles: that ranks share. ready: recorded after the last work on them."""

    index: Tensor
    rows: int
    tiles: Tiles | None
    pixels: Tensor
    ready: torch.cuda.Event | None


class OutputPipeline:
    """Decodes batches of latents, a share on each rank of a replica, and hands the pictures to ``deliver``.

    Use as a context manager: at its end all is delivered; after an exception nothing more is. Every rank of a replica
    puts the same batches.

    Args:
        device: of the latents.
        ranks: those that get the same latents; None for one alone.
        leads: whether this rank delivers.
        deliver: ``deliver(index, pictures)`` with the (B,) numbers of samples and their (B, H, W, 3) or (B, T, H, W, 3)
            uint8. On the calling thread, a batch or two after the one that was put.
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
        # The frames of a picture's codec are independent: they can be shared out where there is a single clip.
        self._frames = isinstance(codec, FrameCodec)
        self._codec = codec.codec if isinstance(codec, FrameCodec) else codec
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._flying: deque[_Batch] = deque()

    def __enter__(self) -> "OutputPipeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

    def put(self, index: Tensor, latents: Tensor) -> None:
        """index: (B,) on the CPU; latents: (B, ...). Raises what ``deliver`` raises."""
        batch = self._start(index, latents)
        if self._ranks is not None and self._flying:
            self._gather(self._flying[-1])
        self._flying.append(batch)
        # What is delivered now was begun before the batch that the GPU draws at this moment: the host waits for it
        # while the GPU has work. The exchange between ranks lies one batch further back.
        while len(self._flying) > (1 if self._ranks is None else 2):
            self._hand_over(self._flying.popleft())

    def finish(self) -> None:
        """Delivers all that has been put."""
        if self._ranks is not None and self._flying:
            self._gather(self._flying[-1])
        while self._flying:
            self._hand_over(self._flying.popleft())

    def _start(self, index: Tensor, latents: Tensor) -> _Batch:
        """Queues the decoding of this rank's share."""
        latents = latents.clone()  # it may be memory that the recording of a step writes to in the next batch
        rows = frames_of(latents) if self._frames else latents
        decode, form, tiles = self._codec.decode_in_slices, to_bytes, None
        if self._ranks is not None and (tiles := self._codec.tiles(rows)) is not None:
            # Tiles travel as they come from the decoder: to blend bytes would round twice.
            rows, codec = tiles.cut(rows), self._codec
            assert isinstance(codec, FrozenVAE)  # the only ones that have tiles
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
        """Every rank's share to all of them. On the main stream, where all ranks communicate in one order."""
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

    def _hand_over(self, batch: _Batch) -> None:
        if batch.ready is not None:
            batch.ready.synchronize()
        if not self._leads:
            return
        pictures = batch.pixels.numpy()
        if self._frames:
            pictures = pictures.reshape(len(batch.index), -1, *pictures.shape[1:])
        self._deliver(batch.index, pictures)

    # ------------------------------------------------------------------------------------------ streams, if there are

    def _on_side(self, after: Tensor):
        """The side stream, when what the main one has been given so far, ``after`` among it, is done."""
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
        """In pinned memory, not there yet: the event after it says when."""
        if pixels.device.type == "cpu":
            return pixels
        host = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
        return host.copy_(pixels, non_blocking=True)
