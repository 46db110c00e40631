"""Tars of cached latents, written by ``preprocess.py latents`` or by other programs.

    latents-256-00000-of-00012.tar          latents-256-00000-of-00012.tar.index     index.json
      __opendit__/shard.json                the settings the tar was made with, and the files that couldn't be read
      000000000.safetensors  000000000.txt
      000000001.safetensors  000000001.txt

A sample's number is its row in the original data set. A second member holds its caption (``.txt``) or class (``.cls``).
The safetensors member has the tensors

    moments  (F, 2C, [t,] h, w) float16   mean and standard deviation; F = 2: also of the mirror image
    tokens   (L, D) float16               with captions and an encoder: the caption's tokens, without padding,
    pooled   (P,) float16                 and its pooled vector; bfloat16 is also possible, see ``text_cache``
    features (F, N, W) float16            with --repa: a vision encoder's features of the picture's N tokens
    first_latents (F, C, t, h, w) float16 for an image-to-video model: means of the clip with all frames but the first
                                          made grey,
    first_tokens  (F, L, D) float16       and, if the model has an image encoder, its tokens of the first frame

A folder may hold pictures of several sizes, with separate tars for each size. ``empty-caption.safetensors``: see
``text_cache``.

In tars of another program, a sample's array is in its member ``.npz``, ``.npy`` or ``.safetensors``.
``preprocess.py index DIR --latents FORM`` writes the tars' indexes and an ``index.json`` that describes the arrays, and
``latents.LatentDataset`` reads them in place. FORM is one of the following, where C is the number of the VAE's latent
channels. The values are not yet multiplied by the VAE's scaling factor.

    mean_std     (2C, [t,] h, w)   mean and standard deviation
    mean_logvar  (2C, [t,] h, w)   mean and logarithm of the variance: diffusers' ``latent_dist.parameters``
    sample       (C, [t,] h, w)    the mean, or a latent that was drawn once and is used unchanged each time

A leading batch dimension of 1 is removed. The mirror image of the array NAME, if there is one, is NAME_flip.
"""

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from opendit.common.json_file import open_regular, parse_json
from opendit.common.json_models import parse_text
from opendit.common.safe_files import refuse_links, remove, replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import hash_parts
from opendit.data.latents_index import (
    INDEX,
    LATENTS_SIZES,
    REPAIR,
    SHARD,
    check_indexes,
)
from opendit.data.shards.dataset import IndexedTar
from opendit.data.shards.index import (
    BLOCK,
    ROW,
    Fields,
    TarIndex,
    empty_header,
    index_of,
    member_header,
    members,
    scan,
    write_index,
)
from opendit.data.shards.store import Remote

ABOUT = "__opendit__/shard.json"  # readers of WebDataset's tars skip names with double underscores
SUFFIX = "safetensors"
FIELDS = Fields((SUFFIX,), (("txt",),), (("cls",),), empty=True)
HEADERS = 3 * BLOCK + 512  # bytes of a sample besides its arrays: two members' headers, a class or caption, names
SUFFIXES = ("safetensors", "npz", "npy")
MIRRORED = "_flip"
_USUAL = ("moments", "latents", "latent")  # preferred names of the array, if several have its shape
_TIMES = 128  # maximum bytes of arrays for each latent value, because a small .npz can unpack to any size


def tar_name(image_size: int, shard: int, shards: int) -> str:
    return f"latents-{image_size}-{shard:05d}-of-{shards:05d}.tar"


class CachedSample(NamedTuple):
    """A sample of a tar of latents.

    Attributes:
        row: the sample's row in the original data set.
        tensors: ``moments`` (F, 2C, [t,] h, w) fp16; with an encoder, the caption's ``tokens`` and ``pooled``; with a
            vision encoder ``features``; for an image-to-video model, ``first_latents`` and ``first_tokens``.
        label: the sample's class.
        caption: stored instead of the class, if there is one.
    """

    row: int
    tensors: dict[str, Tensor]
    label: int
    caption: str | None = None


