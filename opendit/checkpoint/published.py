"""Read public models from folders in diffusers' layout. The folders are not trusted, so all contents are checked.

    model_index.json                     the pipeline's components; compared with the family, nothing is imported
    transformer/config.json              the network's class and sizes
    transformer/diffusion_pytorch_model.safetensors, or several files and their .index.json
    vae/, text_encoder/, tokenizer/, scheduler/

The folder of the transformer is also accepted without the other folders. The model's family (opendit/models/families)
defines how the configuration and the weights' names are translated. Opening a folder reads and compares only the
headers of the weight files. A weight is read on access.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import Field, model_validator
from torch import Tensor

from opendit.checkpoint.files import file_id
from opendit.checkpoint.matched import MatchedTensors, Pair, check_matched
from opendit.checkpoint.tensor_set import WholeTensors
from opendit.common.hub import folder_name, snapshot_of
from opendit.common.json_file import MIB, read_json
from opendit.common.json_models import FileKind, OpenJsonObject, Word, read_file
from opendit.common.tensor_files import open_safetensors
from opendit.common.utils import shown
from opendit.config.names import PARTS, WHOLE
from opendit.diffusion.objectives import objective_from_dict
from opendit.diffusion.objectives.flow import FlowObjective, published_schedule
from opendit.encoders.folder import CONFIG, INDEX, PIPELINE_INDEX, PRETRAINED, PretrainedConfig, one_line, weight_files
from opendit.encoders.published_folder import check_index, names_class
from opendit.models.configuration import DiTConfig
from opendit.models.families import FAMILIES
from opendit.models.families.base import Family, Variant
from opendit.models.families.public_config import PublicConfig, public_config
from opendit.models.weights import Weights
from opendit.models.zoo import Shapes, model_shapes

TRANSFORMER, STEM = "transformer", "diffusion_pytorch_model"
EXPERTS = {TRANSFORMER: "high", f"{TRANSFORMER}_2": "low"}  # names of the two networks of some pipelines
SCHEDULER = "scheduler_config.json"
MOST_LAYERS, MOST_ITEMS, MOST_NUMBER = 1024, 4096, 1 << 24


class NetworkConfig(PretrainedConfig):
    """The content of transformer/config.json of any family. The numbers are bounded before a family uses them."""

    class_name: Word = Field(alias="_class_name")

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, value: Any) -> Any:
        _check_bounds("", value)
        return value


def _check_bounds(key: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _check_bounds(name, item)
    elif isinstance(value, list | str):
        if len(value) > MOST_ITEMS:
            raise ValueError(f"{key[:60]} is longer than {MOST_ITEMS:,}")
        for item in value if isinstance(value, list) else ():
            _check_bounds(key, item)
    elif isinstance(value, int | float):
        least, most = (0, MOST_LAYERS) if key.endswith("layers") else (-MOST_NUMBER, MOST_NUMBER)
        if not least <= value <= most:
            raise ValueError(f"{key[:60]} is {shown(value)}; read are {least:,} to {most:,}")


class ModelIndex(OpenJsonObject):
    """The content of model_index.json of any family."""

    class_name: Word = Field(alias="_class_name")


NETWORK, MODEL_INDEX = FileKind(NetworkConfig, 4 * MIB), FileKind(ModelIndex, 4 * MIB)


@dataclass(frozen=True)
class PublishedFolder:
    """A public model's folder that agrees with the definition of its family.

    Attributes:
        family: the model's family.
        spec: the family's specification of the network, derived from the configuration.
        config: the content of ``transformer``/config.json.
        transformer: the folder of the network.
        pipeline: the folder of the pipeline; None if the user named only the network's folder.
        index: the content of model_index.json, or None.
        root: the folder that all files must lie in.
        files: the weights by their published names.
        pairs: (OpenDiT's names, published names, dimension along which the weights are concatenated).
        alone: True if the user named the folder of one of the pipeline's two networks.
    """

    family: Family
    spec: Any
    config: dict[str, Any]
    transformer: Path
    pipeline: Path | None
    index: dict[str, Any] | None
    root: Path
    files: WholeTensors
    pairs: tuple[Pair, ...]
    alone: bool = False

    def shapes(self) -> Shapes:
        """Return the shapes of OpenDiT's parameters. Raises ValueError; the message names the configuration file."""
        try:
            return model_shapes(public_config(self.family.name, self.config))[0]
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{self.transformer / CONFIG}: {one_line(error)}") from error

    def tensors(
        self, shapes: Mapping[str, Sequence[int]] | None = None, weights: Mapping[str, Tensor] | None = None
    ) -> MatchedTensors:
        """Return the weights by OpenDiT's names.

        Args:
            shapes: shapes of all parameters of the network; by default the result of :meth:`shapes`.
            weights: weights by their published names, to use instead of the weights in the files.

        Raises:
            ValueError: a weight does not fit; the message is one line that names the file and the weight.
        """
        shapes = self.shapes() if shapes is None else shapes
        source = self.files if weights is None else weights
        return MatchedTensors(source, self.pairs, shapes, self.files.path, constants=self.family.constants)

    def published(self, state: Mapping[str, Tensor], path: Path) -> MatchedTensors:
        """Convert OpenDiT's weights to the published names, shapes and dtypes. The inverse of :meth:`tensors`.

        Args:
            state: weights by OpenDiT's names.
            path: path of the weights, for messages.

        Raises:
            ValueError: a weight is missing, unexpected, or does not fit; the message is one line.
        """
        back = [(theirs, ours, dim) for ours, theirs, dim in self.pairs]
        constants = {name: self.files[name] for name in self.family.constants}
        return MatchedTensors(state, back, self.files.shapes, path, self.files.dtypes, constants)

    def close(self) -> None:
        """Unmap the files."""
        self.files.close()


def expert_of(folder: Path) -> str | None:
    """Return which of two networks a folder holds, if its pipeline has one for high noise and one for low noise."""
    path = folder.parent / PIPELINE_INDEX
    if folder.name not in EXPERTS or not (folder / CONFIG).is_file() or not path.is_file():
        return None
    try:
        index = read_json(path, MODEL_INDEX.most_bytes)
    except (ValueError, OSError):
        return None
    return EXPERTS[folder.name] if isinstance(index, dict) and index.get("boundary_ratio") is not None else None


def network_of(folder: str | Path, config: DiTConfig | None) -> Path:
    """Return the folder of the network that ``config`` describes.

    This is ``folder`` itself, or in a pipeline with two networks, the folder of the matching network.
    """
    expert = config.expert if isinstance(config, PublicConfig) else None
    inside = Path(folder) / next((name for name, which in EXPERTS.items() if which == expert), ".")
    return inside if expert_of(inside) == expert else Path(folder)


def is_published(folder: str | Path, families: Mapping[str, Family] = FAMILIES) -> bool:
    """Return True if the folder names the network class of a known family. Nothing else is checked."""
    folder = Path(folder)
    path = next((p for p in (folder / TRANSFORMER / CONFIG, folder / CONFIG) if p.is_file()), None)
    try:
        values = read_json(path, NETWORK.most_bytes) if path else None
    except (ValueError, OSError):
        return False
    name = values.get("_class_name") if isinstance(values, dict) else None
    return name in [family.network for family in families.values()]


def open_published(folder: str | Path, families: Mapping[str, Family]) -> PublishedFolder:
    """Open a public model's folder. Only the headers of the weight files are read.

    Args:
        folder: the folder of the pipeline, or of its transformer.
        families: name -> known family.

    Raises:
        FileNotFoundError: the folder or a file does not exist.
        ValueError: a file is damaged, is a link out of the folder, or belongs to another model. The message is one line
            that names the file.
    """
    folder = Path(folder)
    inside, expert = folder / TRANSFORMER, expert_of(folder)
    pipeline, transformer = (folder, inside) if inside.is_dir() else (None, folder)
    if expert is not None:
        pipeline = folder.parent
    if not (transformer / CONFIG).is_file():
        raise FileNotFoundError(
            f"{folder}: no public model there; give a folder with {TRANSFORMER}/{CONFIG}, as diffusers writes it"
        )
    root = _root(folder if expert is None else folder.parent)
    file_id(transformer / CONFIG, root)
    config = read_file(transformer / CONFIG, NETWORK)
    family = next((family for family in families.values() if family.describes(config)), None)
    if family is None:
        raise ValueError(
            f"{transformer / CONFIG}: _class_name is {shown(config['_class_name'])}; read are "
            f"{', '.join(sorted(family.network for family in families.values()))}"
        )
    index = _read_index(pipeline, family, root) if pipeline else None
    try:
        spec = family.layout(config)
        pairs = tuple((*names, match.dim) for match in family.names(spec) for names in match.names())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        what = f"{one_line(error)} is missing" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"{transformer / CONFIG}: {what}") from error
    files = _open_files(transformer, root)
    check_matched(
        [*family.constants, *(name for _, theirs, _ in pairs for name in theirs)],
        files.shapes,
        f"{files.path}: of the weights of a {family.network} as {CONFIG} has it",
    )
    return PublishedFolder(family, spec, config, transformer, pipeline, index, root, files, pairs, expert is not None)


