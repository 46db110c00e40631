"""Format the text of ``--help``: the flags of each component under a one-line heading, then examples.

``--help`` shows the common flags on one screen. ``--help all`` shows all flags, and ``--help HEADING`` the flags of one
component.
"""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opendit.config.flags import Value, nearest

LEFT = 30  # columns to the left of a flag's description
WIDTHS = (80, 120)  # minimum and maximum line length; between them, the terminal's width is used
STARTS = ("python ", "opendit ", "torchrun ")  # words with which an example command begins
COMMAND = re.compile(rf"\s*({'|'.join(STARTS)})")
REQUIRED = "(required)"
SWITCH_NOTE = "--[no_]x: --x switches x on, --no_x off. In brackets: the default."


@dataclass(frozen=True)
class HelpEntry:
    """Description of a flag, positional argument or command in --help.

    Attributes:
        name: name without dashes.
        written: form on a command line, with the value's placeholder.
        about: description.
        values: range and default.
        common: show the entry in the short help, with this text, or with the first clause of ``about`` if True.
    """

    name: str
    written: str
    about: str
    values: str = ""
    common: bool | str = False

    def lines(self, width: int) -> list[str]:
        left, text = f"  {self.written}", f"{self.about} {self.values}".rstrip()
        left = f"{left:<{LEFT - 2}}  "
        if len(left) + len(text) <= width:
            return [(left + text).rstrip()]
        wrapped = textwrap.wrap(text, width - LEFT, break_long_words=False, break_on_hyphens=False)
        first = [left.rstrip()] if len(left) > LEFT else [left + wrapped.pop(0)]
        return first + [" " * LEFT + line for line in wrapped]

    def in_short(self) -> "HelpEntry":
        """Return the entry with its description for the short help."""
        return replace(self, about=self.common if isinstance(self.common, str) else self.about.partition(";")[0])


@dataclass
class Section:
    """A section of --help: a heading, ``Title: about``, and its entries."""

    title: str
    about: str
    entries: list[HelpEntry] = field(default_factory=list)

    @classmethod
    def headed(cls, heading: str) -> "Section":
        """Create an empty section from the heading ``"Title: about"``."""
        title, _, about = heading.partition(": ")
        return cls(title, about)

    def lines(self, width: int, entries: Iterable[HelpEntry]) -> list[str]:
        shown = [line for entry in entries for line in entry.lines(width)]
        heading = f"{self.title}: {self.about}" if self.about else self.title
        return [heading, *shown] if shown else []


def entry(
    name: str,
    takes: Value | None,
    about: str,
    default: Any,
    *,
    common: bool | str = False,
    alias: str | None = None,
    metavar: str | None = None,
    nargs: str | None = None,
    required: bool = False,
) -> HelpEntry:
    """Create the entry of a flag. takes: allowed values; None for a switch. nargs: as in argparse."""
    bare = name.lstrip("-")
    if takes is None:
        state = "" if default is None else f"[{'on' if default else 'off'}]"
        return HelpEntry(bare, f"--[no_]{bare}", about, state, common)
    value = metavar or takes.metavar or bare.upper()
    value = {"?": f"[{value}]", "+": f"{value} ...", "*": f"[{value} ...]"}.get(nargs or "", value)
    names = f"{name}, {alias}" if alias else name
    allowed = takes.allowed()
    values = [f"({allowed})"] * bool(allowed) + [REQUIRED] * required
    values += [] if default in (None, []) else [f"[{default}]"]
    return HelpEntry(bare, f"{names} {value}" if name.startswith("-") else value, about, " ".join(values), common)


def page(
    program: str, usage: str, about: str, sections: Sequence[Section], examples: Sequence[str], topic: str | None
) -> str:
    """Return the text of --help, --help all or --help TOPIC. Raises ValueError for an unknown topic."""
    width = min(max(shutil.get_terminal_size((WIDTHS[1], 24)).columns, WIDTHS[0]), WIDTHS[1])
    sections = [section for section in sections if section.entries]
    total = sum(len(section.entries) for section in sections)
    chosen = {section.title: section.entries for section in sections}
    if topic is None:
        common = {section.title: [one.in_short() for one in section.entries if one.common] for section in sections}
        chosen = common if any(common.values()) else chosen
    elif topic != "all":
        return "\n".join(_topic(topic, sections, width)) + "\n"
    lines = [
        *textwrap.wrap(f"usage: {program} {usage}", width, subsequent_indent=" " * 7),
        "",
        *textwrap.wrap(about, width),
        "",
    ]
    for section in sections:
        lines += section.lines(width, chosen[section.title])
        lines += [""] if topic == "all" and chosen[section.title] else []
    lines += [""] * (lines[-1] != "")
    if any("--[no_]" in one.written for entries in chosen.values() for one in entries):
        lines += [SWITCH_NOTE]
    if (hidden := total - sum(map(len, chosen.values()))) > 0:
        titles = ", ".join(section.title.lower().replace(" ", "_") for section in sections)
        more = f"{hidden} more flags: {program} --help all, or --help HEADING ({titles})."
        lines += textwrap.wrap(more, width, break_on_hyphens=False)
    if examples:
        lines += [""] * (lines[-1] != "")
        lines += ["Examples:", *(f"  {started_as(program, example)}" for example in examples)]
    return "\n".join(lines).rstrip() + "\n"


def examples_of(doc: str) -> list[str]:
    """Return the commands in a program's docstring."""
    return [line.strip() for line in doc.splitlines() if COMMAND.match(line)]


def about_of(doc: str) -> str:
    """Join the paragraphs of a program's docstring that hold no commands."""
    paragraphs = [part for part in doc.split("\n\n") if not any(map(COMMAND.match, part.splitlines()))]
    return " ".join(" ".join(paragraphs).replace("``", "").split())


def started_as(program: str, example: str) -> str:
    """Rewrite an example as the program was started: ``opendit train`` instead of ``python train.py``."""
    if not program.startswith("opendit "):
        return example
    example = re.sub(r"python (train|sample|preprocess)\.py", r"opendit \1", example)
    example = re.sub(r"(torchrun .*?)(?<![\w./])(train|sample|preprocess)\.py", r"\1-m opendit \2", example)
    return example


def _topic(topic: str, sections: Sequence[Section], width: int) -> list[str]:
    """Return the lines of the section with this title, or of the flag with this name."""
    wanted = topic.lstrip("-").lower().replace(" ", "_").replace("-", "_")
    for section in sections:
        if section.title.lower().replace(" ", "_") == wanted:
            return section.lines(width, section.entries)
    for section in sections:
        if found := [one for one in section.entries if one.name.lower() in (wanted, wanted.removeprefix("no_"))]:
            return section.lines(width, found)
    known = ["all", *(section.title.lower().replace(" ", "_") for section in sections)]
    known += [one.name for section in sections for one in section.entries]
    raise ValueError(f"--help {topic}: no such heading or flag; did you mean {nearest(wanted, known)}?")
