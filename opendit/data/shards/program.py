"""``preprocess.py shards`` packs media or cached latents into tars, and ``preprocess.py index`` indexes tars.

All tars are planned before the first one is written, so any process can write any tar."""

import builtins
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from opendit.common.json_file import MIB, open_regular, read_json
from opendit.common.json_models import Count, FileKind, Word, checked, parse_text
from opendit.common.progress import Progress
from opendit.common.safe_files import make_folder, refuse_links, remove, replacing
from opendit.common.tensor_files import open_safetensors, write_file
from opendit.common.utils import DataError, hash_parts, sha256_of
from opendit.data.base import count_media
from opendit.data.captioned_media import find_captions, read_table
from opendit.data.energon import check_count, is_prepared, load_cooker, read_prepared
from opendit.data.files import CLIPS, in_threads, name_few, printable, problem, suffix_of
from opendit.data.latents import (
    EMPTY,
    SUFFIXES,
    CachedSample,
    arrays_of,
    choose_arrays,
    read_header,
    tar_name,
    write_shard,
)
from opendit.data.latents_index import (
    FILES_VERSION,
    FORMAT,
    INDEX,
    REPAIR,
    SHARD,
    VERSION,
    LatentsOfOneSize,
    check_index,
    check_indexes,
    read_indexes,
)
from opendit.data.latents_index import write_index as write_latents_index
from opendit.data.picture_file import picture_suffixes
from opendit.data.pictures_and_clips import CLIP, find_pictures
from opendit.data.processes import in_processes
from opendit.data.shards.dataset import WORDS, IndexedTar, classes_of, conditioning_of
from opendit.data.shards.index import (
    BLOCK,
    CLASS_NAMES,
    Fields,
    Header,
    TarIndex,
    claim_output,
    index_of,
    padded,
    read_class_names,
    scan,
    tar_blocks,
    write_index,
)
from opendit.encoders.vae import HUB, PerChannel, latent_sides
from opendit.encoders.video_vae import codec_scale, latent_frames, video_geometry