def write_shard(path: Path, samples: Sequence[CachedSample], settings: dict[str, Any], skipped: list[str]) -> str:
    """Write a tar and then its index, each under a temporary name first, and return the tar's SHA-256."""
    refuse_links(path.parent, [path.name, index_of(path).name])
    for left in path.parent.glob(f"{index_of(path).name}.*.partial"):  # left by a killed process
        remove(left)
    about = json.dumps({"settings": settings, "skipped": skipped}, sort_keys=True).encode()
    with replacing(path, temporary=path.name + ".partial") as new:
        sha256 = write_file(new, _blocks(about, samples))["sha256"]
        if samples:
            found = scan(Path(new.name), FIELDS, plan=_plan(settings), sha256=sha256)
            if found[0].rows != len(samples):
                raise ValueError(f"{path}: {found[0].left_out} samples can't be used: {found[0].examples[0]}")
        else:  # none of the tar's source files could be read
            size = os.fstat(new.fileno()).st_size
            header = empty_header(size, sha256, _plan(settings))
            found = header, np.zeros(0, ROW), b""
        remove(index_of(path))
    write_index(index_of(path), *found)
    return sha256


def _plan(settings: dict[str, Any]) -> str:
    return hash_parts(json.dumps(settings, sort_keys=True))


def _blocks(about: bytes, samples: Sequence[CachedSample]) -> Iterator[bytes]:
    """Yield the bytes of a tar, which depend on the samples alone."""
    total = 0
    for name, content in chain([(ABOUT, about)], _members(samples)):
        block = member_header(name, len(content)) + content + bytes(-len(content) % BLOCK)
        yield block
        total += len(block)
    yield bytes(2 * BLOCK + -(total + 2 * BLOCK) % tarfile.RECORDSIZE)


def _members(samples: Sequence[CachedSample]) -> Iterator[tuple[str, bytes]]:
    for row, tensors, label, caption in samples:
        yield f"{row:09d}.{SUFFIX}", save({name: tensor.contiguous() for name, tensor in tensors.items()})
        if caption is None:
            yield f"{row:09d}.cls", str(label).encode()
        else:
            yield f"{row:09d}.txt", caption.encode("utf-8", "replace")


def read_header(path: Path) -> tuple[int, dict[str, Any], list[str]] | None:
    """Return (number of samples, settings, skipped files) of a tar; None if it is not a complete tar written by
    :func:`write_shard`."""
    try:
        header = TarIndex(index_of(path)).header
        with open(open_regular(path), "rb") as file:
            member = next(members(file), None)
            if member is None or member.name != ABOUT or os.fstat(file.fileno()).st_size != header.tar_bytes:
                return None
            file.seek(member.offset_data)
            about = parse_text(file.read(min(member.size, SHARD.most_bytes)).decode(), SHARD, path)
    except (OSError, ValueError):
        return None
    return (header.rows, about["settings"], about["skipped"]) if header.plan == _plan(about["settings"]) else None


def complete_tars(folder: Path, settings: dict[str, Any]) -> set[str]:
    """Return the names of the complete tars of one picture size in a folder.

    Raises ValueError if one was made with other settings."""
    kept = set()
    for path in sorted(folder.glob(f"latents-{settings['image_size']}-*.tar")):
        header = read_header(path)
        if header is None:
            continue  # a damaged tar is recomputed
        other = sorted(key for key in settings if settings.get(key) != header[1].get(key))
        if other:
            changes = (f"{key} {str(header[1].get(key))[:12]} there, {str(settings[key])[:12]} now" for key in other)
            raise ValueError(
                f"--output {folder}: holds latents of other settings ({'; '.join(changes)}); pass another folder or "
                "empty this one"
            )
        kept.add(path.name)
    return kept


def open_tars(folder: Path, index: dict[str, Any]) -> list[IndexedTar]:
    """Open the tars of an index. Raises ValueError, which names a tar that is missing or differs from the index."""
    tars = []
    for shard in index["shards"]:
        path = folder / shard["file"]
        if not path.is_file() or not index_of(path).is_file():
            gone = index_of(path) if path.is_file() else path
            raise ValueError(f"{gone} is missing, or no regular file; {REPAIR}")
        if (size := path.stat().st_size) != shard["bytes"]:
            raise ValueError(f"{path} has {size:,} bytes instead of {shard['bytes']:,}; {REPAIR}")
        tars.append(IndexedTar(str(path), str(path), check_tar(TarIndex(index_of(path)), shard, str(path))))
    return tars


