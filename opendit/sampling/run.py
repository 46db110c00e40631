"""Draws what a run of sample.py asks for: single files, a sheet, an .npz. A job that was killed goes on."""

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from opendit.common.safe_files import LinkRefused, refuse_links, write_whole
from opendit.common.stages import Stages
from opendit.common.utils import hash_parts
from opendit.config.console import print_block
from opendit.config.parallel_sizes import find_place
from opendit.data.progress import Progress
from opendit.encoders.pictures import grid_columns, save_animation, save_contact_sheet, save_grid
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.rendezvous import meet
from opendit.parallel.sequence import attention_note
from opendit.parallel.supervisor import Supervisor
from opendit.sampling.given import describe_given, rows_of
from opendit.sampling.job import GRID_PICTURES, SHEET_CLIPS, digest_of_weights, job_of
from opendit.sampling.output import OutputFolder, file_name, save_one, texts, write_npz
from opendit.sampling.output_pipeline import OutputPipeline, Writers
from opendit.sampling.parts import DamagedPart, Job, PartAssembly, Parts, find
from opendit.sampling.prepare import SamplingRun, prepare
from opendit.sampling.shared_queue import SharedQueue

if TYPE_CHECKING:
    from opendit.config.sample import SampleConfig

PROFILE = "profile.json"
WAITING_BYTES = 256 << 20  # of pictures that wait for a thread to write them


def run(flags: "SampleConfig", stages: Stages) -> None:
    """Samples as the flags say. Ends the program, as ``Supervisor`` says, if that can't be done.

    stages: of the process, for --profile; under it every stage waits for the GPU, so that none runs beside another.
    """
    with Supervisor((ValueError, OSError)) as supervisor:
        with stages("processes, device"):
            mesh = init_mesh(
                sequence_parallel=flags.sequence_parallel_size,
                tensor_parallel=flags.tensor_parallel_size,
                group_of_one=False,
            )
            if flags.profile and mesh.device.type == "cuda":
                stages.wait = torch.cuda.synchronize
        with stages("flags and files: checked"):
            sampling = prepare(flags, mesh, stages)
        with sampling.lock:
            with stages("digests of what decides a sample; an earlier start"):
                parts, earlier = open_parts(sampling)
            supervisor.started(())
            draw(sampling, parts, earlier)


# ------------------------------------------------------------------------------------------ an earlier start


def open_parts(sampling: SamplingRun) -> tuple[Parts, bool]:
    """The parts of the job in its folder, and whether an earlier start left some to go on from. Collective.

    Raises:
        ValueError: on every rank: there are parts of a job with other settings, and --overwrite does not drop them.
    """
    mesh, flags, output, job, problem = sampling.mesh, sampling.flags, Path(sampling.flags.output), None, None
    earlier = False
    weights = digest_of_weights(sampling) if mesh.is_main or mesh.tp_size > 1 else ""
    if mesh.is_main:
        job = job_of(sampling, weights)
        try:
            found = None if flags.overwrite else find(output)
            earlier = found is not None
            if found is not None and (differences := found.differences(job.settings)):
                raise ValueError(
                    f"--output {output}: holds {found.there:,} of {found.count:,} samples of a job that did not end, "
                    f"and this one is another: {', '.join(differences)}; start it as it was to go on, give another "
                    "--output, or add --overwrite to drop what is there"
                )
            if found is not None:
                job = replace(job, samples_a_part=found.samples_a_part)
            refuse_links(output, set(files_of(sampling)) & set(os.listdir(output)), "--output")
        except (ValueError, LinkRefused) as error:
            problem = str(error)
    job, earlier, problem = mesh.broadcast_object((job, earlier, problem))
    if problem:
        raise ValueError(problem)
    return Parts(output, job), earlier


def begin(sampling: SamplingRun, parts: Parts, folder: OutputFolder, earlier: bool) -> list[int]:
    """Rank 0, before the first sample: puts the folder in order. Returns the parts to draw."""
    missing = list(range(parts.count))
    if earlier:
        suffix = suffix_of(sampling)
        files = [folder.folder / (name + suffix) for name in file_names(sampling)] if sampling.flags.save_png else []
        missing, problems = parts.missing(lambda number: not files or is_file(files[number]))
        sampling.notes += problems[:10] + [f"and {len(problems) - 10:,} more"] * (len(problems) > 10)
        there, count = drawn_before(parts, missing), parts.job.count
        sampling.notes.append(f"{there:,} of {count:,} samples are there from an earlier start; it goes on from them")
        folder.go_on()
        parts.remove_unfinished()
    else:
        parts.remove()
        sampling.notes += folder.begin()
    check_room(sampling, parts, missing)
    parts.begin()
    return missing


