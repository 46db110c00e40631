"""Find the first module with a non-finite output, by repeating the last step's forward passes with hooks.

Repeated passes compute equal numbers: a step with non-finite gradients changes no weight, and all random numbers are
keyed by the sample.
"""

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opendit.data import Batch, BatchSchedule, MediaDataset
from opendit.parallel.engines import Engine, StepResult
from opendit.parallel.mesh import ControlGroup
from opendit.training.micro_batch import MicroBatch, PackedMicroBatch, SampleInputs
from opendit.training.runners import Runner

logger = logging.getLogger(__name__)

KEPT = 8  # micro-batches to keep for the diagnosis
NAMED = 5  # samples that a message names
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Diagnosis:
    """Search for the cause of non-finite numbers in a step. Construct and call on every rank. ``runner`` repeats the
    passes, ``inputs`` makes the micro-batches, ``dataset`` and ``schedule`` name the samples."""

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        inputs: SampleInputs,
        dataset: MediaDataset,
        schedule: BatchSchedule,
        micro_batches: int,
    ):
        self.engine, self.runner, self.inputs = engine, runner, inputs
        self.dataset, self.schedule, self.micro_batches = dataset, schedule, micro_batches
        self._channel = ControlGroup(engine.mesh)
        self._batches: deque[Batch] = deque(maxlen=KEPT)

    @property
    def harmless(self) -> bool:
        """True if a rank can fail in the search without leaving other ranks waiting."""
        return self.engine.whole and self.engine.mesh.sharing == 1

    def keep(self, batch: Batch) -> None:
        if self._batches and self._batches[-1].step != batch.step:
            self._batches.clear()
        self._batches.append(batch)

    def find(self, gradients: bool) -> str:
        """Describe the first tensor that was not finite, and name the samples. All ranks must call this. With
        ``gradients``, also search the backward pass. This overwrites the engine's gradients."""
        try:
            found = self._look_forward()
        except Exception as error:
            if not self.harmless:
                raise
            found = f"could not be looked at ({type(error).__name__})"
        reports = self._channel.gather(found)
        for rank, text in enumerate(reports):
            if text is not None:
                return f"on rank {rank} {text}" if len(reports) > 1 else text
        parts = self.micro_batches
        few = f"'s last {KEPT} of {parts} micro-batches" if parts > KEPT else ""
        finite = f"the forward passes of the step{few} are finite"
        if not gradients:
            return finite
        names = self._channel.gather(self._look_backward())
        bad = set().union(*(each for each in names if each))
        # The backward pass reaches later pipeline stages first, then this rank's last parameters.
        order = [*self.engine.shapes, *sorted(bad - self.engine.shapes.keys())]
        first = next((name for name in reversed(order) if name in bad), None)
        if first is not None:
            return f"{finite}, but not the gradient of {first}, the first that the backward pass comes to"
        if any(each is None for each in names):
            return f"{finite}; the gradients are not"
        return f"{finite}, and so are their gradients when they are recomputed"

    def _look_forward(self) -> str | None:
        """Repeat this rank's forward passes. Describe the first non-finite tensor, or return None."""
        found = None
        for batch in list(self._batches):
            micro_batch = self.inputs.of(batch)
            here = self._of(batch, micro_batch, "the latents were not finite", micro_batch.x0) or self._of(
                batch, micro_batch, "the noise was not finite", micro_batch.noise
            )
            with torch.no_grad(), _watched(self.engine.module, micro_batch) as outputs, _eagerly():
                loss = self.runner.losses(micro_batch)
            if here is None and outputs:
                name, bad = outputs[0]
                here = f"the output of {name} was not finite{self._samples(batch, bad)}"
            found = found or here or self._of(batch, micro_batch, "the loss was not finite", loss)
        return found

    def _of(self, batch: Batch, micro_batch: MicroBatch | PackedMicroBatch, text: str, tensor: Tensor) -> str | None:
        bad = _bad_samples(tensor, micro_batch)
        return None if bad is None else text + self._samples(batch, bad)

    def _samples(self, batch: Batch, bad: list[int]) -> str:
        rows = self.schedule.rows(batch.step)
        names = [self.dataset.source(rows[batch.index[i]]) for i in bad[:NAMED]]
        more = ", ..." if len(bad) > NAMED else ""
        return f" for {len(bad)} of {len(batch.index)} samples ({', '.join(names)}{more})"

    def _look_backward(self) -> set[str] | None:
        """Return this rank's parameters with non-finite gradients; None if the engine does not expose gradients."""
        batches = list(self._batches)
        with _eagerly():
            for number, batch in enumerate(batches):
                self.runner.forward_backward(self.inputs.of(batch), last=number == len(batches) - 1)
        shards = self.engine.gradient_shards()
        if shards is None:
            return None
        return {name for name, shard in shards.items() if shard is not None and not shard.isfinite().all()}


def _eagerly() -> contextlib.AbstractContextManager:
    """Return a context in which compiled blocks run eagerly, so that hooks on their modules run."""
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def _watched(module: nn.Module, micro_batch: MicroBatch | PackedMicroBatch) -> Iterator[list[tuple[str, list[int]]]]:
    """Yield a list that hooks fill with one entry: the name of the first module with a non-finite output, and the
    samples with such values."""
    found: list[tuple[str, list[int]]] = []

    def hook(name: str):
        def look(_module, _inputs, output) -> None:
            if not found:
                for tensor in _tensors(output):
                    if (bad := _bad_samples(tensor, micro_batch)) is not None:
                        found.append((name or "the model", bad))
                        return

        return look

    handles = [part.register_forward_hook(hook(name)) for name, part in module.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif dataclasses.is_dataclass(output):
        yield from _tensors([getattr(output, field.name) for field in dataclasses.fields(output)])


def _bad_samples(tensor: Tensor, micro_batch: MicroBatch | PackedMicroBatch) -> list[int] | None:
    """Return the indices of samples with non-finite values, or of all samples if the tensor has no dimension for
    samples. Return None if the tensor is finite or has no floats."""
    if tensor.dtype not in FLOATS or tensor.numel() == 0:
        return None
    finite = tensor.isfinite()
    if finite.all():
        return None
    return micro_batch.samples_of(~finite)


class SkippedSteps:
    """Detector of skipped steps. Call on every rank.

    It logs the cause when a series of faults begins, and ends the run after ``most`` skipped steps in a row.

    Attributes:
        skipping: True if the last examined step was skipped.
        failing: True if a fault caused the skip. In fp16, a skip is no fault while the loss scale is above 1.
    """

    def __init__(self, engine: Engine, diagnosis: Diagnosis, most: int):
        self._engine, self.diagnosis, self._most = engine, diagnosis, most
        self.skipping = self.failing = False

    def look(self, done: int, result: StepResult) -> None:
        """Check whether the last step was skipped. The host waits for the device. Raises FloatingPointError after too
        many skipped steps in a row."""
        was_failing = self.failing
        in_a_row = int(self._engine.skipped_in_a_row)
        self.skipping = in_a_row > 0
        self.failing = self.skipping and not float(result.loss_scale) > 1
        if in_a_row >= self._most:
            raise FloatingPointError(
                f"{in_a_row} steps in a row had non-finite gradients (weights and checkpoints are as before them): "
                f"{self.diagnosis.find(gradients=True)}; try a lower --lr, --mixed_precision bf16, or --load an "
                "earlier checkpoint"
            )
        if self.failing and not was_failing and self.diagnosis.harmless:
            cause = self.diagnosis.find(gradients=False)
            if self._engine.mesh.is_main:
                logger.warning(f"step {done}: skipped, its gradients were not finite: {cause}")
