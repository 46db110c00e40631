"""HDR and wide gamuts, against formulas of the standards in float64; alpha of clips, against FFmpeg and Pillow."""

import struct
import threading
import zlib
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from opendit.data import captioned_media, clips, colours
from opendit.data.base import BadSample, Medium, count_colours
from opendit.data.base import of_picture as picture_medium
from opendit.data.clips import open_clip
from opendit.data.container_header import dolby_profile, problem_of_tables
from opendit.data.picture_file import read_picture
from opendit.data.video_files import READERS, look_up, problem_of

PQ, HLG, SDR = 16, 18, 1


@pytest.fixture(params=READERS)
def reader(request):
    if request.param == "torchcodec" and problem_of(request.param):
        pytest.skip("torchcodec is not installed")
    return request.param


# ---------------------------------------------------------------- the reference

# BT.2087's matrix from BT.2020 to BT.709, with more digits than the standard prints.
TO_709 = np.array(
    [[1.6604910, -0.5876411, -0.0728499], [-0.1245505, 1.1328999, -0.0083494], [-0.0181508, -0.1005789, 1.1187297]]
)


def pq_to_nits(signal):
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    root = np.power(signal, 1 / m2)
    return 10000 * np.power(np.maximum(root - c1, 0) / (c2 - c3 * root), 1 / m1)


def nits_to_pq(nits):
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    power = np.power(nits / 10000, m1)
    return np.power((c1 + c2 * power) / (1 + c3 * power), m2)


def hlg_to_nits(signal):
    """Return nits for (..., 3) signals on a display of 1,000 nits."""
    a = 0.17883277
    b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
    scene = np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)
    luminance = (scene * [0.2627, 0.6780, 0.0593]).sum(-1, keepdims=True)
    return 1000 * luminance**0.2 * scene


def tone_mapped(nits, encode):
    """Return the levels of 255, before rounding, for (..., 3) light of BT.2020 in nits."""
    light = np.maximum((nits / 203) @ TO_709.T, 0)
    t, most = (light - 0.9) / 0.1, (10000 / 203 - 0.9) / 0.1
    light = np.where(light <= 0.9, light, 0.9 + 0.1 * t * (1 + t / most**2) / (1 + t))
    return 255 * np.clip(encode(light), 0, 1)


def bt1886(light):
    return np.power(light, 1 / 2.4)


def srgb(light):
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * np.power(light, 1 / 2.4) - 0.055)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 65535), min_size=3, max_size=3), st.sampled_from([PQ, HLG]))
def test_every_colour_follows_the_standards(colour, transfer):
    pixels = np.array(colour, np.uint16)[None, None]
    to_nits = pq_to_nits if transfer == PQ else hlg_to_nits
    for conversion, encode in ((colours.of_clip(9, transfer), bt1886), (colours.of_picture(9, transfer), srgb)):
        wanted = tone_mapped(to_nits(pixels / 65535), encode)
        # The tolerance is half a level of rounding plus the error of float32. Near black, where the power is steep,
        # float32 is too coarse.
        assert np.abs(conversion(pixels).astype(float) - wanted)[wanted > 30].max(initial=0) <= 0.75


@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_greys_keep_their_order_and_white_is_nearly_white(transfer):
    greys = np.repeat(np.arange(65536, dtype=np.uint16)[None, :, None], 3, 2)
    out = colours.of_clip(9, transfer)(greys)[0]
    assert (np.diff(out[:, 0].astype(int)) >= 0).all()
    differ = np.ptp(out.astype(int), axis=1)  # at the border between two levels, float32 may fall on either side
    assert differ.max() <= 1 and (differ > 0).mean() < 0.002
    nits = (pq_to_nits if transfer == PQ else hlg_to_nits)(greys[0] / 65535)[:, 0]
    assert out[0, 0] == 0 and out[-1, 0] == 255
    assert out[np.searchsorted(nits, 203), 0] in (249, 250)  # room for what is brighter
    dim = nits < 0.9 * 203  # below the knee nothing is compressed
    assert np.abs(out[dim, 0] - 255 * (nits[dim] / 203) ** (1 / 2.4)).max() < 0.6


def test_a_wide_gamut_of_sdr_keeps_greys_and_moves_colours():
    greys = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, 2)
    for primaries in (9, 11, 12):
        assert np.array_equal(colours.of_clip(primaries, SDR)(greys), greys)
        assert np.array_equal(colours.of_picture(primaries, 13)(greys), greys)
    colour = np.array([[[60, 200, 90]]], np.uint8)
    wanted = 255 * np.maximum((colour / 255) ** 2.4 @ TO_709.T, 0) ** (1 / 2.4)
    assert np.abs(colours.of_clip(9, SDR)(colour) - wanted.clip(0, 255)).max() < 1
    assert colours.of_clip(1, SDR) is None and colours.of_clip(6, 6) is None and colours.of_clip(2, 2) is None


