"""Fonts of ``preprocess.py look``: words of captions may be of any script."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from PIL import ImageFont

SIZE = 11
MISSING = "Glyph .* missing from"  # how matplotlib's warning of a glyph that no font has begins
# How the files of fonts with Chinese, Japanese and Korean begin, in lower case; the first that is installed is taken.
CJK = ("notosanscjk", "sourcehansans", "wqy-microhei", "wqy-zenhei", "droidsansfallback", "pingfang", "msyh", "simhei")


@cache
def font_files() -> list[str]:
    """DejaVu Sans, which matplotlib brings and which has more of the world's letters than Pillow's font, and one for
    Chinese, Japanese and Korean if there is any."""
    import matplotlib
    from matplotlib.font_manager import findSystemFonts  # the manager's own list may be older than a font

    found = [str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))]
    # Of several weights the regular one.
    installed = sorted(findSystemFonts(), key=lambda path: ("regular" not in Path(path).name.lower(), path))
    for begin in CJK:
        if path := next((path for path in installed if Path(path).name.lower().startswith(begin)), None):
            return [*found, path]
    return found


@cache
def families() -> list[str]:
    """matplotlib's names of the fonts: it takes each glyph from the first that has it."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    for path in font_files()[1:]:
        fontManager.addfont(path)
    return [FT2Font(path).family_name for path in font_files()]


@cache
def loaded_fonts() -> list[tuple[ImageFont.FreeTypeFont, Mapping[int, object]]]:
    """Pillow's fonts, each with the characters that it has."""
    from matplotlib.ft2font import FT2Font

    return [(ImageFont.truetype(path, SIZE), FT2Font(path).get_charmap()) for path in font_files()]


def font_of(text: str) -> ImageFont.FreeTypeFont:
    """The font that lacks the fewest characters of a text, which Pillow draws in one font."""
    return min(loaded_fonts(), key=lambda font: sum(ord(letter) not in font[1] for letter in text))[0]
