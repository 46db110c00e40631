"""Batches of the sampling server whose samples take their steps together: where steps leave something out."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from opendit.diffusion import Objective
from opendit.inference.sampling_loop import SamplingLoop
from opendit.inference.settings import EnginePlan
from opendit.inference.slot_loop import SampleKind, SlotSample, joined
from opendit.kernels.recording import GraphRecorder, Recorder
from opendit.models import DiT


class BatchLoop:
    """What :class:`opendit.inference.slot_loop.SlotLoop` is, for samples that begin at the same time. Which blocks, or
    which half of guidance, a step evaluates is one decision for a whole batch (``--cache``, ``--guidance_every``), and
    rows at steps of their own would all need another one. So these are the batches of :class:`SamplingEngine`, one
    step at a time, and its very samples; there is room for others when all of a batch have ended.

    Args:
        plan: of the engine. slots: samples of a batch, at most. memory: bytes of tables.
    """

    def __init__(self, model: DiT, objective: Objective, kind: SampleKind, plan: EnginePlan, slots: int, memory: int):
        self.kind, self._slots = kind, slots
        self._engine = plan.engine(model, objective, record=False, table_bytes=memory)  # it is told what records
        self._steps, self._device = plan.steps, model.device
        self.rows: list[SlotSample | None] = []
        self._loop: SamplingLoop | None = None  # of the batch that is under way
        self._at = 0
        self.computed = 0  # steps of rows, also of those that were dropped

    @property
    def live(self) -> list[SlotSample]:
        return [sample for sample in self.rows if sample is not None]

    @property
    def free(self) -> int:
        """Of a batch that has begun, no row."""
        return 0 if self._loop is not None else self._slots - len(self.rows)

    def admit(self, samples: list[SlotSample]) -> None:
        self.rows += samples

    def drop(self, samples: Iterable[SlotSample]) -> None:
        """Nobody waits for them any more; a batch that is under way goes on with their rows."""
        gone = set(map(id, samples))
        self.rows = [None if id(sample) in gone else sample for sample in self.rows]
        if not self.live:
            self.rows, self._loop = [], None
        elif self._loop is None:
            self.rows = list(self.live)

    def advance(
        self, recorder: GraphRecorder | None = None, recording: AbstractContextManager[Any] | None = None
    ) -> list[SlotSample]:
        """As of ``SlotLoop``."""
        loop = self.begin() if self._loop is None else self._loop
        loop.advance(self._at, recorder and _Recorder(recorder, recording or nullcontext()))
        self._at += 1
        self.computed += len(self.rows)
        for sample in self.live:
            sample.step += 1
        return self.live if self._at == self._steps else []

    def record_all(self, recorder: GraphRecorder, recording: AbstractContextManager[Any]) -> None:
        """Nothing: a batch records its own steps as it takes them."""

    def forget_recordings(self) -> None:
        self._engine.forget_recordings()

    def latents(self, samples: list[SlotSample]) -> Tensor:
        """x of samples that have a row, (n, C, ...) float32."""
        rows = {id(sample): row for row, sample in enumerate(self.rows) if sample is not None}
        assert self._loop is not None
        return self._loop.latents()[[rows[id(sample)] for sample in samples]]

    def begin(self) -> SamplingLoop:
        """Puts the live samples into a loop of their own, at its first step."""
        samples = self.live
        numbers, seeds = (
            torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.int64, device=self._device)
            for name in ("number", "seed")
        )
        loop = self._engine.loop_of(len(samples))
        loop.begin(joined([sample.y for sample in samples]), samples[0].null, numbers, seeds)
        self._loop, self._at = loop, 0
        return loop


T = TypeVar("T")


class _Recorder:
    """A recorder that lets nothing else be given to the GPU meanwhile."""

    def __init__(self, recorder: Recorder, recording: AbstractContextManager[Any]):
        self._recorder, self._recording = recorder, recording

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        with self._recording:
            return self._recorder.record(work)
