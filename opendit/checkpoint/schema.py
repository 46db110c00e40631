"""Check the contents of the files of runs and checkpoints, before anything is allocated or built.

A model's and an objective's part is derived from their dataclasses: the fields, their types, and which are required.
Keys that no version of this program has written are refused, for a file that says more than is understood means more.
"""

import dataclasses
import functools
import math
import types
import typing
from pathlib import Path
from typing import Any

from opendit.common.json_file import COUNT, FILE, MIB, NAME, SHA256, FileKind, parse_text
from opendit.common.rules import (
    Invalid,
    Rule,
    either,
    listed,
    mapping,
    nothing,
    number,
    one_of,
    optional,
    plain,
    record,
    string,
    truth,
    whole,
)
from opendit.diffusion.objectives import OBJECTIVES, objective_from_dict
from opendit.models.configuration import DiTConfig
from opendit.models.shapes import Shapes, model_shapes
from opendit.models.zoo import CLASSES, config_from_dict

# Bounds of a configuration's fields, far above every model there is. What a model really takes is compared with the
# weights beside it (opendit.checkpoint.pretrained).
BOUNDS: dict[str, Rule] = {
    "input_size": whole(1, 1 << 16),
    "patch_size": whole(1, 64),
    "in_channels": whole(1, 4096),
    "hidden_size": whole(1, 1 << 16),
    "depth": whole(1, 1024),
    "num_heads": whole(1, 4096),
    "kv_heads": whole(1, 4096),
    "num_classes": whole(1, 10_000_000),
    "mlp_ratio": number(0, 64, above=True),
    "adaln_lora": whole(1, 1 << 16),
    "experts": whole(1, 4096),
    "expert_hidden": whole(1, 1 << 16),
    "expert_capacity": number(0, 4096, above=True),
    "width": whole(1, 1 << 16),
    "max_tokens": whole(1, 1 << 16),
    # of objectives
    "min_snr": number(0, 1e6, above=True),
    "shift": number(0, 1e6, above=True),
    "shift_tokens": whole(1, 1 << 31),
    "mean": number(-100, 100),
    "std": number(0, 100, above=True),
    "sigma_data": number(0, 1e6, above=True),
}
BY_TYPE: dict[type[Any], Rule] = {
    int: whole(0, (1 << 31) - 1),
    float: number(-1e9, 1e9),
    bool: truth,
    str: string(256),
    type(None): nothing,
}
TOKENS = 1 << 22  # of a sample: four times the longest that anybody has trained on


@functools.cache
def fields_rule(kind: type[Any], tag: str | None = None) -> Rule:
    """The rule of a dataclass as JSON, with a string under ``tag`` beside its fields."""
    hints = typing.get_type_hints(kind)
    required, more = {}, {} if tag is None else {tag: string(64)}
    for field in dataclasses.fields(kind):
        given = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        (required if given else more)[field.name] = _typed(hints[field.name], BOUNDS.get(field.name))
    return record(required, more)


