"""Samples to features: several networks on the same pixels, in parts on disk, over ranks; what was killed goes on.

Features are computed where samples are drawn: no picture goes to disk. A row of numbers a sample is kept in
OUTPUT/features/HASH, whose name is made of all that decides it: the next evaluation of the same samples finds them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendit.common.safe_files import make_folder
from opendit.common.utils import hash_parts
from opendit.data.progress import Progress
from opendit.evaluation.media import Media
from opendit.evaluation.networks import FeatureNetwork
from opendit.parallel.mesh import Mesh
from opendit.sampling.job_settings import pixel_shape, settings_of
from opendit.sampling.replica_batches import replica_batches
from opendit.sampling.sample_cache import CacheWriter, SampleCache, SamplingJob, find_unfinished_job, samples_a_part
from opendit.sampling.sample_output import writer_threads
from opendit.sampling.sampling_run import SamplingRun

FOLDER = "features"
AHEAD = 3  # batches that are read while one is computed
# Features by name -> their shape for one sample. Of clips, "pool" and "caption" are (frames, width).
Layout = dict[str, tuple[int, ...]]


class Extractor:
    """The networks of an evaluation, as one function from pixels to a row of numbers a sample.

    Args:
        pictures: of pictures, or of the frames of clips: "pool", and of pictures "spatial" and "logits".
        clips: of clips: "clip"; of moving digits also "digit", "nearest" and "moved".
        captions: CLIP, for its score: "caption".
        motion: whether "motion" is measured: the mean difference between frames.
        batch_size: pictures or frames at a time.
    """

    def __init__(
        self,
        device: torch.device,
        pictures: FeatureNetwork | None = None,
        clips: FeatureNetwork | None = None,
        captions: FeatureNetwork | None = None,
        motion: bool = False,
        batch_size: int = 64,
    ):
        self.device, self.batch_size, self.motion = device, batch_size, motion
        self.pictures, self.clips, self.captions = pictures, clips, captions

    def settings(self) -> dict[str, str]:
        """All that decides the features of given pixels."""
        networks = {"features": self.pictures, "clips": self.clips, "captions": self.captions}
        told = {
            f"{role} {name}": getattr(network, name)
            for role, network in networks.items()
            if network is not None
            for name in ("sha256", "resize", "precision")
        }
        return {**told, "motion": "on" if self.motion else "off"}

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return the shapes of the features of a sample of this shape, (H, W, 3) or (T, H, W, 3)."""
        found = self(torch.zeros(1, *shape, dtype=torch.uint8))
        return {name: tuple(features.shape[1:]) for name, features in found.items()}

    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        """uint8 (B, H, W, 3) or (B, T, H, W, 3) -> features (B, ...) float32 by name."""
        pixels = pixels.to(self.device)
        found: dict[str, Tensor] = {}
        if pixels.ndim == 4:
            if self.pictures is not None:
                found |= self._sliced(self.pictures, pixels)
            if self.captions is not None:
                found["caption"] = self._sliced(self.captions, pixels)["pool"]
            return found
        frames = pixels.flatten(0, 1)
        for name, network in (("pool", self.pictures), ("caption", self.captions)):
            if network is not None:
                found[name] = self._sliced(network, frames)["pool"].unflatten(0, pixels.shape[:2])
        if self.clips is not None:
            of_clips = self._sliced(self.clips, pixels)
            found["clip"] = of_clips["pool"]
            found |= {name: of_clips[name] for name in ("digit", "nearest", "moved") if name in of_clips}
        if self.motion:
            found["motion"] = motion_score(pixels)[:, None]
        return found

    def _sliced(self, network: FeatureNetwork, pixels: Tensor) -> dict[str, Tensor]:
        size = max(1, self.batch_size // (pixels.shape[1] if network.clips else 1))
        parts = [network(part) for part in pixels.split(size)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def motion_score(clips: Tensor) -> Tensor:
    """Measure the motion of clips (B, T, H, W, 3) uint8: the mean absolute difference between a frame and the next, on
    a scale of 255; (B,), 0 for a still picture."""
    if clips.shape[1] < 2:
        return torch.zeros(len(clips), device=clips.device)
    frames = clips.float()
    return (frames[:, 1:] - frames[:, :-1]).abs().mean(dim=(1, 2, 3, 4))


@dataclass(frozen=True)
class Features:
    """The features of all samples, on the CPU: name -> (N, ...) float32. Rank 0 has them, other ranks none.

    seconds, computed: how long the samples that were not there took, and how many they were.
    """

    count: int
    arrays: dict[str, Tensor]
    settings: dict[str, str]
    seconds: float = 0.0
    computed: int = 0


# ------------------------------------------------------------------------------------------ where from


def extract_media(media: Media, extractor: Extractor, output: Path, mesh: Mesh, say: Callable[[str], None]) -> Features:
    """The features of samples in files. Collective."""
    with ThreadPoolExecutor(writer_threads(mesh)) as pool:
        shape = media.batch(range(0, 1), pool).shape[1:]
        settings = {"samples": media.sha256, "media": f"{media.name} {media.how}".strip(), **extractor.settings()}
        store = _Store(output, settings, media.count, extractor.batch_size, extractor.layout(shape), mesh, say)

        def fill(sink: "Sink") -> None:
            groups = store.parts.batches_to_draw(store.missing, extractor.batch_size)
            mine = [batch for group in groups[mesh.rank :: mesh.world_size] for batch in group]
            title = media.name if mesh.world_size == 1 else f"{media.name} (rank 0's part of {mesh.world_size})"
            with Progress(sum(map(len, mine)), "samples", title=title, disable=not mesh.is_main) as progress:
                for batch, pixels in _ahead(mine, media, pool):
                    if pixels.shape[1:] != shape:
                        sizes = " and ".join(" x ".join(map(str, found)) for found in (shape, pixels.shape[1:]))
                        raise ValueError(f"{media.name}: samples are {sizes}; --image_size makes them one size")
                    sink.deliver(torch.arange(batch.start, batch.stop), pixels)
                    progress.update(len(batch))

        return store.run(extractor, fill)


def extract_run(sampling: SamplingRun, extractor: Extractor, output: Path, say: Callable[[str], None]) -> Features:
    """The features of the samples of a run, which are drawn for them. Collective."""
    layout = extractor.layout(pixel_shape(sampling))
    drawn = drawn_by(settings_of(sampling))
    size, count = sampling.flags.batch_size, len(sampling.choices)
    store = _Store(output, {**drawn, **extractor.settings()}, count, size, layout, sampling.mesh, say)

    def fill(sink: "Sink") -> None:
        finite = _FiniteLatents()
        with replica_batches(sampling, store.parts, store.missing, sink.deliver, sink.flush) as batches:
            for batch in batches:
                index = torch.arange(batch.start, batch.stop)
                y, frames = sampling.conditions_of(index)
                seed = sampling.flags.seed
                latents = sampling.engine.sample(y, sampling.null, index, seed, conditioning_frames=frames)
                finite.look(index, latents)
                batches.decode(index, latents)
        finite.check()

    return store.run(extractor, fill)


def drawn_by(settings: dict[str, str]) -> dict[str, str]:
    """All that decides samples, of what sample.py writes beside its parts; not what is kept of them."""
    return {name: value for name, value in settings.items() if name not in ("--save_png", "--npz")}


class _FiniteLatents:
    """Says of a batch whether its latents are finite when the next one is being drawn, so that the host need not wait.
    A picture of NaN is some picture in uint8."""

    def __init__(self):
        self._waiting: deque[tuple[Tensor, Tensor]] = deque()

    def look(self, index: Tensor, latents: Tensor) -> None:
        self._waiting.append((index, latents.flatten(1).isfinite().all(dim=1)))
        if len(self._waiting) > 1:
            self._check(*self._waiting.popleft())

    def check(self) -> None:
        while self._waiting:
            self._check(*self._waiting.popleft())

    @staticmethod
    def _check(index: Tensor, finite: Tensor) -> None:
        bad = index[~finite.cpu()]
        if len(bad):
            raise ValueError(f"sample {int(bad[0]):,} is not finite: the model gives NaN or infinity for it")


def _ahead(batches: list[range], media: Media, pool: ThreadPoolExecutor) -> Iterator[tuple[range, np.ndarray]]:
    """Batches with their pixels, the next ones read meanwhile."""
    with ThreadPoolExecutor(AHEAD) as readers:
        waiting: deque[tuple[range, Future[Any]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, readers.submit(media.batch, batch, pool)))
                if len(waiting) > AHEAD:
                    first, pixels = waiting.popleft()
                    yield first, pixels.result()
            while waiting:
                first, pixels = waiting.popleft()
                yield first, pixels.result()
        finally:
            for _, pixels in waiting:
                pixels.cancel()


# ------------------------------------------------------------------------------------------ where to


class _Store:
    """The parts of a set of features on disk: those of an earlier start, and what is missing."""

    def __init__(
        self,
        output: Path,
        settings: dict[str, str],
        count: int,
        batch_size: int,
        layout: Layout,
        mesh: Mesh,
        say: Callable[[str], None],
    ):
        self.layout, self.mesh, self.settings, self._output = layout, mesh, settings, output
        width = sum(math.prod(shape) for shape in layout.values())
        settings = {**settings, "layout": " ".join(f"{name} {shape}" for name, shape in layout.items())}
        size = samples_a_part(count, batch_size, 4 * width)
        job = SamplingJob(settings, count, count, (width,), size, "<f4")
        identity = hash_parts(str(count), *(part for item in sorted(settings.items()) for part in item))
        self.folder, problem = output / FOLDER / identity[:16], None
        missing: list[int] = []
        if mesh.is_main:
            try:
                job, missing = self._begin(job, say)
            except OSError as error:
                problem = str(error)
        job, missing, problem = mesh.broadcast_object((job, missing, problem))
        if problem:
            raise OSError(problem)
        self.parts, self.missing = SampleCache(self.folder, job, output), missing

    def _begin(self, job: SamplingJob, say: Callable[[str], None]) -> tuple[SamplingJob, list[int]]:
        make_folder(self.folder, root=self._output)
        try:
            found = find_unfinished_job(self.folder)
        except ValueError:  # damaged: of what lies there nothing is known
            found = None
        if found is None or found.settings != job.settings or found.count != job.count:
            parts, missing = SampleCache(self.folder, job, self._output), None
            parts.remove()
        else:
            job = replace(job, samples_a_part=found.samples_a_part)
            parts = SampleCache(self.folder, job, self._output)
            missing, problems = parts.missing(lambda number: True)
            for line in problems[:10]:
                say(line.replace("its samples are drawn again", "its features are computed again"))
            parts.remove_unfinished()
            there = parts.count_outside(missing)
            if there:
                say(f"features of {there:,} of {job.count:,} samples are there from an earlier start")
        parts.begin()
        return job, list(range(parts.count)) if missing is None else missing

    def run(self, extractor: Extractor, fill: Callable[["Sink"], None]) -> Features:
        """Has ``fill`` deliver what is missing, and reads all of it."""
        begun = time.monotonic()
        if self.missing:
            sink = Sink(CacheWriter(self.parts, self.missing), extractor)
            fill(sink)
            sink.flush()
        self.mesh.barrier()
        seconds = time.monotonic() - begun
        count, arrays = self.parts.job.count, {}
        if self.mesh.is_main:
            rows, first = torch.from_numpy(self.parts.first(count)), 0
            for name, shape in self.layout.items():
                width = math.prod(shape)
                arrays[name] = rows[:, first : first + width].unflatten(1, shape)
                first += width
        computed = sum(len(self.parts.samples(part)) for part in self.missing)
        return Features(count, arrays, self.settings, seconds, computed)


class Sink:
    """Pixels in, rows of features to their parts. On a GPU the networks work on a stream of their own, beside the one
    that draws; what a batch gives is taken when the next one has been begun, so that the device need not wait."""

    def __init__(self, assembly: CacheWriter, extractor: Extractor):
        self._assembly, self._extractor = assembly, extractor
        self._waiting: deque[tuple[list[int], Tensor, torch.cuda.Event | None]] = deque()
        self._stream = torch.cuda.Stream(extractor.device) if extractor.device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(extractor.device))  # which has loaded the networks

    def deliver(self, index: Tensor, pixels: np.ndarray) -> None:
        """Samples (B,) by number with their uint8 pixels, in memory that may be used again when this returns."""
        numbers = index.tolist()
        if not any(map(self._assembly.wants, numbers)):
            return
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            # A copy that the host waits for: of this stream alone, where nothing but features is under way.
            found = self._extractor(torch.from_numpy(pixels).to(self._extractor.device))
            rows, done = torch.cat([features.flatten(1) for features in found.values()], dim=1), None
            if self._stream is not None:
                rows = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
        self._waiting.append((numbers, rows, done))
        if len(self._waiting) > 1:
            self._hand_over(*self._waiting.popleft())

    def flush(self) -> None:
        while self._waiting:
            self._hand_over(*self._waiting.popleft())

    def _hand_over(self, numbers: list[int], rows: Tensor, done: torch.cuda.Event | None) -> None:
        if done is not None:
            done.synchronize()
        for number, row in zip(numbers, rows.numpy(), strict=True):
            if not np.isfinite(row).all():
                raise ValueError(f"the features of sample {number:,} are not finite numbers")
            if self._assembly.wants(number):
                self._assembly.add(number, row)
