"""``preprocess.py look``: what it counts, names and draws for every kind of source."""

import base64
import io
import re
import shutil
import threading
import warnings
from fractions import Fraction
from functools import partial
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import matplotlib.font_manager
import numpy as np
import pytest
from diffusers import AutoencoderKL
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

import preprocess
from opendit.data import look
from opendit.data.base import DataError, Medium
from opendit.data.captioned_media import TableRow, write_csv
from opendit.data.digits import make_demo
from opendit.data.look import GAP, LINE, THUMBNAIL, Findings, Look, MediumTokens, draw_histograms, draw_sheet, fill_of
from opendit.data.order import SourceRows
from opendit.data.shards import store
from opendit.data.video_files import write_mp4
from tests.data.shards.tars import captioned, write_tar
from tests.data.shards.test_remote import Handler

SEEN = {"digits": Medium(1, 8, 8), "demo": Medium(48, 16, 16, 24.0)}


def save(path, width, height):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((height, width, 3), 90, np.uint8)).save(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a folder with every kind of source."""
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
    dataset, sizes = look.open_any(str(data_path))
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
    assert "5 pictures with captions, 3x256x256" in tars.dataset.describe().text
    blend = found_in(f"{data / 'tars'}:0.5,{data / 'demo' / 'demo.csv'}:0.5")
    assert "3x16x256x256" in blend.dataset.describe().text
    assert [each.medium for each in blend.looks] == [Medium(1, 17, 20)] * 5 + [SEEN["demo"]] * 4
    run(f"{data / 'tars'}:0.5,{data / 'demo' / 'demo.csv'}:0.5", tmp_path)


def test_latents_are_shown_in_false_colours(data, tmp_path, monkeypatch):
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
    shutil.copytree(data / "latents", tmp_path / "copy")
    blend = found_in(f"{data / 'latents'}:0.5,{tmp_path / 'copy'}:0.5")  # without a size, here and below
    assert [each.medium for each in blend.looks] == [Medium(1, 16, 16)] * 6
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(data)))
    server.faults, server.ranges = [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "cache"))
    try:
        behind = found_in(f"http://127.0.0.1:{server.server_port}/latents")
        assert [each.medium for each in behind.looks] == [each.medium for each in found.looks]
        assert behind.tokens == found.tokens and behind.tokens.image_size == 16
    finally:
        server.shutdown()
        server.server_close()


def test_nothing_is_written_if_nothing_can_be_read(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"no row of .* can be read: .*0.png: not a picture"):
        look.run(str(tmp_path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_rows_are_spread_evenly_and_shown_where_asked(data):
    dataset, sizes = look.open_any("digits", split="test")
    found = look.look(dataset, 10, 4, 1, MediumTokens(*sizes, 16, 1))
    rows = [each.row for each in found.looks]
    assert len(dataset) == 359 and len(rows) == 10 and rows[0] == 0 and rows[-1] == 358
    assert max(np.diff(rows)) - min(np.diff(rows)) <= 1
    assert sum(bool(each.frames) for each in found.looks) == 4


def test_sources_are_looked_into_by_their_weights(data, tmp_path):
    files = sorted((data / "pictures").glob("*/[0-9].png"))
    write_csv(tmp_path / "large.csv", [TableRow(files[i % 6], f"large {i}") for i in range(60)])
    write_csv(tmp_path / "small.csv", [TableRow(files[i], f"small {i}") for i in range(3)])
    by_weight = f"{tmp_path / 'large.csv'}:0.6,{tmp_path / 'small.csv'}:0.4"
    dataset, sizes = look.open_any(by_weight)
    found = look.look(dataset, 20, 10, 1, MediumTokens(*sizes, 16, 1))
    words = [each.words for each in found.drawn]
    assert [sum(name in each for each in words) for name in ("large", "small")] == [12, 8]
    assert sorted(words.count(f"small {i}") for i in range(3)) == [2, 3, 3]
    assert len(found.looks) == 15 and len(found.shown) == len({each.row for each in found.shown}) > 6
    assert sum("small" in each.words for each in found.shown) == 3
    assert "looked into 15 of 63 rows, bad: 0; figures are of 20 samples by weight: " in f"looked into {found.looked}"
    found = look.look(dataset, 0, 10, 1, MediumTokens(*sizes, 16, 1))
    assert len(found.looks) == 63 and sum("small" in each.words for each in found.drawn) == 25
    (tmp_path / "blend.yaml").write_text("sources: [{path: large.csv, epochs: 1}, {path: small.csv, epochs: 5}]")
    dataset, sizes = look.open_any(str(tmp_path / "blend.yaml"))
    rows = look.draw_rows(dataset, 50)
    assert (rows < 60).sum() == 40 and np.unique(rows[rows >= 60], return_counts=True)[1].tolist() == [4, 3, 3]


def test_every_source_is_looked_into():
    rows = SourceRows(("a", "b", "c"), (1000, 1010, 1020), ((0, (Fraction(1), Fraction(1, 9999), Fraction(0))),), 1020)
    about = SimpleNamespace(sources=rows)
    found = look.draw_rows(SimpleNamespace(describe=lambda: about), 20)
    assert rows.count(found).tolist() == [20, 1, 1]


def findings(*looks):
    about = SimpleNamespace(conditioning="label", num_classes=3, sources=None)
    dataset = SimpleNamespace(describe=lambda: about)
    return Findings(dataset, list(looks), [], MediumTokens(16, 1, 1, 16, 1), list(looks))


def test_a_picture_takes_one_place_and_a_clip_three():
    red, blue = (np.tile(np.array(colour, np.uint8), (40, THUMBNAIL, 1)) for colour in ((255, 0, 0), (0, 0, 255)))
    clip = Look(0, "", Medium(9, 40, 160), "a", (blue,) * 3)
    of = [Look(row, "", Medium(1, 40, 160), "a", (red,)) for row in range(1, 5)]
    sheet = np.asarray(Image.open(io.BytesIO(draw_sheet(findings(of[0], clip, *of[1:])))))
    assert sheet.shape == (2 * (40 + 2 * LINE + 2 * GAP) + GAP, 6 * (THUMBNAIL + GAP) + GAP, 3)
    below = GAP + 40 + 2 * LINE + 2 * GAP
    for place, line, colour in ((0, 0, red), (1, 0, blue), (2, 0, blue), (4, 0, red), (5, 0, red), (0, 1, red)):
        assert (sheet[GAP + line * (below - GAP) + 20, GAP + place * (THUMBNAIL + GAP) + 50] == colour[0, 0]).all()
    assert (sheet[below + 20, THUMBNAIL + 2 * GAP + 50 :] == 255).all()


def square_font(path):
    """Write a font in which the character 文 is a black square."""
    pen = TTGlyphPen(None)
    for i, point in enumerate(((0, 0), (0, 1000), (1000, 1000), (1000, 0))):
        (pen.moveTo if i == 0 else pen.lineTo)(point)
    pen.closePath()
    font = FontBuilder(1000)
    font.setupGlyphOrder([".notdef", "square"])
    font.setupCharacterMap({ord("文"): "square"})
    font.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "square": pen.glyph()})
    font.setupHorizontalMetrics({".notdef": (500, 0), "square": (1000, 0)})
    font.setupHorizontalHeader(ascent=1000, descent=0)
    font.setupNameTable({"familyName": "Square", "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(path)


@pytest.mark.parametrize("installed", [False, True])
def test_words_of_other_scripts(installed, data, tmp_path, monkeypatch):
    """Captions are drawn with a font that has their characters, if there is one, without warnings. The page has them as
    text."""
    square_font(tmp_path / "wqy-microhei.ttf")
    fonts = [str(tmp_path / "wqy-microhei.ttf")] if installed else []
    monkeypatch.setattr(matplotlib.font_manager, "findSystemFonts", lambda: fonts)
    caches = look.font_files, look.loaded_fonts, look.families
    for each in caches:
        each.cache_clear()
    white = np.full((4, 4, 3), 255, np.uint8)
    found = findings(Look(0, "", Medium(1, 4, 4), "文文文", (white,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        histograms = np.asarray(Image.open(io.BytesIO(draw_histograms(found))).convert("L"))
    words = np.asarray(Image.open(io.BytesIO(draw_sheet(found))).convert("L"))[GAP + 4 : GAP + 4 + LINE]
    names = histograms[len(histograms) // 2 :, : histograms.shape[1] // 3]
    # Only the installed font draws three squares without a gap.
    assert (max(run_of_dark(line) for line in words) >= 3 * 11) == installed
    assert any(run_of_dark(line[:120]) >= 3 * 8 and run_of_dark(line) < 100 for line in names) == installed
    for each in caches:
        each.cache_clear()
    assert page_words(run(data / "mixed" / "mixed.csv", tmp_path / "out")) == [
        "&lt;b&gt;$x^2$ &amp; 文 (40 x 24, 5 frames, 0.5 s)",
        "&lt;b&gt;$x^2$ &amp; 文 (33 x 22)",
    ]


def run_of_dark(line):
    return max(map(len, "".join("x" if value < 80 else " " for value in line).split()), default=0)


def page_words(page):
    [words] = re.findall("<ol>(.*)</ol>", page)
    return re.findall("<li>(.*?)</li>", words)


def test_no_legend_and_no_title_lies_over_others(monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: (save(self, *args, **options), drawn.append(self))
    )
    draw_histograms(findings(*(Look(row, "", Medium(1, 256, 256), "a class of many letters") for row in range(5000))))
    [figure] = drawn
    for axes in figure.axes:
        around = axes.get_window_extent()
        assert axes.title.get_window_extent().width <= around.width
        if (legend := axes.get_legend()) is not None:
            assert not legend.get_window_extent().overlaps(around)


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
        (Medium(48, 64, 64, 24.0), 16 * 4),  # 16 of the 24 frames at every second one, 4 a token
        (Medium(5, 64, 64, 24.0), 16),
    ],
)
def test_tokens_of_a_medium(medium, tokens):
    assert MediumTokens(256, 16, 2, 16, 4)(medium) == tokens


def reference(lengths, budget):
    """Pack by best fit, looking at every pack, and drop the emptiest pack."""
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
