"""List the files that the page may read: the runs in one folder, and the checkpoints named on the command line.

A browser can only choose names that this module lists. A name from a browser is looked up in a listing and never
becomes part of a path. Listed files are inside the folder of runs; symbolic links that lead out of this folder are
refused.

:class:`Catalog` lists runs, sample grids and weights. The functions after the class read the history of a run: the
curves in log.jsonl, the starts in config.json, and the results of evaluations.
"""

import contextlib
import json
import math
import os
import re
import threading
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from opendit.checkpoint.files import file_id
from opendit.checkpoint.pretrained import find_weights, read_info
from opendit.checkpoint.run_folders import checkpoints_in, run_folders, step_of
from opendit.checkpoint.schema import RUN_CONFIG
from opendit.common.json_file import MIB
from opendit.common.json_models import read_file
from opendit.config.names import PARTS, SHARDS, WHOLE
from opendit.diffusion.objectives import objective_from_dict
from opendit.diffusion.objectives.base import Objective
from opendit.encoders.folder import PIPELINE_INDEX
from opendit.encoders.pictures import one_line
from opendit.models.configuration import DiTConfig
from opendit.models.weights import Weights
from opendit.sampling.model_loading import class_names

NEWEST = "newest"
EXAMPLES, LONGEST_EXAMPLE = 3, 200  # maximum number of example captions of a model, and of characters in each
MOST_GRIDS, GRID_BYTES = 10_000, 64 * MIB
_GRID = re.compile(r"[0-9]{7,12}\.png")


@dataclass(frozen=True)
class WeightsChoice:
    """Weights to draw from.

    Attributes:
        name: text for users, such as "000-DiT-Ti-2, step_0001000, ema".
        path, which, lora: arguments ``path``, ``weights`` and ``lora`` of ``opendit.load``.
        mark: value that changes when the file of the weights changes.
    """

    name: str
    path: Path
    which: str
    mark: tuple[Any, ...] = ()
    lora: tuple[tuple[Path, float], ...] = ()


@dataclass(frozen=True)
class ModelCard:
    """Properties of a model that are needed to check a drawing request.

    Attributes:
        model: name of the model.
        clips: True if the model draws clips, False if it draws pictures.
        captions: True if the model is conditioned on captions, False if on classes.
        classes: names of all classes; empty for a model of captions.
        samplers: names of the usable samplers, the default sampler first.
        guided: True if the model has a null condition.
        size: text such as "256 x 256 pixels".
        objective: name of the training objective.
        examples: captions from the training data.
        begins: True if clips can begin with a picture.
    """

    model: str
    clips: bool
    captions: bool
    classes: tuple[str, ...]
    samplers: tuple[str, ...]
    guided: bool
    size: str
    objective: str
    examples: tuple[str, ...] = ()
    begins: bool = False

    @classmethod
    def of(cls, config: DiTConfig, weights: Weights, objective: Objective) -> "ModelCard":
        side = weights.info.get("image_size")
        return cls(
            model=weights.info.get("model", config.kind),
            clips=config.is_video,
            captions=config.text is not None,
            classes=() if config.text else tuple(class_names(config, weights)),
            samplers=tuple(objective.samplers),
            guided=config.text is not None or config.null_class,
            size=f"{side} x {side} pixels" if side else f"latents of {' x '.join(map(str, config.input_size))}",
            objective=objective.name,
            examples=tuple(
                one_line(caption)[:LONGEST_EXAMPLE] for caption in weights.info.get("captions", ())[:EXAMPLES]
            ),
            begins=config.given_frames is not None,
        )


