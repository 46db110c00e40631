"""Reading pictures: the crop, and every mode and format."""

import struct
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
    """Write a black PNG with ``rows`` of its ``height`` rows, and with ``extra`` chunks before them."""

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
    """Write an uncompressed grey TIFF with any kind of numbers, including kinds that Pillow cannot write."""
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
    step = min(width, height) / size  # source pixels per output pixel
    middle = slice(size // 4, size - size // 4)  # away from the border, where bicubic has no neighbours
    for axis, length in ((0, width), (1, height)):
        source = length / 2 + (np.arange(size) + 0.5 - size / 2) * step
        got = out[..., axis].mean(axis=axis)  # average over the direction along which the ramp is constant
        error = np.abs(got - source / length * 255)[middle]
        # The tolerance is one output pixel, since sizes are rounded and the crop starts at a whole pixel, and two grey
        # levels of rounding.
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
    """Crops are equal to the bit, except for strips that are enlarged."""
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
    # The colour is half transparent, so white shines through.
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
    """Return bytes by the definition of the scale, in numpy's doubles."""
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
    """Pillow reads only the upper 8 of 16 bits a colour."""
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
    image.convert("YCbCr").save(tmp_path / "ycbcr.tif", compression="tiff_lzw")  # Pillow 12 can't read it raw
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
