"""Count captions that a text encoder truncates, and captions without content, before training or encoding starts."""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from opendit.common.utils import DataError
from opendit.data.base import USUALLY_COUNTED, BadSample, MediaDataset
from opendit.data.files import printable
from opendit.encoders.text import HUB, MOST_TEXT_TOKENS, fitting_tokens
from opendit.models.conditioning import byte_tokens

# Words for a missing value in pandas, spreadsheets, JavaScript and Python.
MISSING = frozenset(
    "nan -nan none null nil n/a #n/a na #na <na> <nan> <null> <none> nat undefined #value! #ref! #name? "
    "1.#qnan -1.#qnan 1.#ind -1.#ind".split()
) | {"#n/a n/a"}
MOST_MISSING = 40  # longer captions are not looked up in ``MISSING``
AT_ONCE = 1024  # maximum captions per call of a ``Measure``
MOST_TOKENIZED = 10_000  # maximum captions to tokenize before training

Measure = Callable[[list[str]], Sequence[int]]  # captions -> each caption's number of tokens


def says_nothing(caption: str) -> bool:
    """Return True if a caption is empty, or has only whitespace, punctuation and control characters."""
    if caption[:1].isalnum():  # fast path for nearly all captions
        return False
    return all(unicodedata.category(char)[0] in "ZP" or unicodedata.category(char) in ("Cc", "Cf") for char in caption)


def stands_for_nothing(caption: str) -> bool:
    """Return True for a word that means a missing value, such as ``nan`` or ``None``."""
    return len(caption) <= MOST_MISSING and caption.strip().strip("\"'").lower() in MISSING


@dataclass
class CaptionCount:
    """Statistics of counted captions."""

    rows: int  # rows of the data set
    name: str = "captions"  # beginning of every line
    counted: int = 0  # captions counted, including unreadable ones
    tokens: Counter[int] = field(default_factory=Counter)  # number of tokens -> number of captions
    words: Counter[int] = field(default_factory=Counter)  # number of words -> number of captions
    longest_at: str = ""  # sample with the longest caption
    empty: int = 0  # captions without content, see ``says_nothing``
    empty_at: str = ""  # first such sample
    missing: Counter[str] = field(default_factory=Counter)  # spelling -> number of captions
    missing_at: str = ""
    unreadable: int = 0
    unreadable_at: str = ""  # error of the first unreadable caption

    @property
    def longest(self) -> int:
        return max(self.tokens, default=0)

    @property
    def among(self) -> str:
        """Text such as "of 500", or "of the 10,000 looked at among 1,000,000"."""
        if self.counted == self.rows:
            return f"of {self.rows:,}"
        return f"of the {self.counted:,} looked at among {self.rows:,}"

    def over(self, limit: int) -> int:
        return _above(self.tokens, limit)

    def add(self, captions: dict[int, str], source: Callable[[int], str], measure: Measure) -> None:
        """Count captions. captions: row -> caption. source: returns a row's name for messages."""
        lengths = measure([*captions.values()])
        if lengths and (most := max(lengths)) > self.longest:
            self.longest_at = printable(source([*captions][lengths.index(most)]))
        self.counted += len(captions)
        self.tokens.update(lengths)
        self.words.update(len(caption.split()) for caption in captions.values())
        for row, caption in captions.items():
            if says_nothing(caption):
                self.empty_at = self.empty_at or printable(source(row))
                self.empty += 1
            elif stands_for_nothing(caption):
                self.missing_at = self.missing_at or printable(source(row))
                self.missing[caption.strip()] += 1

    def without_words(self) -> list[str]:
        """Return up to three lines about empty captions, missing values and unreadable captions."""
        lines = []
        if self.empty:
            lines.append(f"{self.name}: {self.empty:,} {self.among} are empty (the first: {self.empty_at})")
        if self.missing:
            written = ", ".join(f"{printable(word)}: {count:,}" for word, count in self.missing.most_common(5))
            lines.append(
                f"{self.name}: {self.missing.total():,} {self.among} are words for a missing value ({written}), and "
                f"are taken as they are (the first: {self.missing_at})"
            )
        if self.unreadable:
            lines.append(
                f"{self.name}: {self.unreadable:,} {self.among} are empty or can't be read, and other samples are "
                f"taken in their place (the first: {self.unreadable_at})"
            )
        return lines

    def cut(self, limit: int, encoder: str, advice: str = "") -> list[str]:
        """Return [line] about captions of more than ``limit`` tokens; [] if there are none."""
        if not (over := self.over(limit)):
            return []
        return [
            f"{self.name}: {over:,} {self.among} are longer than the {limit:,} tokens of --text_encoder {encoder}, and "
            f"are cut; the longest has {self.longest:,} ({self.longest_at}){advice}"
        ]

    def for_any_encoder(self) -> list[str]:
        """Return lines about the tokens that ``bytes`` needs, and about captions that CLIP and T5 surely truncate. For
        CLIP and T5, a word counts as one token. Lengths must be measured by :func:`byte_tokens`."""
        if not self.tokens:
            return []
        takes = fitting_tokens(self.longest)
        lines = [
            f"{self.name}: the longest {self.among} has {self.longest - 1:,} bytes ({self.longest_at}); a new run's "
            f"--text_encoder bytes takes {takes:,} tokens"
        ]
        lines += self.cut(takes, "bytes", takes_whole(self.longest))
        for encoder, (_, _, (_, _, most)) in HUB.items():
            ends = 2 if encoder == "clip" else 1  # number of begin and end tokens
            if over := _above(self.words, most - ends):
                lines.append(
                    f"{self.name}: {over:,} {self.among} at least, by their words, are longer than the {most} tokens "
                    f"of --text_encoder {encoder}, and will be cut there"
                )
        return lines


