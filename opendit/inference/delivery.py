"""Decoding beside the drawing, and handing samples to who asked for them."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opendit.inference.request import SampleRequest


class _Drawn(NamedTuple):
    """Samples of one request. ready: recorded after the last work on their latents."""

    request: SampleRequest
    numbers: list[int]
    latents: Tensor
    ready: torch.cuda.Event | None


class Delivery:
    """A thread that decodes finished latents, on a GPU on a stream of its own, and gives them to their requests.

    An error of decoding ends the request whose samples they are.

    Args:
        decode: latents (n, C, ...) to a list of n samples.
        recording: a lock that is held by whoever records CUDA graphs; nothing is decoded then.
    """

    def __init__(self, decode: Callable[[Tensor], list[Any]], device: torch.device, recording: threading.Lock):
        self._decode, self._device, self._recording = decode, device, recording
        self._queue: queue.SimpleQueue[_Drawn | None] = queue.SimpleQueue()
        self._waiting, self._lock, self._closed = 0, threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="sampling-delivery", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Samples that are not decoded so far."""
        return self._waiting

    def put(self, request: SampleRequest, numbers: list[int], latents: Tensor) -> None:
        """latents: of these samples of a request, which nobody writes to any more."""
        ready = None
        if latents.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        with self._lock:
            self._waiting += len(numbers)
        self._queue.put(_Drawn(request, numbers, latents, ready))

    def close(self) -> None:
        """Ends when what is being decoded is done; the rest is dropped."""
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            if side is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(side))
            while (drawn := self._queue.get()) is not None and not self._closed:
                self._hand_over(drawn, side)
                del drawn

    def _hand_over(self, drawn: _Drawn, side: torch.cuda.Stream | None) -> None:
        request, numbers, latents, ready = drawn
        try:
            if not request.done:
                if side is not None and ready is not None:
                    side.wait_event(ready)
                    latents.record_stream(side)
                with self._recording:
                    samples = self._decode(latents)
                if len(samples) != len(numbers):
                    raise ValueError(f"{len(samples)} samples of {len(numbers)} latents")
                request.deliver(numbers, samples)
        except Exception as error:
            failure = RuntimeError(f"decoding failed: {first_line(error)}")
            failure.__cause__ = error
            request.fail(failure)
        finally:
            with self._lock:
                self._waiting -= len(numbers)


def first_line(error: BaseException) -> str:
    """Of an error, with its kind: a message of one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
