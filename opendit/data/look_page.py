"""The contact sheet, the histograms and the page of ``preprocess.py look``."""

import base64
import functools
import html
import io
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from opendit.data.base import MediaDataset
from opendit.data.captions import count_texts
from opendit.data.files import printable
from opendit.data.fill import BUDGETS, MediumTokens, fill_of
from opendit.data.look_fonts import MISSING, families, font_of
from opendit.data.medium import Medium, count_colours

THUMBNAIL = 160  # pixels of a thumbnail's longer side
COLUMNS, OF_CLIP = 8, 3  # thumbnails in a line of the sheet, and of a clip
GAP, LINE, MOST_CLASSES = 8, 15, 20
INK, FAINT, BACKGROUND = (20, 20, 20), (110, 110, 110), (255, 255, 255)


@dataclass(frozen=True)
class Look:
    """One row that was opened. words: its caption or its class. frames: thumbnails, (h, w, 3) uint8 each: one of a
    picture, three of a clip; none of a row that is not on the contact sheet."""

    row: int
    source: str
    medium: Medium
    words: str
    frames: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Findings:
    """The findings in ``dataset``: looks at rows in their order, and "file: reason" for every bad one.

    drawn: the looks that figures are made from; with several sources as many of each as its weight asks for, so that
    some may occur twice and others not."""

    dataset: MediaDataset
    looks: list[Look]
    bad: list[str]
    tokens: MediumTokens
    drawn: list[Look]

    @property
    def clips(self) -> list[Look]:
        return [each for each in self.drawn if each.medium.frames > 1]

    @property
    def shown(self) -> list[Look]:
        return [each for each in self.looks if each.frames]

    @property
    def counted(self) -> str:
        """Name the unit that figures count."""
        return "rows looked into" if self.dataset.source_rows() is None else "samples by weight"

    @functools.cached_property
    def of_captions(self) -> list[str]:
        """Lines on captions that are long, and on those that say nothing, of the rows that were opened."""
        if self.dataset.conditioning != "text":
            return []
        words = {each.row: each.words for each in self.looks}
        found = count_texts([*words], words.__getitem__, self.dataset.source, len(self.dataset))
        return [*found.without_words(), *found.for_any_encoder(), *self.dataset.cached_captions()]

    @property
    def looked(self) -> str:
        """Describe how many rows were opened and, with several sources, the samples that they stand for."""
        rows = f"{len(self.looks) + len(self.bad):,} of {len(self.dataset):,} rows, bad: {len(self.bad):,}"
        if (sources := self.dataset.source_rows()) is None:
            return rows
        of_each = sources.count(np.array([each.row for each in self.drawn])).tolist()
        named = ", ".join(f"{printable(name)} {count:,}" for name, count in zip(sources.names, of_each, strict=True))
        return f"{rows}; figures are of {len(self.drawn):,} samples by weight: {named}"


def draw_sheet(found: Findings) -> bytes:
    """A PNG of thumbnails in the data set's order, each over its size and its words."""
    clips = any(len(each.frames) > 1 for each in found.shown)
    columns = COLUMNS // OF_CLIP * OF_CLIP if clips else min(COLUMNS, len(found.shown))
    lines: list[list[tuple[int, Look]]] = []  # of each the place in its line
    end = columns
    for each in found.shown:
        places = OF_CLIP if len(each.frames) > 1 else 1
        if end + places > columns:
            lines.append([])
            end = 0
        lines[-1].append((end, each))
        end += places
    heights = [max(frame.shape[0] for _, each in line for frame in each.frames) for line in lines]
    width = THUMBNAIL + GAP
    sheet = Image.new(
        "RGB", (columns * width + GAP, sum(heights) + len(lines) * (2 * LINE + 2 * GAP) + GAP), BACKGROUND
    )
    pen, top = ImageDraw.Draw(sheet), GAP
    for line, height in zip(lines, heights, strict=True):
        for place, each in line:
            left, room = GAP + place * width, (OF_CLIP if len(each.frames) > 1 else 1) * width - 2 * GAP
            for i, frame in enumerate(each.frames):
                sheet.paste(Image.fromarray(frame), (left + i * THUMBNAIL, top))
            for below, (text, ink) in enumerate(((each.words, INK), (_size(each.medium), FAINT))):
                font = font_of(printable(text))
                text = _cut(printable(text), font.getlength, room)
                pen.text((left, top + height + (below + 1) * LINE - 3), text, fill=ink, font=font, anchor="ls")
        top += height + 2 * LINE + 2 * GAP
    return _png(sheet)


