"""ICC profiles, gAMA and cHRM of pictures against Pillow's ImageCms and closed forms."""

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from opendit.data import colours
from opendit.data.base import BadSample
from opendit.data.colours import MAX_PROFILE
from opendit.data.picture_file import as_rgb, read_picture
from tests.data.test_colours import srgb, with_chunk

SRGB = ImageCms.createProfile("sRGB")
P3_PRIMARIES = {
    b"rXYZ": (0.5151, 0.2412, -0.0011),
    b"gXYZ": (0.2920, 0.6922, 0.0419),
    b"bXYZ": (0.1571, 0.0666, 0.7841),
}


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def fixed(value):
    return struct.pack(">i", round(value * 65536))


def build_profile(space, tags, kind=b"mntr", version=0x02400000):
    """Return an ICC profile with these tags: name -> the tag's bytes."""
    table, data, at = b"", b"", 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += name + struct.pack(">II", at, len(content))
        data, at = data + content, at + len(content)
    white = fixed(0.9642) + fixed(1) + fixed(0.8249)
    head = struct.pack(">I4xI4s4s4s12x4s28x", at, version, kind, space, b"XYZ ", b"acsp") + white
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + data


def xyz(*values):
    return b"XYZ \0\0\0\0" + b"".join(map(fixed, values))


def curve(gamma):
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def text(kind, content=b"x"):
    return kind + bytes(4) + struct.pack(">I", len(content) + 1) + content + bytes(80)


def display_p3():
    """Return a profile with sRGB's curve and the primaries of Display P3, as phones write it."""
    profile = bytearray(ImageCms.ImageCmsProfile(SRGB).tobytes())
    for number in range(struct.unpack_from(">I", profile, 128)[0]):
        name, at, _ = struct.unpack_from(">4sII", profile, 132 + 12 * number)
        if name in P3_PRIMARIES:
            profile[at + 8 : at + 20] = b"".join(map(fixed, P3_PRIMARIES[name]))
    return bytes(profile)


def grey_profile(gamma):
    tags = {b"desc": text(b"desc"), b"wtpt": xyz(0.9642, 1, 0.8249), b"kTRC": curve(gamma)}
    return build_profile(b"GRAY", tags)


def by_pillow(image, profile):
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    return np.asarray(ImageCms.profileToProfile(image, opened, SRGB, outputMode="RGB"))


def read(path):
    return np.asarray(read_picture(str(path)))


@pytest.mark.parametrize("suffix", ["png", "tif", "webp", "jpg"])
def test_display_p3_becomes_srgb(tmp_path, suffix):
    image, profile = Image.fromarray(noise(24, 32, 3)), display_p3()
    options = {"webp": {"lossless": True}, "jpg": {"quality": 95}}.get(suffix, {})
    path = tmp_path / f"p3.{suffix}"
    image.save(path, icc_profile=profile, **options)
    stored = Image.open(path).convert("RGB")
    assert np.array_equal(read(path), by_pillow(stored, profile))
    assert np.abs(read(path).astype(int) - np.asarray(stored)).max() > 20


def test_a_green_of_display_p3_is_the_one_of_the_closed_form(tmp_path):
    """P3's (60, 200, 60) is outside of sRGB, (120, 160, 100) inside."""
    for colour in ((60, 200, 60), (120, 160, 100)):
        Image.new("RGB", (4, 4), colour).save(tmp_path / "p3.png", icc_profile=display_p3())
        light = np.where(np.array(colour) / 255 <= 0.04045, 0, ((np.array(colour) / 255 + 0.055) / 1.055) ** 2.4)
        p3 = np.array([[1.2249, -0.2247, 0], [-0.0420, 1.0419, 0], [-0.0197, -0.0786, 1.0979]])  # to sRGB, as published
        assert np.abs(read(tmp_path / "p3.png")[0, 0] - 255 * srgb(np.clip(p3 @ light, 0, 1))).max() < 1.5


