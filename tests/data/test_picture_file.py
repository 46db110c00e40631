"""Pictures from strangers: the crop, every mode and format, and files made to take all memory or for ever."""

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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from opendit.data.base import BadSample
from opendit.data.picture_file import center_crop, picture_suffixes, read_picture


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(path, width, height, depth=8, colors=2, rows=None, extra=b"", level=9):
    """A PNG of black pixels with ``rows`` of its ``height`` rows, ``extra`` chunks before them."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    compress = zlib.compressobj(level)
    row = bytes(1 + (width * {0: 1, 2: 3, 6: 4}[colors] * depth + 7) // 8)
    data = b"".join(compress.compress(row) for _ in range(height if rows is None else rows)) + compress.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colors, 0, 0, 0)
    parts = chunk(b"IHDR", header) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    return path


def tiff(path, array, sample_format=None):
    """An uncompressed grey TIFF of any kind of numbers: more than Pillow itself writes."""
    height, width = array.shape
    data = array.tobytes()
    tags = [(256, width), (257, height), (258, array.itemsize * 8), (259, 1), (262, 1), (273, 8), (277, 1)]
    tags += [(278, height), (279, len(data))] + ([(339, sample_format)] if sample_format else [])
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    path.write_bytes(
        b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)
    )
    return path


def reason(path, **options):
    with pytest.raises(BadSample) as caught:
        read_picture(str(path), **options)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    return str(caught.value)[len(f"{path}: ") :]


# ---------------------------------------------------------------- the crop


def adm_crop(image, size):
    """guided-diffusion's center_crop_arr, as published."""
    while min(*image.size) >= 2 * size:
        image = image.resize(tuple(x // 2 for x in image.size), resample=Image.Resampling.BOX)
    scale = size / min(*image.size)
    image = image.resize(tuple(round(x * scale) for x in image.size), resample=Image.Resampling.BICUBIC)
    array = np.array(image)
    y, x = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[y : y + size, x : x + size]


@settings(max_examples=40, deadline=None)
@given(st.integers(32, 2100), st.integers(32, 2100), st.sampled_from([8, 32, 64, 256]))
@example(2100, 32, 32)
@example(32, 2100, 256)
@example(511, 512, 256)
@example(256, 256, 256)
def test_crop_keeps_the_centre_and_the_scale(width, height, size):
    """On a linear ramp, every output pixel must show the value at its place in the centred square."""
    ramp_x = np.broadcast_to((np.arange(width) + 0.5) / width * 255, (height, width))
    ramp_y = np.broadcast_to(((np.arange(height) + 0.5) / height * 255)[:, None], (height, width))
    image = Image.fromarray(np.stack((ramp_x, ramp_y, ramp_x), -1).round().astype(np.uint8))
    out = np.asarray(center_crop(image, size)).astype(float)
    assert out.shape == (size, size, 3)
    step = min(width, height) / size  # source pixels an output pixel
    middle = slice(size // 4, size - size // 4)  # away from the border, where bicubic has no neighbours
    for axis, length in ((0, width), (1, height)):
        source = length / 2 + (np.arange(size) + 0.5 - size / 2) * step
        got = out[..., axis].mean(axis=axis)  # average over the direction along which the ramp is constant
        error = np.abs(got - source / length * 255)[middle]
        # One output pixel: sizes are rounded and the crop starts at a whole pixel. Two grey levels: rounding.
        assert error.max() <= step / length * 255 + 2


sides = st.integers(1, 700)


@settings(max_examples=150, deadline=None)
@given(sides, sides, st.sampled_from([8, 16, 33, 64, 256]))
@example(500, 375, 256)
@example(63, 64, 32)
@example(256, 1000, 256)
@example(1025, 513, 256)
@example(32, 32, 256)
@example(16, 256, 32)
@example(17, 1, 16)
@example(700, 43, 64)
def test_crop_equals_adm(width, height, size):
    """To the bit for every picture that isn't a strip, and for strips that are made smaller."""
    image = noise(width, height, seed=width * height)
    found, expected = np.asarray(center_crop(image, size)), adm_crop(image, size)
    if max(image.size) <= 16 * min(image.size) or min(image.size) >= size:
        assert np.array_equal(found, expected)
    else:
        assert_strip(found, expected)


def assert_strip(found, expected):
    difference = np.abs(found.astype(int) - expected)
    assert found.shape == expected.shape and (difference > 1).mean() < 0.001 and (difference > 0).mean() < 0.02


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (3, 3001), (2999, 7), (31, 1777), (1700, 100), (99, 1777)])
@pytest.mark.parametrize("target", [16, 32, 101])
def test_strips_are_cropped_before_they_are_enlarged(size, target):
    image = noise(*size)
    assert_strip(np.asarray(center_crop(image, target)), adm_crop(image, target))


# ---------------------------------------------------------------- formats


def test_every_mode_becomes_upright_rgb(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    rgb = Image.fromarray(array)
    grey = rgb.convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    palette = rgb.quantize(16)
    grey_rgb = np.asarray(grey.convert("RGB"))
    cases = {
        "rgb.png": (rgb, array, 0),
        "grey.png": (grey, grey_rgb, 0),
        "deep.png": (deep, grey_rgb, 0),
        "deep.tif": (deep, grey_rgb, 0),
        "int.tif": (Image.fromarray(np.asarray(grey).astype(np.int32) * 257), grey_rgb, 0),
        "rgba.png": (rgb.convert("RGBA"), array, 0),
        "la.png": (grey.convert("LA"), grey_rgb, 0),
        "palette.png": (palette, np.asarray(palette.convert("RGB")), 0),
        "bits.png": (grey.convert("1"), np.asarray(grey.convert("1").convert("RGB")), 0),
        "lossless.webp": (rgb, array, 0),
        "cmyk.tif": (rgb.convert("CMYK"), array, 3),
    }
    for name, (image, expected, tolerance) in cases.items():
        image.save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
        found = read_picture(str(tmp_path / name))
        assert found.mode == "RGB", name
        assert np.abs(np.asarray(found).astype(int) - expected).max() <= tolerance, name


def test_transparent_palette_and_animation(tmp_path, recwarn):
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 250, 120, 60] + [0] * 750)
    palette.save(tmp_path / "t.png", transparency=b"\x80\x80")
    # Half of it, and white shines through.
    assert read_picture(str(tmp_path / "t.png")).getpixel((3, 3)) == (252, 187, 157)
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 255, 0))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert read_picture(str(tmp_path / "a.gif")).getpixel((3, 3)) == (255, 0, 0)
    assert not recwarn.list


