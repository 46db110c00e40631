"""Write the output of sample.py: single files, a sheet, an .npz, and the cache from which a killed job resumes."""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opendit.common.safe_files import LinkRefused, refuse_links, write_whole
from opendit.common.utils import hash_parts
from opendit.config.console import print_block
from opendit.config.sample import parse_cache
from opendit.encoders.conditioner import CaptionConditioner
from opendit.encoders.pictures import grid_columns, save_animation, save_contact_sheet, save_grid
from opendit.encoders.vae import FrozenVAE
from opendit.encoders.video_vae import FrameCodec, VideoCodec
from opendit.models.dit import DiT
from opendit.parallel.layout import Layout
from opendit.parallel.mesh import Mesh
from opendit.parallel.tensor import layout_of
from opendit.sampling import sample_cache
from opendit.sampling.output_files import OutputFolder, file_name, save_one, texts, write_npz
from opendit.sampling.output_pipeline import ReplicaBatches, Writers, replica_batches
from opendit.sampling.sampling_run import SamplingRun, announce

PROFILE = "profile.json"
WAITING_BYTES = 256 << 20  # bytes of the pictures that wait to be written, at most
# Samples on the sheet, at most. The single files and the .npz hold all samples.
GRID_PICTURES, SHEET_CLIPS = 100, 16
ODD = -7046029254386353131  # an odd int64 near 2^64 / golden ratio: its multiples change all bits
# Integers to sum at a time: few enough for a CPU's caches, many enough to occupy a GPU.
WORDS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 22}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

logger = logging.getLogger(__name__)


def open_output(run: SamplingRun) -> "SampleOutput":
    """Open a run's output folder, with an earlier start's cache if there is one. All ranks must call this.

    Raises ValueError on all ranks if a file to write is a link. Without --overwrite, also raises ValueError if the
    cache is damaged or belongs to a job with other settings."""
    with run.stages("digests of what decides a sample; an earlier start"):
        mesh, flags, output, job, problem = run.mesh, run.flags, Path(run.flags.output), None, None
        resumes = False
        weights = digest_of_weights(run) if mesh.is_main or mesh.tp_size > 1 else ""
        if mesh.is_main:
            shape, count = pixel_shape(run), len(run.choices)
            size = sample_cache.samples_a_part(count, flags.batch_size, math.prod(shape))
            kept = count if flags.npz else SHEET_CLIPS if run.model.config.is_video else GRID_PICTURES
            job = sample_cache.SamplingJob(settings_of(run, weights), count, kept, shape, size)
            try:
                earlier = None if flags.overwrite else sample_cache.find_unfinished_job(output)
                resumes = earlier is not None
                if earlier is not None and (differences := earlier.differences(job.settings)):
                    raise ValueError(
                        f"--output {output}: holds {earlier.cached:,} of {earlier.count:,} samples of a job that did "
                        f"not end, and this one is another: {', '.join(differences)}; start it as it was to go on, "
                        "give another --output, or add --overwrite to drop what is there"
                    )
                if earlier is not None:
                    job = replace(job, samples_a_part=earlier.samples_a_part)
                refuse_links(output, set(files_of(run)) & set(os.listdir(output)), "--output")
            except (ValueError, LinkRefused) as error:
                problem = str(error)
        job, resumes, problem = mesh.broadcast_object((job, resumes, problem))
        if problem:
            raise ValueError(problem)
        return SampleOutput(run, sample_cache.SampleCache(output, job), resumes)