def _root(folder: Path) -> Path:
    """Return the folder that all files must lie in.

    In the Hugging Face cache, this is the folder of the repository, because files are links to its ``blobs``. Elsewhere
    it is ``folder`` itself.
    """
    snapshot = snapshot_of(folder)
    return folder.resolve() if snapshot is None else snapshot[0].parent.parent


def _read_index(pipeline: Path, family: Family, root: Path) -> dict[str, Any] | None:
    """Read model_index.json and compare it with the family's components. Return None if the file does not exist."""
    path = pipeline / PIPELINE_INDEX
    if not path.is_symlink() and not path.exists():
        return None
    file_id(path, root)
    index = read_file(path, MODEL_INDEX)
    check_index(pipeline, family)
    if not names_class(index.get(TRANSFORMER), "diffusers", family.network):
        raise ValueError(f"{path}: {TRANSFORMER} is {shown(index.get(TRANSFORMER))}, not {family.network} of diffusers")
    others = [
        name for name, kind in index.items() if name.startswith(f"{TRANSFORMER}_") and kind not in (None, [None, None])
    ]
    variant = family.variant(index)
    wanted = [f"{TRANSFORMER}_2"] if variant is not None and variant.experts else []
    if others != wanted:
        raise ValueError(
            f"{path}: it has a second network, {shown(others[0])}, which is not read"
            if others
            else f"{path}: {cast(Variant, variant).setting} is of two networks, and it has one"
        )
    for name in others:
        boundary = index[cast(Variant, variant).setting]
        if not names_class(index[name], "diffusers", family.network):
            raise ValueError(f"{path}: {name} is {shown(index[name])}, not {family.network} of diffusers")
        if not isinstance(boundary, float) or not 0 < boundary < 1:
            raise ValueError(
                f"{path}: {cast(Variant, variant).setting} is {shown(boundary)}, no number between 0 and 1"
            )
    return index