def test_exif_rotation(tmp_path):
    image = noise(20, 12)
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90 degrees clockwise to view"
    image.save(tmp_path / "r.png", exif=exif)
    found = read_picture(str(tmp_path / "r.png"))
    assert np.array_equal(np.asarray(found), np.rot90(np.asarray(image), -1))


def expected_bytes(values, white, low=0):
    """The scale by its definition, in numpy's doubles."""
    return np.round((values.astype(np.float64) - low) * 255 / (white - low)).astype(int)


ramp = np.linspace(0, 1, 12 * 20).reshape(12, 20)


@pytest.mark.parametrize(
    ("values", "sample_format", "white", "low"),
    [
        ((ramp * 65535).astype(np.uint16), 1, 65535, 0),
        ((ramp * 3000).astype(np.uint16), 1, 65535, 0),  # a dark picture stays dark
        ((ramp * 65535).astype(np.int32), 2, 65535, 0),
        ((ramp * 100_000).astype(np.int32), 2, 100_000, 0),
        ((ramp * (2**31 - 1)).astype(np.int32), 2, 2**31 - 1, 0),
        ((ramp * (2**32 - 1)).astype(np.uint32), 1, 2**32 - 1, 0),
        ((ramp * (2**32 - 1)).astype(np.uint32), None, 2**32 - 1, 0),
        ((ramp * 2000 - 500).astype(np.int32), 2, 1500, -500),
        (ramp.astype(np.float32), 3, 1, 0),
        ((ramp * 255).astype(np.float32), 3, 255, 0),
        ((ramp * 65535).astype(np.float32), 3, 65535, 0),
        ((ramp * 1e6).astype(np.float32), 3, 1e6, 0),
        ((ramp * 4 - 1).astype(np.float32), 3, 3, -1),
        (np.zeros((12, 20), np.float32), 3, 1, 0),
    ],
)
def test_deep_greys_keep_their_range(tmp_path, values, sample_format, white, low):
    found = np.asarray(read_picture(str(tiff(tmp_path / "deep.tif", values, sample_format)))).astype(int)
    assert np.abs(found - expected_bytes(values, white, low)[..., None]).max() <= (1 if values.dtype.kind == "f" else 0)
    assert len(np.unique(found)) > 200 or white == 65535 or not values.any()


