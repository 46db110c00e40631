"""Check the contents of run and checkpoint files before memory is allocated or a model is built.

The pydantic models for settings of networks and objectives are derived from dataclasses. Keys that no version of
OpenDiT has written are refused. This module imports slowly, so import it only to read a file."""

import dataclasses
import functools
import math
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

from annotated_types import Interval, Len, MaxLen
from pydantic import AfterValidator, Discriminator, FailFast, Field, InstanceOf, Tag, create_model, model_validator

from opendit.common.json_file import LARGEST, MIB
from opendit.common.json_models import (
    Count,
    FileKind,
    FileName,
    JsonObject,
    Name,
    OpenJsonObject,
    Positive,
    Sha256,
    Texts,
    Word,
    absent,
    parse_text,
)
from opendit.common.tensor_files import ITEM_BYTES
from opendit.common.utils import shown
from opendit.diffusion.objectives import OBJECTIVES, objective_from_dict
from opendit.encoders.schema import PretrainedConfig
from opendit.models.configuration import DiTConfig
from opendit.models.families.public_config import PublicConfig
from opendit.models.zoo import CLASSES, config_from_dict

# Bounds of configuration fields, far above every existing model. opendit.checkpoint.tensor_set compares a model's real
# size with its weights.
BOUNDS = {
    "input_size": Interval(ge=1, le=1 << 16),
    "patch_size": Interval(ge=1, le=64),
    "in_channels": Interval(ge=1, le=4096),
    "hidden_size": Interval(ge=1, le=1 << 16),
    "depth": Interval(ge=1, le=1024),
    "num_heads": Interval(ge=1, le=4096),
    "kv_heads": Interval(ge=1, le=4096),
    "num_classes": Interval(ge=1, le=10_000_000),
    "mlp_ratio": Interval(gt=0, le=64),
    "adaln_lora": Interval(ge=1, le=1 << 16),
    "experts": Interval(ge=1, le=4096),
    "expert_hidden": Interval(ge=1, le=1 << 16),
    "expert_capacity": Interval(gt=0, le=4096),
    "width": Interval(ge=1, le=1 << 16),
    "max_tokens": Interval(ge=1, le=1 << 16),
    # Bounds of objectives' fields:
    "min_snr": Interval(gt=0, le=1e6),
    "shift": Interval(gt=0, le=1e6),
    "shift_tokens": Interval(ge=1, le=1 << 31),
    "shift_growth": Interval(ge=-1, le=1),
    "shift_terminal": Interval(gt=0, lt=1),
    "empirical_tokens": Interval(ge=0, le=1 << 31),
    "mean": Interval(ge=-100, le=100),
    "std": Interval(gt=0, le=100),
    "sigma_data": Interval(gt=0, le=1e6),
}
BY_TYPE: dict[type[Any], Any] = {
    int: Annotated[int, Interval(ge=0, le=(1 << 31) - 1)],
    float: Annotated[float, Interval(ge=-1e9, le=1e9)],
    str: Annotated[str, MaxLen(256)],
}
# in an index: cuts per shard, ranges per cut, dimensions per tensor, at most
MOST_CUTS, MOST_RANGES, MOST_DIMENSIONS = 8, 4096, 8
TOKENS = 1 << 22  # most tokens of a sample: four times the longest sample in published training

# ------------------------------------------------------------------------------------------ from dataclasses


@functools.cache
def model_of(kind: type[Any], tag: str | None = None) -> type[JsonObject]:
    """Create a pydantic model for a dataclass's JSON form. tag: name of an optional string field."""
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {} if tag is None else {tag: (Word, "")}
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        fields[field.name] = (_typed(hints[field.name], BOUNDS.get(field.name)), ... if required else None)
    return create_model(kind.__name__, __base__=JsonObject, **fields)


