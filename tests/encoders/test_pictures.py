"""Captions of any kind are drawn quickly, as much of each as fits."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFont

from opendit.encoders.pictures import draw_grid, fit_caption, one_line, save_contact_sheet, save_grid, to_uint8

FONT = ImageFont.load_default(size=11)
ODD = ["", " ", "\n", "a\nb\tc\x00d\x1b[31m", "مرحبا بالعالم", "e\u0301" * 9, "\U0001f469\u200d" * 3]
ODD += ["\ud800", "caf\udce9", "\u202eabc", "漢字"]


@given(st.text(st.characters(codec=None), max_size=300), st.sampled_from([8, 64, 120, 1024]))
@settings(deadline=None, max_examples=300)
def test_what_is_drawn_of_a_caption(caption, width):
    text, line = fit_caption(caption, width, FONT), one_line(caption)
    assert text.isprintable() and not any(0xD800 <= ord(c) < 0xE000 for c in text)
    if FONT.getlength(line) <= width or len(line) <= 4:
        assert text == line
    else:
        start = text.removesuffix("…")
        assert text != start and line.startswith(start) and (FONT.getlength(text) <= width or len(text) <= 5)
        longer = line[: len(start) + 1]
        assert FONT.getlength(longer + "…") > width or longer == line


def test_a_short_caption_is_left_as_it_is():
    assert fit_caption("zero", 64, FONT) == "zero" and fit_caption("abcd", 1, FONT) == "abcd"
    assert fit_caption("a name that is far too long for its picture", 64, FONT) == "a name th…"
    assert one_line("a\r\n\tb\u2028c\x00d") == "a b c d" and one_line("x\udce9") == "x\ufffd"


@pytest.mark.parametrize("caption", ["lorem ipsum " * 420, "\u0301" * 5000, "\n" * 5000, "👩‍👩‍👧" * 1000, "i" * 10**6])
def test_long_captions_are_drawn_in_time(caption):
    pictures = np.zeros((32, 256, 256, 3), np.uint8)
    began = time.process_time()
    draw_grid(pictures, [caption] * 32)
    assert time.process_time() - began < 3  # takes 0.2 s; adding one character at a time would take minutes


def test_sheets_of_odd_captions(tmp_path):
    save_contact_sheet(tmp_path / "sheet.png", np.zeros((len(ODD), 3, 8, 8, 3), np.uint8), ODD)
    assert (tmp_path / "sheet.png").stat().st_size > 100


def test_pixels_become_bytes_and_a_sheet_has_room_for_all(tmp_path):
    pixels = torch.tensor([-2.0, -1, 0, 1, 3]).view(1, 1, 1, 5)
    assert to_uint8(pixels)[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255]
    clips = to_uint8(torch.zeros(2, 3, 4, 5, 7))
    assert clips.shape == (2, 4, 5, 7, 3) and clips.dtype == np.uint8
    save_grid(tmp_path / "sub" / "g.png", np.zeros((3, 8, 8, 3), np.uint8), ["zero", "one", "two"], columns=2)
    width, height = Image.open(tmp_path / "sub" / "g.png").size
    assert (width, height) == (2 * 68 + 4, 2 * 82 + 4)