def test_deep_colours_keep_their_range(tmp_path):
    """16 bits a colour, of which Pillow gives the upper 8."""
    values = (ramp * 65535).astype(">u2")
    deep = np.stack([values, values[::-1], values[:, ::-1]], -1).astype(">u2")
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in deep))
    head = struct.pack(">IIBBBBB", 20, 12, 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    assert np.array_equal(np.asarray(read_picture(str(tmp_path / "deep.png"))), (deep >> 8).astype(np.uint8))


def test_numbers_that_are_not_finite_have_no_range(tmp_path):
    for value in (np.nan, np.inf):
        path = tiff(tmp_path / "bad.tif", np.full((4, 4), value, np.float32), 3)
        assert reason(path) == "a picture with values that are not finite"


def blend(colours, alpha):
    return colours * (alpha / 255.0) + 255 * (1 - alpha / 255.0)


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("RGBA", "png"), ("RGBA", "tif"), ("RGBA", "webp"), ("RGBA", "tga"), ("LA", "png"), ("LA", "tif"), ("P", "png")],
)
def test_transparency_is_blended_onto_white(tmp_path, mode, suffix):
    random = np.random.default_rng(1)
    colours = random.integers(0, 256, (12, 20, 3), dtype=np.uint8)
    alpha = np.array([0, 255, 128, 1], np.uint8)[random.integers(0, 4, (12, 20))]
    path = tmp_path / f"a.{suffix}"
    if mode == "LA":
        colours = np.repeat(colours[..., :1], 3, -1)
        image = Image.merge("LA", [Image.fromarray(colours[..., 0]), Image.fromarray(alpha)])
    else:
        image = Image.merge("RGBA", [*Image.fromarray(colours).split(), Image.fromarray(alpha)])
    options = {"lossless": True, "exact": True} if suffix == "webp" else {}
    if mode == "P":
        indices = random.integers(0, 4, (12, 20), dtype=np.uint8)
        palette = random.integers(0, 256, (4, 3), dtype=np.uint8)
        levels = np.array([0, 255, 128, 60], np.uint8)
        image = Image.fromarray(indices, mode="P")
        image.putpalette(palette.tobytes())
        colours, alpha = palette[indices], levels[indices]
        options = {"transparency": levels.tobytes()}
    image.save(path, **options)
    found = np.asarray(read_picture(str(path))).astype(float)
    assert np.abs(found - blend(colours, alpha[..., None])).max() <= 1
    assert (found[alpha == 0] == 255).all() and (found[alpha == 255] == colours[alpha == 255]).all()


def test_a_colour_that_stands_for_transparency(tmp_path):
    array = np.zeros((4, 6), np.uint8)
    array[1:] = 90
    deep = (array.astype(np.uint16) + 1) * 500
    pictures = [
        (Image.fromarray(array), 90, array),
        (Image.fromarray(array).convert("RGB"), (90, 90, 90), array),
        (Image.fromarray(deep), 500, np.round(deep / 257)),
    ]
    for image, key, grey in pictures:
        image.save(tmp_path / "key.png", transparency=key)
        found = np.asarray(read_picture(str(tmp_path / "key.png")))
        clear = np.asarray(image).reshape(4, 6, -1)[..., 0] == np.ravel(key)[0]
        assert (found[clear] == 255).all() and (found[~clear] == grey[~clear][:, None]).all() and clear.any()