class SampleOutput:
    """The output of a run, see :func:`open_output`. resumes: True if ``cache`` holds samples of an earlier start."""

    def __init__(self, run: SamplingRun, cache: sample_cache.SampleCache, resumes: bool):
        self.run, self.cache, self._resumes = run, cache, resumes
        self._folder = OutputFolder(Path(run.flags.output), files_of(run))

    @contextlib.contextmanager
    def missing_batches(self) -> Iterator[ReplicaBatches]:
        """Prepare the folder, print the run's summary, and yield this replica's batches of missing samples.

        On exit, rank 0 writes the sheet and the .npz. All ranks must call this. Raises OSError if a disk is full or
        fails. The message says which samples are on disk and what to do."""
        run, mesh = self.run, self.run.mesh
        try:
            missing = self._begin() if mesh.is_main else None
            announce(run)
            # No rank may write a file before rank 0 has removed old files.
            missing = mesh.broadcast_object(missing)
            with self._written(missing) as batches:
                yield batches
            mesh.barrier()
            if mesh.is_main:
                self._finish()
            mesh.barrier()
        except LinkRefused:
            raise
        except OSError as error:
            text = f"{error}; {self._what_is_safe(error)}"
            if mesh.world_size == 1 and not self.cache.count_cached():
                with contextlib.suppress(OSError):
                    self.cache.remove()
            raise OSError(text) from error

    def _begin(self) -> list[int]:
        """Remove old files, and create the cache. Return its missing parts. Only rank 0 calls this."""
        run, cache, folder = self.run, self.cache, self._folder
        missing = list(range(cache.count))
        if self._resumes:
            files = [folder.folder / name for name in sample_files(run)]
            missing, problems = cache.missing(lambda number: not files or is_file(files[number]))
            run.notes += problems[:10] + [f"and {len(problems) - 10:,} more"] * (len(problems) > 10)
            cached, count = cache.count_outside(missing), cache.job.count
            run.notes.append(f"{cached:,} of {count:,} samples are there from an earlier start; it goes on from them")
            folder.resume()
            cache.remove_unfinished()
        else:
            cache.remove()
            run.notes += folder.begin()
        self._check_room(missing)
        cache.begin()
        return missing

    def _check_room(self, missing: list[int]) -> None:
        """Raise OSError if the missing samples and the .npz don't fit on their disks."""
        cache, npz = self.cache, self.run.flags.npz
        sample = math.prod(cache.job.shape)
        needs = [(cache.folder.parent, sum(map(cache.rows, missing)) * sample, str(cache.folder))]
        if npz:
            needs.append((Path(npz).absolute().parent, cache.job.count * sample, npz))
        disks = [folder.stat().st_dev for folder, *_ in needs]
        for (folder, _, name), disk in zip(needs, disks, strict=True):
            needed = sum(size for (_, size, _), other in zip(needs, disks, strict=True) if other == disk)
            free = shutil.disk_usage(folder).free
            if free < needed:
                space = f"{needed / 2**20:,.1f} MiB are needed, {free / 2**20:,.1f} are free"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {space}", name)

    @contextlib.contextmanager
    def _written(self, missing: list[int]) -> Iterator[ReplicaBatches]:
        run, stages = self.run, self.run.stages
        files, cache_writer = sample_files(run), sample_cache.CacheWriter(self.cache, missing)

        def write(number: int, picture: np.ndarray) -> None:
            began = time.perf_counter()
            if files:
                save_one(self._folder.folder / files[number], picture, run.fps)
            cache_writer.add(number, picture)
            stages.mark("first sample on disk")
            stages.beside("writing, by threads", time.perf_counter() - began)

        def deliver(index: Tensor, pictures: np.ndarray) -> None:
            with stages("writing: waited for"):
                for number, picture in zip(index.tolist(), pictures, strict=True):
                    if cache_writer.wants(number):
                        writers.put(write, number, picture)

        def finish() -> None:
            with stages("writing: waited for"):
                writers.close()

        threads = writer_threads(run.mesh)
        waiting = min(4096, max(threads, WAITING_BYTES // math.prod(self.cache.job.shape)))
        with (
            Writers(threads, waiting) as writers,
            replica_batches(run, self.cache, missing, deliver, finish) as batches,
        ):
            yield batches

    def _finish(self) -> None:
        """Write the sheet and the .npz, remove the cache, and print a summary. Only rank 0 calls this."""
        run = self.run
        with run.stages("sheet, .npz"):
            rows = self.collect()
            # Rank 0 does not know other ranks' evaluations of guidance's unconditional half.
            if run.engine.approximations.note and not run.replica.halves:
                rows["approximate"] = f"{run.engine.share_evaluated:.1%} of the blocks' work was done"
            self.cache.remove()
        print_block("\nDone", rows)
        if run.flags.profile:
            path = self._folder.folder / PROFILE
            write_whole(path, (json.dumps(run.stages.to_dict(), indent=1) + "\n").encode())
            logger.info("profile of rank 0 (%s):\n%s", path, run.stages.table())

    def collect(self) -> dict[str, str]:
        """Write the .npz and the sheet from the cache. Return the summary's rows about the written files."""
        run, flags, captions, output = self.run, self.run.flags, self.run.captions, self._folder.folder
        clips, rows = run.model.config.is_video, {}
        if flags.npz:
            shape, labels = (len(captions), *self.cache.job.shape), run.choices.numpy()
            with_text = run.model.config.text is not None
            arrays = {
                "arr_0": ("|u1", shape, self.cache.all_blocks()),
                "arr_1": texts(captions) if with_text else (labels.dtype.str, labels.shape, [labels]),
            }
            # Name the temporary file after the output folder, so that the next job there replaces it.
            write_npz(Path(flags.npz), arrays, mark=hash_parts(str(output.resolve()))[:12])
            of = " x ".join(map(str, shape))
            rows["npz"] = f"{flags.npz}: arr_0 {of}, arr_1 {'captions' if with_text else 'labels'}"
        shown = self.cache.first(SHEET_CLIPS if clips else GRID_PICTURES)
        if clips:
            save_contact_sheet(output / "grid.png", shown, captions[: len(shown)])
            save_animation(output / "grid.gif", shown, captions[: len(shown)], run.fps)
        else:
            save_grid(output / "grid.png", shown, captions[: len(shown)], columns=grid_columns(captions))
        rows = {"sheet": f"{output / 'grid.png'}{', moving in grid.gif' if clips else ''}", **rows}
        if flags.save_png:
            rows["clips" if clips else "pictures"] = f"{self._folder.count_samples():,} in {output}"
        return rows

    def _what_is_safe(self, error: OSError) -> str:
        """Return the message after an error: which samples are on disk, and what the user can do."""
        flags, cache, found, cached = self.run.flags, self.cache, "no sample is there", self.cache.count_cached()
        if flags.save_png:
            complete = f"{self._folder.count_samples():,} of {cache.job.count:,}"
            found = f"{complete} samples are there and whole, in {self._folder.folder}"
        elif cached and flags.npz:
            found = f"{cached:,} of {cache.job.count:,} samples are in {cache.folder}/*.npy, for np.load"
        if isinstance(error, sample_cache.DamagedPart):
            return f"{found}; start it again as it was: what is damaged is drawn anew"
        if cached:
            found += "; make room" + ", or give another place to --npz," * bool(flags.npz)
            return f"{found} and start it again as it was: it goes on from there"
        return f"{found}; make room, or give other places to --output and --npz"


def is_file(path: Path) -> bool:
    """Return True if a file exists and is not empty. After a power cut, files may be empty."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def files_of(run: SamplingRun) -> list[str]:
    """Return the names of all files that a run writes in its output folder."""
    grids = ["grid.png", *(["grid.gif"] if run.model.config.is_video else [])]
    return [*sample_files(run), *grids, *([PROFILE] if run.flags.profile else [])]


def sample_files(run: SamplingRun) -> list[str]:
    """Return the name of every sample's file; an empty list without --save_png."""
    suffix = ".mp4" if run.model.config.is_video else ".png"
    names = (file_name(number, caption) + suffix for number, caption in enumerate(run.captions))
    return list(names) if run.flags.save_png else []


def writer_threads(mesh: Mesh) -> int:
    """Return the number of threads that encode files: this process's share of the CPU cores, at most 8."""
    here = min(mesh.world_size, torch.cuda.device_count() or mesh.world_size)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(1, cores // here))


def pixel_shape(sampling: SamplingRun) -> tuple[int, ...]:
    """Return the shape of a decoded sample: (H, W, 3), or (T, H, W, 3) for a clip. Grey pictures become RGB."""
    codec, (*frames, height, width) = sampling.codec, sampling.size
    inner = codec.codec if isinstance(codec, FrameCodec) else codec
    channels = inner.latent_channels
    if isinstance(inner, FrozenVAE):
        config = inner.vae.config
        channels = config.get("out_channels", 3)
        # some VAEs' out_channels count the channels of a patch
        channels = channels // (config.get("patch_size") or 1) ** 2 or channels
    if frames and isinstance(codec, VideoCodec):
        frames = [(frames[0] - 1) * codec.temporal_downscale + 1]
    return (*frames, height * codec.downscale, width * codec.downscale, 3 if channels == 1 else channels)


def settings_of(sampling: SamplingRun, weights: str | None = None) -> dict[str, str]:
    """Return all settings that affect a sample or the stored files, as name -> value. Messages show these names.

    The number of processes and ``--batch_size`` are left out, because they only change how matrix products are rounded.
    weights: result of :func:`digest_of_weights`, if known."""
    flags, objective, conditioner = sampling.flags, sampling.objective, sampling.conditioner
    codec = sampling.codec.codec if isinstance(sampling.codec, FrameCodec) else sampling.codec
    vae = tensors_digest(codec.vae.state_dict())[:16] if isinstance(codec, FrozenVAE) else ""
    encoder = conditioner.encoder if isinstance(conditioner, CaptionConditioner) else None
    choices = sampling.choices.numpy().tobytes(), json.dumps(sampling.names)  # json turns any text into ASCII
    settings = {
        "weights": weights or digest_of_weights(sampling),
        "model": hash_parts(json.dumps(sampling.model.config.to_dict(), sort_keys=True))[:16],
        "objective": json.dumps(objective.to_dict(), sort_keys=True),
        "--sampler": objective.choose(flags.sampler),
        "--num_sampling_steps": flags.num_sampling_steps,
        "--cfg_scale": f"{flags.cfg_scale:g}",
        "--cfg_channels": flags.cfg_channels,
        "--cfg_interval": " ".join(f"{level:g}" for level in flags.cfg_interval) or None,
        "--guidance_every": flags.guidance_every if flags.guidance_every > 1 else None,
        "--guidance_by": flags.guidance_by if flags.guidance_by != "null" else None,
        "--cache": parse_cache(flags.cache) if flags.cache else None,
        "--seed": flags.seed,
        "--num_samples": len(sampling.choices),
        "classes or prompts": hash_parts(*choices)[:16],
        "given frames": None
        if sampling.conditioning_frames is None
        else tensors_digest({"given": sampling.conditioning_frames})[:16],
        "--negative_prompt": json.dumps(flags.negative_prompt) if flags.negative_prompt is not None else None,
        "text encoder": encoder and tensors_digest(encoder.model.state_dict())[:16],
        "size of latents": " x ".join(map(str, sampling.size)),
        "--mixed_precision": flags.mixed_precision,
        "kernels": sampling.kernels.ops_note,
        "attention": sampling.kernels.attention_note,
        "--vae": vae or codec.name,
        "--vae_tiling": "on" if flags.vae_tiling else "off",
        "--vae_compile": "on" if flags.vae_compile else None,
        "frames a second": f"{sampling.fps:g}" if sampling.model.config.is_video else None,
        "--save_png": "on" if flags.save_png else "off",
        "--npz": "given" if flags.npz else "not given",
    }
    return {name: str(value)[:4096] for name, value in settings.items() if value is not None}


def digest_of_weights(sampling: SamplingRun) -> str:
    """Hash the model's full tensors. All ranks that divide the model's layers must call this."""
    model, mesh = sampling.model, sampling.mesh
    divided = mesh.tp_size > 1
    return tensors_digest(_GatheredTensors(model, layout_of(model, mesh)) if divided else model.state_dict())[:16]


class _GatheredTensors(Mapping[str, Tensor]):
    """The full tensors of a model with layers divided over ranks. Reading a tensor gathers it."""

    def __init__(self, model: DiT, layout: Layout):
        self._own, self._layout = model.state_dict(), layout

    def __getitem__(self, name: str) -> Tensor:
        return self._layout.gather(name, self._own[name]) if name in self._layout.shapes else self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


@torch.no_grad()
def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash tensors' names, dtypes, shapes and contents, on their device. The hash is not cryptographic.

    Contents are read as integers. Each integer is multiplied by an odd factor that depends on its position, and the
    products are summed modulo 2^64. On a GPU, SHA-256 would be much slower."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        words = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {weighted_sum(words)}\n".encode())
    return digest.hexdigest()


def weighted_sum(words: Tensor) -> int:
    """Return the sum over i of words[i] * ((i + 1) * ODD | 1), modulo 2^64.

    The factors are computed for one slice of words. For a slice with an even start s, they are larger by s * ODD."""
    size, device = WORDS_AT_ONCE[words.device.type], words.device
    factors = torch.arange(1, 1 + min(size, len(words)), device=device) * ODD | 1
    products, total = torch.empty_like(factors), torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(words), size):
        part = words[start : start + size]
        total += torch.mul(part, factors[: len(part)], out=products[: len(part)]).sum()
        # the int64 that equals start * ODD modulo 2^64
        total += part.sum(dtype=torch.int64) * ((start * ODD + (1 << 63)) % (1 << 64) - (1 << 63))
    return int(total.item())
