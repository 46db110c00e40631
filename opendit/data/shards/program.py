"""``preprocess.py shards`` and ``preprocess.py index``."""

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from opendit.common.json_file import open_regular, read_json
from opendit.common.json_models import checked
from opendit.common.safe_files import refuse_links, remove, replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import DataError, hash_parts
from opendit.data.base import name_few
from opendit.data.energon.cooked import load_cooker
from opendit.data.energon.prepared import all_tars, check_count, is_prepared
from opendit.data.files import printable
from opendit.data.latents_index import FORMAT, INDEX, TARS_VERSION, check_indexes, read_indexes
from opendit.data.latents_index import write_index as write_latents_index
from opendit.data.pictures_and_clips import CLIP
from opendit.data.processes import in_processes
from opendit.data.progress import Progress
from opendit.data.shards.dataset import IndexedTar, classes_of
from opendit.data.shards.index import CLASS_NAMES, NAMES_OF_CLASSES, Header, TarIndex, index_of, write_index
from opendit.data.shards.latents import SUFFIXES, arrays_of, choose_arrays
from opendit.data.shards.scan import Fields, scan
from opendit.data.shards.writer import find_entries, is_done, plan_jobs, repack_latents, write_job
from opendit.encoders.vae import HUB, PerChannel
from opendit.encoders.video_vae import codec_scale, latent_frames, video_geometry

_TRIED = 100  # samples, of which the first readable one gives the array's name


def make_shards(data_path: str, output: str, *, shard_size: int = 10**9, num_workers: int = 4) -> None:
    """Pack a folder of pictures, a CSV, or cached latents in safetensors files into tars of up to ``shard_size`` bytes.

    Tars that exist are kept. Raises ValueError, OSError or DataError."""
    path = Path(data_path)
    if path.is_dir() and (indexes := read_indexes(path)) is not None:
        return repack_latents(path, indexes[0], Path(output), shard_size=shard_size, num_workers=num_workers)
    entries, class_names, left_out = find_entries(data_path)
    if left_out:
        print(f"left out {len(left_out):,} files: {name_few(left_out)}")
    if not entries:
        raise DataError(
            f"--data_path {printable(data_path)}: no file of it can be packed; preprocess.py check says "
            "what is wrong with them"
        )
    folder = Path(output)
    jobs = plan_jobs(entries, folder, shard_size)
    names = [job.tar.name for job in jobs]
    refuse_links(folder, [CLASS_NAMES, *names, *(index_of(name).name for name in names)], "--output")
    others = sorted({tar.name for tar in folder.glob("*.tar")} - set(names))
    if others:
        raise ValueError(f"--output {printable(output)} holds other tars: {name_few(others)}; name another folder")
    todo = [job for job in jobs if not is_done(job)]
    _remove_partial(folder)
    if class_names:
        with replacing(folder / CLASS_NAMES, temporary=f"{CLASS_NAMES}.{os.getpid()}.partial") as new:
            write_file(new, iter([json.dumps(class_names, indent=1).encode()]))
    done = sum(len(job.entries) for job in jobs) - sum(len(job.entries) for job in todo)
    with Progress(len(entries), "samples", initial=done, title="packing") as bar:
        for count in in_processes(write_job, todo, num_workers):
            bar.update(count)
    print(f"{len(entries):,} samples in {count_tars(len(jobs))}: train with --data_path {printable(output)}")


def index_folder(
    root: str, *, latents: str | None, energon_cooker: str | None, num_workers: int, force: bool, **of_latents: Any
) -> None:
    """Run ``preprocess.py index`` with its flags' values. of_latents: see ``index_latents``."""
    if latents is None:
        return make_indexes(root, num_workers=num_workers, energon_cooker=energon_cooker, force=force)
    return index_latents(root, latents, num_workers=num_workers, force=force, **of_latents)


def make_indexes(root: str, *, num_workers: int = 4, energon_cooker: str | None = None, force: bool = False) -> None:
    """Make the index of every tar of a folder, or of one tar, that has none or an outdated one; with ``force`` of all.

    In a folder that Energon prepared these are the tars of all splits, read by its field map or by a cooker
    (``module:function``).

    Raises ValueError, OSError or DataError; indexes of the tars before a bad one stay."""
    path, fields, plan, counts = Path(root), None, "", []
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if is_prepared(path):
        if energon_cooker:
            load_cooker(energon_cooker)  # raises what is wrong with it
        prepared = all_tars(path, cooked=energon_cooker is not None)
        fields, plan, counts = prepared.fields, prepared.plan, [count for _, count in prepared.tars]
        tars = [path / name for name, _ in prepared.tars]
    elif energon_cooker:
        raise ValueError(
            f"--energon_cooker {energon_cooker}: DIR {printable(root)} was not prepared by Energon; leave it out"
        )
    elif path.is_dir() and read_indexes(path) is not None:
        raise ValueError(
            f"DIR {printable(root)}: its tars hold latents with their indexes; train with them, or add --latents if "
            "another program made them"
        )
    if not tars:
        raise ValueError(f"DIR {printable(root)} holds no .tar files")
    root_of_all = path if path.is_dir() else path.parent
    indexes = index_tars(tars, fields, plan, num_workers=num_workers, force=force, root=root_of_all)
    for tar, index, count in zip(tars, indexes, counts, strict=False):
        check_count(tar, index, count, f"DIR {printable(root)}")
    headers = [index.header for index in indexes]
    print(
        f"{sum(header.rows for header in headers):,} samples ({_kinds(headers)}) in {count_tars(len(tars))}: train "
        f"with --data_path {printable(root)}"
    )


