"""TensorBoard's files, written by the thread that trains: SummaryWriter's own thread dies of a full disk."""

import os
import socket
import struct
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from opendit.common.records import RecordFile


class Board:
    """Curves and pictures for TensorBoard, in an event file of this start.

    Args:
        folder: of the event files.
        first_step: what earlier starts wrote from this step on is hidden: it is about to be done again.
        root: of :class:`RecordFile`.
    """

    def __init__(self, folder: Path, first_step: int, root: Path | None = None):
        made = _messages("event")
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file, self._written = RecordFile(folder / name, root), False
        version = made.Event(wall_time=time.time(), file_version="brain.Event:2")
        log = made.SessionLog(status=made.SessionLog.START)
        start = made.Event(wall_time=time.time(), step=first_step, session_log=log)
        self._start = _record(version.SerializeToString()) + _record(start.SerializeToString())

    @property
    def complete(self) -> bool:
        """True if something was written, and none of it was lost or still waits."""
        return self._written and not self._file.waiting and not self._file.lost

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Raises OSError if they have to wait for the next ones, as do all methods."""
        Summary = _messages("summary").Summary
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]), step)

    def picture(self, tag: str, png: bytes, step: int) -> None:
        """Shows a PNG file of these bytes."""
        Summary = _messages("summary").Summary
        width, height = struct.unpack(">II", png[16:24])  # of the header, the first chunk of every PNG
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def close(self) -> None:
        self._file.close()

    def _add(self, summary, step: int) -> None:
        event = _record(_messages("event").Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
        start, self._start = self._start, b""
        self._written = True
        self._file.append(start + event)


def _messages(of: str) -> Any:
    """TensorBoard's protocol buffers, whose classes are made when they are imported."""
    return import_module(f"tensorboard.compat.proto.{of}_pb2")


def _record(data: bytes) -> bytes:
    """A TFRecord: length and data, each with its masked CRC."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = []

    class Sink:
        write = staticmethod(written.append)

    RecordWriter(Sink).write(data)
    return b"".join(written)
