"""Draws what a run of sample.py asks for: single files, a sheet, an .npz."""

import contextlib
import errno
import shutil
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from opendit.common.replace import replacing
from opendit.data.progress import Progress
from opendit.data.video_file import write_mp4
from opendit.encoders.pictures import grid_columns, save_animation, save_contact_sheet, save_grid, to_uint8
from opendit.inference.output import ArrayFile, OutputFolder, file_name, in_parts, removed_at_the_end, texts, write_npz
from opendit.inference.prepare import SamplingRun, prepare
from opendit.parallel.mesh import init_mesh
from opendit.parallel.sequence import attention_note
from opendit.parallel.supervisor import Supervisor
from opendit.training.monitor import print_block

if TYPE_CHECKING:
    from opendit.cli.sample_flags import SampleConfig

GRID_PICTURES, SHEET_CLIPS = 100, 16  # at most; the single files and the .npz hold all


def run(flags: "SampleConfig") -> None:
    """Samples as the flags say. Ends the program, as ``Supervisor`` says, if that can't be done."""
    with Supervisor((ValueError, OSError)) as supervisor:
        mesh = init_mesh(sequence_parallel=flags.sequence_parallel_size)
        sampling = prepare(flags, mesh)
        supervisor.started(())
        with sampling.lock:
            draw(sampling)


def draw(sampling: SamplingRun) -> None:
    """Draws this replica's share; rank 0 then makes the sheet and the .npz of all.

    Raises:
        OSError: a disk that takes no more; the message says what is there and what can be done.
    """
    mesh, all_drawn = sampling.mesh, False
    folder = OutputFolder(Path(sampling.flags.output), files_of(sampling))
    rows: list[ArrayFile] = []
    with removed_at_the_end(rows):
        try:
            if mesh.is_main:
                sampling.notes += folder.begin()
            announce(sampling)
            mesh.barrier()  # nothing is written before what was there is gone
            draw_share(sampling, folder.folder, rows)
            mesh.barrier()
            all_drawn = True
            if mesh.is_main:
                print_block("\nDone", collect(sampling, folder))
            mesh.barrier()
        except OSError as error:
            raise OSError(f"{error}; {what_is_there(sampling, folder, rows, all_drawn)}") from error


def draw_share(sampling: SamplingRun, output: Path, rows: list[ArrayFile]) -> None:
    """The samples of this rank's replica: their own files, and in ``rows`` what rank 0 needs of them."""
    flags, mesh, replica = sampling.flags, sampling.mesh, sampling.replica
    mine = torch.arange(len(sampling.choices)).tensor_split(replica.count)[replica.number]
    torch.set_float32_matmul_precision("highest")
    y = sampling.conditions[sampling.choices[mine].to(mesh.device)]
    batches = sampling.engine.batches(y, sampling.null, mine, flags.batch_size, flags.seed)
    names, needed = file_names(sampling), int((mine < on_file(sampling)).sum())
    with Progress(len(mine), "samples", disable=not mesh.is_main) as progress:
        for index, latents in batches:
            if sampling.codec is None:  # this rank helps another one to draw its samples
                continue
            first, pictures = int(index[0]), to_uint8(sampling.codec.decode(latents))
            # Through a file: with 50,000 pictures the .npz does not fit in every process's memory.
            if not rows and needed:
                rows.append(ArrayFile(rows_of(output, replica.number), needed, pictures.shape[1:]))
                check_room(sampling, pictures[0].nbytes)
            if first < on_file(sampling):
                rows[0].append(pictures[: on_file(sampling) - first])
            if flags.save_png:
                for number, picture in zip(index.tolist(), pictures, strict=True):
                    save_one(output / names[number], picture, sampling.fps)
            progress.update(len(index))
    for file in rows:
        file.close()


def on_file(sampling: SamplingRun) -> int:
    """How many samples, the first ones, rank 0 needs again: all for an .npz, those on the sheet without."""
    if sampling.flags.npz:
        return len(sampling.choices)
    return SHEET_CLIPS if sampling.model.config.is_video else GRID_PICTURES


def rows_of(output: Path, replica: int) -> Path:
    return output / f".rows-{replica:04d}.npy"


def check_room(sampling: SamplingRun, size: int) -> None:
    """Raises OSError if the .npz of samples of this many bytes can't fit beside what is there."""
    if not sampling.flags.npz or not sampling.mesh.is_main:
        return
    free, needed = shutil.disk_usage(Path(sampling.flags.npz).absolute().parent).free, size * len(sampling.choices)
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"--npz takes {needed / 2**30:.2f} GiB, {free / 2**30:.2f} are free there", sampling.flags.npz
        )


