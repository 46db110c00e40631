"""Compute features of samples with one or more networks, divided between ranks, with a cache on disk.

Features are stored in OUTPUT/features/HASH, where HASH covers every setting that affects them. Another evaluation with
equal settings reads the stored features."""

import logging
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

from opendit.common.progress import Progress
from opendit.common.safe_files import make_folder
from opendit.common.utils import hash_parts
from opendit.evaluation.media import Media
from opendit.evaluation.networks import FeatureNetwork
from opendit.parallel.mesh import Mesh
from opendit.sampling.output_pipeline import replica_batches
from opendit.sampling.sample_cache import CacheWriter, SampleCache, SamplingJob, find_unfinished_job, samples_a_part
from opendit.sampling.sample_output import pixel_shape, settings_of, writer_threads
from opendit.sampling.sampling_run import SamplingRun

logger = logging.getLogger(__name__)

FOLDER = "features"
AHEAD = 3  # number of batches that are read in advance
# Feature's name -> its shape for one sample. For clips, "pool" and "caption" have the shape (frames, width).
Layout = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Extractor:
    """Applies all networks of an evaluation to pixels.

    Args:
        pictures: network for pictures or frames. For frames, only the feature "pool" is used.
        clips: network for clips, with the feature "clip", or "digit", "nearest" and "moved" for moving digits.
        captions: CLIP, with the feature "caption", for the CLIP score.
        motion: add the feature "motion", see :func:`motion_score`.
        batch_size: number of pictures or frames that a network processes at a time.
    """

    device: torch.device
    pictures: FeatureNetwork | None = None
    clips: FeatureNetwork | None = None
    captions: FeatureNetwork | None = None
    motion: bool = False
    batch_size: int = 64

    def settings(self) -> dict[str, str]:
        """Return the names and values of all settings that affect the features."""
        networks = {"features": self.pictures, "clips": self.clips, "captions": self.captions}
        settings = {
            f"{role} {name}": getattr(network, name)
            for role, network in networks.items()
            if network is not None
            for name in ("sha256", "resize", "precision")
        }
        return {**settings, "motion": "on" if self.motion else "off"}

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return the features' shapes for one sample. shape: the sample's shape, (H, W, 3) or (T, H, W, 3)."""
        found = self(torch.zeros(1, *shape, dtype=torch.uint8))
        return {name: tuple(features.shape[1:]) for name, features in found.items()}

    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return name -> features (B, ...) float32 for uint8 pixels (B, H, W, 3) or (B, T, H, W, 3)."""
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
    """Return the mean absolute difference between consecutive frames, (B,). clips: uint8 (B, T, H, W, 3)."""
    if clips.shape[1] < 2:
        return torch.zeros(len(clips), device=clips.device)
    frames = clips.float()
    return (frames[:, 1:] - frames[:, :-1]).abs().mean(dim=(1, 2, 3, 4))


@dataclass(frozen=True)
class Features:
    """The samples' features (N, ...) float32 on the CPU; empty on ranks other than 0. seconds: computing time.
    computed: number of samples without cached features."""

    count: int
    arrays: dict[str, Tensor]
    seconds: float = 0.0
    computed: int = 0


def extract_media(media: Media, extractor: Extractor, output: Path, mesh: Mesh) -> Features:
    """Return the features of samples in files. All ranks must call this."""
    with ThreadPoolExecutor(writer_threads(mesh)) as pool:
        shape = media.batch(range(0, 1), pool).shape[1:]
        settings = {"samples": media.sha256, "media": f"{media.name} {media.how}".strip(), **extractor.settings()}
        store = _Store(output, settings, media.count, extractor.batch_size, extractor.layout(shape), mesh)

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


def extract_run(sampling: SamplingRun, extractor: Extractor, output: Path) -> Features:
    """Draw samples from a checkpoint and return their features. All ranks must call this."""
    layout = extractor.layout(pixel_shape(sampling))
    settings = drawn_by(settings_of(sampling))
    size, count = sampling.flags.batch_size, len(sampling.choices)
    store = _Store(output, {**settings, **extractor.settings()}, count, size, layout, sampling.mesh)

    def fill(sink: "Sink") -> None:
        drawn: list[tuple[Tensor, Tensor]] = []  # (index, finite) of the last batch
        with replica_batches(sampling, store.parts, store.missing, sink.deliver, sink.flush) as batches:
            for batch in batches:
                index = torch.arange(batch.start, batch.stop)
                y, frames = sampling.conditions_of(index)
                seed = sampling.flags.seed
                latents = sampling.engine.sample(y, sampling.null, index, seed, conditioning_frames=frames)
                _check_finite(drawn)
                drawn = [(index, latents.flatten(1).isfinite().all(dim=1))]
                batches.decode(index, latents)
        _check_finite(drawn)

    return store.run(extractor, fill)


