"""Measure how readable pages are: words per sentence, numbers per hundred words, longest sentence, longest line.

    python scripts/prose.py README.md docs/*.md

Code blocks, tables, drawings and headings are left out. The longest line is measured over all lines except code blocks,
tables and lines with links that can't be broken.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*")
UNBREAKABLE = re.compile(r"^\s*(?:\||!\[|\[[^\]]*\]:|<)|https?://\S{60,}")


class Prose(NamedTuple):
    """Figures of a page.

    Attributes:
        words: number of words.
        a_sentence: words per sentence.
        numbers: numbers per hundred words.
        longest_sentence: words of the longest sentence.
        longest_line: characters of the longest line.
    """

    words: int
    a_sentence: float
    numbers: float
    longest_sentence: int
    longest_line: int


def measure(text: str) -> Prose:
    """Measure a page in Markdown."""
    lines = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).splitlines()
    longest = max((len(line) for line in lines if not UNBREAKABLE.search(line)), default=0)
    paragraphs, current = [], []
    for line in lines:
        is_prose = line.strip() and not re.match(r"\s*(?:\||#|!\[|<)", line)
        if current and (not is_prose or re.match(r"\s*(?:[-*]|\d+\.) ", line)):
            paragraphs.append(" ".join(current))
            current = []
        if is_prose:
            current.append(re.sub(r"^\s*(?:[-*>]|\d+\.) ", "", line).strip())
    paragraphs.append(" ".join(current))
    prose = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text)) for text in paragraphs if text]
    sentences = [
        found for text in prose for found in re.split(r"(?<=[.!?:])\s+(?=[A-Z\"`*(\[])", text) if found.strip()
    ]
    counts = [len(sentence.split()) for sentence in sentences] or [0]
    words = sum(counts)
    numbers = sum(len(NUMBER.findall(text)) for text in prose)
    return Prose(words, words / len(counts), 100 * numbers / max(1, words), max(counts), longest)


def main(paths: list[str]) -> None:
    """Print a table with a line for each page."""
    print(f"{'page':32} {'words':>6} {'a sentence':>10} {'numbers/100':>11} {'longest':>8} {'line':>5}")
    for path in paths:
        found = measure(Path(path).read_text(encoding="utf-8"))
        print(
            f"{path:32} {found.words:6,} {found.a_sentence:10.1f} {found.numbers:11.1f} {found.longest_sentence:8} "
            f"{found.longest_line:5}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