def test_rare_colour_spaces(tmp_path):
    image = Image.new("RGB", (8, 8), (200, 60, 30))
    image.convert("YCbCr").save(tmp_path / "ycbcr.tif")
    image.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    Image.new("LAB", (8, 8), (140, 128, 128)).save(tmp_path / "lab.tif")
    for name, expected in (("ycbcr.tif", (200, 60, 30)), ("cmyk.jpg", (200, 60, 30)), ("lab.tif", (132, 132, 132))):
        found = np.asarray(read_picture(str(tmp_path / name))).astype(int)
        assert np.abs(found - expected).max() <= 8, name


def test_every_format_that_pillow_writes_is_read(tmp_path):
    image = noise(64, 64).quantize(16).convert("RGB")
    tried = set()
    for suffix in sorted(picture_suffixes()):
        for mode in ("RGB", "P", "1"):
            path = tmp_path / f"picture{suffix}"
            try:
                image.convert(mode).save(path)
            except (OSError, KeyError, ValueError):
                continue  # Pillow doesn't write this format, or not this mode
            assert read_picture(str(path)).mode == "RGB", suffix
            tried.add(suffix)
    assert {".jpg", ".jfif", ".png", ".webp", ".tga", ".qoi", ".jp2", ".ico", ".sgi", ".mpo", ".dds"} <= tried
    assert not picture_suffixes() & {".eps", ".ps", ".pdf", ".mpg", ".h5", ".wmf"}


# ---------------------------------------------------------------- files of strangers


def run_apart(code, *arguments, memory=None):
    """What a process of its own prints; with ``memory`` bytes of address space past what it has at the start."""
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
    """Enlarged as a whole, the first would have 4 billion pixels; it used to take 11 GB."""
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
    """Files of a few hundred bytes to a megabyte that would fill the memory; read with 300 MB of it."""
    cases = {
        "declared.png": "more than the 178,956,970 of the largest picture that is read",
        "true.png": "more than the 178,956,970",
        "canvas.gif": "more than the 178,956,970",
        "lying.bmp": "more than the 178,956,970",
        "text.png": "Decompressed data too large",
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
    code = """
for path in sys.argv[1:]:
    try:
        print(read_picture(path))
    except BadSample as bad:
        print(bad)
"""
    lines = run_apart(code, *(tmp_path / name for name in cases), memory=300 * 2**20).splitlines()
    assert len(lines) == len(cases)
    for line, (name, says) in zip(lines, cases.items(), strict=True):
        assert line.startswith(f"{tmp_path / name}: ") and says in line


def test_a_picture_for_which_memory_is_short_is_a_bad_one(tmp_path):
    path = png(tmp_path / "large.png", 12000, 12000, level=1)
    code = """
try:
    read_picture(sys.argv[1])
except BadSample as bad:
    print(bad)
"""
    assert run_apart(code, path, memory=200 * 2**20) == f"{path}: there is not enough memory to decode it"


def test_a_jpeg_of_thousands_of_scans(tmp_path):
    """Each scan of some bytes passes over the whole picture."""
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
    """Numbers in decimal, which Pillow reads in Python: 1 s for a million pixels; there may be 178 times as many."""
    line = "7 " * 3000 + "\n"
    (tmp_path / "slow.ppm").write_text("P3\n1000 1000\n255\n" + line * 1000)
    begin = time.monotonic()
    assert reason(tmp_path / "slow.ppm", time_limit=0.1) == "not read within 0.1 seconds"
    assert time.monotonic() - begin < 10


def test_a_header_that_asks_for_more_than_the_file(tmp_path):
    """An entry of a TIFF with 4 GB of numbers, of which there are none."""
    path = tmp_path / "tags.tif"
    Image.new("L", (8, 8)).save(path, tiffinfo={270: "x" * 50})
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<HH", 270, 2))
    data[at + 4 : at + 8] = struct.pack("<I", 2**32 - 2)
    path.write_bytes(data)
    code = "try:\n    print(read_picture(sys.argv[1]).size)\nexcept BadSample as bad:\n    print(bad)"
    assert run_apart(code, path, memory=300 * 2**20) in ("(8, 8)", f"{path}: not a picture in any known format")


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
