"""Store the page's pictures and clips as files in a temporary folder. Every file contains its settings."""

import contextlib
import fcntl
import io
import json
import os
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
from opendit.data.video_files import write_mp4
from opendit.sampling.output_files import VideoClip, file_name

KEY = "opendit"  # key of the settings in a PNG; in an MP4 the settings are the comment
MOST_BYTES = 512 * MIB
PREFIX, LOCK = "opendit-page-", "in_use.lock"  # prefix of the folder's name, and name of the lock file in the folder
_TOKEN = re.compile(r"[A-Za-z0-9_-]{22}")


@dataclass(frozen=True)
class StoredSample:
    """A stored sample.

    Attributes:
        token: last part of the sample's URL.
        name: file name for downloads.
        label: class or caption.
        settings: the settings that the file contains.
        size: height and width in pixels.
        is_clip: True for a clip, False for a picture.
        bytes: size of the file.
    """

    token: str
    name: str
    label: str
    settings: dict[str, Any]
    size: tuple[int, int]
    is_clip: bool
    bytes: int


class SampleStore:
    """Stores samples in a temporary folder and deletes the oldest samples when the folder is full.

    The constructor also deletes the folders of pages that were killed. As a context manager, the store deletes its own
    folder on exit.

    most_bytes: maximum size of all files together. The most recent batch is kept even if it is larger.
    """

    def __init__(self, most_bytes: int = MOST_BYTES):
        delete_abandoned()
        self._folder, self._most = Path(tempfile.mkdtemp(prefix=PREFIX)), most_bytes  # a folder of mode 0700
        self._in_use = _hold(self._folder / LOCK)
        self._batches: OrderedDict[str, list[StoredSample]] = OrderedDict()
        self._samples: dict[str, StoredSample] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "SampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        remove_tree(self._folder)
        os.close(self._in_use)

    def add(self, samples: list[Any], labels: list[str], settings: dict[str, Any]) -> tuple[str, list[StoredSample]]:
        """Write the samples that a ``Pipeline`` has returned. Return a token for the batch, and the stored samples.

        settings: settings to write into every file, together with the sample's "label" and "number". If writing fails,
        none of the samples is kept, and OSError is raised.
        """
        stored: list[StoredSample] = []
        try:
            for number, (sample, label) in enumerate(zip(samples, labels, strict=True)):
                stored.append(self._write(sample, number, label, {**settings, "label": label, "number": number}))
        except BaseException:
            for one in stored:
                remove(self._path(one))
            raise
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
        """Return a sample and its file; None if the sample is unknown or has been deleted."""
        with self._lock:
            found = self._samples.get(token)
        return None if found is None else (found, self._path(found))

    def archive(self, batch: str) -> bytes | None:
        """Return a ZIP archive of a batch's samples; None if the samples have been deleted."""
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
        text = json.dumps(settings)  # json.dumps returns ASCII for any caption
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


def delete_abandoned() -> None:
    """Delete this user's sample folders that were left by killed processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            file = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another process has just created or deleted the folder
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder)
        os.close(file)


def _hold(path: Path) -> int:
    """Return the descriptor of a new, locked file. The system releases the lock when the process ends or is killed."""
    beside = path.with_suffix(".new")
    file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(beside, path)  # locked before it gets this name, so that no process can see the file unlocked
    return file


def is_token(text: str) -> bool:
    """Return True if ``text`` has the form of a token."""
    return _TOKEN.fullmatch(text) is not None
