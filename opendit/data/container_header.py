"""Read the header of a clip's file before a decoder is asked: it is quick, and a decoder believes anything."""

from typing import NamedTuple

from opendit.data.animation_header import HEAD, may_be_animation
from opendit.data.avi_header import has_no_b_frames
from opendit.data.mp4_header import read_tables
from opendit.data.mp4_track import PlainTrack

IN_ORDER = "MPEG-4 without B frames"
ANIMATION = "animation"


class ContainerHeader(NamedTuple):
    """problem: why the file can't be believed, or None. codec: of an MP4 the four letters of its only video track,
    ``IN_ORDER`` for an AVI file that says so, ``ANIMATION`` for formats of pictures that have animations; empty where
    that takes a closer look. track: the only video track of an MP4 whose frames are found by their numbers."""

    problem: str | None
    codec: str = ""
    track: PlainTrack | None = None


def read_header(path: str) -> ContainerHeader:
    """A file's header; of what is neither an AVI nor an MP4 file it is empty. Raises OSError if it can't be read."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
        if may_be_animation(head):
            return ContainerHeader(None, ANIMATION)
        if head[:4] == b"RIFF":
            return ContainerHeader(None, IN_ORDER if has_no_b_frames(file) else "")
        return ContainerHeader(*read_tables(file))