@dataclass
class Catalog:
    """The runs in ``outputs`` and the checkpoints in ``extra``. Every method call lists the files again.

    Attributes:
        outputs: the folder of runs; it may not exist yet.
        extra: name -> path of the checkpoints named on the command line.
        lora: name -> path of the LoRAs named on the command line.
    """

    outputs: Path
    extra: dict[str, Path] = field(default_factory=dict)
    lora: dict[str, Path] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.outputs.resolve()

    def inside(self, path: Path) -> bool:
        """Return True if ``path`` exists and, with all links resolved, is inside the folder of runs."""
        try:
            return path.resolve(strict=True).is_relative_to(self.root)
        except (OSError, RuntimeError):  # RuntimeError: a loop of links
            return False

    # ------------------------------------------------------------------------------------------ runs

    def runs(self) -> list[str]:
        """Return the names of the runs, newest first."""
        folders = reversed(run_folders(self.outputs))
        return [path.name for path in folders if path.is_dir() and self.inside(path) and _is_text(path.name)]

    def refused(self) -> list[str]:
        """Return the names of runs that are links out of the folder of runs, or that have a name that is not UTF-8."""
        folders = [path for path in run_folders(self.outputs) if path.is_dir()]
        return [path.name for path in folders if not self.inside(path) or not _is_text(path.name)]

    def run(self, name: str) -> Path:
        """Return the folder of a run. Raises ValueError if the run is not listed."""
        if not isinstance(name, str) or name not in self.runs():
            raise ValueError("no such run: it is not, or no longer, in the folder of runs; refresh the page")
        return self.outputs / name

    def file(self, run: str, name: str) -> Path | None:
        """Return the path of a file in a run.

        Return None if the file doesn't exist, is not a regular file, or is a link out of the folder of runs.

        name: name of the file. The caller must never take it from a browser.
        """
        path = self.run(run) / name
        try:
            file_id(path, self.root)
        except ValueError:
            return None
        return path

    # ------------------------------------------------------------------------------------------ grids

    def grids(self, run: str) -> list[str]:
        """Return the names of a run's sample grids, in the order of their steps."""
        folder = self.run(run) / "samples"
        if not folder.is_dir() or not self.inside(folder):
            return []
        found = sorted(
            (path.name for path in folder.iterdir() if _GRID.fullmatch(path.name)), key=lambda n: int(n[:-4])
        )
        return found[-MOST_GRIDS:]

    def grid(self, run: str, name: str) -> Path:
        """Return the path of a sample grid.

        Raises ValueError if the grid is not listed, is too large, or is a link out of the folder of runs.
        """
        if name not in self.grids(run):
            raise ValueError("no such grid")
        path = self.run(run) / "samples" / name
        if file_id(path, self.root).size > GRID_BYTES:
            raise ValueError(f"{name} is larger than {GRID_BYTES // MIB} MiB")
        return path

    # ------------------------------------------------------------------------------------------ weights

    def sources(self) -> list[str]:
        """Return the names of runs with checkpoints and of the checkpoints named on the command line."""
        return [name for name in self.runs() if self.has_checkpoint(name)] + list(self.extra)

    def has_checkpoint(self, run: str) -> bool:
        return bool(self._checkpoints(run))

    def checkpoints(self, source: str) -> list[str]:
        """Return ``NEWEST`` and the names of a run's checkpoints; only ``NEWEST`` if ``source`` is in ``extra``."""
        if source in self.extra:
            return [NEWEST]
        return [NEWEST, *(path.name for path in self._checkpoints(source))]

    def _checkpoints(self, run: str) -> list[Path]:
        return [path for path in checkpoints_in(self.run(run)) if step_of(path) >= 0 and not path.name.startswith(".")]

    def averages(self, source: str, checkpoint: str) -> list[str]:
        """Return the names of the sets of weights in a checkpoint: "ema", further averages, and "model"."""
        if source in self.extra:
            return ["ema", "model"] if self.extra[source].is_dir() and not self._is_pipeline(source) else ["ema"]
        folder = self._folder(source, checkpoint)
        names = set()
        for path in folder.iterdir() if folder.is_dir() and self.inside(folder) else ():
            for suffix in (SHARDS, PARTS, WHOLE):
                if path.name.endswith(suffix):
                    names.add(path.name.removesuffix(suffix))
                    break
        averages = sorted(name for name in names if name == "ema" or re.fullmatch("ema_[0-9.e-]+", name))
        return averages + ["model"] * ("model" in names) or ["ema"]

    def _is_pipeline(self, source: str) -> bool:
        return (self.extra[source] / PIPELINE_INDEX).is_file()

    def _folder(self, run: str, checkpoint: str) -> Path:
        folders = self._checkpoints(run)
        if not folders:
            raise ValueError(f"{run} has no checkpoint yet")
        if checkpoint == NEWEST:
            return folders[0]
        found = next((folder for folder in folders if folder.name == checkpoint), None)
        if found is None:
            raise ValueError(f"{run} does not have this checkpoint, or no longer; refresh the page")
        return found

    def weights(self, source: str, checkpoint: str, average: str) -> WeightsChoice:
        """Return the weights with these three listed names.

        Raises:
            ValueError: a name is not listed, or a file is a link out of the folder of runs.
        """
        if source in self.extra:
            if average not in ("ema", "model"):
                raise ValueError(f"{source} does not have these weights; refresh the page")
            return WeightsChoice(source, self.extra[source], average, _mark(self.extra[source]))
        folder = self._folder(source, checkpoint)
        if average not in self.averages(source, checkpoint):
            raise ValueError(f"{source}, {folder.name} does not have these weights; refresh the page")
        # Refer to the newest checkpoint by its run's path, so that loading can fall back to an older checkpoint.
        by_run = checkpoint == NEWEST and average in ("ema", "model")
        for each in self._checkpoints(source) if by_run else [folder]:
            self._refuse_links_out(each)
        name, mark = f"{source}, {folder.name}, {average}", (folder.name, _mark(folder))
        if average in ("ema", "model"):
            return WeightsChoice(name, self.run(source) if by_run else folder, average, mark)
        # the path of the file selects any other average
        return WeightsChoice(name, find_weights(folder, average), "ema", mark)

    def loras(self) -> list[str]:
        """Return the names of the LoRAs: those named on the command line, and the runs of ``train.py --lora``."""
        return [*self.lora, *(name for name in self.runs() if self.has_checkpoint(name) and self._is_lora(name))]

    def _is_lora(self, run: str) -> bool:
        try:
            choice = self.weights(run, NEWEST, self.averages(run, NEWEST)[0])
            return "lora" in read_info(find_weights(choice.path, choice.which))
        except (ValueError, OSError):  # ignored here; the damage is reported when a user chooses the checkpoint
            return False

    def with_loras(self, choice: WeightsChoice, chosen: list[tuple[str, float]]) -> WeightsChoice:
        """Return ``choice`` with LoRAs added. chosen: (name, weight) pairs. Raises ValueError for an unlisted name."""
        listed, found = self.loras() if chosen else [], []
        for name, weight in chosen:
            if name not in listed:
                raise ValueError("a LoRA that is not, or no longer, listed: choose among those of the list")
            found.append((self.lora[name] if name in self.lora else self.weights(name, NEWEST, "ema").path, weight))
        named = ", ".join([choice.name, *(f"{name}:{weight:g}" for name, weight in chosen)])
        marks = tuple(_mark(path) for path, _ in found)
        return replace(choice, name=named, mark=(choice.mark, marks), lora=tuple(found)) if found else choice

    def _refuse_links_out(self, checkpoint: Path) -> None:
        """Raise ValueError if a checkpoint, or one of its files to read, is a link out of the folder of runs."""
        if not self.inside(checkpoint):
            raise ValueError(f"{checkpoint.name} leads out of the folder of runs, and is not read")
        for path in checkpoint.iterdir():
            if path.name.endswith((WHOLE, ".json")):
                file_id(path, self.root)

    def card(self, choice: WeightsChoice) -> ModelCard | None:
        """Return the card of a model from the metadata of its weights; None if the weights have no metadata.

        This does not read the weights. Raises ValueError or OSError for a damaged file.
        """
        file = find_weights(choice.path, choice.which)
        info = read_info(file)
        weights = Weights({}, file, info)
        config = weights.config
        return config and ModelCard.of(config, weights, objective_from_dict(info.get("objective")))