def _cut(text: str, length: Callable[[str], float], most: float) -> str:
    text = text[:200]
    if length(text) <= most:
        return text
    while text and length(text + "…") > most:
        text = text[:-1]
    return text + "…"


def _size(medium: Medium) -> str:
    """Return the size as text, width x height: "64 x 64", or "64 x 64, 48 frames, 2.0 s" of a clip."""
    size = f"{medium.width:,} x {medium.height:,}"
    if medium.frames > 1:
        size += f", {medium.frames:,} frames" + (f", {medium.seconds:.1f} s" if medium.fps else "")
    return size


def _png(image: Image.Image) -> bytes:
    memory = io.BytesIO()
    image.save(memory, "PNG")
    return memory.getvalue()


def draw_histograms(found: Findings) -> bytes:
    """A PNG of six parts: sizes, aspect ratios, durations, captions or classes, tokens, and fill by budget."""
    import matplotlib

    with matplotlib.rc_context({"font.family": families()}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", MISSING, UserWarning)  # the page has the words as text
        return _draw_histograms(found)


def _draw_histograms(found: Findings) -> bytes:
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a screen

    media = [each.medium for each in found.drawn]
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    (sizes, aspects, durations), (words, tokens, fill) = figure.subplots(2, 3)

    counts = Counter((medium.width, medium.height) for medium in media)
    width, height = zip(*counts, strict=True)
    sizes.scatter(width, height, s=[20 + 400 * count / len(media) for count in counts.values()], alpha=0.5)
    sizes.set(title="sizes", xlabel="width, pixels", ylabel="height, pixels", xlim=(0, None), ylim=(0, None))

    ratios = np.log2([medium.width / medium.height for medium in media])
    _histogram(aspects, ratios, "aspect ratio", "width / height", found.counted)
    aspects.xaxis.set_major_formatter(lambda value, _: f"{2.0**value:.2f}")

    timed = [each.medium.seconds for each in found.clips if each.medium.fps]
    if timed:
        _histogram(durations, timed, "durations of clips", "seconds", found.counted)
    else:
        _histogram(durations, [each.medium.frames for each in found.clips], "frames of clips", "frames", found.counted)

    if found.dataset.conditioning == "text":
        _histogram(words, [len(each.words.split()) for each in found.drawn], "caption lengths", "words", found.counted)
    else:
        common = Counter(each.words for each in found.drawn).most_common(MOST_CLASSES)[::-1]
        names = [_cut(printable(name), len, 24) for name, _ in common]
        words.barh(range(len(common)), [count for _, count in common])
        words.set_yticks(range(len(common)), names, fontsize=8, parse_math=False)
        words.set(title=f"classes ({found.dataset.num_classes:,} in all)", xlabel=found.counted)

    lengths = [found.tokens(medium) for medium in media]
    _histogram(tokens, lengths, "tokens of a sample", "tokens", found.counted)

    fills = [fill_of(lengths, budget) for budget in BUDGETS]
    names = [f"{each.budget // 1024}k" for each in fills]
    used = [100 * (each.fill or 0) for each in fills]
    for name, each in zip(names, fills, strict=True):
        if each.fill is None:
            fill.text(name, 3, "too few rows" if each.too_long < 1 else "", rotation=90, ha="center", fontsize=8)
    fill.bar(names, used, label="tokens used")
    fill.plot(names, [100 * each.too_long for each in fills], "o-", color="tab:red", label="media too long")
    fill.set(title="fill by budget of tokens", xlabel="tokens of a sequence", ylabel="%", ylim=(0, 105))
    fill.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)  # below the axes
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=90)
    return memory.getvalue()


