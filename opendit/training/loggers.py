"""Loggers beside log.jsonl: TensorBoard, Weights & Biases, MLflow."""

import io
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any

from opendit.common.records import RecordFile
from opendit.common.safe_files import make_folder, write_whole


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
        """True if something was written and nothing is lost or still waiting."""
        return self._written and not self._file.waiting and not self._file.lost

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write points of curves. Like all methods, raises OSError if they have to wait for the next ones."""
        Summary = _messages("summary").Summary
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]), step)

    def picture(self, tag: str, png: bytes, step: int) -> None:
        """Write a PNG file of these bytes."""
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
    """Return TensorBoard's protocol buffers, whose classes are made at their import."""
    return import_module(f"tensorboard.compat.proto.{of}_pb2")


def _record(data: bytes) -> bytes:
    """Return a TFRecord: length and data, each with its masked CRC."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = []

    class Sink:
        write = staticmethod(written.append)

    RecordWriter(Sink).write(data)
    return b"".join(written)


PROJECT = "opendit"


class RunLogger(ABC):
    """Takes what TensorBoard takes. All methods may raise whatever the library raises."""

    where: str  # what to do to see it, in one line

    @abstractmethod
    def __init__(self, folder: Path, config: dict[str, Any]):
        """folder: of the run, which may have been logged before; a resumed run continues there. config: its flags."""

    @abstractmethod
    def scalars(self, values: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def picture(self, tag: str, png: bytes, step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class WandbLogger(RunLogger):
    """Weights & Biases: files under the run's folder, unless WANDB_MODE is set. WANDB_PROJECT names the project."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which would report crashes of the library itself
        import wandb  # pyright: ignore[reportMissingImports]  # who wants it installs it

        self._wandb = wandb
        known = folder / "wandb" / "run_id"
        make_folder(known.parent, root=folder)  # wandb itself would follow a link there
        run_id = known.read_text().strip() if known.is_file() else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=folder.name,
            mode=mode,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=config,
            settings=wandb.Settings(console="off", silent=True),  # the output has a progress bar
        )
        write_whole(known, self._run.id.encode(), root=folder)
        # By a column of their own, steps may be logged again after a resume from an earlier one.
        self._run.define_metric("*", step_metric="step")
        self.where = f"wandb sync {folder}/wandb/offline-run-*" if mode == "offline" else f"wandb ({mode})"

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def picture(self, tag: str, png: bytes, step: int) -> None:
        self._run.log({tag: self._wandb.Image(_image(png)), "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowLogger(RunLogger):
    """MLflow: a database beside the run folders, unless MLFLOW_TRACKING_URI is set. MLFLOW_EXPERIMENT_NAME names the
    experiment."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it tells its makers how it is used
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # who wants it installs it
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric, outputs = Metric, folder.resolve().parent
        own = f"sqlite:///{outputs / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = self._find(folder, None if uri != own else (outputs / "mlartifacts").as_uri())
        known = self._client.get_run(self._run_id).data.params  # which can't be changed
        params = [Param(name, str(value)[:500]) for name, value in config.items() if name not in known]
        for first in range(0, len(params), 100):  # as many as one call takes
            self._client.log_batch(self._run_id, params=params[first : first + 100])
        self.where = f"mlflow ui --backend-store-uri {uri}"

    def _find(self, folder: Path, artifacts: str | None) -> str:
        """Return the MLflow run of this folder; create it if there is none."""
        client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name, artifact_location=artifacts)
        path = folder / "mlflow_run_id"
        if path.is_file():
            run_id = path.read_text().strip()
            client.update_run(run_id, status="RUNNING")
            return run_id
        run_id = client.create_run(experiment, run_name=folder.name).info.run_id
        write_whole(path, run_id.encode())
        return run_id

    def scalars(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, metrics=[self._metric(k, float(v), now, step) for k, v in values.items()])

    def picture(self, tag: str, png: bytes, step: int) -> None:
        self._client.log_image(self._run_id, _image(png), key=tag, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id, "FINISHED")


LOGGERS: dict[str, type[RunLogger]] = {"wandb": WandbLogger, "mlflow": MlflowLogger}


def _image(png: bytes):
    from PIL import Image

    return Image.open(io.BytesIO(png))