def _typed(hint: Any, bounds: Interval | None) -> Any:
    """Return the JSON type of a dataclass field with type ``hint``; tuples are lists. ``bounds`` limits its numbers."""
    if dataclasses.is_dataclass(hint):
        return model_of(typing.cast(type[Any], hint))
    if typing.get_origin(hint) in (types.UnionType, Union):
        return Union[tuple(_typed(part, bounds) for part in typing.get_args(hint))]  # noqa: UP007 (of a tuple)
    if typing.get_origin(hint) is tuple:
        item, *rest = typing.get_args(hint)
        least, most = (1, 8) if rest == [...] else (1 + len(rest),) * 2
        return Annotated[list[_typed(item, bounds)], Len(least, most)]
    if hint in (int, float) and bounds is not None:
        return Annotated[hint, bounds]
    return BY_TYPE.get(hint, hint)


def _tagged(kinds: dict[str, type[JsonObject]], tag: str, default: str | None) -> Any:
    """Return the union of the models ``kinds``. A JSON object's string under the key ``tag`` selects the model."""

    def named(value: Any) -> str | None:
        found = value.get(tag, default) if isinstance(value, dict) else None
        return found if isinstance(found, str) else None

    known = f"{tag} should be one of {', '.join(kinds)}"
    options = tuple(Annotated[kind, Tag(name)] for name, kind in kinds.items())
    return Annotated[
        Union[options],  # noqa: UP007 (of a tuple)
        Discriminator(named, custom_error_type="unknown_kind", custom_error_message=known),
    ]


class PublicIndex(JsonObject):
    """The settings that are read from a public model's ``model_index.json``."""

    expand_timesteps: bool | None = None
    boundary_ratio: Annotated[float, Interval(gt=0, lt=1)] | None = None
    expert: Literal["high", "low"] | None = None


class PublicModel(JsonObject):
    """A public model's configuration, as ``PublicConfig.to_dict`` writes it."""

    kind: Word
    family: Word
    published: dict[str, Any]
    input_size: Annotated[list[Annotated[int, Interval(ge=1, le=1 << 16)]], Len(2, 3)]
    max_tokens: Annotated[int, Interval(ge=1, le=1 << 16)]
    index: PublicIndex | None = None


if TYPE_CHECKING:
    ModelConfig: TypeAlias = dict[str, Any]
    ObjectiveSettings: TypeAlias = dict[str, Any]
else:
    # The output of ``DiTConfig.to_dict``. Without the key "kind", it describes a DiT.
    KINDS = {kind.config.kind: model_of(kind.config, "kind") for kind in CLASSES.values()}
    ModelConfig = _tagged(KINDS | {PublicConfig.kind: PublicModel}, "kind", DiTConfig.kind)
    # The output of ``Objective.to_dict``.
    ObjectiveSettings = _tagged({name: model_of(kind, "name") for name, kind in OBJECTIVES.items()}, "name", None)

# ------------------------------------------------------------------------------------------ the files

Rate = Annotated[float, Interval(gt=0, le=1e6)]
Width = Annotated[int, Interval(ge=1, le=1 << 16)]
Figure = Annotated[float, Interval(ge=-1e38, le=1e38)]


class LoraEntry(JsonObject):
    """LoRA settings of a checkpoint, and the path of its base weights."""

    rank: int = Field(ge=1, le=1 << 16)
    alpha: Rate
    base: Name
    targets: Texts = absent()


class Metadata(JsonObject):
    """Metadata of the weights files of a run."""

    model: str = Field("", max_length=64, pattern=r"^[\w./-]+\z")
    config: ModelConfig = {}
    objective: ObjectiveSettings = {}
    class_names: Texts = []
    captions: Annotated[list[Annotated[InstanceOf[str], MaxLen(1 << 20)]], FailFast(), MaxLen(4096)] = []
    vae: Name = ""
    text_encoder: Name | None = None
    sampler: Word | None = None
    image_size: int = Field(1, ge=1, le=1 << 20)
    num_frames: int = Field(1, ge=1, le=1 << 20)
    frame_interval: int = Field(1, ge=1, le=1 << 20)
    fps: Rate = 1
    clip_fps: Rate = 1
    lora: LoraEntry = absent()
    step: Count = 0
    version: Count = 0

    @model_validator(mode="after")
    def _complete(self) -> "Metadata":
        for key, needed in (("lora", "config"), ("config", "model")):
            if key in self.model_fields_set and needed not in self.model_fields_set:
                raise ValueError(f"{needed} is missing beside {key}")
        return self


