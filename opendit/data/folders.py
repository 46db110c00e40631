"""List the files with given suffixes below a folder, and count everything else in it."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from opendit.data.base import name_few
from opendit.data.files import kind_of, printable

CLIPS = frozenset(".mp4 .avi .mov .mkv .webm .m4v .mpg .mpeg .wmv .flv .ts .3gp .ogv".split())
VISITS = 100  # maximum visits to one folder; nested links would otherwise multiply without limit

Identity = tuple[int, int]  # device and inode: the same for every path to a folder


@dataclass
class Ignored:
    """The files and folders that a search ignored.

    Attributes:
        suffixes: suffix -> number of ignored files.
        hidden: number of hidden files and folders.
        outside: number of pictures outside the class folders.
        named: "path (kind)" of links that lead back up, pipes, devices and sockets.
        unreadable: "path (reason)" of folders that can't be read.
    """

    suffixes: Counter[str] = field(default_factory=Counter)
    hidden: int = 0
    outside: int = 0
    named: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def add(self, other: "Ignored") -> None:
        self.suffixes += other.suffixes
        self.hidden += other.hidden
        self.outside += other.outside
        self.named += other.named
        self.unreadable += other.unreadable

    def __bool__(self) -> bool:
        return bool(self.suffixes or self.hidden or self.outside or self.named or self.unreadable)

    def __str__(self) -> str:
        """Return one line such as "ignored 12 files of suffixes that are not read (10 .txt, 2 .gz), ..."."""
        kinds: dict[str, Counter[str]] = {}
        for suffix, count in self.suffixes.items():
            kinds.setdefault(_kind(suffix), Counter())[suffix] = count
        parts = [
            f"{counts.total():,} file{'s' * (counts.total() != 1)} {kind} ({_by_suffix(counts)})"
            for kind, counts in sorted(kinds.items())
        ]
        if self.outside:
            parts.append(f"{self.outside:,} picture{'s' * (self.outside != 1)} outside the class folders")
        if self.hidden:
            parts.append(f"{self.hidden:,} hidden")
        if self.named:
            parts.append(name_few(self.named))
        if self.unreadable:
            parts.append(f"folders that can't be read: {name_few(self.unreadable)}")
        return f"ignored {', '.join(parts)}"


def _kind(suffix: str) -> str:
    if suffix in CLIPS:
        return "of clips, which need a CSV (python preprocess.py folder)"
    if suffix in (".eps", ".ps"):
        return "of PostScript, which is a program and no picture"
    return "of suffixes that are not read"


def _by_suffix(counts: Counter[str]) -> str:
    common = counts.most_common(6)
    shown = [f"{count:,} {printable(suffix[:12]) or 'without one'}" for suffix, count in common]
    others = counts.total() - sum(count for _, count in common)
    return ", ".join(shown) + (f", {others:,} of others" if others else "")


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def suffix_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def identity_of(folder: str) -> Identity:
    state = os.stat(folder)
    return state.st_dev, state.st_ino


def folders_above(folder: str) -> frozenset[Identity]:
    """Return the identities of a folder and all its parents."""
    path, found = os.path.realpath(folder), set()
    while True:
        found.add(identity_of(path))
        if (above := os.path.dirname(path)) == path:
            return frozenset(found)
        path = above


def list_folder(folder: str, suffixes: frozenset[str], ignored: Ignored) -> tuple[list[str], list[str]]:
    """Return the names of a folder's files with one of ``suffixes``, and of its subfolders, both sorted. Count
    everything else in ``ignored``.

    A link to a missing file counts as a file, so that reading it reports the loss. Raises OSError if the folder can't
    be read."""
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    files, folders = [], []
    for entry in entries:
        name = entry.name
        if is_hidden(name):
            ignored.hidden += 1
        elif _is_folder(entry):
            folders.append(name)
        elif (kind := _unusual(entry)) is not None:
            ignored.named.append(f"{printable(entry.path)} ({kind})")
        elif (suffix := suffix_of(name)) in suffixes:
            files.append(name)
        else:
            ignored.suffixes[suffix] += 1
    return files, folders


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _unusual(entry: os.DirEntry[str]) -> str | None:
    try:  # for most entries the listing has the file type, so this rarely accesses the disk
        return None if entry.is_file(follow_symlinks=False) else kind_of(entry.stat().st_mode)
    except OSError:
        return None  # a broken link


def files_below(
    folder: str,
    suffixes: frozenset[str],
    ignored: Ignored,
    *,
    above: frozenset[Identity] = frozenset(),
    visits: int = VISITS,
) -> Iterator[str]:
    """Yield the paths of all files with one of ``suffixes`` below a folder, sorted: in each folder first the files,
    then the subfolders.

    Links are followed, except to a parent folder or a folder in ``above``. A folder is read at most ``visits`` times.
    Everything else is counted in ``ignored``."""
    todo, seen = [(folder, above)], Counter()
    while todo:
        path, above = todo.pop()
        try:
            here = identity_of(path)
            if here in above:
                ignored.named.append(f"{printable(path)} (a link that leads back up)")
                continue
            seen[here] += 1
            if seen[here] > visits:
                ignored.named.append(f"{printable(path)} (a folder that links led to before)")
                continue
            files, folders = list_folder(path, suffixes, ignored)
        except OSError as error:
            ignored.unreadable.append(f"{printable(path)} ({error.strerror or error})")
            continue
        for name in files:
            yield os.path.join(path, name)
        todo += [(os.path.join(path, name), above | {here}) for name in reversed(folders)]
