"""List the files that the page may read: the runs under one folder, their checkpoints and sample grids, and the
checkpoints that were named when the page was started.

A browser only ever chooses among the names that are listed here: what it sends is looked up in a listing and never made
a part of a path. What is listed lies inside the folder of runs; a symbolic link that leads out of it is refused.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendit.checkpoint.files import file_id
from opendit.checkpoint.foreign import PIPELINE_INDEX
from opendit.checkpoint.pretrained import find_weights, read_info
from opendit.checkpoint.run_folders import checkpoints_in, run_folders, step_of
from opendit.common.json_file import MIB
from opendit.config.names import PARTS, SHARDS, WHOLE
from opendit.diffusion.objectives import objective_from_dict
from opendit.diffusion.objectives.base import Objective
from opendit.models.configuration import DiTConfig
from opendit.models.weights import Weights
from opendit.sampling.model_loading import class_names

NEWEST = "newest"
MOST_GRIDS, GRID_BYTES = 10_000, 64 * MIB
_GRID = re.compile(r"[0-9]{7,12}\.png")


@dataclass(frozen=True)
class WeightsChoice:
    """Weights to draw from, as ``opendit.load`` takes them.

    name: for people, "000-DiT-Ti-2, step_0001000, ema". path, which: arguments of ``opendit.load``. mark: changes when
    the file does.
    """

    name: str
    path: Path
    which: str
    mark: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ModelCard:
    """The facts about a model that a request for samples needs.

    classes: the name of every class; none of a model of captions. samplers: those that it can be drawn with, the
    default one first. guided: whether it has a null condition. size: as people write it.
    """

    model: str
    clips: bool
    captions: bool
    classes: tuple[str, ...]
    samplers: tuple[str, ...]
    guided: bool
    size: str
    objective: str

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
        )


@dataclass
class Catalog:
    """The runs under ``outputs`` and the checkpoints of ``extra``, looked up anew at every call.

    outputs: the folder of runs; it need not be there yet. extra: name -> path, of whoever starts the page.
    """

    outputs: Path
    extra: dict[str, Path] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.outputs.resolve()

    def inside(self, path: Path) -> bool:
        """Return True if a path, with all links resolved, leads to something in the folder of runs."""
        try:
            return path.resolve(strict=True).is_relative_to(self.root)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle
            return False

    # ------------------------------------------------------------------------------------------ runs

    def runs(self) -> list[str]:
        """The names of the runs, the newest first."""
        return [path.name for path in reversed(run_folders(self.outputs)) if path.is_dir() and self.inside(path)]

    def refused(self) -> list[str]:
        """The names of runs that lead out of the folder."""
        return [path.name for path in run_folders(self.outputs) if path.is_dir() and not self.inside(path)]

    def run(self, name: str) -> Path:
        """The folder of a run. Raises ValueError for a name that is not listed."""
        if not isinstance(name, str) or name not in self.runs():
            raise ValueError("no such run: it is not, or no longer, in the folder of runs; refresh the page")
        return self.outputs / name

    def file(self, run: str, name: str) -> Path | None:
        """A file of a run by a name of the program's own, never a browser's; None if there is none, or if it leads out
        of the folder of runs or is no regular file."""
        path = self.run(run) / name
        try:
            file_id(path, self.root)
        except ValueError:
            return None
        return path

    # ------------------------------------------------------------------------------------------ grids

    def grids(self, run: str) -> list[str]:
        """The names of a run's sample grids, by step."""
        folder = self.run(run) / "samples"
        if not folder.is_dir() or not self.inside(folder):
            return []
        found = sorted(
            (path.name for path in folder.iterdir() if _GRID.fullmatch(path.name)), key=lambda n: int(n[:-4])
        )
        return found[-MOST_GRIDS:]

    def grid(self, run: str, name: str) -> Path:
        """The file of a sample grid. Raises ValueError for names that are not listed and links that lead elsewhere."""
        if name not in self.grids(run):
            raise ValueError("no such grid")
        path = self.run(run) / "samples" / name
        if file_id(path, self.root).size > GRID_BYTES:
            raise ValueError(f"{name} is larger than {GRID_BYTES // MIB} MiB")
        return path

    # ------------------------------------------------------------------------------------------ weights

    def sources(self) -> list[str]:
        """List what samples can be drawn from: runs that have checkpoints, and checkpoints named at the start."""
        return [name for name in self.runs() if self._checkpoints(name)] + list(self.extra)

    def checkpoints(self, source: str) -> list[str]:
        """A run's checkpoints by name, after ``NEWEST``; nothing else to choose of a single checkpoint."""
        if source in self.extra:
            return [NEWEST]
        return [NEWEST, *(path.name for path in self._checkpoints(source))]

    def _checkpoints(self, run: str) -> list[Path]:
        return [path for path in checkpoints_in(self.run(run)) if step_of(path) >= 0 and not path.name.startswith(".")]

    def averages(self, source: str, checkpoint: str) -> list[str]:
        """The sets of weights of a checkpoint: "ema" first, further averages, "model"."""
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
        """The weights of three names as they are listed.

        Raises ValueError for other names, and for files that lead out of the folder of runs."""
        if source in self.extra:
            if average not in ("ema", "model"):
                raise ValueError(f"{source} does not have these weights; refresh the page")
            return WeightsChoice(source, self.extra[source], average, _mark(self.extra[source]))
        folder = self._folder(source, checkpoint)
        if average not in self.averages(source, checkpoint):
            raise ValueError(f"{source}, {folder.name} does not have these weights; refresh the page")
        # The newest one is asked for by its run, so that a damaged one is passed over for one before it.
        by_run = checkpoint == NEWEST and average in ("ema", "model")
        for each in self._checkpoints(source) if by_run else [folder]:
            self._refuse_links_out(each)
        name, mark = f"{source}, {folder.name}, {average}", (folder.name, _mark(folder))
        if average in ("ema", "model"):
            return WeightsChoice(name, self.run(source) if by_run else folder, average, mark)
        return WeightsChoice(name, find_weights(folder, average), "ema", mark)  # a further average is a file alone

    def _refuse_links_out(self, checkpoint: Path) -> None:
        """Raises ValueError if a checkpoint, or a file that is read of it, leads out of the folder of runs."""
        if not self.inside(checkpoint):
            raise ValueError(f"{checkpoint.name} leads out of the folder of runs, and is not read")
        for path in checkpoint.iterdir():
            if path.name.endswith((WHOLE, ".json")):
                file_id(path, self.root)

    def card(self, choice: WeightsChoice) -> ModelCard | None:
        """Read the weights' metadata, without the weights; None if they have none. Raises ValueError or OSError for a
        damaged file."""
        file = find_weights(choice.path, choice.which)
        info = read_info(file)
        weights = Weights({}, file, info)
        config = weights.config
        return config and ModelCard.of(config, weights, objective_from_dict(info.get("objective")))


def _mark(path: Path) -> tuple[Any, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns
