"""Functions that write tars for tests."""

import io
import tarfile

import numpy as np
from PIL import Image

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
