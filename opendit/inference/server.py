"""The sampling server: one queue, one worker thread, continuous batching; nothing of networks or of ports.

with SamplingServer(opendit.load("outputs/000-DiT-XL-2")) as server:
    request = server.submit([207, 360], seed=0, steps=50, guidance=4.0)
    pictures = request.result(timeout=60)
"""

import atexit
import contextlib
import itertools
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendit.diffusion.guidance import is_within
from opendit.inference.arguments import MOST_STEPS, check_number
from opendit.inference.batch_loop import BatchLoop
from opendit.inference.delivery import Delivery, first_line
from opendit.inference.engine import TABLE_BYTES, why_not_recorded
from opendit.inference.given import drawn_without
from opendit.inference.pipeline import Order, Pipeline
from opendit.inference.request import QueueFullError, SampleRequest, ServerClosedError
from opendit.inference.sampling_loop import NotRecordedError
from opendit.inference.settings import DrawSettings, EnginePlan
from opendit.inference.slot_inputs import StepTable
from opendit.inference.slot_loop import SampleKind, SlotLoop, SlotSample, batch_sizes
from opendit.kernels.recording import GraphRecorder

LOOPS = 3  # kinds of samples that are drawn at the same time
TABLES = 128  # numbers of steps whose tables are kept
AHEAD = 2  # steps that the host may be ahead of the GPU