def test_palettes_and_alpha_are_converted_too(tmp_path):
    profile, pixels = display_p3(), noise(16, 16, 4)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "alpha.png", icc_profile=profile)
    colours = by_pillow(image.convert("RGB"), profile).astype(float)
    alpha = pixels[..., 3:] / 255
    assert np.abs(read(tmp_path / "alpha.png") - (colours * alpha + 255 * (1 - alpha))).max() <= 1
    palette = image.convert("RGB").quantize(32)
    palette.save(tmp_path / "palette.png", icc_profile=profile)
    assert np.array_equal(read(tmp_path / "palette.png"), by_pillow(palette.convert("RGB"), profile))
    grey = Image.fromarray(pixels[..., 0])
    grey.save(tmp_path / "grey.png", icc_profile=profile)  # a grey picture with a profile for RGB
    assert np.array_equal(read(tmp_path / "grey.png"), by_pillow(grey.convert("RGB"), profile))


def test_srgb_itself_is_not_touched(tmp_path, monkeypatch):
    image = Image.fromarray(noise(24, 32, 3))
    image.save(tmp_path / "srgb.png", icc_profile=ImageCms.ImageCmsProfile(SRGB).tobytes())
    assert np.array_equal(read(tmp_path / "srgb.png"), np.asarray(image))
    # A profile is parsed only once.
    monkeypatch.setattr(ImageCms, "buildTransform", None)
    assert np.array_equal(read(tmp_path / "srgb.png"), np.asarray(image))
    image.save(tmp_path / "none.png")
    assert np.array_equal(read(tmp_path / "none.png"), np.asarray(image))


@pytest.mark.parametrize("gamma", [1.0, 1.8, 2.2])
def test_greys_with_a_profile(tmp_path, gamma):
    profile, levels = grey_profile(gamma), np.arange(256, dtype=np.uint8)
    Image.fromarray(levels[None]).save(tmp_path / "grey.png", icc_profile=profile)
    wanted = 255 * srgb((levels / 255) ** gamma)
    found = read(tmp_path / "grey.png")[0]
    assert (found == found[:, :1]).all() and np.abs(found[:, 0] - wanted).max() <= 1
    Image.fromarray(np.stack([levels, levels // 2 + 128], -1)[None]).save(tmp_path / "la.png", icc_profile=profile)
    alpha = (levels // 2 + 128) / 255
    assert np.abs(read(tmp_path / "la.png")[0, :, 1] - (wanted * alpha + 255 * (1 - alpha))).max() <= 1.6
    deep = np.linspace(0, 65535, 3001).round().astype(np.uint16)
    Image.fromarray(deep[None]).save(tmp_path / "deep.png", icc_profile=profile)
    wanted = 255 * srgb((deep / 65535) ** gamma)
    assert np.abs(read(tmp_path / "deep.png")[0, :, 0] - wanted).max() <= 1.6  # between 256 converted greys


def test_cmyk_goes_through_its_profile(tmp_path):
    """In this profile, unlike in real ones, cyan prints red."""
    points = np.stack(np.meshgrid(*[[0.0, 1.0]] * 4, indexing="ij"), -1).reshape(-1, 4)
    lab = np.stack([100 - 60 * points[:, 0] - 40 * points[:, 3], 70 * points[:, 0], 50 * points[:, 0]], -1)
    coded = np.stack([lab[:, 0] * 652.8, (lab[:, 1] + 128) * 256, (lab[:, 2] + 128) * 256], -1).clip(0, 65535)
    table = b"mft2\0\0\0\0" + bytes([4, 3, 2, 0]) + b"".join(map(fixed, np.eye(3).ravel())) + struct.pack(">HH", 2, 2)
    table += struct.pack(">2H", 0, 65535) * 4 + coded.astype(">u2").tobytes() + struct.pack(">2H", 0, 65535) * 3
    tags = {b"desc": text(b"desc"), b"wtpt": xyz(0.9642, 1, 0.8249), b"A2B0": table}
    profile = bytearray(build_profile(b"CMYK", tags, b"prtr"))
    profile[20:24] = b"Lab "
    image = Image.fromarray(np.full((16, 16, 4), (255, 0, 0, 0), np.uint8), "CMYK")
    wanted = by_pillow(image, bytes(profile))[0, 0]
    assert wanted[0] > wanted[1] + 50  # red
    image.save(tmp_path / "inks.tif", icc_profile=bytes(profile))
    assert np.array_equal(read(tmp_path / "inks.tif")[0, 0], wanted)
    image.save(tmp_path / "inks.jpg", icc_profile=bytes(profile), quality=100)
    assert np.abs(read(tmp_path / "inks.jpg")[8, 8].astype(int) - wanted).max() <= 3
    image.save(tmp_path / "plain.tif")
    assert read(tmp_path / "plain.tif")[0, 0].tolist() == [0, 255, 255]


def test_profiles_that_make_no_sense_are_passed_over(tmp_path):
    image, good = Image.fromarray(noise(8, 8, 3)), display_p3()
    broken = [
        b"nothing",
        bytes(200),
        good[:300],
        good[:16] + b"CMYK" + good[20:],
        good[:16] + b"Lab " + good[20:],
        grey_profile(1.0),
        good[:12] + b"link" + good[16:],
        good + bytes(MAX_PROFILE),
    ]
    for profile in broken:
        image.save(tmp_path / "broken.tif", icc_profile=profile)
        found = read(tmp_path / "broken.tif")
        kept = np.array_equal(found, np.asarray(image))
        assert kept or profile[12:16] == b"link", profile[:32]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8), st.sampled_from(["RGB", "L", "CMYK"]))
def test_damaged_profiles_do_no_harm(at, damage, mode):
    profile = bytearray(grey_profile(1.8) if mode == "L" else display_p3())
    at %= len(profile)
    profile[at : at + len(damage)] = damage
    image = Image.new(mode, (4, 4))
    image.info["icc_profile"] = bytes(profile)
    assert as_rgb(image).mode == "RGB"


def test_a_compressed_profile_without_end_is_a_bad_sample(tmp_path):
    import zlib

    bomb = b"name\0\0" + zlib.compress(bytes(1 << 24))
    path = with_chunk(tmp_path / "bomb.png", noise(4, 4, 3), (b"iCCP", bomb))
    with pytest.raises(BadSample, match=r"too large"):
        read_picture(str(path))


# ---------------------------------------------------------------- PNG's chunks


def gama(gamma):
    return b"gAMA", struct.pack(">I", round(gamma * 100_000))


def chrm(*values):
    return b"cHRM", struct.pack(">8I", *(round(value * 100_000) for value in values))


SRGB_CHRM = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)


@pytest.mark.parametrize("gamma", [1.0, 0.55556, 0.3])
def test_a_png_s_gamma_counts(tmp_path, gamma):
    levels = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, 2)
    wanted = 255 * srgb((levels / 255.0) ** (1 / gamma))
    assert np.abs(read(with_chunk(tmp_path / "g.png", levels, gama(gamma))) - wanted).max() <= 0.6
    found = read(with_chunk(tmp_path / "c.png", levels, gama(gamma), chrm(*SRGB_CHRM)))
    assert np.abs(found - wanted).max() <= 0.6
    deep = np.linspace(0, 65535, 3001).round().astype(np.uint16)[None]
    found = read(with_chunk(tmp_path / "deep.png", deep, gama(gamma)))[0, :, 0]
    assert np.abs(found - 255 * srgb((deep[0] / 65535) ** (1 / gamma))).max() <= 1.6