def drawn_before(parts: Parts, missing: list[int]) -> int:
    return parts.job.count - sum(len(parts.samples(part)) for part in missing)


def is_file(path: Path) -> bool:
    """Return True if a file exists and is not empty, as a power cut may leave one."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def check_room(sampling: SamplingRun, parts: Parts, missing: list[int]) -> None:
    """Raises OSError if the parts to draw and the .npz can't fit on their disks: now, not after hours."""
    sample = math.prod(parts.job.shape)
    needs = [(parts.folder.parent, sum(map(parts.rows, missing)) * sample, str(parts.folder))]
    if sampling.flags.npz:
        needs.append((Path(sampling.flags.npz).absolute().parent, parts.job.count * sample, sampling.flags.npz))
    disks = [folder.stat().st_dev for folder, *_ in needs]
    for (folder, _, name), disk in zip(needs, disks, strict=True):
        needed = sum(size for (_, size, _), other in zip(needs, disks, strict=True) if other == disk)
        free = shutil.disk_usage(folder).free
        if free < needed:
            what = f"{os.strerror(errno.ENOSPC)}: {needed / 2**20:,.1f} MiB are needed, {free / 2**20:,.1f} are free"
            raise OSError(errno.ENOSPC, what, name)


# ------------------------------------------------------------------------------------------ drawing


def draw(sampling: SamplingRun, parts: Parts, earlier: bool) -> None:
    """Draws what this replica takes of what is missing; rank 0 then makes the sheet and the .npz of all.

    Raises:
        OSError: a disk that takes no more; the message says what is there and what can be done.
    """
    mesh, missing = sampling.mesh, None
    folder = OutputFolder(Path(sampling.flags.output), files_of(sampling))
    try:
        if mesh.is_main:
            missing = begin(sampling, parts, folder, earlier)
        announce(sampling)
        # Nothing is written before what was there is gone. The queue has a name that no earlier job's had.
        missing, name = mesh.broadcast_object((missing, secrets.token_hex(8)))
        draw_share(sampling, parts, missing, name)
        mesh.barrier()
        if mesh.is_main:
            with sampling.stages("sheet, .npz"):
                rows = collect(sampling, parts, folder) | approximated(sampling)
                parts.remove()
            print_block("\nDone", rows)
            if sampling.flags.profile:
                write_profile(sampling, folder)
        mesh.barrier()
    except LinkRefused:
        raise
    except OSError as error:
        text = f"{error}; {what_is_there(sampling, parts, folder, error)}"
        if mesh.world_size == 1 and not parts.there():
            with contextlib.suppress(OSError):
                parts.remove()
        raise OSError(text) from error


