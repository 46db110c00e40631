"""Functions that write tars for tests."""

import io
import tarfile

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load

from opendit.data.shards.index import Header, empty_header


def picture(seed: int, suffix: str = "png", size=(20, 17)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[suffix])
    return file.getvalue()


def write_tar(path, members, **options):
    """Write a tar with ``members``, (name, bytes), in this order."""
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def captioned(count, first=0):
    names = range(first, first + count)
    return [part for i in names for part in ((f"{i:04d}.png", picture(i)), (f"{i:04d}.txt", b"a %d" % i))]


def header_of(**told) -> Header:
    """Return the header of an index with one class, and with these fields replaced."""
    return empty_header(0, "", "").model_copy(
        update={"checked": False, "conditioning": "label", "num_classes": 1, **told}
    )


def latents_in(tar) -> dict[int, tuple[dict[str, torch.Tensor], bytes]]:
    """Return row -> (tensors, class or caption) of the samples in a tar of latents."""
    found: dict[int, list] = {}
    with tarfile.open(tar) as members:
        for member in members:
            key, ending = member.name.split(".", 1)
            if key.isdigit():
                content = members.extractfile(member).read()
                found.setdefault(int(key), []).append(load(content) if ending == "safetensors" else content)
    return {row: tuple(parts) for row, parts in found.items()}


def latents_of(folder) -> dict[int, tuple[dict[str, torch.Tensor], bytes]]:
    """Return the samples of all tars in a folder, in the order of the tars; see :func:`latents_in`."""
    return {row: parts for tar in sorted(folder.glob("*.tar")) for row, parts in latents_in(tar).items()}