def drawn_by(settings: dict[str, str]) -> dict[str, str]:
    """Drop settings that do not affect the samples. settings: from ``settings_of``."""
    return {name: value for name, value in settings.items() if name not in ("--save_png", "--npz")}


def _check_finite(drawn: list[tuple[Tensor, Tensor]]) -> None:
    """Raise ValueError for latents that are not finite, because uint8 pixels would hide a NaN. Call this after
    launching the next batch, so that the device does not wait for the host."""
    for index, finite in drawn:
        if len(bad := index[~finite.cpu()]):
            raise ValueError(f"sample {int(bad[0]):,} is not finite: the model gives NaN or infinity for it")


def _ahead(batches: list[range], media: Media, pool: ThreadPoolExecutor) -> Iterator[tuple[range, np.ndarray]]:
    """Yield (batch, pixels) for all batches in order. Up to AHEAD more batches are read in the background."""
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


class _Store:
    """Cache of features on disk. ``missing`` lists the cache files to compute."""

    def __init__(self, output: Path, settings: dict[str, str], count: int, batch_size: int, layout: Layout, mesh: Mesh):
        self.layout, self.mesh, self._output = layout, mesh, output
        width = sum(math.prod(shape) for shape in layout.values())
        settings = {**settings, "layout": " ".join(f"{name} {shape}" for name, shape in layout.items())}
        size = samples_a_part(count, batch_size, 4 * width)
        job = SamplingJob(settings, count, count, (width,), size, "<f4")
        identity = hash_parts(str(count), *(part for item in sorted(settings.items()) for part in item))
        self.folder, problem = output / FOLDER / identity[:16], None
        missing: list[int] = []
        if mesh.is_main:
            try:
                job, missing = self._begin(job)
            except OSError as error:
                problem = str(error)
        job, missing, problem = mesh.broadcast_object((job, missing, problem))
        if problem:
            raise OSError(problem)
        self.parts, self.missing = SampleCache(self.folder, job, output), missing

    def _begin(self, job: SamplingJob) -> tuple[SamplingJob, list[int]]:
        make_folder(self.folder, root=self._output)
        try:
            found = find_unfinished_job(self.folder)
        except ValueError:  # the manifest is damaged
            found = None
        if found is None or found.settings != job.settings or found.count != job.count:
            parts, missing = SampleCache(self.folder, job, self._output), None
            parts.remove()
        else:
            job = replace(job, samples_a_part=found.samples_a_part)
            parts = SampleCache(self.folder, job, self._output)
            missing, problems = parts.missing(lambda number: True)
            for line in problems[:10]:
                line = line.replace("its samples are drawn again", "its features are computed again")
                logger.warning("note: %s", line)
            parts.remove_unfinished()
            there = parts.count_outside(missing)
            if there:
                logger.info(f"note: features of {there:,} of {job.count:,} samples are there from an earlier start")
        parts.begin()
        return job, list(range(parts.count)) if missing is None else missing

    def run(self, extractor: Extractor, fill: Callable[["Sink"], None]) -> Features:
        """Compute the missing features: ``fill(sink)`` delivers the pixels to the sink. Then read all features."""
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
        return Features(count, arrays, seconds, computed)


class Sink:
    """Receives pixels, computes their features and writes the features into the cache.

    On a GPU, the networks run on a separate stream while samples are drawn. The host waits for a batch's features only
    after launching the next batch."""

    def __init__(self, assembly: CacheWriter, extractor: Extractor):
        self._assembly, self._extractor = assembly, extractor
        self._waiting: deque[tuple[list[int], Tensor, torch.cuda.Event | None]] = deque()
        self._stream = torch.cuda.Stream(extractor.device) if extractor.device.type == "cuda" else None
        if self._stream is not None:
            # The networks were loaded on the current stream, so wait for it.
            self._stream.wait_stream(torch.cuda.current_stream(extractor.device))

    def deliver(self, index: Tensor, pixels: np.ndarray) -> None:
        """Compute the features of the samples ``index`` (B,). The caller may then overwrite ``pixels`` (uint8)."""
        numbers = index.tolist()
        if not any(map(self._assembly.wants, numbers)):
            return
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            # Wait for this copy, but not for the stream that draws samples.
            found = self._extractor(torch.from_numpy(pixels).to(self._extractor.device))
            rows, done = torch.cat([features.flatten(1) for features in found.values()], dim=1), None
            if self._stream is not None:
                rows = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
        self._waiting.append((numbers, rows, done))
        self.flush(waiting=1)

    def flush(self, waiting: int = 0) -> None:
        """Write the features of all delivered batches except the last ``waiting`` ones."""
        while len(self._waiting) > waiting:
            numbers, rows, done = self._waiting.popleft()
            if done is not None:
                done.synchronize()
            for number, row in zip(numbers, rows.numpy(), strict=True):
                if not np.isfinite(row).all():
                    raise ValueError(f"the features of sample {number:,} are not finite numbers")
                if self._assembly.wants(number):
                    self._assembly.add(number, row)
