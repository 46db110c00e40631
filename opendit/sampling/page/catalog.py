"""List the files that the page may read: the runs in one folder, and the checkpoints named on the command line.

A name from a browser is only looked up in these lists. Links out of the folder of runs are refused."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opendit.checkpoint.pretrained import find_weights, read_info
from opendit.checkpoint.run_folders import checkpoints_in, run_folders, step_of
from opendit.checkpoint.tensor_set import file_size
from opendit.common.json_file import MIB
from opendit.config.names import PARTS, SHARDS, WHOLE
from opendit.diffusion.objectives import objective_from_dict
from opendit.diffusion.objectives.base import Objective
from opendit.encoders.folder import PIPELINE_INDEX
from opendit.encoders.pictures import one_line
from opendit.models.configuration import DiTConfig
from opendit.models.zoo import Weights
from opendit.sampling.model_loading import class_names

NEWEST = "newest"
EXAMPLES, LONGEST_EXAMPLE = 3, 200  # example captions of a model, and characters in each, at most
MOST_GRIDS, GRID_BYTES = 10_000, 64 * MIB
_GRID = re.compile(r"[0-9]{7,12}\.png")


@dataclass(frozen=True)
class WeightsChoice:
    """Weights to draw from, with a ``name`` for users, such as "000-DiT-Ti-2, step_0001000, ema". ``path``, ``which``
    and ``lora`` are for ``opendit.load``. ``mark`` changes when the weights' file or folder changes."""

    name: str
    path: Path
    which: str
    mark: tuple[Any, ...] = ()
    lora: tuple[tuple[Path, float], ...] = ()


@dataclass(frozen=True)
class ModelCard:
    """Properties of a model that are needed to check a drawing request.

    Attributes:
        clips: True if the model draws clips, False if it draws pictures.
        captions: True if the model is conditioned on captions, False if on ``classes`` (names).
        samplers: names of the usable samplers, the default sampler first.
        guided: True if the model has a null condition.
        size: text such as "256 x 256 pixels".
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
    """The runs in ``outputs``, and the checkpoints (``extra``) and LoRAs (``lora``) from the command line, name ->
    path. Every call lists the files again."""

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

    def runs(self) -> list[str]:
        """Return the names of the runs, newest first."""
        folders = reversed(run_folders(self.outputs))
        return [path.name for path in folders if path.is_dir() and self.inside(path) and _is_text(path.name)]

    def refused(self) -> list[str]:
        """Return the names of runs that are not shown: links out of the folder, and names that are not UTF-8."""
        folders = [path for path in run_folders(self.outputs) if path.is_dir()]
        return [path.name for path in folders if not self.inside(path) or not _is_text(path.name)]

    def run(self, name: str) -> Path:
        """Return the folder of a run. Raises ValueError if the run is not listed."""
        if not isinstance(name, str) or name not in self.runs():
            raise ValueError("no such run: it is not, or no longer, in the folder of runs; refresh the page")
        return self.outputs / name

    def file(self, run: str, name: str) -> Path | None:
        """Return the path of a file in a run; None if the file is not regular or leads out of the folder of runs.
        ``name`` must never come from a browser."""
        path = self.run(run) / name
        try:
            file_size(path, self.root)
        except ValueError:
            return None
        return path

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
        """Return a listed sample grid's path. Raises ValueError for a file that is too large, or a link out of the
        folder."""
        if name not in self.grids(run):
            raise ValueError("no such grid")
        path = self.run(run) / "samples" / name
        if file_size(path, self.root) > GRID_BYTES:
            raise ValueError(f"{name} is larger than {GRID_BYTES // MIB} MiB")
        return path

    def sources(self) -> list[str]:
        """Return the names of runs with checkpoints, and of checkpoints from the command line."""
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
        """Return the names of a checkpoint's weights: "ema", further averages, and "model"."""
        if source in self.extra:
            path = self.extra[source]
            return ["ema", "model"] if path.is_dir() and not (path / PIPELINE_INDEX).is_file() else ["ema"]
        folder = self._folder(source, checkpoint)
        files = folder.iterdir() if folder.is_dir() and self.inside(folder) else ()
        suffixes = (SHARDS, PARTS, WHOLE)
        names = {next((f.name.removesuffix(s) for s in suffixes if f.name.endswith(s)), "") for f in files}
        averages = sorted(name for name in names if name == "ema" or re.fullmatch("ema_[0-9.e-]+", name))
        return averages + ["model"] * ("model" in names) or ["ema"]

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
        """Return the weights with these three names. Raises ValueError if a name is not listed, or if a file is a link
        out of the folder of runs."""
        if source in self.extra:
            if average not in ("ema", "model"):
                raise ValueError(f"{source} does not have these weights; refresh the page")
            return WeightsChoice(source, self.extra[source], average, _mark(self.extra[source]))
        folder = self._folder(source, checkpoint)
        if average not in self.averages(source, checkpoint):
            raise ValueError(f"{source}, {folder.name} does not have these weights; refresh the page")
        # With the run's path, loading can fall back to an older checkpoint.
        by_run = checkpoint == NEWEST and average in ("ema", "model")
        for each in self._checkpoints(source) if by_run else [folder]:
            self._refuse_links_out(each)
        name, mark = f"{source}, {folder.name}, {average}", (folder.name, _mark(folder))
        if average in ("ema", "model"):
            return WeightsChoice(name, self.run(source) if by_run else folder, average, mark)
        # other averages are selected by their files
        return WeightsChoice(name, find_weights(folder, average), "ema", mark)

    def loras(self) -> list[str]:
        """Return the LoRAs' names: those from the command line, and runs of ``train.py --lora``."""
        return [*self.lora, *(name for name in self.runs() if self.has_checkpoint(name) and self._is_lora(name))]

    def _is_lora(self, run: str) -> bool:
        try:
            choice = self.weights(run, NEWEST, self.averages(run, NEWEST)[0])
            return "lora" in read_info(find_weights(choice.path, choice.which))
        except (ValueError, OSError):  # damage is reported when a user chooses the checkpoint
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
        """Raise ValueError if a checkpoint, or a file to read in it, is a link out of the folder of runs."""
        if not self.inside(checkpoint):
            raise ValueError(f"{checkpoint.name} leads out of the folder of runs, and is not read")
        for path in checkpoint.iterdir():
            if path.name.endswith((WHOLE, ".json")):
                file_size(path, self.root)

    def card(self, choice: WeightsChoice) -> ModelCard | None:
        """Return the card of a model; None without metadata. Raises ValueError or OSError for a damaged file."""
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