def _is_text(name: str) -> bool:
    """Return True if a file name is valid UTF-8; a browser can't send other names back."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _mark(path: Path) -> tuple[Any, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns


# ------------------------------------------------------------------------------------------- a run's history

METRICS = {"loss": "loss", "grad_norm": "gradient norm", "samples_per_s": "samples a second"}
POINTS = 400  # maximum number of points in a curve; neighbouring points of longer curves are averaged
MOST_POINTS = 40_000  # maximum number of points of a curve in memory
LOG_BYTES, LINE_BYTES = 512 * MIB, MIB


def curves(catalog: Catalog, runs: list[str]) -> dict[str, list[tuple[int, float, str]]]:
    """Return, for each of ``METRICS``, the points (step, value, run) of all ``runs``."""
    found: dict[str, list[tuple[int, float, str]]] = {metric: [] for metric in METRICS}
    for run in runs:
        if (log := catalog.file(run, "log.jsonl")) is None:
            continue
        for metric, points in log_reader(log).points().items():
            found[metric] += [(step, value, run) for step, value in points]
    return found


class LogReader:
    """Reads the lines that were added to a run's log since the last call."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._begin(None)

    def _begin(self, file: tuple[int, int] | None) -> None:
        self._file, self._place, self._last = file, 0, b""
        self._points: dict[str, list[tuple[int, float]]] = {metric: [] for metric in METRICS}

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Return the points (step, value) for each of ``METRICS``, at most ``POINTS`` each. Raises OSError."""
        with self._lock, open(self._path, "rb") as log:
            known = os.fstat(log.fileno())
            log.seek(self._place - len(self._last))
            same = self._file == (known.st_dev, known.st_ino) and log.read(len(self._last)) == self._last
            if not same:  # the file was replaced, or was truncated and has grown again
                self._begin((known.st_dev, known.st_ino))
            if known.st_size - self._place > LOG_BYTES:
                self._place, self._last = known.st_size - LOG_BYTES, b""
            log.seek(self._place)
            while line := log.readline(LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < LINE_BYTES:  # the line is still being written
                    break
                self._place, self._last = self._place + len(line), line[-100:]
                self.add(line)
            return {metric: thinned(sorted(points)) for metric, points in self._points.items()}

    def add(self, line: bytes) -> None:
        """Add the values in a line of the log. A line without values is ignored."""
        try:
            entry = json.loads(line)
            step = entry["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return
        if type(step) is not int or not 0 <= step < 2**53:
            return
        for metric, points in self._points.items():
            value = entry.get(metric)
            with contextlib.suppress(OverflowError):  # the value is an integer outside the range of floats
                if type(value) in (int, float) and math.isfinite(float(value)):
                    points.append((step, float(value)))
            if len(points) > MOST_POINTS:
                points[:] = thinned(sorted(points), MOST_POINTS // 2)


@lru_cache(maxsize=64)
def log_reader(log: Path) -> LogReader:
    """Return the reader of a log. The same log always has the same reader."""
    return LogReader(log)


def thinned(points: list[tuple[int, float]], most: int = POINTS) -> list[tuple[int, float]]:
    """Reduce a curve to at most ``most`` points.

    Each new point is the mean of neighbouring values, at the last of these values' steps. The last point does not
    change.
    """
    if len(points) <= most:
        return points
    *earlier, last = points
    edges = [round(i * len(earlier) / (most - 1)) for i in range(most)]
    groups = [earlier[low:high] for low, high in zip(edges, edges[1:], strict=False)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups] + [last]


RESULTS = ("results.jsonl", "evaluation/results.jsonl")
RESULT_BYTES = 4 * MIB
RESULT_FIELDS = ("metric", "value", "interval", "count", "samples", "reference", "sampler", "steps", "guidance", "time")


def results(catalog: Catalog, run: str, evaluations: Path | None = None) -> list[dict[str, Any]]:
    """Return the results of ``opendit evaluate`` for a run, newest first.

    The results are read from the run's folder and from the folder ``evaluations``. From ``evaluations``, only results
    for weights inside the run's folder are returned.
    """
    found, root = [], catalog.run(run).resolve()
    for name in RESULTS:
        if (path := catalog.file(run, name)) is not None:
            found += _rows(path)
    if evaluations is not None and (path := evaluations / "results.jsonl").is_file():
        found += [row for row in _rows(path) if _lies_in(row.get("samples"), root)]
    unique = {json.dumps(row, sort_keys=True): row for row in found}
    return sorted(unique.values(), key=lambda row: str(row.get("time")), reverse=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the results in the first RESULT_BYTES of a file."""
    rows = []
    with open(path, "rb") as file:
        for line in file.read(RESULT_BYTES).splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # the line is still being written
                continue
            if isinstance(row, dict) and "metric" in row and "value" in row:
                rows.append({name: row.get(name) for name in RESULT_FIELDS})
    return rows


def _lies_in(samples: Any, folder: Path) -> bool:
    try:
        return isinstance(samples, str) and Path(samples).resolve().is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):
        return False


def starts(catalog: Catalog, run: str) -> list[dict[str, Any]]:
    """Return a record for each time the run was started or resumed, in order, from its config.json. Raises ValueError
    for a damaged file.

    Records by early versions of OpenDiT have only flags.
    """
    if (path := catalog.file(run, "config.json")) is None:
        return []
    content = read_file(path, RUN_CONFIG)
    found = content.get("starts") or [content]
    return [start for start in found if isinstance(start, dict)]


def changed_flags(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a text for each flag that differs between two starts, such as "--lr 0.0001 -> 0.001"."""
    old, new = (flags if isinstance(flags := start.get("flags"), dict) else {} for start in (before, after))
    return [f"--{name} {old.get(name)} -> {new.get(name)}" for name in {**old, **new} if old.get(name) != new.get(name)]
