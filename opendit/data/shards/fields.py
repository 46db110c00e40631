"""Find the medium, the caption and the class among a sample's members."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opendit.data.folders import CLIPS
from opendit.data.picture_file import picture_suffixes

# Members of which a folder or the whole name is in double underscores belong to no sample.
_META = re.compile(r"__[^/]*__($|/)")

Path = tuple[str, ...]  # a member's ending, then keys or numbers inside of its JSON


@dataclass(frozen=True)
class Fields:
    """The places of a sample's parts; of several places the first that the sample has counts.

    medium: endings of pictures and clips; None: the first member whose ending is one. caption, label: see ``Path``.
    parts: the only endings that are looked at; None: all. exact: endings keep their case, as Energon takes them, where
    webdataset's are in lower case. whole: a sample is all its members, which code of the user's reads (no field then).
    empty: whether an empty caption is one.
    """

    medium: tuple[str, ...] | None = None
    caption: tuple[Path, ...] = (("txt",), ("json", "caption"), ("json", "text"))
    label: tuple[Path, ...] = (("cls",), ("json", "label"))
    parts: tuple[str, ...] | None = None
    exact: bool = False
    whole: bool = False
    empty: bool = field(default=False, repr=False)  # the repr tells indexes of Energon's folders apart

    def find_medium(self, parts: Mapping[str, object]) -> str | None:
        """The ending of the member that is the picture or clip: ``jpg`` before ``mask.jpg``."""
        if self.parts is not None:
            parts = {ending: part for ending, part in parts.items() if self.takes(ending)}
        if self.medium is not None:
            return next((ending for ending in self.medium if ending in parts), None)
        media = [ending for ending in parts if suffix_of(ending) in picture_suffixes() | CLIPS]
        return min(media, key=lambda ending: "." in ending, default=None)

    def takes(self, ending: str) -> bool:
        return self.parts is None or ending in self.parts


def split_name(name: str, exact: bool = False) -> tuple[str, str] | None:
    """Return a member's key and ending, in lower case unless ``exact``; None for one that belongs to no sample.

    WebDataset's rule, the expression ``^((?:.*/|)[^.]+)[.]([^/]*)$``, in linear time: a name is cut at the first dot
    behind the last slash. That expression takes quadratic time for names with many slashes."""
    last = name.rfind("/")
    dot = name.find(".", last + 1)
    if dot < 0 or _META.match(name):
        return None
    # The [^.]+ may begin behind any slash before the first line break, which ``.`` does not match.
    line = name.find("\n", 0, dot)
    before = name.rfind("/", 0, dot if line < 0 else line)
    if before + 1 == dot:  # nothing is left for it: it takes more
        before = name.rfind("/", 0, max(0, before))
    if before + 1 == dot or "." in name[before + 1 : dot]:
        return None
    ending = name[dot + 1 :]
    return name[:dot], ending if exact else ending.lower()


def suffix_of(ending: str) -> str:
    """``seg.PNG`` -> ``.png``."""
    return "." + ending.rpartition(".")[2].lower()


def read_caption(content: bytes, path: Path, empty: bool = False) -> str:
    """The caption in a member's bytes, without blanks around it. Raises ValueError if there is none, or it is empty and
    may not be so."""
    text = _read(content, path)
    if not isinstance(text, str):
        raise ValueError(f"{_shown(path)} is {_kind(text)}, not a text")
    if not (text := text.strip()) and not empty:
        raise ValueError(f"{_shown(path)} is empty")
    return text


def read_label(content: bytes, path: Path) -> int:
    """The class in a member's bytes. Raises ValueError if there is none."""
    label = _read(content, path)
    try:
        number = int(label) if isinstance(label, str) else label
    except ValueError:
        number = None
    if type(number) is not int or not 0 <= number < 2**31:
        raise ValueError(f"{_shown(path)} is {str(label)[:40]!r}, not the number of a class")
    return number


def _read(content: bytes, path: Path) -> object:
    try:
        text = content.decode("utf-8-sig")
        value: Any = json.loads(text) if suffix_of(path[0]) in (".json", ".jsn") else text
        for key in path[1:]:
            value = value[int(key)] if isinstance(value, list) else value[key]
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"the .{path[0]} isn't UTF-8") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the .{path[0]} isn't JSON ({error})") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"it has no {_shown(path)}") from error


def _shown(path: Path) -> str:
    return "." + path[0] + "".join(f"[{key}]" for key in path[1:])


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", type(None): "null"}.get(type(value), str(value)[:40])