class ManifestEntry(JsonObject):
    """A file in the manifest."""

    bytes: Count
    sha256: Sha256


class Manifest(JsonObject):
    """The content of manifest.json."""

    version: Count
    files: Annotated[dict[FileName, ManifestEntry], FailFast(), MaxLen(100_000)]
    sha256: Sha256


class AnyState(OpenJsonObject):
    """The state.json of any version."""

    version: Count


class Scaler(JsonObject):
    """The state of the loss scaler."""

    scale: float = Field(1.0, gt=0, le=1e38)
    growth: Count = 0
    hysteresis: int = Field(0, ge=-(2**31), le=LARGEST)


class Averages(JsonObject):
    """A checkpoint's averages. ``files`` maps each file to a decay, or to the width of a power average. With power
    averages, ``snapshots`` lists the steps of all checkpoints that the run had saved, including this one."""

    files: Annotated[dict[FileName, Annotated[float, Interval(ge=0, le=1)]], FailFast(), MaxLen(1000)]
    updates: Count
    snapshots: Annotated[list[Count], FailFast(), MaxLen(1_000_000)] = absent()


class SavedFigures(JsonObject):
    """The metrics of --evaluate_every; ``of`` identifies the data on which they were measured."""

    of: Word
    figures: Annotated[dict[Word, Figure], FailFast(), MaxLen(100)]


class Packs(JsonObject):
    """The state of packing samples into sequences (opendit.data.packs)."""

    position: Count
    carry: Annotated[list[Count], FailFast()]
    stages: Annotated[list[Count], FailFast(), Len(1)]
    global_batch: Positive
    capacity: Positive
    step: Count = 0
    # Only earlier versions write ``window`` and ``origin``, for windows with a fixed number of steps.
    window: Count = 0
    origin: Count = 0


class StateFile(JsonObject):
    """The content of state.json."""

    version: Count
    model: Word
    step: Count
    epoch: Count
    skipped: Count
    optimizer_steps: Count
    scaler: Scaler
    ema: Averages
    # Settings that are compared when the run is resumed.
    world_size: int = Field(1, ge=1, le=1 << 20)
    plugin: Word = ""
    precision: Word = ""
    fp8: bool = False
    attention: Word = ""
    sequence_parallel: Annotated[str, MaxLen(256)] | None = None
    global_batch: Positive = 1
    seed: int = Field(0, ge=-(2**63), le=2**64)
    val_loss: Figure = 0
    evaluation: SavedFigures = absent()
    packs: Packs | None = None
    objective: ObjectiveSettings = {}
    # the result of opendit.training.fingerprint.fingerprint
    fingerprint: Annotated[dict[Word, Any], FailFast(), MaxLen(1000)] = {}


class RunConfig(OpenJsonObject):
    """The starts and resumes in a run's config.json."""

    starts: Annotated[list[Any], MaxLen(100_000)] = []


# ------------------------------------------------------------------------------------------ sets of tensors


def _check_cut(cut: list[int | None]) -> list[int | None]:
    dim, *edges = cut
    if dim is not None and dim > MOST_DIMENSIONS:
        raise ValueError(f"there is no dimension {dim}")
    if None in edges or len(edges) % 2:
        raise ValueError("it has a start without a stop")
    return cut


def _check_shape(shape: list[int]) -> list[int]:
    if math.prod(shape) > 1 << 48:
        raise ValueError("it is of more elements than any model has")
    return shape


Cut = Annotated[list[Count | None], FailFast(), Len(1, 1 + 2 * MOST_RANGES), AfterValidator(_check_cut)]
SideLength = Annotated[int, Interval(ge=1, le=1 << 40)]


