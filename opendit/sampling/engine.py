"""The sampling engine: many batches by one model, each step one recorded CUDA graph, nothing computed twice.

``opendit.diffusion.sampling.sample_latents`` says in a few lines what is drawn; this draws the same.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from opendit.config.approximations import Approximations
from opendit.diffusion import Objective
from opendit.kernels.fp8_weight import keep_weights
from opendit.kernels.recording import GraphRecorder
from opendit.models import Condition, DiT
from opendit.sampling.sampling_loop import LoopSettings, NotRecordedError, SamplingLoop
from opendit.sampling.step_inputs import evaluation_times

TABLE_BYTES = 256 << 20  # of DiT-XL/2's modulations, those of 50 steps of 12 guided samples, or of 10 steps of 64
LOOPS = 4  # batch sizes whose recordings are kept


class SamplingEngine:
    """Draws latents by one model with one set of settings, for as long as its weights stay where and what they are.

    A batch size's first batch records its steps, further ones replay them. Recordings of the batch sizes that were used
    last are kept. With operations in float8, weights are cast once. Where nothing can be recorded, the same code runs
    kernel by kernel; ``note`` says which and why.

    Args:
        model: in its place and precision, in eval mode.
        objective: what it was trained by.
        steps: of the sampler.
        sampler: one of the objective's; None for its default.
        cfg_scale, cfg_channels, cfg_interval: of guidance, as of ``sample_latents``.
        guidance_every: the unconditional half of guidance is evaluated in every so manieth step only.
        cache: "first_block[:THRESHOLD]" or "taylor:K[:ORDER]": not all steps evaluate all blocks
            (``opendit.sampling.approximations``).
        size: (h, w) or (t, h, w) of the latents; the model's own when left out.
        around: makes of ``model(x, t, y)`` what guidance calls in its place: a strategy that shares batches between
            ranks (``SharedBatch``).
        record: whether steps may be recorded.
        table_bytes: memory of the modulations that are made beforehand, and as much again of captions' keys and values.
        loops: batch sizes whose recordings are kept.
        recorder: of recordings; made when it is needed if left out.
        say: is told, once, if a recording fails.

    Raises ValueError for a sampler of another objective, for an interval that is none, and for approximations that are
    none or can't be combined.
    """

    approximations: Approximations
    settings: LoopSettings
    evaluated: int
    note: str

    def __init__(
        self,
        model: DiT,
        objective: Objective,
        *,
        steps: int,
        sampler: str | None = None,
        cfg_scale: float = 4.0,
        cfg_channels: int | None = None,
        cfg_interval: tuple[float, float] | None = None,
        guidance_every: int = 1,
        cache: str | None = None,
        size: tuple[int, ...] | None = None,
        around: Callable[..., Any] | None = None,
        record: bool = True,
        table_bytes: int = TABLE_BYTES,
        loops: int = LOOPS,
        recorder: GraphRecorder | None = None,
        say: Callable[[str], None] = print,
    ):
        size = tuple(size or model.config.input_size)
        objective = objective.for_tokens(math.prod(model.config.grid_of(size)))
        name = objective.choose(sampler)
        self.approximations = Approximations.of(guidance_every, cache, steps)
        if self.approximations.by_batch and (around is not None or model.sequence is not None):
            raise ValueError(f"--cache {cache}: decides by what a rank sees, and ranks share samples; use taylor:3")
        self.settings = LoopSettings(
            model=model,
            objective=objective,
            steps=steps,
            sampler=name,
            cfg_scale=cfg_scale,
            cfg_channels=cfg_channels,
            cfg_interval=cfg_interval,
            size=size,
            around=around,
            memory=table_bytes,
            approximations=self.approximations,
        )
        if model.ops.float8 and model.sequence is None:
            keep_weights(model.blocks)
        channels = model.config.in_channels, model.config.out_channels
        times = evaluation_times(objective, name, steps, channels, model.device)
        most = max(map(len, times))
        # Steps with fewer evaluations: what they don't use is the time of their first one.
        self._times = torch.stack([torch.cat([t, t[:1].expand(most - len(t))]) for t in times])
        self.evaluated = 0  # blocks times rows of the network's batches so far
        self._whole = 0  # the same if nothing were left out
        # By batch size, the one that was used last at the end.
        self.loops: OrderedDict[int, SamplingLoop] = OrderedDict()
        self._most_loops, self._recorder, self._say = loops, recorder, say
        self.note = why_not_recorded(model, record, recorder is not None)
        if not self.note and recorder is None:
            self._recorder = GraphRecorder()
        self.note = f"kernel by kernel: {self.note}" if self.note else "recorded as a CUDA graph"

    @property
    def records(self) -> bool:
        """True if steps are recorded as CUDA graphs."""
        return self.note.startswith("recorded")

    @torch.inference_mode()
    def sample(
        self,
        y: Condition,
        null: Condition,
        index: Tensor,
        seed: int,
        *,
        given: Tensor | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
        callback: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Latents (B, C, h, w), or (B, C, t, h, w) of a clip model, float32.

        Args:
            y: what to draw, B rows, on the model's device.
            null: the condition of guidance's other half: one row, or, of negative prompts, B.
            index: (B,) int64 numbers of the samples in the whole job; noise depends on ``seed`` and these only.
            given: mask ++ given (B, 1 + C, T, H, W) of clips, of a model with given frames; these are in the result.
            progress: wraps the iterable of steps, e.g. tqdm.
            callback: ``callback(i, x)`` gets the sampler's x (B, C, ...) after step i, to look at before it returns.

        Raises ValueError if y and index differ in length, if null does not fit y, or for frames that are given to a
        model that takes none.
        """
        if len(y) != len(index):
            raise ValueError(f"{len(y)} conditions for {len(index)} samples")
        if given is not None and self.settings.model.config.given_frames is None:
            raise ValueError("the model was trained without --given_frames; leave the given frames out")
        if self.settings.cfg_scale != 1.0 and (len(null) not in (1, len(y)) or null.shape[1:] != y.shape[1:]):
            raise ValueError(f"null_y {tuple(null.shape)} does not expand to y {tuple(y.shape)}")
        loop = self.loop_of(len(index))
        device = self.settings.model.device
        given = None if given is None else given.to(device)
        loop.begin(y, null, index.to(device), seed, given)
        steps = range(self.settings.steps)
        for i in steps if progress is None else progress(steps):
            self._advance(loop, i)
            if callback is not None:
                callback(i, loop.latents())
        self.evaluated, self._whole = self.evaluated + loop.evaluated, self._whole + loop.whole
        latents = loop.latents()
        return latents if given is None else torch.where(given[:, :1] > 0, given[:, 1:], latents)

    @property
    def share_evaluated(self) -> float:
        """The share of the blocks' work, with both halves of guidance, that all batches so far did not leave out.

        For ranks that share a batch it is this one's share of what all of them would do.
        """
        return self.evaluated / max(1, self._whole)

    def batches(
        self, y: Condition, null: Condition, index: Tensor, batch_size: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (index, latents) of up to ``batch_size`` samples at a time, as :meth:`sample` draws; ``index`` may lie
        on the CPU, and is yielded as it is."""
        for first in range(0, len(index), batch_size):
            rows = slice(first, first + batch_size)
            yield index[rows], self.sample(y[rows], null if len(null) == 1 else null[rows], index[rows], seed)

    def loop_of(self, samples: int) -> SamplingLoop:
        """The loop of a batch size; the one that was not used for longest makes room for a new one."""
        if samples not in self.loops:
            while len(self.loops) >= self._most_loops:
                self.loops.popitem(last=False)
            self.loops[samples] = SamplingLoop(self.settings, self._times, samples)
        self.loops.move_to_end(samples)
        return self.loops[samples]

    def forget_recordings(self) -> None:
        for loop in self.loops.values():
            loop.recordings.clear()

    def _advance(self, loop: SamplingLoop, i: int) -> None:
        if self.records:
            try:
                return loop.advance(i, self._recorder)
            except NotRecordedError as error:
                self._failed(error)
        return loop.advance(i)

    def _failed(self, error: NotRecordedError) -> None:
        """Goes on without recordings: the memory that they share is good for no other one."""
        self.note = f"kernel by kernel: recording failed: {str(error).splitlines()[0]}"
        self._recorder = None
        self.forget_recordings()
        self._say(f"CUDA graph: {self.note}")


def why_not_recorded(model: DiT, record: bool, has_recorder: bool) -> str:
    """Why a model's sampling steps are not recorded, or nothing. record: whether that is asked for."""
    if not record:
        return "recording is off"
    if not has_recorder and model.device.type != "cuda":
        return "CUDA graphs need a GPU"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast casts weights anew in every block that it is asked for"
    return model.no_graph
