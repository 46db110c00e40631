"""``preprocess.py look``: of every kind of source, what it counts, names and draws."""

import base64
import io
import re

import numpy as np
import pytest
from diffusers import AutoencoderKL
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import preprocess
from opendit.data import look
from opendit.data.base import DataError
from opendit.data.csv_table import TableRow, write_csv
from opendit.data.fill import MediumTokens, fill_of
from opendit.data.look_page import THUMBNAIL
from opendit.data.medium import Medium
from opendit.data.moving_digits import make_demo
from opendit.data.video_file import write_mp4
from tests.data.shards.tars import captioned, write_tar

SEEN = {"digits": Medium(1, 8, 8), "demo": Medium(48, 16, 16, 24.0)}


def save(path, width, height):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((height, width, 3), 90, np.uint8)).save(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with every kind of source in it."""
    root = tmp_path_factory.mktemp("look")
    for i in range(6):
        save(root / "pictures" / f"class{i % 2}" / f"{i}.png", 20 + 10 * i, 30)
    (root / "pictures" / "class0" / "bad.png").write_bytes(b"no picture")
    make_demo(root / "demo", 4, 16)
    write_mp4(root / "mixed" / "a.mp4", np.zeros((5, 24, 40, 3), np.uint8), 10)
    (root / "mixed" / "cut.mp4").write_bytes((root / "mixed" / "a.mp4").read_bytes()[:300])
    save(root / "mixed" / "b.png", 33, 22)
    names = ("a.mp4", "cut.mp4", "b.png", "<i>gone.png")
    write_csv(root / "mixed" / "mixed.csv", [TableRow(root / "mixed" / n, "<b>$x^2$ & 文") for n in names])
    (root / "tars").mkdir()
    write_tar(root / "tars" / "a.tar", captioned(5))
    assert preprocess.main(["index", str(root / "tars"), "--num_workers", "1"]) == 0
    return root


def run(data_path, output):
    assert preprocess.main(["look", str(data_path), "--output", str(output), "--num_workers", "2"]) == 0
    return (output / look.PAGE).read_text()


def found_in(data_path, **options):
    dataset, sizes = look.open_any(str(data_path), None, None, None, "train")
    return look.look(dataset, 0, 8, 2, MediumTokens(*sizes, 16, 1))


def test_folders_name_their_bad_pictures(data, tmp_path, capsys):
    found = found_in(data / "pictures")
    assert [each.medium for each in found.looks] == [Medium(1, 30, 20 + 10 * i) for i in (0, 2, 4, 1, 3, 5)]
    assert [each.words for each in found.looks] == ["class0"] * 3 + ["class1"] * 3
    [bad] = found.bad
    assert "bad.png: not a picture" in bad and bad.count("bad.png") == 1
    page = run(data / "pictures", tmp_path)
    out = capsys.readouterr().out
    assert "bad: 1" in out and bad in out and "bad: 1" in page and "bad.png: not a picture" in page


def test_captioned_clips_and_pictures(data, tmp_path):
    found = found_in(data / "mixed" / "mixed.csv")
    assert [each.medium for each in found.looks] == [Medium(5, 24, 40, 10.0), Medium(1, 22, 33)]
    assert [len(each.frames) for each in found.looks] == [3, 1]
    assert len(found.bad) == 2 and "cut.mp4" in found.bad[0] and "gone.png" in found.bad[1]
    page = run(data / "mixed" / "mixed.csv", tmp_path)
    assert (
        "<i>" not in page
        and "&lt;i&gt;gone.png" in page
        and 'src="data:image/png;base64,' in page
        and "http" not in page
    )
    for content in re.findall(r"base64,([^\"]+)", page):
        Image.open(io.BytesIO(base64.b64decode(content))).load()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([look.SHEET, look.HISTOGRAMS, look.PAGE])


@pytest.mark.parametrize(("name", "count", "medium"), [("digits", 1438, SEEN["digits"]), ("demo", 4, SEEN["demo"])])
def test_what_is_built_in(data, name, count, medium):
    found = found_in("digits" if name == "digits" else data / "demo" / "demo.csv")
    assert len(found.looks) == count and {each.medium for each in found.looks} == {medium} and not found.bad


def test_tars_and_blends(data, tmp_path):
    tars = found_in(data / "tars")
    assert {each.medium for each in tars.looks} == {Medium(1, 17, 20)} and tars.looks[3].words == "a 3"
    blend = found_in(f"{data / 'tars'}:0.5,{data / 'demo' / 'demo.csv'}:0.5")
    assert [each.medium for each in blend.looks] == [Medium(1, 17, 20)] * 5 + [SEEN["demo"]] * 4
    run(f"{data / 'tars'}:0.5,{data / 'demo' / 'demo.csv'}:0.5", tmp_path)


def test_latents_are_shown_in_false_colours(data, tmp_path):
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (20, 16, 3), dtype=np.uint8)
        (data / "few").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(data / "few" / f"{i}.png")
    flags = (
        f"--data_path {data / 'few'} --vae {data / 'vae'} --image_size 16 --output {data / 'latents'} --num_workers 0"
    )
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, **kinds)
    vae.save_pretrained(data / "vae")
    assert preprocess.main(["latents", *flags.split()]) == 0
    found = found_in(data / "latents")
    assert {each.medium for each in found.looks} == {Medium(1, 16, 16)}
    assert found.looks[0].frames[0].std() > 10
    run(data / "latents", tmp_path)


def test_nothing_is_written_if_nothing_can_be_read(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"no row of .* can be read: .*0.png: not a picture"):
        look.run(str(tmp_path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_rows_are_spread_evenly_and_shown_where_asked(data):
    dataset, sizes = look.open_any("digits", None, None, None, "test")
    found = look.look(dataset, 10, 4, 1, MediumTokens(*sizes, 16, 1))
    rows = [each.row for each in found.looks]
    assert len(dataset) == 359 and len(rows) == 10 and rows[0] == 0 and rows[-1] == 358
    assert max(np.diff(rows)) - min(np.diff(rows)) <= 1
    assert sum(bool(each.frames) for each in found.looks) == 4


def test_thumbnails():
    assert look.thumbnail(np.zeros((8, 6), np.uint8)).shape == (THUMBNAIL, THUMBNAIL // 8 * 6, 3)
    assert look.thumbnail(np.zeros((1000, 3, 3), np.uint8)).shape == (THUMBNAIL, 1, 3)
    assert look.thumbnail(np.zeros((90, 320, 3), np.uint8)).shape == (45, 160, 3)


@pytest.mark.parametrize(
    ("medium", "tokens"),
    [
        (Medium(1, 256, 256), 256),
        (Medium(1, 512, 512), 256),  # scaled down
        (Medium(1, 64, 64), 16),  # never up
        (Medium(1, 512, 2048), 8 * 32),  # the area of 256 x 256 at 1:4
        (Medium(48, 64, 64, 24.0), 16 * 4),  # 16 of its 24 every-second frames, 4 a token
        (Medium(5, 64, 64, 24.0), 16),
    ],
)
def test_tokens_of_a_medium(medium, tokens):
    assert MediumTokens(256, 16, 2, 16, 4)(medium) == tokens


def reference(lengths, budget):
    """Best fit, by looking at every sequence."""
    packs = []
    for length in sorted(lengths, reverse=True):
        fits = [pack for pack in packs if sum(pack) + length <= budget]
        if fits:
            max(fits, key=sum).append(length)
        else:
            packs.append([length])
    packs.remove(min(packs, key=sum))
    return packs


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 90))
def test_fill_against_best_fit_by_hand(lengths, budget):
    packs, found = reference(lengths, budget), fill_of(lengths, budget)
    assert found.too_long == 0
    if not packs:
        assert found.fill is None
    else:
        assert found.fill == pytest.approx(sum(map(sum, packs)) / (budget * len(packs)))


def test_fill_of_what_is_too_long():
    assert fill_of([5, 5, 30, 4], 10) == fill_of([30, 4, 5, 5], 10)
    found = fill_of([5, 5, 30, 4], 10)
    assert found.fill == 1.0 and found.too_long == 0.25
    assert fill_of([30], 10).fill is None and fill_of([], 10).too_long == 0


def test_a_name_that_is_nothing_is_refused_in_one_line(tmp_path, capsys):
    assert preprocess.main(["look", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "DATA" in said and "doesn't exist" in said