_READ = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A sample to pack: a media file, and its caption or class as a second member."""

    key: str
    path: str
    bytes: int  # size of the media file
    changed: int  # modification time of the media file in ns
    ending: str  # the medium's extension in the tar
    beside: str  # the second member's extension: txt or cls
    text: builtins.bytes  # the second member's content


@dataclass(frozen=True)
class TarPlan:
    """A tar to write."""

    tar: Path
    plan: str  # hash of all tars' entries; stored in the tar's index
    entries: list[Entry]


def find_entries(data_path: str) -> tuple[list[Entry], list[str], list[str]]:
    """Return (samples, class names, "path: reason" for files that can't be packed) for a table or folder. With
    captions, there are no class names. Raises ValueError or FileNotFoundError."""
    captioned = find_captions(data_path) if os.path.isdir(data_path) else None
    if captioned is not None and not captioned.has_captions:
        found = find_pictures(data_path)
        class_names, beside = found.class_names, "cls"
        media = [(path, suffix_of(path), str(label)) for path, label in zip(found.paths, found.labels, strict=True)]
    else:
        class_names, beside, media = [], "txt", []
        for row in read_table(data_path) if captioned is None else captioned.rows:
            suffix = suffix_of(str(row.path))
            if suffix not in picture_suffixes() | CLIPS:
                suffix = ".jpg" if row.is_picture else ".mp4"  # decoders ignore the suffix
            media.append((str(row.path), suffix, row.text))
    states = in_threads(lambda medium: _state(medium[0]), media, 16)
    entries, left_out = [], []
    if captioned is not None and captioned.has_captions:
        left_out += [name for names in captioned.left_out.values() for name in names]
    for number, ((path, suffix, text), state) in enumerate(zip(media, states, strict=True)):
        if isinstance(state, str) or not text:
            left_out.append(f"{printable(path)}: {state if isinstance(state, str) else 'empty caption'}")
            continue
        content = text.encode("utf-8", "replace")
        entries.append(Entry(f"{number:09d}", path, *state, suffix[1:], beside, content))
    return entries, class_names, left_out


def _state(path: str) -> tuple[int, int] | str:
    if (why := problem(path)) is not None:
        return why
    state = os.stat(path)
    return (state.st_size, state.st_mtime_ns) if state.st_size else "the file is empty"


def plan_jobs(entries: list[Entry], folder: Path, shard_size: int) -> list[TarPlan]:
    """Divide the entries, in order, into tars of at most ``shard_size`` bytes. A larger entry gets its own tar."""
    cuts, used = [], 0
    for number, entry in enumerate(entries):
        size = 2 * BLOCK + padded(entry.bytes) + padded(len(entry.text))
        if not cuts or used + size > shard_size - 2 * BLOCK:
            cuts.append(number)
            used = 0
        used += size
    lines = [f"{entry.key} {entry.path} {entry.bytes} {entry.changed} {entry.ending}" for entry in entries]
    texts = hash_parts(*(entry.text for entry in entries))
    plan = hash_parts("1", str(shard_size), "\n".join(lines), texts)
    digits = max(5, len(str(len(cuts))))
    return [
        TarPlan(folder / f"shard-{number:0{digits}d}-of-{len(cuts):0{digits}d}.tar", plan, entries[first:last])
        for number, (first, last) in enumerate(zip(cuts, [*cuts[1:], len(entries)], strict=True))
    ]


def is_done(job: TarPlan) -> bool:
    """Return True if the tar and its index are complete. Raises ValueError for an index with another plan."""
    if not index_of(job.tar).exists():
        return False
    header = TarIndex(index_of(job.tar)).header
    if header.plan != job.plan:
        raise ValueError(
            f"--output {job.tar.parent}: {job.tar.name} was made of other files, captions or sizes; name another "
            "folder, or empty this one"
        )
    return job.tar.exists() and job.tar.stat().st_size == header.tar_bytes


def write_job(job: TarPlan) -> int:
    """Write a tar and then its index, both atomically. Return the number of samples. Raises OSError, or ValueError if a
    file has changed since the tars were planned."""
    with replacing(job.tar, temporary=f"{job.tar.name}.{os.getpid()}.partial") as new:
        written = write_file(new, tar_blocks(_members(job.entries)))
        header, rows, keys = scan(Path(new.name), plan=job.plan, sha256=written["sha256"])
        if header.rows != len(job.entries):
            raise ValueError(f"{job.tar.name}: {header.left_out} samples can't be used: {header.examples[0]}")
    write_index(index_of(job.tar), header, rows, keys)
    return header.rows


def _members(entries: list[Entry]) -> Iterator[tuple[str, int, Iterable[bytes]]]:
    for entry in entries:
        yield f"{entry.key}.{entry.ending}", entry.bytes, _content(entry)
        yield f"{entry.key}.{entry.beside}", len(entry.text), (entry.text,)


def _content(entry: Entry) -> Iterator[bytes]:
    left = entry.bytes
    with open(entry.path, "rb", buffering=0) as file:
        while left and (block := file.read(min(left, _READ))):
            left -= len(block)
            yield block
        if left or file.read(1):
            raise ValueError(f"{printable(entry.path)} has changed since the tars were planned; start again")


# ------------------------------------------------------------------------------------------ the commands


_TRIED = 100  # maximum samples to read for finding the latents' array


def make_shards(data_path: str, output: str, *, shard_size: int = 10**9, num_workers: int = 4) -> None:
    """Pack a folder or table into tars of up to ``shard_size`` bytes, or convert latents of version 1. Complete tars
    stay unchanged. Raises ValueError, OSError or DataError."""
    path = Path(data_path)
    if path.is_dir() and holds_old_latents(path):
        return convert_latents(path, Path(output), num_workers=num_workers)
    if path.is_dir() and read_indexes(path) is not None:
        raise ValueError(f"--data_path {printable(data_path)}: these latents lie in tars already; train with them")
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
    claim_output(folder, names, [CLASS_NAMES, *(index_of(name).name for name in names)])
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


def make_indexes(
    root: str,
    *,
    latents: str | None = None,
    num_workers: int = 4,
    energon_cooker: str | None = None,
    force: bool = False,
    **of_latents: Any,
) -> None:
    """Run ``preprocess.py index`` with its flags as arguments: index a tar, or a folder's tars with missing or outdated
    indexes. force: index all tars. latents, of_latents: arguments of :func:`index_latents`.

    In a folder from Energon, the tars of all splits are indexed, by the folder's field map or by a cooker
    (``module:function``). Raises ValueError, OSError or DataError. Indexes written before the error remain."""
    if latents is not None:
        return index_latents(root, latents, num_workers=num_workers, force=force, **of_latents)
    path, fields, plan, counts = Path(root), None, "", []
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if is_prepared(path):
        if energon_cooker:
            load_cooker(energon_cooker)  # raises ValueError for an unusable cooker
        prepared = read_prepared(path, f"DIR {printable(path)}", splits=None, cooked=energon_cooker is not None)
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
    """Index every tar whose index is missing, outdated or of another plan. Print the samples that are left out. root:
    follow no link below this folder. Raises as :func:`make_indexes`."""
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
    return (
        f"{count_media(clips, pictures)} with {', '.join(sorted({WORDS[header.conditioning] for header in headers}))}"
    )


def _remove_partial(folder: Path) -> None:
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
    """Index a folder of tars with another program's latents. form: see opendit/data/latents.py. The VAE's configuration
    is read, but not its weights. Raises OSError. Raises ValueError, with the fix, if latents do not fit form, VAE and
    size, or if the tars mix captions and classes."""
    folder, shown = Path(root), f"DIR {printable(root)}"
    tars = sorted(folder.glob("*.tar")) if folder.is_dir() else []
    if not tars:
        raise ValueError(f"{shown}: holds no .tar files; give --latents a folder of them")
    if is_prepared(folder):
        raise ValueError(f"{shown}: was prepared by Energon; leave --latents out")
    if any("foreign" not in index for index in read_indexes(folder) or []):
        raise ValueError(f"{shown}: preprocess.py latents made these tars and their indexes; train with them")
    if vae not in HUB:
        vae = str(Path(vae).expanduser().resolve())  # valid in any working directory
    shape, scale, shift = _geometry(vae, image_size, num_frames if use_video else None)
    fields, plan = Fields(medium=SUFFIXES), hash_parts("latents of another program")
    indexes = index_tars(tars, fields, plan, num_workers=num_workers, force=force)
    headers = [index.header for index in indexes]
    found = [IndexedTar(str(tar), index) for tar, index in zip(tars, indexes, strict=True)]
    conditioning = conditioning_of(shown, found)
    names = _names(tars[0], indexes[0], form, shape, shown)
    shards = [
        {"file": tar.name, "count": header.rows, "bytes": header.tar_bytes, "sha256": header.sha256}
        | ({"shape_key": CLIP} if use_video else {})
        for tar, header in zip(tars, headers, strict=True)
    ]
    index = {
        "count": sum(header.rows for header in headers),
        "class_names": [] if conditioning == "text" else classes_of(shown, found, read_class_names(folder)),
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
    check_indexes({"format": FORMAT, "version": VERSION, "sizes": [index]}, str(folder / INDEX))
    write_latents_index(folder, [index])
    size, arrays = "x".join(map(str, index["latent_shape"])), " and ".join(map(printable, names)) or ".npy files"
    what, words = "clips" if use_video else "pictures", "captions" if conditioning == "text" else "classes"
    print(
        f"latents ({size}; {form} in {arrays}) of {index['count']:,} {what} with {words} in {count_tars(len(tars))}: "
        f"train with --data_path {printable(root)} --image_size {image_size}"
    )


def _geometry(vae: str, image_size: int, frames: int | None) -> tuple[tuple[int, ...], PerChannel, PerChannel]:
    """Return ((2C, [t,] h, w), scaling factor, shift factor). Raises ValueError or FileNotFoundError."""
    scale, shift = codec_scale(vae)
    channels, downscale, temporal = video_geometry(vae, 3)
    sides = latent_sides(vae, downscale, image_size, image_size)
    if frames is None and temporal > 1:
        raise ValueError(f"--vae {vae}: is of clips; add --use_video")
    length = () if frames is None else (latent_frames(frames, temporal, f"--vae {vae}"),)
    return (2 * channels, *length, *sides), scale, shift


def _names(tar: Path, index: TarIndex, form: str, shape: tuple[int, ...], shown: str) -> tuple[str, ...]:
    """Return ``choose_arrays`` for the first sample with such latents. Raises ValueError if ``_TRIED`` samples have
    none."""
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


# ------------------------------------------------------------------------------------------ latents of early versions

# A folder of version 1 holds latents-00000-of-00012.safetensors, ... and an index.json for one picture size. A file
# with n samples has the tensors moments (n, F, 2C, [t,] h, w) float16 (see opendit.data.latents), labels and rows (n,)
# int64. With captions, it has captions (bytes,) uint8 in UTF-8 with caption_ends (n,). With a text encoder, it has
# tokens (all captions' tokens, D) with token_ends (n,), and pooled (n, P). The metadata are the settings and the
# unreadable files.
_KEY = "opendit"  # the only metadata key in a file


class LatentsIndex(LatentsOfOneSize):
    """The index.json of version 1."""

    format: Word
    version: Count


LATENTS_INDEX = FileKind(LatentsIndex, 32 * MIB)


@dataclass(frozen=True)
class LatentsTar:
    """A tar to write from a safetensors file."""

    path: Path
    file: dict[str, Any]  # the safetensors file's entry in the index
    # content of the tar's first member
    settings: dict[str, Any]
    skipped: list[str]


def holds_old_latents(folder: Path) -> bool:
    try:
        index = read_json(folder / INDEX, LATENTS_INDEX.most_bytes)
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and (index.get("format"), index.get("version")) == (FORMAT, FILES_VERSION)


def convert_latents(folder: Path, output: Path, *, num_workers: int) -> None:
    """Write a folder's latents as tars in ``output``, one for each file. Existing tars stay, so an interrupted
    conversion continues. Raises ValueError for an invalid index or other tars in ``output``, and DataError for damaged
    files."""
    index = checked(read_json(folder / INDEX, LATENTS_INDEX.most_bytes), LATENTS_INDEX, folder / INDEX)
    check_index(index, folder / INDEX)
    del index["format"], index["version"]
    files, plans = sorted(index["shards"], key=lambda file: file.get("shape_key", 0)), []
    for number, file in enumerate(files):
        header, name = _header(folder / file["file"]), tar_name(index["image_size"], number, len(files))
        plans.append(LatentsTar(output / name, file, header["settings"] | {"version": VERSION}, header["skipped"]))
    make_folder(output)
    claim_output(output, [plan.path.name for plan in plans], [INDEX, EMPTY])
    done = [plan for plan in plans if (found := read_header(plan.path)) is not None and found[1] == plan.settings]
    todo = [plan for plan in plans if plan not in done]
    with Progress(index["count"], "samples", initial=sum(plan.file["count"] for plan in done), title="packing") as bar:
        for count in in_processes(partial(_write, folder=folder), todo, num_workers):
            bar.update(count)
    if "text" in index:
        with replacing(output / EMPTY) as new, open(folder / EMPTY, "rb") as old:
            shutil.copyfileobj(old, new)
        index["checksums"] = {EMPTY: sha256_of(output / EMPTY)}
    shards = [
        {**plan.file, "file": plan.path.name, "bytes": plan.path.stat().st_size, "sha256": sha256_of(plan.path)}
        for plan in plans
    ]
    write_latents_index(output, [{**index, "settings": plans[0].settings, "shards": shards}])
    print(f"{index['count']:,} latents in {len(plans):,} tars: train with --data_path {printable(output)}")


def _header(path: Path) -> dict[str, Any]:
    """Return the settings and the skipped files of a safetensors file. Raises DataError."""
    try:
        with open_safetensors(path) as file:
            return parse_text((file.metadata() or {}).get(_KEY, ""), SHARD, path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is missing or damaged; {REPAIR}") from error


def _write(plan: LatentsTar, folder: Path) -> int:
    path, count = folder / plan.file["file"], plan.file["count"]
    if "sha256" in plan.file and sha256_of(path) != plan.file["sha256"]:
        raise DataError(f"{path} is damaged: its checksum is not the index's; {REPAIR}")
    try:
        with open_safetensors(path) as file:
            samples = list(_samples({name: file.get_tensor(name) for name in file.keys()}))  # noqa: SIM118
        if len(samples) != count:
            raise ValueError(f"{len(samples):,} samples, {INDEX} says {count:,}")
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}; {REPAIR}") from error
    write_shard(plan.path, samples, plan.settings, plan.skipped)
    return count


def _samples(tensors: dict[str, Tensor]) -> Iterator[CachedSample]:
    """Yield a file's samples. Raises KeyError, ValueError or RuntimeError if its tensors contradict each other."""
    rows, labels = tensors["rows"].tolist(), tensors["labels"].tolist()
    captions: Iterable[str | None] = repeat(None, len(rows))
    if "captions" in tensors:
        captions = (
            text.numpy().tobytes().decode("utf-8", "surrogatepass")
            for text in _cut(tensors["captions"], tensors["caption_ends"])
        )
    parts = {"moments": tensors["moments"]}
    if "tokens" in tensors:
        parts |= {"tokens": _cut(tensors["tokens"], tensors["token_ends"]), "pooled": tensors["pooled"]}
    for row, label, caption, *own in zip(rows, labels, captions, *parts.values(), strict=True):
        yield CachedSample(row, dict(zip(parts, own, strict=True)), label, caption)


def _cut(joined: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return joined.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