def _open_files(transformer: Path, root: Path) -> WholeTensors:
    """Map the weight files, and compare their headers with the file sizes and the index."""
    files = weight_files(transformer, STEM)
    for file in files:
        file_id(file, root)
    path = transformer / (STEM + PARTS)
    place: dict[str, str] = {}
    if path.is_file():
        file_id(path, root)
        place = read_file(path, INDEX)["weight_map"]
        if not place:
            raise ValueError(f"{path} names no weights")
    tensors = WholeTensors(path if place else transformer / (STEM + WHOLE), open_safetensors, place)
    tensors.check_floats()
    return tensors


# ------------------------------------------------------------------------------------------------ as OpenDiT weights


def read_published(folder: str | Path) -> Weights:
    """Open a public model's folder as weights by OpenDiT's names, with the model's settings, such as its schedule, in
    ``info``.

    A weight is read from its file on access. Raises the errors of :func:`open_published` and ``published_schedule``.
    """
    opened = open_published(folder, FAMILIES)
    family, info = opened.family, {}
    root, variant = opened.pipeline, opened.family.variant(opened.index)
    if root is not None:
        if (root / "vae" / CONFIG).is_file():
            info["vae"] = str((root / "vae").resolve())
        if opened.index is not None:
            info["text_encoder"] = str(root.resolve())
            if family.distilled is not None and opened.index.get("is_distilled") is True:
                info["distilled"] = True
        schedule = root / "scheduler" / SCHEDULER
        if schedule.is_file():
            try:
                objective, sampler = published_schedule(
                    read_file(schedule, PRETRAINED), family.shifted_end, family.karras
                )
            except ValueError as error:
                raise ValueError(f"{schedule}: {error}".replace(f"{schedule}: {schedule}", str(schedule))) from error
            # These families compute a dynamic shift by FLUX.2's formula. A constant shift stays as it is.
            if family.shift == "empirical" and objective.shift_tokens is not None:
                objective = FlowObjective(empirical_tokens=0)
            info |= {"objective": objective.to_dict(), "sampler": sampler}
    expert = expert_of(opened.transformer) if opened.alone else None
    index = (opened.index or {}) | ({} if expert is None else {"expert": expert})
    config = public_config(family.name, opened.config, index=index)
    if variant is not None:
        info["clip_fps"] = variant.fps
    place = opened.transformer if opened.alone else opened.pipeline or opened.transformer
    shapes, _ = model_shapes(config)
    info |= {"model": folder_name(place), "config": config.to_dict()}
    objective = objective_from_dict(info.get("objective", FlowObjective().to_dict()))
    if expert is not None:
        between = {"least": config.boundary} if expert == "high" else {"most": config.boundary}
        objective = replace(cast(FlowObjective, objective), **between)
    info["objective"] = objective.to_dict()
    return Weights(opened.tensors(shapes), place, info)