def draw_share(sampling: SamplingRun, parts: Parts, missing: list[int], name: str) -> None:
    """Those of the missing samples that this rank's replica takes from the queue ``name``, to their files and parts."""
    flags, stages = sampling.flags, sampling.stages
    names, assembly = file_names(sampling), PartAssembly(parts, missing)

    def write(number: int, picture: np.ndarray) -> None:
        began = time.perf_counter()
        if flags.save_png:
            save_one(Path(flags.output) / names[number], picture, sampling.fps)
        assembly.add(number, picture)
        stages.mark("first sample on disk")
        stages.beside("writing, by threads", time.perf_counter() - began)

    def deliver(index: Tensor, pictures: np.ndarray) -> None:
        with stages("writing: waited for"):
            for number, picture in zip(index.tolist(), pictures, strict=True):
                if assembly.wants(number):
                    writers.put(write, number, picture)

    def finish() -> None:
        with stages("writing: waited for"):
            writers.close()

    threads = writer_threads(sampling.mesh)
    waiting = min(4096, max(threads, WAITING_BYTES // math.prod(parts.job.shape)))
    with Writers(threads, waiting) as writers:
        draw_missing(sampling, parts, missing, name, deliver, finish)


def draw_missing(
    sampling: SamplingRun,
    parts: Parts,
    missing: list[int],
    name: str,
    deliver: Callable[[Tensor, np.ndarray], None],
    finish: Callable[[], None],
    look: Callable[[Tensor, Tensor], None] = lambda index, latents: None,
) -> None:
    """Draws what this rank's replica takes of the missing parts from the queue ``name``, with a bar.

    Args:
        deliver: as of :class:`OutputPipeline`.
        finish: is called after the last sample that this rank delivers.
        look: is given the numbers and latents of every batch before it is decoded.
    """
    mesh, replica, stages = sampling.mesh, sampling.replica, sampling.stages
    groups = parts.to_draw(missing, batch_size_of(parts.job, sampling.flags.batch_size, replica.count))
    queue = SharedQueue(meet(find_place()), name, len(groups), replica)
    total = sum(len(batch) for group in groups for batch in group)
    with (
        Progress(total, "samples", disable=not mesh.is_main) as progress,
        OutputPipeline(sampling.codec, mesh.device, deliver, replica.ranks, replica.leads) as pipeline,
    ):
        for batch in (batch for number in queue for batch in groups[number]):
            with stages("drawing"):
                index, latents = draw_batch(sampling, batch)
            look(index, latents)
            with stages("decoding"):
                pipeline.put(index, latents)
            if replica.leads:
                progress.update(queue.finished(len(index)) - progress.done)
        with stages("decoding"):
            pipeline.finish()
        finish()
        if mesh.is_main:
            with stages("other processes: waited for"):
                while (done := queue.finished(0)) < total:
                    progress.update(done - progress.done)
                    time.sleep(0.1)
            progress.update(total - progress.done)


def batch_size_of(job: Job, most: int, replicas: int) -> int:
    """Samples at a time, at most ``most``. A job of few samples has smaller batches, so that replicas draw the same
    number of them and end at about the same time. A large job has many parts, which are full batches of ``most``."""
    if job.samples_a_part > 1:
        return min(most, math.ceil(job.count / replicas))
    rounds = math.ceil(job.count / (most * replicas))
    return math.ceil(job.count / (rounds * replicas))


def draw_batch(sampling: SamplingRun, batch: range) -> tuple[Tensor, Tensor]:
    """Numbers and latents of these samples."""
    torch.set_float32_matmul_precision("highest")
    index = torch.arange(batch.start, batch.stop)
    y = sampling.conditions[sampling.choices[index].to(sampling.mesh.device)]
    progress = sampling.staged_steps(len(index)) if sampling.flags.profile else None
    given = rows_of(sampling.given, index)
    return index, sampling.engine.sample(y, sampling.null, index, sampling.flags.seed, given=given, progress=progress)


def writer_threads(mesh: Mesh) -> int:
    """Return the number of threads that encode files: this process's share of the machine's cores, up to 8."""
    here = min(mesh.world_size, torch.cuda.device_count() or mesh.world_size)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(1, cores // here))


# ------------------------------------------------------------------------------------------ the end


def collect(sampling: SamplingRun, parts: Parts, folder: OutputFolder) -> dict[str, str]:
    """Rank 0: the .npz and the sheet from all parts. Returns what there is now, for people."""
    flags, captions, output = sampling.flags, sampling.captions, folder.folder
    clips, rows = sampling.model.config.is_video, {}
    if flags.npz:
        shape, labels = (len(captions), *parts.job.shape), sampling.choices.numpy()
        with_text = sampling.model.config.text is not None
        arrays = {
            "arr_0": ("|u1", shape, parts.all_blocks()),
            "arr_1": texts(captions) if with_text else (labels.dtype.str, labels.shape, [labels]),
        }
        # One job at a time writes to a folder, and the next one to it writes over what a killed one left.
        write_npz(Path(flags.npz), arrays, mark=hash_parts(str(output.resolve()))[:12])
        of = " x ".join(map(str, shape))
        rows["npz"] = f"{flags.npz}: arr_0 {of}, arr_1 {'captions' if with_text else 'labels'}"
    shown = parts.first(SHEET_CLIPS if clips else GRID_PICTURES)
    if clips:
        save_contact_sheet(output / "grid.png", shown, captions[: len(shown)])
        save_animation(output / "grid.gif", shown, captions[: len(shown)], sampling.fps)
    else:
        save_grid(output / "grid.png", shown, captions[: len(shown)], columns=grid_columns(captions))
    rows = {"sheet": f"{output / 'grid.png'}{', moving in grid.gif' if clips else ''}", **rows}
    if flags.save_png:
        rows["clips" if clips else "pictures"] = f"{folder.there():,} in {output}"
    return rows


def what_is_there(sampling: SamplingRun, parts: Parts, folder: OutputFolder, error: OSError) -> str:
    """After an error: what of the samples is there and whole, and what to do."""
    found, there = "no sample is there", parts.there()
    if sampling.flags.save_png:
        found = f"{folder.there():,} of {parts.job.count:,} samples are there and whole, in {folder.folder}"
    elif there and sampling.flags.npz:
        found = f"{there:,} of {parts.job.count:,} samples are in {parts.folder}/*.npy, for np.load"
    if isinstance(error, DamagedPart):
        return f"{found}; start it again as it was: what is damaged is drawn anew"
    if there:
        found += "; make room" + ", or give another place to --npz," * bool(sampling.flags.npz)
        return f"{found} and start it again as it was: it goes on from there"
    return f"{found}; make room, or give other places to --output and --npz"


def write_profile(sampling: SamplingRun, folder: OutputFolder) -> None:
    """Prints where rank 0's time went, and writes it."""
    write_whole(folder.folder / PROFILE, (json.dumps(sampling.stages.to_dict(), indent=1) + "\n").encode())
    print(f"profile of rank 0 ({folder.folder / PROFILE}):\n{sampling.stages.table()}", flush=True)


def files_of(sampling: SamplingRun) -> list[str]:
    """All files that the run will write into its folder."""
    suffix = suffix_of(sampling)
    single = [name + suffix for name in file_names(sampling)] if sampling.flags.save_png else []
    grids = ["grid.png", *(["grid.gif"] if sampling.model.config.is_video else [])]
    return [*single, *grids, *([PROFILE] if sampling.flags.profile else [])]


def suffix_of(sampling: SamplingRun) -> str:
    return ".mp4" if sampling.model.config.is_video else ".png"


def file_names(sampling: SamplingRun) -> list[str]:
    """Return the file name of every sample, without the suffix."""
    return [file_name(number, caption) for number, caption in enumerate(sampling.captions)]


def announce(sampling: SamplingRun) -> None:
    if not sampling.mesh.is_main:
        return
    flags, device, replica, sequence = sampling.flags, sampling.mesh.device, sampling.replica, sampling.sequence
    parameters, ranks = sampling.model.config.parameters(), sampling.mesh.tp_size
    layers = f", layers divided by {ranks}" if ranks > 1 else ""
    processor = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    sampler = sampling.objective.choose(flags.sampler)
    shares = f", shared out over {replica.count}" if replica.count > 1 else ""
    rows = {
        "weights": str(sampling.source),
        "model": f"{parameters / 1e6:.1f} M parameters, {flags.mixed_precision}{layers}",
        "sampler": f"{sampler}, {flags.num_sampling_steps} steps, guidance {flags.cfg_scale}"
        f"{', its halves on different processes' if replica.halves else ''}",
        "vae": sampling.codec.name,
        "attention": attention_note(sampling.kernels.attention_note, sequence),
        "kernels": sampling.kernels.ops_note,
        "steps": sampling.engine.note,
        **approximate(sampling),
        "sequence": f"over {sampling.mesh.sp_size} ranks, {sequence.plan}" if sequence else "whole on every rank",
        "processes": f"{sampling.mesh.world_size} ({processor})",
        "samples": f"{len(sampling.choices)}{shares}, seed {flags.seed}",
        **describe_given(sampling.given, flags.image or flags.clip),
    }
    print_block("OpenDiT sampling", rows)
    for note in sampling.notes:
        print(f"note: {note}", flush=True)


def approximate(sampling: SamplingRun) -> dict[str, str]:
    """The row that says what is approximated, if anything is."""
    note = sampling.engine.approximations.note
    return {"approximate": note} if note else {}


def approximated(sampling: SamplingRun) -> dict[str, str]:
    """The row that says what it came to, where this rank knows it."""
    if not approximate(sampling) or sampling.replica.halves:
        return {}
    return {"approximate": f"{sampling.engine.share_evaluated:.1%} of the blocks' work was done"}
