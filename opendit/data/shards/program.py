"""``preprocess.py shards`` and ``preprocess.py index``."""

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from opendit.common.safe_files import refuse_links, remove, replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import DataError
from opendit.data.base import name_few
from opendit.data.energon.cooked import load_cooker
from opendit.data.energon.indexes import check_count
from opendit.data.energon.prepared import all_tars, is_prepared
from opendit.data.files import printable
from opendit.data.latents_index import read_indexes
from opendit.data.processes import in_processes
from opendit.data.progress import Progress
from opendit.data.shards.fields import Fields
from opendit.data.shards.index import CLASS_NAMES, Header, TarIndex, index_of, write_index
from opendit.data.shards.scan import scan
from opendit.data.shards.writer import find_entries, is_done, plan_jobs, write_job


def make_shards(data_path: str, output: str, *, shard_size: int = 10**9, num_workers: int = 4) -> None:
    """Packs a folder of pictures, a CSV, or cached latents in safetensors files into tars of at most ``shard_size``
    bytes. What is there is kept.

    Raises ValueError, OSError or DataError."""
    path = Path(data_path)
    if path.is_dir() and (indexes := read_indexes(path)) is not None:
        from opendit.data.shards.repack import repack_latents  # torch, which packing files does without

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
    """``preprocess.py index`` with its flags' values. of_latents: as of ``index_latents``."""
    if latents is None:
        return make_indexes(root, num_workers=num_workers, energon_cooker=energon_cooker, force=force)
    from opendit.data.shards.index_latents import index_latents  # torch, which indexing media does without

    return index_latents(root, latents, num_workers=num_workers, force=force, **of_latents)


def make_indexes(root: str, *, num_workers: int = 4, energon_cooker: str | None = None, force: bool = False) -> None:
    """Makes the index of every tar of a folder, or of one tar, that has none or a stale one; ``force``: of all. Of a
    folder that Energon prepared the tars of all splits, as its field map or a cooker (``module:function``) has them.

    Raises ValueError, OSError or DataError; indexes of the tars before a bad one stay."""
    path, fields, plan, counts = Path(root), None, "", []
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if is_prepared(path):
        if energon_cooker:
            load_cooker(energon_cooker)  # says what is wrong with it
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
    """Makes the index of every tar that has none or a stale one, or one of another plan; says what is left out.

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
    """Files that a process of ours began and that is gone."""
    for path in folder.glob("*.partial"):
        found = re.fullmatch(r".+\.(?:tar|index|json)\.(\d+)\.partial", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            remove(path)
