"""Weights out: one safetensors file, or several with an index, as transformers and diffusers write them."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from opendit.checkpoint.tensor_set import TensorSet
from opendit.common.safe_files import remove, replacing, write_whole
from opendit.common.tensor_files import DTYPES, Kinds, nbytes, write_tensors
from opendit.config.checkpoints import PARTS, WHOLE


def write_weights(output: Path, state: Mapping[str, Tensor], metadata: dict[str, str], most_bytes: int) -> list[Path]:
    """Writes ``output``, a .safetensors file, or where its tensors are more than ``most_bytes``
    STEM-00001-of-000NN.safetensors and so on, with STEM.safetensors.index.json. Returns the files, the one that stands
    for the weights first.

    Tensors are read one at a time; each file has the metadata. What there was of the other form under this name is
    removed. Raises OSError.
    """
    kinds = state.kinds if isinstance(state, TensorSet) else kinds_of(state)
    groups = shared_out(kinds, most_bytes)
    stem = output.name.removesuffix(WHOLE)
    index, old = output.with_name(stem + PARTS), parts_of(output)
    if len(groups) == 1:
        with replacing(output) as new:
            write_tensors(new, state, metadata, kinds)
        _remove([index, *old])
        return [output]
    names = [f"{stem}-{i:05d}-of-{len(groups):05d}{WHOLE}" for i in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        with replacing(output.with_name(name)) as new:
            write_tensors(new, state, metadata, {key: kinds[key] for key in group})
    total = sum(nbytes(*kind) for kind in kinds.values())
    places = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"
    write_whole(index, text.encode())
    written = [output.with_name(name) for name in names]
    _remove([output, *(path for path in old if path not in written)])
    return [index, *written]


def parts_of(output: Path) -> list[Path]:
    """The files beside ``output`` with a part of the weights of its name."""
    number = "[0-9]" * 5
    return sorted(output.parent.glob(f"{output.name.removesuffix(WHOLE)}-{number}-of-{number}{WHOLE}"))


def shared_out(kinds: Kinds, most_bytes: int) -> list[list[str]]:
    """The tensors in their order, in groups of at most so many bytes; a tensor that is larger has a group alone. (As
    huggingface_hub does, which would have all tensors in memory.)"""
    groups, group, size = [], [], 0
    for name, kind in kinds.items():
        if nbytes(*kind) > most_bytes:
            groups.append([name])
            continue
        if group and size + nbytes(*kind) > most_bytes:
            groups.append(group)
            group, size = [], 0
        group.append(name)
        size += nbytes(*kind)
    return [*groups, group] if group else groups


def kinds_of(state: Mapping[str, Tensor]) -> Kinds:
    """dtype and shape of every tensor."""
    return {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()}


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            remove(path)