def collect(sampling: SamplingRun, folder: OutputFolder) -> dict[str, str]:
    """Rank 0: the .npz and the sheet from all replicas' rows. Returns what there is now, for people."""
    flags, captions, output = sampling.flags, sampling.captions, folder.folder
    shares = [
        int((share < on_file(sampling)).sum())
        for share in torch.arange(len(captions)).tensor_split(sampling.replica.count)
    ]
    parts = [np.load(rows_of(output, number), mmap_mode="r") for number, size in enumerate(shares) if size]
    clips, rows = parts[0].ndim == 5, {}
    if flags.npz:
        shape = (len(captions), *parts[0].shape[1:])
        labels = sampling.choices.numpy()
        with_text = sampling.model.config.text is not None
        write_npz(
            Path(flags.npz),
            {
                "arr_0": ("|u1", shape, chain.from_iterable(map(in_parts, parts))),
                "arr_1": texts(captions) if with_text else (labels.dtype.str, labels.shape, [labels]),
            },
        )
        of = " x ".join(map(str, shape))
        rows["npz"] = f"{flags.npz}: arr_0 {of}, arr_1 {'captions' if with_text else 'labels'}"
    shown = np.stack(list(islice(chain.from_iterable(parts), SHEET_CLIPS if clips else GRID_PICTURES)))
    if clips:
        save_contact_sheet(output / "grid.png", shown, captions[: len(shown)])
        save_animation(output / "grid.gif", shown, captions[: len(shown)], sampling.fps)
    else:
        save_grid(output / "grid.png", shown, captions[: len(shown)], columns=grid_columns(captions))
    rows = {"sheet": f"{output / 'grid.png'}{', moving in grid.gif' if clips else ''}", **rows}
    if flags.save_png:
        rows["clips" if clips else "pictures"] = f"{folder.there():,} in {output}"
    return rows


def what_is_there(sampling: SamplingRun, folder: OutputFolder, rows: list[ArrayFile], all_drawn: bool) -> str:
    """After an error: what of the samples is there and whole, and what to do. Where there are no single files, the rows
    of this process, or of all if they have drawn theirs, become files that np.load reads."""
    flags, found = sampling.flags, ""
    if flags.save_png:
        found = f"{folder.there():,} of {len(sampling.choices):,} samples are there and whole, in {flags.output}"
    elif flags.npz and rows and rows[0].written:
        kept = folder.folder / "samples-{:04d}.npy"
        with contextlib.suppress(OSError):
            rows[0].keep(Path(str(kept).format(sampling.replica.number)))
            for other in range(sampling.replica.count) if all_drawn and sampling.mesh.is_main else ():
                with contextlib.suppress(FileNotFoundError):
                    rows_of(folder.folder, other).rename(str(kept).format(other))
            found = f"what was drawn is in {folder.folder}/samples-*.npy, for np.load"
    return f"{found or 'no sample is there'}; make room, or give other places to --output and --npz"


def files_of(sampling: SamplingRun) -> list[str]:
    """All files that the run will write into its folder."""
    suffix = ".mp4" if sampling.model.config.is_video else ".png"
    single = [name + suffix for name in file_names(sampling)] if sampling.flags.save_png else []
    return [*single, "grid.png", *(["grid.gif"] if sampling.model.config.is_video else [])]


def file_names(sampling: SamplingRun) -> list[str]:
    """Of every sample, without the suffix."""
    return [file_name(number, caption) for number, caption in enumerate(sampling.captions)]


def announce(sampling: SamplingRun) -> None:
    if not sampling.mesh.is_main:
        return
    flags, device, replica, sequence = sampling.flags, sampling.mesh.device, sampling.replica, sampling.sequence
    parameters = sum(p.numel() for p in sampling.model.parameters())
    processor = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    sampler = sampling.objective.choose(flags.sampler)
    shares = f", shared out over {replica.count}" if replica.count > 1 else ""
    rows = {
        "weights": str(sampling.source),
        "model": f"{parameters / 1e6:.1f} M parameters, {flags.mixed_precision}",
        "sampler": f"{sampler}, {flags.num_sampling_steps} steps, guidance {flags.cfg_scale}"
        f"{', its halves on different processes' if replica.halves else ''}",
        "vae": sampling.codec.name,
        "attention": attention_note(sampling.kernels.attention_note, sequence),
        "kernels": sampling.kernels.ops_note,
        "steps": sampling.engine.note,
        "sequence": f"over {sampling.mesh.sp_size} ranks, {sequence.plan}" if sequence else "whole on every rank",
        "processes": f"{sampling.mesh.world_size} ({processor})",
        "samples": f"{len(sampling.choices)}{shares}, seed {flags.seed}",
    }
    print_block("OpenDiT sampling", rows)
    for note in sampling.notes:
        print(f"note: {note}", flush=True)


def save_one(stem: Path, picture: np.ndarray, fps: float) -> None:
    """STEM.png of a picture (H, W, 3), STEM.mp4 of a clip (T, H, W, 3); whole, or not there."""
    if picture.ndim == 4:
        write_mp4(stem.with_name(stem.name + ".mp4"), picture, fps)
    else:
        with replacing(stem.with_name(stem.name + ".png")) as new:
            Image.fromarray(picture).save(new)
