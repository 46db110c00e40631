"""The pictures and clips that the page shows, as files with the settings inside, in a folder of its own."""

import io
import json
import re
import secrets
import tempfile
import threading
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from opendit.common.json_file import MIB
from opendit.common.safe_files import remove, remove_tree, replacing
from opendit.data.video_file import write_mp4
from opendit.sampling.output_files import VideoClip, file_name

KEY = "opendit"  # of the PNG's text; an MP4 has the same text as its comment
MOST_BYTES = 512 * MIB
_TOKEN = re.compile(r"[A-Za-z0-9_-]{22}")


@dataclass(frozen=True)
class StoredSample:
    """A sample that was drawn.

    token: what its address on the page ends with. name: of the file when it is downloaded. label: its class or caption.
    settings: what it was drawn with, as it stands in the file. size: height and width in pixels.
    """

    token: str
    name: str
    label: str
    settings: dict[str, Any]
    size: tuple[int, int]
    is_clip: bool
    bytes: int


class SampleStore:
    """Keeps samples, the oldest ones only as long as there is room; a context manager, whose folder goes at the end.

    most_bytes: of all files together. The samples that were added last stay, however large they are.
    """

    def __init__(self, most_bytes: int = MOST_BYTES):
        self._folder, self._most = Path(tempfile.mkdtemp(prefix="opendit-page-")), most_bytes  # of mode 0700
        self._batches: OrderedDict[str, list[StoredSample]] = OrderedDict()
        self._samples: dict[str, StoredSample] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "SampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        remove_tree(self._folder)

    def add(self, samples: list[Any], labels: list[str], settings: dict[str, Any]) -> tuple[str, list[StoredSample]]:
        """Writes what a ``Pipeline`` has returned; (the token of all together, each of them).

        settings: of all; each file has its own "label" and "number" besides. Raises OSError.
        """
        stored = []
        for number, (sample, label) in enumerate(zip(samples, labels, strict=True)):
            stored.append(self._write(sample, number, label, {**settings, "label": label, "number": number}))
        batch = secrets.token_urlsafe(16)
        with self._lock:
            self._batches[batch] = stored
            self._samples |= {one.token: one for one in stored}
            while len(self._batches) > 1 and sum(one.bytes for one in self._samples.values()) > self._most:
                for old in self._batches.popitem(last=False)[1]:
                    del self._samples[old.token]
                    remove(self._path(old))
        return batch, stored

    def find(self, token: str) -> tuple[StoredSample, Path] | None:
        """A sample and its file; None for what is not, or no longer, there."""
        with self._lock:
            found = self._samples.get(token)
        return None if found is None else (found, self._path(found))

    def archive(self, batch: str) -> bytes | None:
        """A ZIP of samples that were added together; None if they are not there any more."""
        with self._lock:
            stored, content = self._batches.get(batch), io.BytesIO()
            if stored is None:
                return None
            with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
                for one in stored:
                    archive.write(self._path(one), one.name)
        return content.getvalue()

    def _path(self, sample: StoredSample) -> Path:
        return self._folder / (sample.token + (".mp4" if sample.is_clip else ".png"))

    def _write(self, sample: Any, number: int, label: str, settings: dict[str, Any]) -> StoredSample:
        is_clip, token = isinstance(sample, VideoClip), secrets.token_urlsafe(16)
        path = self._folder / f"{token}.{'mp4' if is_clip else 'png'}"
        text = json.dumps(settings)  # which is ASCII, whatever a caption holds
        if is_clip:
            write_mp4(path, sample.frames, sample.fps, comment=text)
            size = sample.frames.shape[1:3]
        else:
            picture: Image.Image = sample
            info = PngInfo()
            info.add_text(KEY, text)
            with replacing(path) as file:
                picture.save(file, "PNG", pnginfo=info)
            size = (picture.height, picture.width)
        name = f"{file_name(number, label)}-seed{settings['seed']}{path.suffix}"
        return StoredSample(token, name, label, settings, size, is_clip, path.stat().st_size)


def is_token(text: str) -> bool:
    """Return True if a text has the form of a token."""
    return _TOKEN.fullmatch(text) is not None
