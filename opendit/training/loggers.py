"""Loggers in addition to log.jsonl: TensorBoard, Weights & Biases, MLflow."""

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
    """Writer of curves and pictures for TensorBoard, in a new event file for each start of a run.

    Args:
        folder: folder of the event files.
        first_step: first step of this start. TensorBoard hides the points that earlier starts wrote for this and later
            steps, because this start repeats these steps.
        root: argument of :class:`RecordFile`.
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
        """True if at least one record was written, and no record is lost or still waits to be written."""
        return self._written and not self._file.waiting and not self._file.lost

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Add one point to each named curve.

        Like all methods of this class, this raises OSError if the write fails. The points are then written together
        with the next ones.
        """
        Summary = _messages("summary").Summary
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]), step)

    def picture(self, tag: str, png: bytes, step: int) -> None:
        """Write a picture. png: the bytes of a PNG file."""
        Summary = _messages("summary").Summary
        width, height = struct.unpack(">II", png[16:24])  # fields of IHDR, the first chunk of every PNG
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
    """Import a module of TensorBoard's protocol buffers. The import creates the module's classes."""
    return import_module(f"tensorboard.compat.proto.{of}_pb2")


def _record(data: bytes) -> bytes:
    """Return a TFRecord: the length and the data, each followed by its masked CRC."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = []

    class Sink:
        write = staticmethod(written.append)

    RecordWriter(Sink).write(data)
    return b"".join(written)


PROJECT = "opendit"


class RunLogger(ABC):
    """Interface of loggers that get the same values as TensorBoard. All methods may raise errors of the logger's
    library."""

    where: str  # one line that tells the user how to view the log

    @abstractmethod
    def __init__(self, folder: Path, config: dict[str, Any]):
        """Start or continue the log of a run.

        Args:
            folder: the run's folder. A resumed run continues the log that this folder names.
            config: the run's flags.
        """

    @abstractmethod
    def scalars(self, values: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def picture(self, tag: str, png: bytes, step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class WandbLogger(RunLogger):
    """Logger for Weights & Biases. It writes files under the run's folder unless WANDB_MODE is set.

    WANDB_PROJECT names the project.
    """

    def __init__(self, folder: Path, config: dict[str, Any]):
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # turns off crash reports
        import wandb  # pyright: ignore[reportMissingImports]  # an optional dependency

        self._wandb = wandb
        known = folder / "wandb" / "run_id"
        make_folder(known.parent, root=folder)  # make the folder here, because wandb would follow a symbolic link
        run_id = known.read_text().strip() if known.is_file() else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=folder.name,
            mode=mode,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=config,
            # keeps wandb from capturing the console with its progress bar
            settings=wandb.Settings(console="off", silent=True),
        )
        write_whole(known, self._run.id.encode(), root=folder)
        # W&B's own step can only rise. The separate metric "step" lets a resumed run log the same steps again.
        self._run.define_metric("*", step_metric="step")
        self.where = f"wandb sync {folder}/wandb/offline-run-*" if mode == "offline" else f"wandb ({mode})"

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def picture(self, tag: str, png: bytes, step: int) -> None:
        self._run.log({tag: self._wandb.Image(_image(png)), "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowLogger(RunLogger):
    """Logger for MLflow. It writes a database next to the run folders unless MLFLOW_TRACKING_URI is set.

    MLFLOW_EXPERIMENT_NAME names the experiment.
    """

    def __init__(self, folder: Path, config: dict[str, Any]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # turns off usage reports to MLflow's makers
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # an optional dependency
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric, outputs = Metric, folder.resolve().parent
        own = f"sqlite:///{outputs / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = self._find(folder, None if uri != own else (outputs / "mlartifacts").as_uri())
        # log only new parameters, because logged ones can't be changed
        known = self._client.get_run(self._run_id).data.params
        params = [Param(name, str(value)[:500]) for name, value in config.items() if name not in known]
        for first in range(0, len(params), 100):  # one call accepts at most 100 parameters
            self._client.log_batch(self._run_id, params=params[first : first + 100])
        self.where = f"mlflow ui --backend-store-uri {uri}"

    def _find(self, folder: Path, artifacts: str | None) -> str:
        """Return the id of the MLflow run for this folder. If there is none, create an MLflow run."""
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