class IndexedTensor(JsonObject):
    """A tensor in an index of shards. ``shards`` maps each file to cuts of the tensor."""

    dtype: str = Field(pattern=rf"^({'|'.join(ITEM_BYTES)})\z")
    shape: Annotated[list[SideLength], MaxLen(MOST_DIMENSIONS), AfterValidator(_check_shape)]
    shards: Annotated[dict[FileName, Annotated[list[Cut], FailFast(), MaxLen(MOST_CUTS)]], FailFast(), MaxLen(1 << 16)]


class IndexFile(JsonObject):
    """The content of an index of shards."""

    version: int = Field(ge=1, le=1)
    set: str = Field(max_length=64, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._]*\z")
    step: Count
    metadata: Annotated[dict[Word, Annotated[str, MaxLen(16 * MIB)]], FailFast(), MaxLen(16)]
    tensors: Annotated[dict[Annotated[str, MaxLen(1024)], IndexedTensor], FailFast(), MaxLen(1 << 20)]


# ------------------------------------------------------------------------------------------ files of diffusers


class TransformerConfig(OpenJsonObject):
    """The content of transformer/config.json of diffusers' DiTPipeline."""

    class_name: Word = Field(alias="_class_name")
    num_attention_heads: Width
    attention_head_dim: Width
    num_layers: Width
    patch_size: int = Field(ge=1, le=64)
    sample_size: int = Field(ge=1, le=512)
    in_channels: int = Field(ge=1, le=4096)
    num_embeds_ada_norm: int = Field(ge=1, le=1_000_000)


MOST_LAYERS, MOST_ITEMS, MOST_NUMBER = 1024, 4096, 1 << 24


class NetworkConfig(PretrainedConfig):
    """The content of transformer/config.json of any family. Numbers out of bounds are rejected before use."""

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


ClassNumber = Annotated[str, Field(pattern=r"^[0-9]{1,7}\z")]


class PipelineIndex(OpenJsonObject):
    """The content of model_index.json of diffusers' DiTPipeline."""

    id2label: Annotated[dict[ClassNumber, Name] | None, FailFast()] = None


METADATA = FileKind(Metadata, 16 * MIB)
MANIFEST_FILE = FileKind(Manifest, 16 * MIB)
ANY_STATE = FileKind(AnyState, 4 * MIB)
STATE_FILE = FileKind(StateFile, 4 * MIB)
RUN_CONFIG = FileKind(RunConfig, 64 * MIB)
INDEX_FILE = FileKind(IndexFile, 256 * MIB)
TRANSFORMER, PIPELINE = FileKind(TransformerConfig, 4 * MIB), FileKind(PipelineIndex, 16 * MIB)
NETWORK = FileKind(NetworkConfig, 4 * MIB)

# ------------------------------------------------------------------------------------------ reading


def checked_metadata(text: str, source: Path | str) -> dict[str, Any]:
    """Parse and check the metadata of a weights file. Raises ValueError with one line that names the source."""
    info = parse_text(text, METADATA, source)
    if "config" in info:
        checked_config(info["config"], source)
    try:
        objective_from_dict(info.get("objective"))
    except ValueError as error:
        raise ValueError(f"{source}: objective: {error}") from error
    return info


def checked_config(values: dict[str, Any], source: Path | str) -> DiTConfig:
    """Build the configuration from ``values``, after pydantic's checks. Raises ValueError with the source if the model
    can't be built or has too many tokens."""
    try:
        config = config_from_dict(values)
        if config.hidden_size % config.num_heads:
            raise ValueError(f"hidden_size {config.hidden_size} does not divide by num_heads {config.num_heads}")
        if config.mlp_hidden < 1:
            raise ValueError(f"mlp_ratio {config.mlp_ratio} leaves nothing of hidden_size {config.hidden_size}")
        if (tokens := config.tokens) > TOKENS:
            raise ValueError(f"input_size makes {tokens:,} tokens; at most {TOKENS:,} are read")
        config.check()
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{source}: config: {error}") from error
    return config
