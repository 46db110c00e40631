"""``preprocess.py look``: show some rows of a data set on a contact sheet, in histograms and on an HTML page."""

import base64
import functools
import html
import io
import warnings
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from opendit.common.progress import Progress
from opendit.common.safe_files import make_folder, refuse_links, write_whole
from opendit.common.utils import DataError
from opendit.config.names import inline_sources, is_address
from opendit.data.base import MediaDataset, Medium, count_colours
from opendit.data.blend import BlendedDataset
from opendit.data.captions import count_texts
from opendit.data.files import name_few, printable
from opendit.data.latents import fetch_latents_indexes
from opendit.data.latents_index import read_indexes
from opendit.data.pictures_and_clips import PICTURE, PicturesAndClips
from opendit.data.processes import run_apart
from opendit.data.shards.store import Remote
from opendit.data.sources import Recaptioned, build_dataset
from opendit.encoders.pictures import fit_caption

BUDGETS = tuple(1024 * 2**i for i in range(8))  # sequence lengths in tokens, from 1k to 128k


@dataclass(frozen=True)
class MediumTokens:
    """Counts a medium's tokens at its original aspect ratio and length. A larger medium is scaled down to the area of
    ``image_size`` squared."""

    image_size: int
    num_frames: int  # maximum frames of a clip
    frame_interval: int
    token_pixels: int  # a token's side in pixels
    token_frames: int  # a token's number of frames
    fps: float | None = None  # frames per second to count; None counts every ``frame_interval``-th frame

    def __call__(self, medium: Medium) -> int:
        scale = min(1.0, self.image_size / (medium.height * medium.width) ** 0.5)
        rows, columns = (max(1, round(side * scale / self.token_pixels)) for side in (medium.height, medium.width))
        frames = min(self.num_frames, -(-medium.frames_at(self.fps) // self.frame_interval))
        return rows * columns * -(-frames // self.token_frames)


@dataclass(frozen=True)
class BudgetFill:
    """Result of packing media into sequences of ``budget`` tokens."""

    budget: int
    # Used fraction of the tokens, without the emptiest sequence, because more media would fill it. None for one
    # sequence.
    fill: float | None
    too_long: float  # fraction of media that are left out because they are longer than a sequence


def fill_of(lengths: Sequence[int], budget: int) -> BudgetFill:
    """Pack media with these token counts by best fit: longest first, each into the fullest sequence with room."""
    fitting = sorted((length for length in lengths if length <= budget), reverse=True)
    free: list[int] = []  # free tokens of each sequence, ascending
    for length in fitting:
        place = bisect_left(free, length)
        left = free.pop(place) if place < len(free) else budget
        insort(free, left - length)
    full = free[:-1]
    fill = 1 - sum(full) / (budget * len(full)) if full else None
    return BudgetFill(budget, fill, 1 - len(fitting) / len(lengths) if lengths else 0.0)


SIZE = 11
MISSING = "Glyph .* missing from"  # start of matplotlib's warning about a missing glyph
# Beginnings of lower-case file names of fonts with Chinese, Japanese and Korean. The first installed font is used.
CJK = ("notosanscjk", "sourcehansans", "wqy-microhei", "wqy-zenhei", "droidsansfallback", "pingfang", "msyh", "simhei")


@cache
def font_files() -> list[str]:
    """Return font files: matplotlib's DejaVu Sans and, if installed, one for Chinese, Japanese and Korean."""
    import matplotlib
    from matplotlib.font_manager import findSystemFonts  # matplotlib's cached list may lack new fonts

    found = [str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))]
    # Prefer fonts of regular weight.
    installed = sorted(findSystemFonts(), key=lambda path: ("regular" not in Path(path).name.lower(), path))
    for begin in CJK:
        if path := next((path for path in installed if Path(path).name.lower().startswith(begin)), None):
            return [*found, path]
    return found


@cache
def families() -> list[str]:
    """Return matplotlib's names for the fonts. matplotlib draws each glyph with the first font that has it."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    for path in font_files()[1:]:
        fontManager.addfont(path)
    return [FT2Font(path).family_name for path in font_files()]


@cache
def loaded_fonts() -> list[tuple[ImageFont.FreeTypeFont, Mapping[int, object]]]:
    """Return Pillow's fonts, each with a mapping from the font's characters."""
    from matplotlib.ft2font import FT2Font

    return [(ImageFont.truetype(path, SIZE), FT2Font(path).get_charmap()) for path in font_files()]


def font_of(text: str) -> ImageFont.FreeTypeFont:
    """Return the font that lacks the fewest of a text's characters. Pillow draws a text in a single font."""
    return min(loaded_fonts(), key=lambda font: sum(ord(letter) not in font[1] for letter in text))[0]


THUMBNAIL = 160  # a thumbnail's longer side in pixels
COLUMNS, OF_CLIP = 8, 3  # thumbnails in a line of the sheet, and for a clip
GAP, LINE, MOST_CLASSES = 8, 15, 20
INK, FAINT, BACKGROUND = (20, 20, 20), (110, 110, 110), (255, 255, 255)


@dataclass(frozen=True)
class Look:
    """One opened row."""

    row: int
    source: str
    medium: Medium
    words: str  # caption or class
    frames: tuple[np.ndarray, ...] = ()  # thumbnails (h, w, 3) uint8; empty if the row is not on the contact sheet


@dataclass(frozen=True)
class Findings:
    """Results from opening rows of ``dataset``."""

    dataset: MediaDataset
    looks: list[Look]  # the rows that could be opened, in the data set's order
    bad: list[str]  # "file: reason" for every row that could not be opened
    tokens: MediumTokens
    drawn: list[Look]  # rows for the statistics; weights may repeat rows

    @property
    def clips(self) -> list[Look]:
        return [each for each in self.drawn if each.medium.frames > 1]

    @property
    def shown(self) -> list[Look]:
        return [each for each in self.looks if each.frames]

    @property
    def counted(self) -> str:
        return "rows looked into" if self.dataset.describe().sources is None else "samples by weight"

    @functools.cached_property
    def of_captions(self) -> list[str]:
        """Lines for the log about long captions and about captions without words."""
        if (about := self.dataset.describe()).conditioning != "text":
            return []
        words = {each.row: each.words for each in self.looks}
        found = count_texts([*words], words.__getitem__, self.dataset.source, len(self.dataset))
        return [*found.without_words(), *found.for_any_encoder(), *about.cut_captions]

    @property
    def looked(self) -> str:
        """Text with the numbers of opened and bad rows and, if there are several sources, each source's samples."""
        rows = f"{len(self.looks) + len(self.bad):,} of {len(self.dataset):,} rows, bad: {len(self.bad):,}"
        if (sources := self.dataset.describe().sources) is None:
            return rows
        of_each = sources.count(np.array([each.row for each in self.drawn])).tolist()
        named = ", ".join(f"{printable(name)} {count:,}" for name, count in zip(sources.names, of_each, strict=True))
        return f"{rows}; figures are of {len(self.drawn):,} samples by weight: {named}"


def draw_sheet(found: Findings) -> bytes:
    """Draw a PNG of thumbnails. Below each are the caption or class, and the size."""
    clips = any(len(each.frames) > 1 for each in found.shown)
    columns = COLUMNS // OF_CLIP * OF_CLIP if clips else min(COLUMNS, len(found.shown))
    lines: list[list[tuple[int, Look]]] = []  # (column, look) pairs of each line
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
                text = fit_caption(printable(text), room, font)
                pen.text((left, top + height + (below + 1) * LINE - 3), text, fill=ink, font=font, anchor="ls")
        top += height + 2 * LINE + 2 * GAP
    memory = io.BytesIO()
    sheet.save(memory, "PNG")
    return memory.getvalue()


def _size(medium: Medium) -> str:
    """Return a text such as "64 x 64" (width x height), or "64 x 64, 48 frames, 2.0 s" for a clip."""
    size = f"{medium.width:,} x {medium.height:,}"
    if medium.frames > 1:
        size += f", {medium.frames:,} frames" + (f", {medium.seconds:.1f} s" if medium.fps else "")
    return size


def draw_histograms(found: Findings) -> bytes:
    """Draw a PNG of six plots: sizes, aspect ratios, durations, captions or classes, tokens, and fill by budget."""
    import matplotlib

    with matplotlib.rc_context({"font.family": families()}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", MISSING, UserWarning)  # the HTML page shows the captions completely
        return _draw_histograms(found)


def _draw_histograms(found: Findings) -> bytes:
    from matplotlib.figure import Figure  # pyplot would keep the figures in memory and need a display

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

    if found.dataset.describe().conditioning == "text":
        _histogram(words, [len(each.words.split()) for each in found.drawn], "caption lengths", "words", found.counted)
    else:
        common = Counter(each.words for each in found.drawn).most_common(MOST_CLASSES)[::-1]
        names = [text if len(text := printable(name)) <= 24 else f"{text[:23]}…" for name, _ in common]
        words.barh(range(len(common)), [count for _, count in common])
        words.set_yticks(range(len(common)), names, fontsize=8, parse_math=False)
        words.set(title=f"classes ({found.dataset.describe().num_classes:,} in all)", xlabel=found.counted)

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
    if low == high:  # draw one bar
        axes.bar([low], [len(values)], width=0.1 * abs(low) or 0.1)
        axes.set_xlim(low - (abs(low) or 1), low + (abs(low) or 1))
    else:
        axes.hist(values, bins=40)


_STYLE = "body{font:14px sans-serif;margin:2em}img{max-width:100%;display:block}"


def make_page(found: Findings, sheet: bytes, histograms: bytes) -> str:
    """Return a self-contained HTML page with the data set's description, bad rows, both pictures, and all captions."""
    t = found.tokens
    which = f"every {t.frame_interval}. frame" if t.fps is None else f"{t.fps:g} frames a second"
    how = (
        f"Tokens at its own aspect ratio, scaled down to the area of {t.image_size} x {t.image_size} pixels, {which} "
        f"up to {t.num_frames}; a token is {t.token_frames} x {t.token_pixels} x {t.token_pixels} of frames and pixels."
    )
    lines = [found.dataset.describe().text, f"Looked into {found.looked}."]
    lines += [f"{line}." for line in count_colours(each.medium for each in found.looks)] + found.of_captions
    words = [f"{each.words} ({_size(each.medium)})" for each in found.shown]
    return "\n".join(
        [
            f"<!doctype html><html><head><meta charset='utf-8'><title>Data</title><style>{_STYLE}</style></head><body>",
            *(f"<p>{_escaped(line)}</p>" for line in [*lines, how]),
            f"<ul>{''.join(f'<li>{_escaped(line)}</li>' for line in found.bad)}</ul>",
            *(
                f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
                for name, content in (("histograms", histograms), ("contact sheet", sheet))
            ),
            "<p>On the contact sheet, line by line:</p>",
            f"<ol>{''.join(f'<li>{_escaped(line)}</li>' for line in words)}</ol></body></html>\n",
        ]
    )


def _escaped(text: str) -> str:
    return html.escape(printable(text))


TIME_LIMIT = 60.0  # maximum seconds for opening a row
SHEET, HISTOGRAMS, PAGE = "contact_sheet.png", "histograms.png", "look.html"


def run(
    data_path: str,
    output: str,
    *,
    samples: int = 1000,
    pictures: int = 48,
    token_pixels: int = 16,
    token_frames: int = 1,
    num_workers: int = 2,
    fps: float | None = None,
    **media: Any,
) -> None:
    """Run ``preprocess.py look`` with its flags as arguments. media: options for :func:`open_any`.

    Raises DataError and writes nothing if no row can be read."""
    refuse_links(Path(output), [SHEET, HISTOGRAMS, PAGE], "--output")
    dataset, video = open_any(data_path, fps=fps, **media)
    found = look(dataset, samples, pictures, num_workers, MediumTokens(*video, token_pixels, token_frames, fps))
    if not found.looks:
        raise DataError(f"no row of {data_path} can be read: {name_few(found.bad)}")
    folder = Path(output)
    make_folder(folder)
    content = {SHEET: draw_sheet(found), HISTOGRAMS: draw_histograms(found)}
    content[PAGE] = make_page(found, content[SHEET], content[HISTOGRAMS]).encode("utf-8", "replace")
    for name, written in content.items():
        write_whole(folder / name, written)
    print("\n".join([dataset.describe().text, *dataset.describe().notes]))
    colours = count_colours(each.medium for each in found.looks)
    print("\n".join([f"looked into {found.looked}", *colours, *found.of_captions]))
    for bad in found.bad[:10]:
        print(f"  {bad}")
    if len(found.bad) > 10:
        print(f"  and {len(found.bad) - 10:,} more, in {folder / PAGE}")
    print(f"wrote {', '.join(str(folder / name) for name in content)}")


def open_any(
    data_path: str,
    *,
    image_size: int | None = None,
    num_frames: int | None = None,
    frame_interval: int | None = None,
    fps: float | None = None,
    **options: Any,
) -> tuple[MediaDataset, tuple[int, int, int]]:
    """Return (data set, (image_size, num_frames, frame_interval)) for ``--data_path``, with clips if there are any.
    Missing arguments come from the settings of cached latents; for other data they are 256, 16, 1 and no ``fps``.
    options: more fields of ``sources.Request``. Raises ValueError or FileNotFoundError, naming the flag."""
    made: dict[str, Any] = {}
    if (indexes := _indexes(data_path)) is not None:
        index = next((each for each in indexes if each["image_size"] == image_size), indexes[-1])
        made = {"image_size": index["image_size"], **(index.get("video") or {})}
    size = image_size or made.get("image_size", 256)
    frames, interval = num_frames or made.get("num_frames", 16), frame_interval or made.get("frame_interval", 1)
    rate = fps if fps is not None or frame_interval is not None else made.get("fps")
    # max_bad is 1.0 because bad files are only reported. If the data set can't be opened with clips, try without.
    options |= dict(seed=0, max_bad=1.0, short_clips="interval", num_frames=frames, frame_interval=interval, fps=rate)
    try:
        dataset = build_dataset(data_path, size, use_video=True, **options)
    except ValueError:
        dataset = build_dataset(data_path, size, use_video=False, **options)
    if not _has_clips(dataset):
        with suppress(ValueError):  # an Energon cooker's clips can't be opened as pictures
            dataset = build_dataset(data_path, size, use_video=False, **options)
    return dataset, (size, frames, interval)


def _indexes(data_path: str) -> list[dict[str, Any]] | None:
    """Read the indexes of cached latents, for a blend from its first source. Return None for other data."""
    if inline := inline_sources(data_path):
        return _indexes(inline[0][0])
    if not is_address(data_path):
        return read_indexes(Path(data_path)) if Path(data_path).is_dir() else None
    try:
        return fetch_latents_indexes(data_path, Remote(data_path))
    except (DataError, ValueError, OSError) as error:
        shown = f"--data_path {printable(data_path)}"
        raise ValueError(f"{shown}: {str(error).removeprefix(f'{shown}: ')}") from error


def _has_clips(dataset: MediaDataset) -> bool:
    """Return False if the data set can hold clips but has none. Data sets other than ``PicturesAndClips`` are opened
    with clips only if they contain some."""
    dataset = dataset.whole if isinstance(dataset, Recaptioned) else dataset
    if isinstance(dataset, BlendedDataset):
        return any(map(_has_clips, dataset.parts))
    if not isinstance(dataset, PicturesAndClips) or not dataset.use_video or dataset.describe().kind == "latents":
        return True
    return bool(np.any(dataset.shapes().keys != PICTURE))


def draw_rows(dataset: MediaDataset, samples: int) -> np.ndarray:
    """Return ``samples`` evenly spaced rows in ascending order, or all rows if there are fewer.

    A source gets rows in proportion to its initial weight, at least one. A small source's rows may repeat."""
    sources = dataset.describe().sources
    if sources is None:
        return _spread(len(dataset), min(samples, len(dataset)))
    weights = sources.stages[0][1]
    due = [weight * samples / Fraction(sum(weights)) for weight in weights]
    counts = [max(1, round(each)) for each in due]
    starts = [0, *sources.ends[:-1]]
    of_each = zip(starts, sources.sizes, counts, strict=True)
    return np.concatenate([start + _spread(size, count) for start, size, count in of_each])


def _spread(size: int, count: int) -> np.ndarray:
    """Return ``count`` evenly spaced integers in [0, ``size``), ascending, repeated if ``count`` > ``size``."""
    some = np.linspace(0, size - 1, count % size).round().astype(np.int64)
    return np.sort(np.concatenate([np.tile(np.arange(size), count // size), some]))


def look(dataset: MediaDataset, samples: int, pictures: int, num_workers: int, tokens: MediumTokens) -> Findings:
    """Open ``samples`` rows (0: all), chosen by :func:`draw_rows`. Up to ``pictures`` rows get thumbnails."""
    samples = min(samples or len(dataset), len(dataset))
    drawn = draw_rows(dataset, samples)
    rows = (np.unique(drawn) if samples < len(dataset) else np.arange(len(dataset))).tolist()
    shown = set(drawn[_spread(len(drawn), min(pictures, len(drawn)))].tolist())
    work = [(row, row in shown) for row in rows]

    found: dict[int, Look | str] = {}
    with closing(run_apart(functools.partial(_open_row, dataset), work, num_workers, TIME_LIMIT)) as results:
        with Progress(len(rows), "rows", title="looking") as bar:
            for place, result in results:
                found[place] = result
                bar.update()
    looks, bad = {}, []
    for place, row in enumerate(rows):
        if isinstance(result := found[place], str):
            name = printable(dataset.source(row))
            bad.append(f"{name}: {printable(result).removeprefix(f'{name}: ').removeprefix(': ')}")
        else:
            looks[row] = result
    samples_seen = [looks[row] for row in drawn.tolist() if row in looks]
    return Findings(dataset, list(looks.values()), bad, tokens, samples_seen or list(looks.values()))


def _open_row(dataset: MediaDataset, row: int, keep: bool) -> Look:
    medium, frames = dataset.preview(row)
    words = dataset.caption(row)
    if words is None:
        names = dataset.describe().class_names
        words = names[dataset.label(row)] if names else ""
    kept = tuple(thumbnail(frame) for frame in frames) if keep else ()
    return Look(row, printable(dataset.source(row)), medium, words, kept)


def thumbnail(frame: np.ndarray) -> np.ndarray:
    """Scale a frame, (H, W) or (H, W, 3) uint8, to (h, w, 3) with sides of at most ``THUMBNAIL`` pixels.

    Small frames are enlarged by an integer factor, so that their pixels stay visible."""
    image = Image.fromarray(np.ascontiguousarray(frame)).convert("RGB")
    longest = max(image.size)
    if longest > THUMBNAIL:
        size = [max(1, round(side * THUMBNAIL / longest)) for side in image.size]
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    times = THUMBNAIL // longest
    return np.asarray(image.resize([side * times for side in image.size], Image.Resampling.NEAREST))