def _above(counts: Counter[int], limit: int) -> int:
    return sum(count for number, count in counts.items() if number > limit)


def takes_whole(tokens: int) -> str:
    """Return text about the flag that keeps ``tokens`` tokens; "" if no value is large enough."""
    return f"; --max_text_tokens {tokens} takes them whole" if tokens <= MOST_TEXT_TOKENS else ""


def caption_rows(dataset: MediaDataset, most: int | None = None) -> np.ndarray:
    """Return the rows to count, ascending int64. ``Description.counted_captions`` and ``most`` limit their number. If
    limited, the rows are evenly spaced groups of neighbours, because neighbours are often in one file."""
    found, start = [], 0
    for rows, counted in dataset.describe().counted_captions or ((len(dataset), USUALLY_COUNTED),):
        count = counted if most is None else min(most, counted)
        if rows <= count:
            found.append(np.arange(start, start + rows))
        else:
            group = math.isqrt(count)
            starts = np.linspace(0, rows - group, count // group).astype(np.int64)
            found.append(start + np.unique(starts[:, None] + np.arange(group)))
        start += rows
    return np.concatenate(found)


def count_captions(
    dataset: MediaDataset, measure: Measure = byte_tokens, most: int | None = None, name: str = "captions"
) -> CaptionCount:
    """Count the captions in :func:`caption_rows`. A data set without captions gives an empty count."""
    rows = caption_rows(dataset, most).tolist() if dataset.describe().conditioning == "text" else []
    return count_texts(rows, dataset.caption, dataset.source, len(dataset), measure, name)


def count_texts(
    rows: Sequence[int],
    caption: Callable[[int], str | None],
    source: Callable[[int], str],
    total: int,
    measure: Measure = byte_tokens,
    name: str = "captions",
) -> CaptionCount:
    """Count the captions of ``rows``, out of ``total`` rows."""
    found = CaptionCount(total, name)
    for first in range(0, len(rows), AT_ONCE):
        captions: dict[int, str] = {}
        for row in rows[first : first + AT_ONCE]:
            try:
                captions[row] = caption(row) or ""
            except (BadSample, DataError, OSError) as error:
                found.unreadable_at = found.unreadable_at or printable(str(error))
                found.unreadable += 1
                found.counted += 1
        found.add(captions, source, measure)
    return found