def test_what_png_says_in_several_ways(tmp_path):
    colours = noise(8, 8, 3)
    unchanged = [
        [gama(0.45455)],  # what programs write for sRGB
        [gama(0.45455), chrm(*SRGB_CHRM)],
        [(b"sRGB", b"\0"), gama(1.0)],  # sRGB comes before gAMA
        [(b"cICP", bytes([1, 13, 0, 1])), gama(1.0)],  # and cICP before all
        [gama(0.0)],
        [gama(1000.0)],
        [chrm(0, 0, 0, 0, 0, 0, 0, 0)],
        [chrm(*[0.3] * 8)],
    ]
    for number, chunks in enumerate(unchanged):
        found = read(with_chunk(tmp_path / "png.png", colours, *chunks))
        assert np.array_equal(found, colours), number
    # BT.2020's primaries, with sRGB's curve.
    wide = chrm(0.3127, 0.329, 0.708, 0.292, 0.17, 0.797, 0.131, 0.046)
    found = read(with_chunk(tmp_path / "wide.png", np.full((2, 2, 3), (120, 160, 100), np.uint8), wide))
    light = ((np.array([120, 160, 100]) / 255 + 0.055) / 1.055) ** 2.4
    matrix = np.array([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]])
    assert np.abs(found[0, 0] - 255 * srgb(matrix @ light)).max() < 1


def test_the_caches_of_strangers_profiles_are_bounded():
    assert colours.transform_of.cache_info().maxsize * MAX_PROFILE <= 2**26
