"""Untrusted picture files: the time and memory that they cost, and what they may open."""

import io
import os
import socket
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from opendit.data.base import BadSample
from opendit.data.picture_file import read_picture
from tests.data.test_picture_file import noise, png, reason


def run_apart(code, *arguments, memory=None):
    """Run code in a separate process and return what it prints. ``memory`` is how many bytes of address space the
    process may add after its start."""
    limit = f"""
import resource
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + {memory}, pages + {memory}))
"""
    start = "import sys, resource\nfrom opendit.data.picture_file import *\nfrom opendit.data.base import BadSample\n"
    start += "picture_suffixes()\n"
    code = start + (limit if memory else "") + code
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_thin_picture_takes_no_memory(tmp_path):
    """If enlarged before the crop, the first picture would have 4 billion pixels."""
    paths = [png(tmp_path / "tall.png", 1, 60000), png(tmp_path / "wide.png", 60000, 2)]
    assert paths[0].stat().st_size < 500
    code = """
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    for size in (64, 256, 1024):
        assert center_crop(read_picture(path), size).size == (size, size)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run_apart(code, *paths)) < 60_000  # KB


def test_too_many_pixels_are_refused_unread(tmp_path):
    """The files have a megabyte at most but would fill the memory. They are read with 300 MB."""
    cases = {
        "declared.png": "more than the 178,956,970 of the largest picture that is read",
        "true.png": "more than the 178,956,970",
        "canvas.gif": "more than the 178,956,970",
        "lying.bmp": "more than the 178,956,970",
        "text.png": "Decompressed data too large",
        "tags.tif": "",  # read, or refused as an unknown format
    }
    png(tmp_path / "declared.png", 2**31 - 1, 2**31 - 1, rows=0)
    png(tmp_path / "true.png", 400_000, 500, depth=1, colors=0)
    (tmp_path / "canvas.gif").write_bytes(b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;")
    data = io.BytesIO()
    Image.new("RGB", (8, 8)).save(data, "BMP")
    data = bytearray(data.getvalue())
    data[18:26] = struct.pack("<ii", 60000, 60000)
    (tmp_path / "lying.bmp").write_bytes(data)
    text = b"Comment\0\0" + zlib.compress(bytes(200_000_000), 1)
    text = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    png(tmp_path / "text.png", 8, 8, extra=text)
    Image.new("L", (8, 8)).save(tmp_path / "tags.tif", tiffinfo={270: "x" * 50})
    data = bytearray((tmp_path / "tags.tif").read_bytes())
    at = data.index(struct.pack("<HH", 270, 2))
    data[at + 4 : at + 8] = struct.pack("<I", 2**32 - 2)  # an entry that declares 4 GB of numbers
    (tmp_path / "tags.tif").write_bytes(data)
    code = """
for path in sys.argv[1:]:
    try:
        print(f"{path}: {read_picture(path).size}")
    except BadSample as bad:
        print(bad)
"""
    lines = run_apart(code, *(tmp_path / name for name in cases), memory=300 * 2**20).splitlines()
    assert len(lines) == len(cases)
    for line, (name, says) in zip(lines, cases.items(), strict=True):
        assert line.startswith(f"{tmp_path / name}: ") and says in line


def test_a_picture_for_which_memory_is_short_is_a_bad_one(tmp_path):
    path = png(tmp_path / "large.png", 7000, 7000, level=1)
    code = """
try:
    read_picture(sys.argv[1])
except BadSample as bad:
    print(bad)
"""
    assert run_apart(code, path, memory=100 * 2**20) == f"{path}: there is not enough memory to decode it"


def test_a_jpeg_of_thousands_of_scans(tmp_path):
    """Each scan has only some bytes but covers all pixels."""
    path = tmp_path / "scans.jpg"
    Image.new("L", (1500, 1000)).save(path, progressive=True)
    data = path.read_bytes()
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff\xda", first + 2)
    path.write_bytes(data[:second] + data[first:second] * 3000 + data[second:])
    begin = time.monotonic()
    assert "scans, more than 500" in reason(path)
    assert time.monotonic() - begin < 5
    sound = tmp_path / "sound.jpg"
    noise(1500, 1000).save(sound, progressive=True)
    assert np.array_equal(np.asarray(read_picture(str(sound))), np.asarray(Image.open(sound)))


def test_a_slow_file_is_given_up(tmp_path):
    """Pillow reads decimal numbers in Python, at 1 s per million pixels, and a file may have 178 million."""
    line = "7 " * 3000 + "\n"
    (tmp_path / "slow.ppm").write_text("P3\n1000 1000\n255\n" + line * 1000)
    begin = time.monotonic()
    assert reason(tmp_path / "slow.ppm", time_limit=0.1) == "not read within 0.1 seconds"
    assert time.monotonic() - begin < 10


def test_postscript_is_not_run(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **options: pytest.fail("a program was run"))
    Image.new("RGB", (8, 8)).save(tmp_path / "program.eps")
    (tmp_path / "program.eps").rename(tmp_path / "program.png")
    assert reason(tmp_path / "program.png") == "not a picture in any known format"


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.png"))
        (tmp_path / "loose.png").symlink_to(tmp_path / "nowhere.png")
        (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
        (tmp_path / "device.png").symlink_to("/dev/zero")
        says = {
            "pipe": "a named pipe, not a file",
            "folder": "a folder, not a file",
            "socket": "a socket, not a file",
            "device": "a device, not a file",
            "loose": "a link to a file that doesn't exist",
            "circle": "Too many levels of symbolic links",
            "none": "No such file or directory",
        }
        assert {name: reason(tmp_path / f"{name}.png") for name in says} == says


def test_names_are_shown_on_one_line(tmp_path):
    name = os.fsdecode(b"caf\xe9\n\x1b[31m.png")
    (tmp_path / name).write_text("no picture")
    with pytest.raises(BadSample) as caught:
        read_picture(str(tmp_path / name))
    shown = f"{tmp_path}/caf\\xe9\\n\\x1b[31m.png: not a picture in any known format"
    assert str(caught.value) == shown and shown.isprintable()
    noise(8, 8).save(tmp_path / "sound.png")
    (tmp_path / "sound.png").rename(tmp_path / name)
    assert read_picture(str(tmp_path / name)).size == (8, 8)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_files_are_pictures_or_bad_samples(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    kind = data.draw(
        st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP", "PPM", "TGA", "ICO", "QOI", "JPEG2000"])
    )
    file = io.BytesIO()
    noise(16, 16).save(file, kind)
    content = bytearray(file.getvalue())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, min(len(content), 200) - 1))] = data.draw(st.integers(0, 255))
    path = folder / "damaged"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        assert read_picture(str(path), time_limit=20).mode == "RGB"
    except BadSample as bad:
        assert str(bad).startswith(f"{path}: ") and len(str(bad)) < len(str(path)) + 220