def index_tars(
    tars: Sequence[Path], fields: Fields | None, plan: str, *, num_workers: int, force: bool, root: Path | None = None
) -> list[TarIndex]:
    """Make the index of every tar that has none, an outdated one or one of another plan; print what is left out.

    root: the folder below which no link is followed (opendit/common/safe_files.py). Raises as :func:`make_indexes`."""
    for folder in {tar.parent for tar in tars}:
        _remove_partial(folder)
    todo = [tar for tar in tars if force or not _is_current(tar, plan)]
    for tar in todo:
        refuse_links(tar.parent, [index_of(tar).name], "DIR")
    with Progress(len(tars), "tars", initial=len(tars) - len(todo), title="indexing") as bar:
        for _ in in_processes(partial(_index, fields=fields, plan=plan, root=root), todo, num_workers):
            bar.update()
    indexes = [TarIndex(index_of(tar)) for tar in tars]
    headers = [index.header for index in indexes]
    if left_out := sum(header.left_out for header in headers):
        examples = [example for header in headers for example in header.examples]
        print(f"left out {left_out:,} samples: {name_few(examples)}")
    return indexes


def _index(tar: Path, fields: Fields | None, plan: str, root: Path | None) -> None:
    write_index(index_of(tar), *scan(tar, fields, plan=plan), root=root)


def _is_current(tar: Path, plan: str) -> bool:
    index = index_of(tar)
    try:
        if index.stat().st_mtime_ns < tar.stat().st_mtime_ns:
            return False
        header = TarIndex(index).header
        return header.tar_bytes == tar.stat().st_size and (not plan or header.plan == plan)
    except (OSError, ValueError):
        return False


def count_tars(number: int) -> str:
    return f"{number:,} tar{'s'[: number != 1]}"


def _kinds(headers: Sequence[Header]) -> str:
    pictures = sum(header.pictures for header in headers)
    clips = sum(header.rows for header in headers) - pictures
    media = " and ".join(f"{count:,} {name}" for count, name in ((clips, "clips"), (pictures, "pictures")) if count)
    words = {"text": "captions", "label": "classes", "none": "neither captions nor classes"}
    return f"{media} with {', '.join(sorted({words[header.conditioning] for header in headers}))}"