def _typed(hint: Any, bounds: Rule | None) -> Rule:
    """The rule of a field's annotation; ``bounds``: of the numbers in it."""
    if dataclasses.is_dataclass(hint):
        return fields_rule(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return either(*(_typed(part, bounds) for part in reversed(typing.get_args(hint))))
    if typing.get_origin(hint) is tuple:
        item, *rest = typing.get_args(hint)
        least, most = (1, 8) if rest == [...] else (1 + len(rest),) * 2
        return listed(_typed(item, bounds), least, most)
    if hint in (int, float) and bounds is not None:
        return bounds
    return BY_TYPE[hint]


def model_rule(value: Any, place: str) -> None:
    """A model's configuration as ``DiTConfig.to_dict`` writes it; one without a kind is a DiT's."""
    kinds = {kind.config.kind: kind.config for kind in CLASSES.values()}
    _tagged(value, place, "kind", DiTConfig.kind, kinds)


def objective_rule(value: Any, place: str) -> None:
    """An objective as ``Objective.to_dict`` writes it."""
    _tagged(value, place, "name", None, OBJECTIVES)


def _tagged(value: Any, place: str, tag: str, default: str | None, kinds: dict[str, type[Any]]) -> None:
    if isinstance(value, dict):
        found = value.get(tag, default)
        if not isinstance(found, str) or found not in kinds:
            one_of(*kinds)(found, f"{place}.{tag}")
        return fields_rule(kinds[found], tag)(value, place)
    record({})(value, place)


LORA = record({"rank": whole(1, 1 << 16), "alpha": number(0, 1e6, above=True), "base": NAME})
_METADATA = record(
    {},
    {
        "model": string(64, r"[\w./-]+", "the name of a model"),
        "config": model_rule,
        "objective": objective_rule,
        "class_names": listed(string(1 << 16), most=10_000_000),
        "captions": listed(string(1 << 20), most=4096),
        "vae": NAME,
        "text_encoder": optional(NAME),
        "image_size": whole(1, 1 << 20),
        "num_frames": whole(1, 1 << 20),
        "frame_interval": whole(1, 1 << 20),
        "fps": number(0, 1e6, above=True),
        "clip_fps": number(0, 1e6, above=True),
        "lora": LORA,
        "step": COUNT,
        "version": COUNT,
    },
)


def _metadata_rule(value: Any, place: str) -> None:
    _METADATA(value, place)
    for key, needed in (("lora", "config"), ("config", "model")):
        if key in value and needed not in value:
            raise Invalid(f"{needed} is missing beside {key}")


METADATA = FileKind(_metadata_rule, 16 * MIB)
MANIFEST_FILE = FileKind(
    record(
        {
            "version": COUNT,
            "files": mapping(FILE, record({"bytes": COUNT, "sha256": SHA256}), 100_000),
            "sha256": SHA256,
        }
    ),
    16 * MIB,
)
_PACKS = record(
    {
        "position": COUNT,
        "carry": listed(COUNT),
        "stages": listed(COUNT, least=1),
        "global_batch": whole(1),
        "capacity": whole(1),
    },
    {"step": COUNT, "window": COUNT, "origin": COUNT},  # the last two where windows had a fixed number of steps
)
ANY_STATE = FileKind(record({"version": COUNT}, others=plain(8)), 4 * MIB)  # of any version
STATE_FILE = FileKind(
    record(
        {
            "version": COUNT,
            "model": string(64),
            "step": COUNT,
            "epoch": COUNT,
            "skipped": COUNT,
            "optimizer_steps": COUNT,
            "scaler": record(
                {}, {"scale": number(0, 1e38, above=True), "growth": COUNT, "hysteresis": whole(-(2**31))}
            ),
            "ema": record({"files": mapping(FILE, number(0, 1), 1000), "updates": COUNT}),
        },
        # What the run was; a later start compares it with itself.
        {
            "world_size": whole(1, 1 << 20),
            "plugin": string(64),
            "precision": string(64),
            "fp8": truth,
            "attention": string(64),
            "sequence_parallel": optional(string(256)),
            "global_batch": whole(1),
            "seed": whole(-(2**63), 2**64),
            "val_loss": number(-1e38, 1e38),
            "evaluation": record({"of": string(64), "figures": mapping(string(64), number(-1e38, 1e38), 100)}),
            "packs": optional(_PACKS),  # opendit.data.order.packs
            "objective": objective_rule,
            "fingerprint": mapping(string(64), plain(2), 1000),  # opendit.training.fingerprint
        },
    ),
    4 * MIB,
)
# Of a run's config.json only the list of starts is read (opendit.training.fingerprint); people may have written into
# the file.
RUN_CONFIG = FileKind(record({}, {"starts": listed(plain(8), most=100_000)}, others=plain(8)), 64 * MIB)


def checked_metadata(text: str, source: Path | str) -> dict[str, Any]:
    """Parse and check the metadata of a weights file, with its model and objective. Raises ValueError as
    :func:`read_file` does."""
    info = parse_text(text, METADATA, source)
    if "config" in info:
        checked_config(info["config"], source)
    try:
        objective_from_dict(info.get("objective"))
    except ValueError as error:
        raise ValueError(f"{source}: objective: {error}") from error
    return info


def checked_config(values: dict[str, Any], source: Path | str) -> DiTConfig:
    """The configuration that ``values``, which keep :func:`model_rule`, describe.

    Raises ValueError with one line that names the source, for one that can't be built or has too many tokens."""
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


# ------------------------------------------------------------------------------------------ weights of a model


def check_size(config: DiTConfig, shapes: Shapes, path: Path) -> None:
    """Raises ValueError if a model has more weights than the files that ``shapes`` are of: from a formula, at once."""
    described, held = config.parameters(), sum(map(math.prod, shapes.values()))
    if described > held:
        raise ValueError(
            f"{path} does not hold the model that its configuration describes: {described:,} weights there, "
            f"{held:,} in the file"
        )


def check_shapes(config: DiTConfig, shapes: Shapes, path: Path) -> None:
    """Raises ValueError unless ``shapes`` are exactly a model's parameters and buffers, naming the first difference."""
    check_size(config, shapes, path)
    try:
        parameters, buffers = model_shapes(config)
    except ValueError as error:
        raise ValueError(f"{path}: config: {error}") from error
    compare(parameters | buffers, shapes, path)


def compare(own: Shapes, theirs: Shapes, path: Path) -> None:
    """Raises ValueError unless both have the same names and shapes."""
    differences = {
        "missing": own.keys() - theirs.keys(),
        "unexpected": theirs.keys() - own.keys(),
        "of another shape": {name for name in own.keys() & theirs.keys() if own[name] != theirs[name]},
    }
    problems = [f"{len(names)} {what} (first: {min(names)[:100]})" for what, names in differences.items() if names]
    if problems:
        raise ValueError(f"{path} is a checkpoint of another model: parameters {', '.join(problems)}")