def _histogram(axes, values, title: str, label: str, counted: str) -> None:
    axes.set(title=title, xlabel=label, ylabel=counted)
    if not len(values):
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
        return
    low, high = min(values), max(values)
    if low == high:  # one bar, of which the axis shows what it is
        axes.bar([low], [len(values)], width=0.1 * abs(low) or 0.1)
        axes.set_xlim(low - (abs(low) or 1), low + (abs(low) or 1))
    else:
        axes.hist(values, bins=40)


def make_page(found: Findings, sheet: bytes, histograms: bytes) -> str:
    """One HTML page that needs no other file: what the data set is, the bad rows, both pictures, and a table."""
    media = [each.medium for each in found.drawn]
    of_clips = [each.medium for each in found.clips]
    columns = {
        "width": [medium.width for medium in media],
        "height": [medium.height for medium in media],
        "frames of clips": [medium.frames for medium in of_clips],
        "seconds of clips": [medium.seconds for medium in of_clips if medium.fps],
        "frames a second": [medium.fps for medium in of_clips if medium.fps],
        "tokens": [found.tokens(medium) for medium in media],
    }
    if found.dataset.conditioning == "text":
        columns["words of captions"] = [len(each.words.split()) for each in found.drawn]
        columns["characters of captions"] = [len(each.words) for each in found.drawn]
    rows = "".join(
        f"<tr><th>{name}</th>"
        + "".join(f"<td>{figure:.4g}</td>" for figure in (min(v), np.median(v), max(v)))
        + "</tr>"
        for name, v in columns.items()
        if v
    )
    fills = "".join(
        f"<tr><th>{each.budget:,}</th><td>{_share(each.fill)}</td><td>{each.too_long:.1%}</td></tr>"
        for each in (fill_of(columns["tokens"], budget) for budget in BUDGETS)
    )
    t = found.tokens
    which = f"every {t.frame_interval}. frame" if t.fps is None else f"{t.fps:g} frames a second"
    how = (
        f"At its own aspect ratio, scaled down to the area of {t.image_size} x {t.image_size} pixels, {which} up to "
        f"{t.num_frames}; a token is {t.token_frames} x {t.token_pixels} x {t.token_pixels} of frames and pixels."
    )
    colours = "".join(f"<p>{line}.</p>" for line in count_colours(each.medium for each in found.looks))
    bad = "".join(f"<li>{_escaped(line)}</li>" for line in found.bad)
    words = "".join(f"<li>{_escaped(each.words)} ({_size(each.medium)})</li>" for each in found.shown)
    pictures = (
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        for name, content in (("histograms", histograms), ("contact sheet", sheet))
    )
    return (
        "<!doctype html><html><head><meta charset='utf-8'><title>Data</title><style>body{font:14px sans-serif;"
        "margin:2em;max-width:1400px}img{max-width:100%;display:block;margin:1em 0}td,th{padding:2px 12px;"
        "text-align:right}th{text-align:left}</style></head><body>"
        f"<p>{_escaped(found.dataset.describe())}</p>"
        f"<p>Looked into {_escaped(found.looked)}.</p>"
        f"{colours}"
        + "".join(f"<p>{_escaped(line)}</p>" for line in found.of_captions)
        + f"<ul>{bad}</ul><table><tr><th></th><th>least</th><th>median</th><th>most</th></tr>{rows}</table>"
        f"<p>{how}</p><table><tr><th>tokens of a sequence</th><th>used</th><th>media too long</th></tr>{fills}</table>"
        f"{''.join(pictures)}<p>On the contact sheet, line by line:</p><ol>{words}</ol></body></html>\n"
    )


def _share(fill: float | None) -> str:
    return "too few rows" if fill is None else f"{fill:.1%}"


def _escaped(text: str) -> str:
    return html.escape(printable(text))