def fetch_latents_indexes(address: str, remote: Remote) -> list[dict[str, Any]] | None:
    """Read the indexes of a folder behind an address; see ``read_indexes``. Raises ValueError, DataError or OSError."""
    name = f"{address.rstrip('/')}/{INDEX}"
    content = None if address.lower().endswith(".tar") else remote.read_if_there(name, LATENTS_SIZES.most_bytes)
    return None if content is None else check_indexes(parse_json(content, name), name)


def check_tar(index: TarIndex, shard: dict[str, Any], name: str) -> TarIndex:
    """Return ``index``. Raises ValueError if the tar differs from ``shard``, its entry in index.json."""
    header = index.header
    if (header.rows, header.tar_bytes, header.sha256) != (shard["count"], shard["bytes"], shard.get("sha256")):
        raise ValueError(f"{index_of(name)} is of another tar than index.json means; {REPAIR}")
    return index


# ------------------------------------------------------------------------------------------ latents of other programs


def arrays_of(
    content: bytes, suffix: str, shape: tuple[int, ...], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the numeric arrays in a member, by name. The array of a ``.npy`` has the name "".

    names: the arrays to unpack; None for all. shape: shape (2C, [t,] h, w) of the latents. Raises ValueError for a
    ``.npz``
    that unpacks to far more than such latents take, and any exception for damaged bytes."""
    if suffix == ".safetensors":
        return load(content)
    if suffix == ".npy":
        return {"": torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))}
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        if (size := sum(member.file_size for member in packed.infolist())) > (most := _TIMES * int(np.prod(shape))):
            raise ValueError(f"its .npz unpacks to {size:,} bytes, more than {most:,}")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files if names is None or name in names}
    return {name: torch.from_numpy(array) for name, array in found.items() if array.dtype.kind in "fi"}


def choose_arrays(arrays: Mapping[str, Tensor], form: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the name of the array of latents, and the name of its mirror image's array if there is one.

    Raises ValueError if no array has the shape, or several without a usual name."""
    stored = _stored_shape(form, shape)
    fits = [name for name in arrays if _fits(arrays[name], stored) and not name.endswith(MIRRORED)]
    chosen = [name for name in _USUAL if name in fits][:1] or fits
    if len(chosen) != 1:
        of = ", ".join(f"{name[:40] or 'a .npy'} {list(array.shape)}" for name, array in arrays.items())
        which = "several of them fit" if fits else f"none is {list(stored)} of floating point"
        raise ValueError(f"it has {of or 'no arrays'}, and {which}")
    mirrored = f"{chosen[0]}{MIRRORED}"
    return (chosen[0], mirrored) if mirrored in arrays and _fits(arrays[mirrored], stored) else (chosen[0],)


def read_moments(content: bytes, suffix: str, foreign: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    """Return the mean and standard deviation (F, 2C, [t,] h, w) fp32 of a sample, and of its mirror image if F is 2.

    foreign: the index's description of these latents: ``form``, ``array`` and, with mirror images, ``mirrored``. Raises
    ValueError for an array that is missing, of another shape or not finite, and as :func:`arrays_of`."""
    names = [foreign[key] for key in ("array", "mirrored") if key in foreign]
    arrays, stored = arrays_of(content, suffix, shape, names), _stored_shape(foreign["form"], shape)
    views = []
    for name in names:
        if name not in arrays:
            raise ValueError(f"it has no array {name!r}")
        if not _fits(arrays[name], stored):
            raise ValueError(f"latents of shape {list(arrays[name].shape)}, not {list(stored)}")
        views.append(_moments(arrays[name].reshape(stored).float(), foreign["form"]))
    found = torch.stack(views)
    if not found.isfinite().all():
        raise ValueError("latents that are not finite")
    return found


def _moments(x: Tensor, form: str) -> Tensor:
    if form == "sample":
        return torch.cat([x, torch.zeros_like(x)])
    if form == "mean_logvar":
        mean, logvar = x.chunk(2)
        return torch.cat([mean, torch.exp(0.5 * logvar.clamp(-30, 20))])  # the limits are diffusers'
    return x


def _stored_shape(form: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] // 2, *shape[1:]) if form == "sample" else shape


def _fits(array: Tensor, shape: tuple[int, ...]) -> bool:
    return array.is_floating_point() and tuple(array.shape) in (shape, (1, *shape))
