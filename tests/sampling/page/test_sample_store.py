"""Samples are stored as files that contain their settings; the oldest files are deleted."""

import errno
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from opendit.sampling.output_files import VideoClip
from opendit.sampling.page.catalog import WeightsChoice
from opendit.sampling.page.drawing import KEY, DrawingRequest, SampleStore
from opendit.sampling.pipeline import DrawSettings

SETTINGS = {"seed": 3, "steps": 5, "negative": '"ünï"\n🎲', "weights": "a run"}


def request(*labels: str) -> DrawingRequest:
    choice = WeightsChoice("a run", Path("a"), "ema")
    return DrawingRequest(choice, len(labels), DrawSettings(), None, labels, SETTINGS)


def picture(value: int, side: int = 8) -> Image.Image:
    return Image.fromarray(np.full((side, side + 1, 3), value, np.uint8))


def test_a_picture_holds_its_settings():
    with SampleStore() as store:
        batch, (first, second) = store.add([picture(1), picture(2)], request("zero", "a/../<b>\0"))
        found, path = store.find(second.token), second.path
        with Image.open(path) as read:
            assert np.array_equal(np.asarray(read), np.asarray(picture(2)))
            assert json.loads(read.text[KEY]) == {**SETTINGS, "label": "a/../<b>\0", "number": 1}
        assert found is second and second.size == (8, 9) and not second.is_clip
        assert second.name == "000001-a_____b__-seed3.png" and first.name == "000000-zero-seed3.png"
        with zipfile.ZipFile(io.BytesIO(store.archive(batch))) as archive:
            assert archive.namelist() == [first.name, second.name]
            assert archive.read(second.name) == path.read_bytes()
        folder = path.parent
        assert folder.stat().st_mode & 0o77 == 0 and store.find(batch) is None and store.archive(first.token) is None
    assert not folder.exists()


def test_a_clip_holds_its_settings():
    frames = np.random.default_rng(0).integers(0, 255, (4, 16, 18, 3), np.uint8)
    with SampleStore() as store:
        _, (clip,) = store.add([VideoClip(frames, 8.0)], request("left"))
        with av.open(str(clip.path)) as file:
            assert json.loads(file.metadata["comment"]) == {**SETTINGS, "label": "left", "number": 0}
            assert file.streams.video[0].frames == 4 and file.streams.video[0].average_rate == 8
    assert clip.is_clip and clip.size == (16, 18) and clip.name.endswith(".mp4")


def test_the_oldest_go():
    with SampleStore(most_bytes=1) as store:
        one, (first,) = store.add([picture(1)], request("a"))
        path = first.path
        two, (second,) = store.add([picture(2)], request("a"))
        assert store.find(first.token) is None and store.archive(one) is None and not path.exists()
        assert store.find(second.token) and store.archive(two)
    with SampleStore(most_bytes=10**6) as store:
        kept = [store.add([picture(1)], request("a"))[1][0] for _ in range(9)]
        assert all(store.find(one.token) for one in kept)


def test_a_full_disk_leaves_nothing(monkeypatch):
    """The third of three pictures does not fit on the disk."""
    with SampleStore() as store:
        _, (kept,) = store.add([picture(0)], request("kept"))
        folder = kept.path.parent
        before, write, calls = sorted(folder.iterdir()), Image.SAVE["PNG"], []

        def save(*given, **named):
            calls.append(given)
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*given, **named)

        monkeypatch.setitem(Image.SAVE, "PNG", save)
        with pytest.raises(OSError, match="No space left"):
            store.add([picture(1), picture(2), picture(3)], request("a", "b", "c"))
        assert sorted(folder.iterdir()) == before and len(calls) == 3


def test_a_start_deletes_what_a_killed_page_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from opendit.sampling.page.drawing import SampleStore\nimport time\n"
    code += "store = SampleStore()\ntime.sleep(60)"
    running = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    while not (locks := list(tmp_path.glob("*/.lock"))):
        assert running.poll() is None
        time.sleep(0.01)
    left = locks[0].parent
    (left / "picture.png").write_bytes(b"1")
    foreign = tmp_path / "opendit-page-other"
    foreign.mkdir()  # has no lock file of a page
    with SampleStore():
        assert (left / "picture.png").exists()  # it is in use
    running.kill()
    running.wait()
    with SampleStore():
        assert not left.exists() and foreign.exists()