def test_primaries_that_span_no_colours_are_refused():
    for points in (((0.3, 0.3),) * 4, ((0.6, 0.3), (0.3, 0.6), (0.15, 0.0), (0.3, 0.3))):
        with pytest.raises(ValueError, match="span no colours"):
            colours.to_bt709(points)


# ---------------------------------------------------------------- clips


def encode(path, planes, pix_fmt, *, codec="libx264", colours_=(1, 1, 1), options=None, count=6, full=False):
    """Encode the planes of one frame ``count`` times. colours_: primaries, transfer, matrix."""
    height, width = planes[0].shape
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=24, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        context = stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace = colours_
        context.color_range = 2 if full else 1
        for time in range(count):
            frame = av.VideoFrame(width, height, pix_fmt)
            for plane, numbers in zip(frame.planes, planes, strict=True):
                rows = np.zeros((plane.height, plane.line_size // numbers.itemsize), numbers.dtype)
                rows[:, : numbers.shape[1]] = numbers
                plane.update(rows.tobytes())
            frame.color_primaries, frame.color_trc, frame.colorspace = colours_
            frame.color_range, frame.pts, frame.time_base = 2 if full else 1, time, Fraction(1, 24)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def grey_planes(signal, bits, height=64):
    """Return planes of 4:2:0 in limited range for (W,) signals in [0, 1]."""
    scale = 2 ** (bits - 8)
    dtype = np.uint8 if bits == 8 else np.uint16
    luma = np.tile(np.round((16 + 219 * signal) * scale).astype(dtype), (height, 1))
    chroma = np.full((height // 2, len(signal) // 2), 128 * scale, dtype)
    return [luma, chroma, chroma]


def read(path, reader="auto", indices=(1, 4)):
    return clips.decode_frames(str(path), lambda length: list(indices), threading.Event(), reader=reader)


LOSSLESS = {"libx264": {"qp": "0"}, "libx265": {"x265-params": "lossless=1:log-level=0"}, "ffv1": {}}


@pytest.mark.parametrize(
    "codec, ending, bits",
    [("libx265", "mp4", 10), ("libx264", "mp4", 8), ("libx264", "mov", 10), ("libx264", "mkv", 8), ("ffv1", "mkv", 10)],
)
@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_a_ramp_of_sdr_comes_back_from_hdr(tmp_path, reader, transfer, codec, ending, bits):
    ramp = np.linspace(0, 1, 96)
    if transfer == PQ:
        signal = nits_to_pq(203 * ramp**2.4)
    else:
        scene = (203 / 1000 * ramp**2.4) ** (1 / 1.2)
        a = 0.17883277
        bright = a * np.log(np.maximum(12 * scene - (1 - 4 * a), 1e-9)) + 0.5 - a * np.log(4 * a)
        signal = np.where(scene <= 1 / 12, np.sqrt(3 * scene), bright)
    pix_fmt = "yuv420p" if bits == 8 else "yuv420p10le"
    options = {} if (codec, bits) == ("libx264", 10) else LOSSLESS[codec]
    path = encode(
        tmp_path / f"hdr.{ending}", grey_planes(signal, bits), pix_fmt, codec=codec, colours_=(9, transfer, 9),
        options=options or {"crf": "1"},
    )  # fmt: skip
    found = read(path, reader)
    assert found.shape == (2, 64, 96, 3)
    assert np.array_equal(found, read(path, "pyav"))
    dim = ramp < 0.95
    # The tolerance is a step of the file's 8 or 10 bits, and one level.
    assert np.abs(found[0, 30, dim, 1] - 255 * ramp[dim]).max() <= (4 if bits == 8 else 1.6)
    assert (found[0, 30] >= 249).all(1).any() and found[0, 30, -1, 0] in (249, 250, 251)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_colours_of_clips_follow_the_standards(tmp_path, reader, transfer, full):
    """Convert signals of BT.2020 to 10 bits by its equations in float64."""
    signal = np.random.default_rng(transfer).uniform(0, 0.7, (32, 48, 3))
    y = signal @ [0.2627, 0.6780, 0.0593]
    cb, cr = (signal[..., 2] - y) / (2 * (1 - 0.0593)), (signal[..., 0] - y) / (2 * (1 - 0.2627))
    if full:
        coded = [1023 * y, 1023 * cb + 512, 1023 * cr + 512]
    else:
        coded = [4 * (219 * y + 16), 4 * (224 * cb + 128), 4 * (224 * cr + 128)]
    coded = [each.round().clip(0, 1023) for each in coded]
    planes = [each.astype(np.uint16) for each in coded]
    path = encode(
        tmp_path / "clip.mkv", planes, "yuv444p10le", codec="ffv1", colours_=(9, transfer, 9), count=2, full=full
    )
    if full:
        y, cb, cr = coded[0] / 1023, (coded[1] - 512) / 1023, (coded[2] - 512) / 1023
    else:
        y, cb, cr = (coded[0] / 4 - 16) / 219, (coded[1] / 4 - 128) / 224, (coded[2] / 4 - 128) / 224
    red, blue = y + 2 * (1 - 0.2627) * cr, y + 2 * (1 - 0.0593) * cb
    signal = np.stack([red, (y - 0.2627 * red - 0.0593 * blue) / 0.6780, blue], -1).clip(0, 1)
    wanted = tone_mapped((pq_to_nits if transfer == PQ else hlg_to_nits)(signal), bt1886)
    error = np.abs(read(path, reader, [1])[0] - wanted)[wanted > 20]
    assert error.max() < 0.8 and (error < 0.52).mean() > 0.98


def test_hdr_is_found_by_the_stream_where_the_container_says_nothing(tmp_path, reader):
    path = encode(
        tmp_path / "hdr.mp4", grey_planes(np.linspace(0, 0.75, 96), 8), "yuv420p", colours_=(9, PQ, 9),
        options={"qp": "1"},
    )  # fmt: skip
    data = path.read_bytes()
    assert b"colr" in data
    path.write_bytes(data.replace(b"colr", b"free"))
    assert read(path, reader)[0, 30, 64, 0] > 180  # the number in the file is near 128


def test_what_other_readers_would_show_otherwise_is_left_to_pyav(tmp_path):
    """This also holds where torchcodec, which would show them differently, is not installed."""
    ramp, high = np.linspace(0, 0.7, 96), np.linspace(0, 0.7, 1280)
    for signal, tags, converted in (
        (ramp, (9, PQ, 9), True),
        (ramp, (9, HLG, 9), True),
        (ramp, (12, SDR, 1), True),
        (high, (2, 2, 2), True),
        (high, (1, 1, 1), False),
        (ramp, (2, 2, 2), False),
        (ramp, (1, 1, 1), False),
    ):
        path = encode(tmp_path / "clip.mkv", grey_planes(signal, 8), "yuv420p", colours_=tags, count=2)
        assert look_up(str(path)).converted == converted, tags


RED = (98, 107, 210)  # Y, Cb, Cr


def exact(matrix, depth=8):
    """Return RED in RGB by the equations of the matrix's standard."""
    kr, kb = {1: (0.2126, 0.0722), 6: (0.299, 0.114), 9: (0.2627, 0.0593)}[matrix]
    y, cb, cr = (RED[0] - 16) / 219, (RED[1] - 128) / 224, (RED[2] - 128) / 224
    r, b = y + 2 * (1 - kr) * cr, y + 2 * (1 - kb) * cb
    return 255 * np.clip([r, (y - kr * r - kb * b) / (1 - kr - kb), b], 0, 1)


@pytest.mark.parametrize("ending, codec", [("mp4", "libx264"), ("mkv", "libx264"), ("avi", "mpeg4")])
@pytest.mark.parametrize(
    "size, tag, meant",
    [
        ((320, 240), 2, 6),
        ((768, 576), 2, 6),
        ((1280, 720), 2, 1),
        ((576, 1024), 2, 1),
        ((1280, 720), 6, 6),
        ((320, 240), 1, 1),
        ((320, 240), 9, 9),
    ],
)
def test_the_matrix_is_the_one_that_players_take(tmp_path, reader, ending, codec, size, tag, meant):
    if codec == "mpeg4" and tag != 2:
        pytest.skip("names no matrix")
    width, height = size
    planes = [np.full((height, width), RED[0], np.uint8)]
    planes += [np.full((height // 2, width // 2), value, np.uint8) for value in RED[1:]]
    path = encode(
        tmp_path / f"clip.{ending}", planes, "yuv420p", codec=codec, colours_=(2, 2, tag), count=3,
        options={"qp": "0"} if codec == "libx264" else {"qscale": "1", "b": "50M"},
    )  # fmt: skip
    found = read(path, reader, [1])[0, height // 2, width // 2]
    assert np.abs(found - exact(meant)).max() <= 2.5, (found, exact(meant), exact(1), exact(6))


def test_colours_that_nothing_converts_are_named(tmp_path):
    path = encode(tmp_path / "ictcp.mkv", grey_planes(np.linspace(0, 1, 96), 8), "yuv420p", colours_=(9, PQ, 14))
    with pytest.raises(BadSample, match="coded as ICtCp, which can't be converted"):
        read(path)
    path = encode(tmp_path / "ictcp.mp4", grey_planes(np.linspace(0, 1, 96), 8), "yuv420p", colours_=(9, PQ, 14))
    with pytest.raises(BadSample, match="coded as ICtCp, which can't be converted"):
        read(path)


def test_dolby_vision_without_another_form_is_named(tmp_path):
    path = encode(tmp_path / "clip.mp4", grey_planes(np.linspace(0, 1, 96), 8), "yuv420p", colours_=(2, 2, 2))
    data, at = path.read_bytes(), path.read_bytes().index(b"avcC")
    # Replace the box after avcC by a box of Dolby Vision with the same length.
    end = at - 4 + struct.unpack_from(">I", data, at - 4)[0]
    for profile, compatible, refused in ((5, 0, True), (8, 4, False), (8, 1, False)):
        box = struct.pack(">5B", 1, 0, profile << 1, 0, compatible << 4)
        length = struct.unpack_from(">I", data, end)[0]
        patched = data[: end + 4] + b"dvcC" + box.ljust(length - 8, b"\0") + data[end + length :]
        path.write_bytes(patched)
        problem = problem_of_tables(str(path))
        assert (problem is not None) == refused
        if refused:
            assert problem.startswith("Dolby Vision of profile 5, whose colours can't be converted")
            with pytest.raises(BadSample, match="profile 5"):
                read(path)
        else:
            assert read(path).shape == (2, 64, 96, 3)
    assert dolby_profile(b"") is None


def test_check_and_look_count_what_is_converted(tmp_path, capsys):
    ramp = np.linspace(0, 0.7, 96)
    encode(tmp_path / "a.mp4", grey_planes(ramp, 8), "yuv420p", colours_=(9, PQ, 9))
    encode(tmp_path / "b.mp4", grey_planes(ramp, 8), "yuv420p", colours_=(9, HLG, 9))
    encode(tmp_path / "c.mkv", grey_planes(ramp, 8), "yuv420p", colours_=(9, HLG, 9))
    encode(tmp_path / "d.mp4", grey_planes(ramp, 8), "yuv420p", colours_=(12, SDR, 1))
    encode(tmp_path / "e.mp4", grey_planes(ramp, 8), "yuv420p")
    (tmp_path / "table.csv").write_text("path,text\n" + "".join(f"{n},x\n" for n in ("a.mp4", "b.mp4", "c.mkv")))
    captioned_media.check(str(tmp_path / "table.csv"), str(tmp_path / "out.csv"), num_frames=2)
    told = capsys.readouterr().out
    assert "2 clips are HDR (HLG), tone-mapped to SDR\n1 clip is HDR (PQ), tone-mapped to SDR\n" in told
    assert open_clip(str(tmp_path / "d.mp4"))[0].colours == "wide gamut (Display P3)"
    assert open_clip(str(tmp_path / "e.mp4"))[0].colours == ""
    media = [Medium(9, 4, 4, colours="wide gamut (BT.2020)"), Medium(1, 4, 4, colours="HDR (PQ)"), Medium(1, 4, 4)]
    assert count_colours(media) == [
        "1 picture is HDR (PQ), tone-mapped to SDR",
        "1 clip is wide gamut (BT.2020), converted to BT.709",
    ]


# ---------------------------------------------------------------- alpha of clips


def moving_alpha(count=5, height=48, width=96):
    """Return (T, H, W, 4) smooth colours whose alpha goes from 0 to 255."""
    y, x = np.mgrid[:height, :width]
    frames = [
        np.stack([x * 2, y * 4, 255 - x * 2, np.roll(x * 255 // (width - 1), 9 * t, 1)], -1) for t in range(count)
    ]
    return np.stack(frames).astype(np.uint8)


def on_white(rgba):
    """Blend (..., 4) onto white, as (..., 3) in float64."""
    alpha = rgba[..., 3:].astype(float) / 255
    return rgba[..., :3] * alpha + 255 * (1 - alpha)


@pytest.mark.parametrize(
    "codec, pix_fmt, ending",
    [
        ("libvpx", "yuva420p", "webm"),
        ("libvpx-vp9", "yuva420p", "webm"),
        ("libvpx-vp9", "yuva420p", "mkv"),
        ("qtrle", "argb", "mov"),
        ("png", "rgba", "mov"),
        ("ffv1", "bgra", "mkv"),
        ("ffv1", "yuva444p16le", "mkv"),
        ("prores", "yuva444p10le", "mov"),
    ],
)
def test_transparent_clips_lie_on_white(tmp_path, reader, codec, pix_fmt, ending):
    pictures, path = moving_alpha(), tmp_path / f"clip.{ending}"
    options = {"auto-alt-ref": "0", "crf": "4", "b": "20M"} if "vpx" in codec else {}
    with av.open(str(path), "w") as file:
        try:
            stream = file.add_stream(codec, rate=10, options=options)
        except Exception:
            pytest.skip(f"PyAV was built without {codec}")
        stream.width, stream.height, stream.pix_fmt = pictures.shape[2], pictures.shape[1], pix_fmt
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(picture, format="rgba").reformat(format=pix_fmt)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    found = read(path, reader, [1, 3])
    assert np.array_equal(found, read(path, "pyav", [1, 3]))
    lossy = codec in ("libvpx", "libvpx-vp9", "prores") or pix_fmt.startswith("yuva")
    error = np.abs(found - on_white(pictures[[1, 3]]))
    assert error.mean() < (4 if lossy else 0.51) and (lossy or error.max() <= 1)
    # The colours without their alpha would be far off.
    assert np.abs(found - pictures[[1, 3], ..., :3].astype(float)).mean() > 30


def test_an_opaque_clip_with_alpha_is_as_one_without(tmp_path):
    pictures = moving_alpha()
    pictures[..., 3] = 255
    for name, form in (("with", "bgra"), ("without", "bgr0")):
        with av.open(str(tmp_path / f"{name}.mkv"), "w") as file:
            stream = file.add_stream("ffv1", rate=10)
            stream.width, stream.height, stream.pix_fmt = pictures.shape[2], pictures.shape[1], form
            for picture in pictures:
                file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgba").reformat(format=form)))
            file.mux(stream.encode())
    assert np.array_equal(read(tmp_path / "with.mkv"), read(tmp_path / "without.mkv"))
    assert np.array_equal(read(tmp_path / "with.mkv")[0], pictures[1, ..., :3])


# ---------------------------------------------------------------- HDR pictures


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunk(path, pixels, *chunks):
    """Write a PNG with chunks before its pixels."""
    Image.fromarray(pixels).save(path)
    data = path.read_bytes()
    at = data.index(b"IDAT") - 4
    path.write_bytes(data[:at] + b"".join(chunk(*each) for each in chunks) + data[at:])
    return path


@pytest.mark.parametrize("transfer, name", [(PQ, "HDR (PQ)"), (HLG, "HDR (HLG)")])
def test_hdr_pictures_are_tone_mapped(tmp_path, transfer, name):
    colour = np.random.default_rng(0).integers(0, 200, (16, 24, 3), dtype=np.uint8)
    wanted = tone_mapped((pq_to_nits if transfer == PQ else hlg_to_nits)(colour / 255), srgb)
    path = with_chunk(tmp_path / "hdr.png", colour, (b"cICP", bytes([9, transfer, 0, 1])))
    medium, pixels = picture_medium(read_picture(str(path)))
    assert medium.colours == name
    assert np.abs(pixels[0] - wanted)[wanted > 30].max() <= 0.75
    avif = tmp_path / "hdr.avif"
    Image.fromarray(colour).save(avif, quality=100, subsampling="4:4:4")
    data = avif.read_bytes()
    at = data.index(b"nclx") + 4
    avif.write_bytes(data[:at] + struct.pack(">HH", 9, transfer) + data[at + 4 :])
    plain = np.asarray(Image.open(avif).convert("RGB"))  # AVIF is lossy
    wanted = tone_mapped((pq_to_nits if transfer == PQ else hlg_to_nits)(plain / 255), srgb)
    medium, pixels = picture_medium(read_picture(str(avif)))
    assert medium.colours == name
    assert np.abs(pixels[0] - wanted)[wanted > 30].max() <= 0.75


def test_a_picture_whose_cicp_is_srgb_is_left_alone(tmp_path):
    colour = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for codes in ((1, 13), (1, 1), (2, 2), (6, 6)):
        path = with_chunk(tmp_path / "sdr.png", colour, (b"cICP", bytes([*codes, 0, 1])))
        assert np.array_equal(np.asarray(read_picture(str(path))), colour)
        assert picture_medium(read_picture(str(path)))[0].colours == ""