def _remove_partial(folder: Path) -> None:
    """Delete unfinished files of processes that have ended."""
    for path in folder.glob("*.partial"):
        found = re.fullmatch(r".+\.(?:tar|index|json)\.(\d+)\.partial", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            remove(path)


# ------------------------------------------------------------------------------------------ latents of other programs


def index_latents(
    root: str,
    form: str,
    *,
    vae: str = "ema",
    image_size: int = 256,
    use_video: bool = False,
    num_frames: int = 16,
    frame_interval: int = 1,
    fps: float | None = None,
    num_workers: int = 4,
    force: bool = False,
) -> None:
    """Make the indexes of a folder of tars with latents of ``form`` (see opendit/data/shards/latents.py).

    A run then reads it like a folder that ``preprocess.py latents`` made. Only the VAE's configuration is read, not its
    weights.

    Raises ValueError, which says what to do, for tars that hold no latents of this form, VAE and size, or not all with
    captions or all with classes; OSError."""
    folder, shown = Path(root), f"DIR {printable(root)}"
    tars = sorted(folder.glob("*.tar")) if folder.is_dir() else []
    if not tars:
        raise ValueError(f"{shown}: holds no .tar files; give --latents a folder of them")
    if is_prepared(folder):
        raise ValueError(f"{shown}: was prepared by Energon; leave --latents out")
    if any("foreign" not in index for index in read_indexes(folder) or []):
        raise ValueError(f"{shown}: preprocess.py latents made these tars and their indexes; train with them")
    if vae not in HUB:
        vae = str(Path(vae).expanduser().resolve())  # for runs started in other folders
    shape, scale, shift = _geometry(vae, image_size, num_frames if use_video else None)
    fields, plan = Fields(medium=SUFFIXES), hash_parts("latents of another program")
    indexes = index_tars(tars, fields, plan, num_workers=num_workers, force=force)
    headers = [index.header for index in indexes]
    conditioning = _conditioning(tars, headers, shown)
    names = _names(tars[0], indexes[0], form, shape, shown)
    shards = [
        {"file": tar.name, "count": header.rows, "bytes": header.tar_bytes, "sha256": header.sha256}
        | ({"shape_key": CLIP} if use_video else {})
        for tar, header in zip(tars, headers, strict=True)
    ]
    index = {
        "count": sum(header.rows for header in headers),
        "class_names": [] if conditioning == "text" else _class_names(folder, tars, indexes, shown),
        "image_size": image_size,
        "vae": vae,
        "scaling_factor": scale,
        "shift_factor": shift,
        "latent_shape": [shape[0] // 2, *shape[1:]],
        "flips": len(names) > 1,
        "shards": shards,
        "conditioning": conditioning,
        "foreign": {"form": form, "array": names[0]} | ({"mirrored": names[1]} if len(names) > 1 else {}),
    }
    if use_video:
        index["video"] = {"num_frames": num_frames, "frame_interval": frame_interval, "short_clips": "skip"}
        index["video"] |= {} if fps is None else {"fps": fps}
    check_indexes({"format": FORMAT, "version": TARS_VERSION, "sizes": [index]}, str(folder / INDEX))
    write_latents_index(folder, TARS_VERSION, [index])
    size, arrays = "x".join(map(str, index["latent_shape"])), " and ".join(map(printable, names)) or ".npy files"
    what, words = "clips" if use_video else "pictures", "captions" if conditioning == "text" else "classes"
    print(
        f"latents ({size}; {form} in {arrays}) of {index['count']:,} {what} with {words} in {count_tars(len(tars))}: "
        f"train with --data_path {printable(root)} --image_size {image_size}"
    )


def _geometry(vae: str, image_size: int, frames: int | None) -> tuple[tuple[int, ...], PerChannel, PerChannel]:
    """Return (2C, [t,] h, w), the scaling factor and the shift factor. Raises ValueError or FileNotFoundError."""
    scale, shift = codec_scale(vae)
    channels, downscale, temporal = video_geometry(vae, 3)
    if image_size % downscale:
        raise ValueError(f"--image_size {image_size}: no multiple of {downscale}; --vae {vae} needs one")
    if frames is None and temporal > 1:
        raise ValueError(f"--vae {vae}: is of clips; add --use_video")
    length = () if frames is None else (latent_frames(frames, temporal, f"--vae {vae}"),)
    side = image_size // downscale
    return (2 * channels, *length, side, side), scale, shift


def _conditioning(tars: list[Path], headers: list[Header], shown: str) -> str:
    """Return "text" or "label"; latents without captions and classes have one class."""
    kinds = {header.conditioning: tar.name for tar, header in zip(tars, headers, strict=True)}
    if len(kinds) > 1:
        words = {"text": "captions", "label": "classes", "none": "neither captions nor classes"}
        each = " and ".join(f"{printable(name)} {words[kind]}" for kind, name in kinds.items())
        raise ValueError(f"{shown}: of its tars has {each}; keep them in folders of their own")
    return "text" if "text" in kinds else "label"


def _class_names(folder: Path, tars: list[Path], indexes: list[TarIndex], shown: str) -> list[str]:
    """Return the class names in the folder, or their numbers. Raises ValueError for a label without a name."""
    path, names = folder / CLASS_NAMES, []
    if path.exists():
        names = checked(read_json(path, NAMES_OF_CLASSES.most_bytes), NAMES_OF_CLASSES, path)
    found = [IndexedTar(str(tar), str(tar), index) for tar, index in zip(tars, indexes, strict=True)]
    return classes_of(shown, found, names)


def _names(tar: Path, index: TarIndex, form: str, shape: tuple[int, ...], shown: str) -> tuple[str, ...]:
    """Return the names from ``choose_arrays`` for the first readable sample of a tar."""
    problem = "no samples"
    with open(open_regular(tar), "rb") as file:
        for row in range(min(_TRIED, index.header.rows)):
            record = index.record(row)
            file.seek(record.medium_at)
            try:
                arrays = arrays_of(file.read(record.medium_bytes), index.header.suffixes[record.suffix], shape)
                return choose_arrays(arrays, form, shape)
            except Exception as error:  # damaged bytes raise any type
                problem = f"{printable(index.key(row))}: {printable(str(error))}"
    raise ValueError(
        f"{shown}: {printable(tar.name)} holds no latents as --latents {form}, --vae and --image_size say ({problem}); "
        "correct the flags, or call the array moments or latents"
    )
