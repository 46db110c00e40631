"""Checks a folder of cached latents at the start of a run, from its index and the headers of its shards.

A cache may be a stranger's, or have been copied halfway; what is wrong with it is told before the first step, in one
line that names the file. The contents' checksums are compared later, beside the training (opendit.data.verification).
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from opendit.common.tensor_files import open_safetensors

_SMALL = ("labels", "captions", "caption_ends", "token_ends")  # read whole: a few bytes a sample
REPAIR = "copy it again or run the preprocess.py command that made it"


class ShardLayout(NamedTuple):
    """The contents that every shard of an index must have: latents of ``shape`` (2C, [t,] h, w), ``views`` of each
    picture, labels below ``classes``, captions if there are no classes (0), and embeddings of up to ``max_tokens``
    (0: none)."""

    shape: tuple[int, ...]
    views: int
    classes: int
    max_tokens: int


def check_index(index: dict[str, Any], path: Path) -> None:
    """Raises ValueError if the parts of an index, each of which keeps its rule, do not go together."""

    def require(right: bool, problem: str) -> None:
        if not right:
            raise ValueError(f"{path}: {problem}; {REPAIR}")

    shards, shape = index["shards"], index["latent_shape"]
    counted = sum(shard["count"] for shard in shards)
    require(index["count"] == counted, f"count is {index['count']:,}, its shards' counts are {counted:,} in all")
    require(counted > 0, "count is 0: it holds no samples")
    require(len({shard["file"] for shard in shards}) == len(shards), "shards name a file twice")
    require((len(shape) == 4) == ("video" in index), f"latent_shape is {shape}, which is not that of its video field")
    for key in ("scaling_factor", "shift_factor"):
        values = index[key]
        fits = not isinstance(values, list) or len(values) == shape[0]
        require(fits, f"{key} is not one number, nor one for each of {shape[0]} channels")
    text = index.get("conditioning", "label") == "text"
    require(text or "text" not in index, "text is there, but conditioning is not text")
    require(text or bool(index["class_names"]), "class_names is empty")


def layout_of(index: dict[str, Any]) -> ShardLayout:
    channels, *sides = index["latent_shape"]
    text = index.get("conditioning", "label") == "text"
    classes = 0 if text else len(index["class_names"])
    max_tokens = index["text"]["max_tokens"] if "text" in index else 0
    return ShardLayout((2 * channels, *sides), 2 if index["flips"] else 1, classes, max_tokens)


def read_shard(folder: Path, shard: dict[str, Any], layout: ShardLayout) -> dict[str, np.ndarray]:
    """The small tensors of a shard, whose file, size, tensors and shapes must be those that the index says.

    Raises ValueError naming the file and what is wrong."""
    path = folder / shard["file"]
    if not path.is_file():
        raise ValueError(f"{path} is missing, or no regular file; {REPAIR}")
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to a file outside of its folder; put the file itself there")
    size = path.stat().st_size
    if size != shard["bytes"]:
        raise ValueError(f"{path} has {size:,} bytes instead of {shard['bytes']:,}; {REPAIR}")
    with open_safetensors(path, "np") as file:
        try:
            _check_header(file, shard["count"], layout)
            small = {name: file.get_tensor(name) for name in file.keys() if name in _SMALL}  # noqa: SIM118
            _check_values(small, file, layout)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; {REPAIR}") from error
    return small


def _check_header(file: safe_open, rows: int, layout: ShardLayout) -> None:
    """Raises ValueError unless a shard has the tensors of ``rows`` samples; None stands for any length."""
    moments = (rows, layout.views, *layout.shape)
    wanted = {"moments": ("F16", moments), "labels": ("I64", (rows,)), "rows": ("I64", (rows,))}
    if not layout.classes:
        wanted |= {"captions": ("U8", (None,)), "caption_ends": ("I64", (rows,))}
    if layout.max_tokens:
        wanted |= {"tokens": ("F16", (None, None)), "token_ends": ("I64", (rows,)), "pooled": ("F16", (rows, None))}
    names = set(file.keys())
    for name in sorted(names ^ wanted.keys()):
        raise ValueError(f"tensor {name[:100]!r} is {'not expected' if name in names else 'missing'}")
    for name, (dtype, shape) in wanted.items():
        part = file.get_slice(name)
        found = part.get_shape()
        if name == "moments" and len(shape) == len(found) == 6 and found[3] == 1:
            shape = (*shape[:3], 1, *shape[4:])  # pictures among clips have one frame
        fits = len(found) == len(shape) and all(b in (None, a) for a, b in zip(found, shape, strict=True))
        if part.get_dtype() != dtype or not fits:
            expected = ["any" if side is None else side for side in shape]
            raise ValueError(f"{name} is {part.get_dtype()} {found}, not {dtype} {expected}")


def _check_values(small: dict[str, np.ndarray], file: safe_open, layout: ShardLayout) -> None:
    """Raises ValueError for labels without a class, captions that are no UTF-8, and ends that are no ends."""
    labels = small["labels"]
    wrong = (labels < 0) | (labels >= layout.classes)
    if layout.classes and wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"labels are {labels.min()} to {labels.max()}, of {layout.classes:,} classes (sample {first:,} has "
            f"{labels[first]})"
        )
    if not layout.classes:
        _check_ends("caption_ends", small["caption_ends"], len(small["captions"]))
        text, starts = small["captions"], small["caption_ends"][:-1]
        inside = starts[starts < len(text)]
        try:
            text.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ValueError(f"captions are not UTF-8 at byte {error.start}") from error
        if ((text[inside] & 0xC0) == 0x80).any():
            raise ValueError("caption_ends cut a character in two")
    if layout.max_tokens:
        ends = small["token_ends"]
        rows, width = file.get_slice("tokens").get_shape()
        _check_ends("token_ends", ends, rows)
        if len(ends) and np.diff(ends, prepend=0).max() > layout.max_tokens:
            raise ValueError(f"token_ends give a caption more than {layout.max_tokens} tokens")
        if file.get_slice("pooled").get_shape()[1] != width:
            raise ValueError("tokens and pooled are not of one width")


def _check_ends(name: str, ends: np.ndarray, total: int) -> None:
    last = ends[-1] if len(ends) else 0
    if last != total or (ends < 0).any() or (np.diff(ends) < 0).any():
        raise ValueError(f"{name} do not rise to {total:,}")