class SamplingServer:
    """Draws what any threads ask for, in batches in which every sample is at a step of its own.

    Samples with other numbers of steps, seeds, conditions, guidance scales, intervals and negative captions share a
    batch: whenever a row is free, the next sample takes it at its step 0. What can't be in one batch (another sampler,
    guidance or none, another number of guided channels, another size) is drawn in a batch of its own kind. So are
    samples with ``cache`` or ``guidance_every``, which begin and end together (:class:`BatchLoop`).

    Who is next:

    - A free row goes to the request that has fewest samples in rows, the oldest of these. So a request of a thousand
      samples does not keep one of a single sample waiting, and every request gets its turn.
    - Kinds that have samples in rows take one step each in turn. Three kinds are drawn at the same time; while another
      one waits, the one with fewest samples in rows gets no new ones, until it has none and makes room, for the kind of
      the request that has waited longest since it got a row.

    A sample is what its seed says: number i of a request with seed s starts from the noise of sample number i of
    ``Pipeline`` with seed s, and is the same in any company up to the rounding of matrix products; in batches of one
    size, bit for bit. (Where guidance has an interval, both halves are computed outside of it, too, with scale 1; the
    pipeline's fused steps, on a GPU, round otherwise.)

    Args:
        pipe: what draws; calling it while the server is open is allowed.
        batch_size: rows, over which samples are drawn at the same time; the batch is as small as the work allows.
        max_waiting: samples that may wait for a row.
        decode: makes the results of latents (n, C, ...), a list of n; None for the pipeline's pictures or clips.
        record: whether steps may be recorded as CUDA graphs.
        table_bytes: of the tables of modulations of one kind.
        recorder: of recordings; made when it is needed if left out.
        say: is told what should be known of the model, and if a recording fails.

    Raises ValueError for sizes below 1.
    """

    def __init__(
        self,
        pipe: Pipeline,
        *,
        batch_size: int = 64,
        max_waiting: int = 1024,
        decode: Callable[[Tensor], list[Any]] | None = None,
        record: bool = True,
        table_bytes: int = TABLE_BYTES,
        recorder: GraphRecorder | None = None,
        say: Callable[[str], None] = warnings.warn,
    ):
        check_number("batch_size", batch_size, 1, 65_536, int)
        check_number("max_waiting", max_waiting, 1, 2**31, int)
        self.pipe, self.batch_size, self.max_waiting = pipe, batch_size, max_waiting
        self._sizes, self._memory, self._say, self._recorder = batch_sizes(batch_size), table_bytes, say, recorder
        why = why_not_recorded(pipe.model, record, recorder is not None)
        without = drawn_without(pipe.config)
        self.notes = [*pipe.notes, *without]
        for note in without:
            say(note)
        self.note = f"kernel by kernel: {why}" if why else "recorded as a CUDA graph"
        # What draws one kind of samples each, the one that was used last at the end.
        self.loops: OrderedDict[SampleKind, SlotLoop | BatchLoop] = OrderedDict()
        self._joint: dict[str, dict[str, Tensor]] = {}  # of samplers: what all their trajectories look up in
        self._tables: OrderedDict[tuple[Any, ...], StepTable] = OrderedDict()
        self._preparing = threading.Lock()  # of what submit does with the encoders and on the device
        self._alone = itertools.count()  # of requests whose samples share a batch with no others
        self._wake = threading.Condition()  # over what follows
        self._requests: list[SampleRequest] = []  # that have not ended, in the order of their arrival
        self._closed = ""  # why nothing is taken any more
        self._recording = threading.Lock()
        self._computed = 0  # by loops that are gone
        self._ahead: list[torch.cuda.Event] = []
        self._precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        self._delivery = Delivery(decode or pipe.shown, pipe.device, self._recording)
        self._worker = threading.Thread(target=self._work, name="sampling-server", daemon=True)
        self._worker.start()
        atexit.register(self.close)

    def __enter__(self) -> "SamplingServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def undelivered(self) -> int:
        """Samples that are drawn and wait to be decoded."""
        return self._delivery.waiting

    @property
    def waiting(self) -> int:
        """Samples that wait for a row."""
        return sum(len(request.pending) for request in list(self._requests) if not request.done)

    @property
    def computed(self) -> int:
        """Steps of rows that were computed so far, those of free rows among them."""
        return self._computed + sum(loop.computed for loop in list(self.loops.values()))

    # ---------------------------------------------------------------------------------------------------- for clients

    def submit(
        self,
        what: int | str | Sequence[int | str],
        *,
        callback: Callable[[float], None] | None = None,
        record_all: bool = False,
        **settings: Any,
    ) -> SampleRequest:
        """Asks for one sample for each of ``what``; returns at once.

        settings: seed, steps, guidance and whatever else a call of ``Pipeline`` takes (:class:`DrawSettings`).
        callback: ``callback(progress)`` with a number from 0 to 1 after every step of its samples, in the thread that
            draws: it should return soon. What it raises ends the request, and ``result`` raises it.
        record_all: records the steps of every batch size for samples of this kind now, which takes seconds; otherwise
            each is recorded when it is needed first, and all who have samples in rows wait for it then.

        Raises:
            ValueError: as a call of ``Pipeline``.
            QueueFullError: ``max_waiting`` samples would wait.
            ServerClosedError: the server was closed, or its worker died.
        """
        with self._wake:
            self._check_room(1)  # before anything is encoded
        with self._preparing, self._on_device(), torch.inference_mode():
            asked = DrawSettings(**settings)
            order = self.pipe.order(what, asked)
            kind = self._kind(order.plan, asked)
            samples = self._samples(order, self._table(kind, asked.steps), asked.seed)
        request = SampleRequest(kind, samples, asked.steps, callback)
        request.records_all = record_all
        with self._wake:
            self._check_room(len(samples))
            self._requests.append(request)
            self._wake.notify_all()
        request.add_done_callback(self._ended)
        return request

    def close(self) -> None:
        """Ends all requests that have not ended with ServerClosedError, after the step that is being taken."""
        self._end("the sampling server was closed")
        atexit.unregister(self.close)
        if threading.current_thread() is not self._worker:
            self._worker.join()
        self._delivery.close()
        if self._precision:
            torch.set_float32_matmul_precision(self._precision)
            self._precision = ""

    def _kind(self, plan: EnginePlan, asked: DrawSettings) -> SampleKind:
        guided, together = plan.cfg_scale != 1.0, None
        if plan.approximates:
            # A first-block cache decides by the whole batch, so that others' samples may not be in it.
            alone = next(self._alone) if plan.by_batch else None
            together = plan, asked.negative, alone
        return SampleKind(plan.sampler, guided, plan.cfg_channels if guided else None, plan.size, together)

    def _samples(self, order: Order, table: StepTable, seed: int) -> list[SlotSample]:
        scales, interval = np.full(table.steps, order.plan.cfg_scale, dtype=np.float32), order.plan.cfg_interval
        if interval is not None:
            scales[[not is_within(interval, level) for level in table.levels]] = 1.0
        return [
            SlotSample(None, number, table, order.y[number : number + 1], order.null, scales, seed)
            for number in range(len(order.y))
        ]

    def _table(self, kind: SampleKind, steps: int) -> StepTable:
        key = kind.sampler, kind.size, steps
        if key not in self._tables:
            pipe, config = self.pipe, self.pipe.config
            channels, shape = (config.in_channels, config.out_channels), (config.in_channels, *kind.size)
            joint = self._joint.setdefault(kind.sampler, {})
            objective = pipe.objective.for_tokens(math.prod(config.grid_of(kind.size)))
            made = StepTable(objective, kind.sampler, steps, channels, shape, joint, MOST_STEPS, pipe.model.device)
            while len(self._tables) >= TABLES:
                self._tables.popitem(last=False)
            self._tables[key] = made
        self._tables.move_to_end(key)
        return self._tables[key]

    def _check_room(self, samples: int) -> None:
        """Raises ServerClosedError, or QueueFullError if so many more samples can't wait."""
        if self._closed:
            raise ServerClosedError(self._closed)
        waiting = self.waiting
        if waiting + samples > self.max_waiting:
            raise QueueFullError(
                f"{waiting:,} samples wait for a row, and {samples:,} more would be over the {self.max_waiting:,} that "
                "this server takes; ask again when some are done"
            )

    def _ended(self, _: SampleRequest) -> None:
        with self._wake:
            self._wake.notify_all()

    def _end(self, why: str, cause: BaseException | None = None) -> None:
        """Nothing is taken any more, and all requests end."""
        with self._wake:
            self._closed = self._closed or why
            requests, self._requests = self._requests, []
            self._wake.notify_all()
        for request in requests:
            error = ServerClosedError(self._closed)
            error.__cause__ = cause
            request.fail(error)

    # ----------------------------------------------------------------------------------------------------- the worker

    def _work(self) -> None:
        try:
            with torch.inference_mode(), self._on_device():
                if self.records and self._recorder is None:
                    self._recorder = GraphRecorder()
                while self._wait():
                    for loop in [loop for loop in self.loops.values() if loop.live]:
                        self._step(loop)
        except BaseException as error:  # what no request is to blame for
            self._end(f"the sampling server's worker died: {first_line(error)}", error)
        finally:
            self.loops.clear()

    def _wait(self) -> bool:
        """Until there is something to draw; gives free rows to samples. False when the server is closed."""
        while True:
            with self._wake:
                if self._closed:
                    return False
                self._requests = [request for request in self._requests if not request.done]
                for loop in self.loops.values():
                    self._drop(loop, [sample for sample in loop.live if sample.owner.done])
                chosen = self._choose() if self.undelivered <= 2 * self.batch_size else []
                if not chosen and not any(loop.live for loop in self.loops.values()):
                    # What waits for the delivery is not told of: it is looked at again soon.
                    self._wake.wait(0.01 if any(request.pending for request in self._requests) else None)
                    continue
            for kind, samples in chosen:
                self._admit(kind, samples)
            return True

    def _choose(self) -> list[tuple[SampleKind, list[SlotSample]]]:
        """Samples for the free rows, by kind."""
        waiting = [request for request in self._requests if request.pending]
        closing = self._make_room(waiting)
        room, chosen = LOOPS - len(self.loops), []
        for kind in dict.fromkeys(request.kind for request in sorted(waiting, key=lambda request: request.served)):
            loop = self.loops.get(kind)
            if loop is None and room == 0 or loop is not None and loop is closing:
                continue
            room -= loop is None
            free = self.batch_size if loop is None else loop.free
            mine = [request for request in waiting if request.kind == kind]
            samples = []
            while len(samples) < free and mine:
                request = min(mine, key=lambda request: (request.in_rows, request.arrival))
                samples.append(request.pending.popleft())
                request.take_row()
                if not request.pending:
                    mine.remove(request)
            if samples:
                chosen.append((kind, samples))
        return chosen

    def _make_room(self, waiting: list[SampleRequest]) -> SlotLoop | BatchLoop | None:
        """If a kind waits for which there is no room: the loop that gets no new samples, once it has none it goes."""
        kinds = dict.fromkeys(request.kind for request in waiting)
        if len(self.loops) < LOOPS or all(kind in self.loops for kind in kinds):
            return None
        kind, closing = min(self.loops.items(), key=lambda item: len(item[1].live))
        if closing.live:
            return closing
        self._forget(kind)
        return None

    def _admit(self, kind: SampleKind, samples: list[SlotSample]) -> None:
        for request in dict.fromkeys(sample.owner for sample in samples):
            mine = [sample for sample in samples if sample.owner is request]
            try:
                if kind not in self.loops:
                    self.loops[kind] = self._make_loop(kind, mine[0])
                self.loops[kind].admit(mine)
            except Exception as error:
                _fail({request}, error)

    def _make_loop(self, kind: SampleKind, sample: SlotSample) -> SlotLoop | BatchLoop:
        given = self.pipe.model, self.pipe.objective, kind
        if kind.together is None:
            return SlotLoop(*given, sample, self._sizes, self._memory)
        return BatchLoop(*given, kind.together[0], self.batch_size, self._memory)

    def _step(self, loop: SlotLoop | BatchLoop) -> None:
        """One step of a loop's samples; those that have ended go to be decoded."""
        live = loop.live
        try:
            ended = self._advance(loop)
            for request, samples in _by_request(live).items():
                request.advanced(len(samples))
            for request, samples in _by_request(ended).items():
                self._delivery.put(request, [sample.number for sample in samples], loop.latents(samples))
            self._drop(loop, ended)
        except Exception as error:
            self._forget(loop.kind)
            _fail(_by_request(live), error)

    def _forget(self, kind: SampleKind) -> None:
        self._computed += self.loops.pop(kind).computed

    def _advance(self, loop: SlotLoop | BatchLoop) -> list[SlotSample]:
        if self.pipe.device.type == "cuda":  # the host does not run ahead of what it says is done
            while len(self._ahead) >= AHEAD:
                self._ahead.pop(0).synchronize()
        recorder = self._recorder if self.records else None
        try:
            if recorder is not None and any(sample.owner.records_all for sample in loop.live):
                loop.record_all(recorder, self._recording)
            ended = loop.advance(recorder, self._recording)
        except NotRecordedError as error:
            self.note = f"kernel by kernel: recording failed: {str(error).splitlines()[0]}"
            self._recorder = None
            for other in self.loops.values():
                other.forget_recordings()
            self._say(f"CUDA graph: {self.note}")
            ended = loop.advance()
        if self.pipe.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
            self._ahead.append(event)
        return ended

    def _drop(self, loop: SlotLoop | BatchLoop, samples: list[SlotSample]) -> None:
        for sample in samples:
            sample.owner.in_rows -= 1
        loop.drop(samples)

    @property
    def records(self) -> bool:
        """Whether steps are recorded."""
        return self.note.startswith("recorded")

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """What is enqueued inside is in one order with all that the server does."""
        device = self.pipe.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.default_stream(device)):
            yield


def _by_request(samples: list[SlotSample]) -> dict[SampleRequest, list[SlotSample]]:
    found: dict[SampleRequest, list[SlotSample]] = {}
    for sample in samples:
        found.setdefault(sample.owner, []).append(sample)
    return found


def _fail(requests: Iterable[SampleRequest], error: Exception) -> None:
    for request in requests:
        failure = RuntimeError(f"drawing failed: {first_line(error)}")
        failure.__cause__ = error
        request.fail(failure)
