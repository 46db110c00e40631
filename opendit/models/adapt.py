"""Fine-tuning: initialise a model with the weights of another model that has the same blocks.

Classes, resolution, text encoder, VAE and objective may differ. Weights that do not fit are resized or initialised
anew; tables that depend on the resolution are computed.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.vdit import VDiTConfig
from opendit.models.weights import Weights

# Fields of a configuration that only affect layers before and after the blocks. All other fields must be equal.
AROUND_THE_BLOCKS = {
    "input_size", "patch_size", "in_channels", "num_classes", "null_class", "learn_sigma", "text", "positions",
    "given_frames", "published", "index", "alignment", "uncertainty",
}  # fmt: skip
TABLE, HEAD, PATCHES = "y_embedder.embedding_table.weight", "final_layer.linear.", "x_embedder.proj.weight"


@dataclass
class Adaptation:
    """The origins of a model's parameters and buffers.

    Attributes:
        reused: Name -> number of elements of parameters from the file.
        resized: Name -> number of elements of parameters that come partly from the file.
        new: Name -> number of elements of parameters with initial values.
        recomputed: Name -> number of elements of fixed tables.
        left_out: Name -> number of elements of tensors in the file that are not used.
        why: Name -> explanation, for ``resized``.
        stored: Name -> name in the file, for ``reused``.
        made: Name -> resized value in host memory, for ``resized``.
    """

    reused: dict[str, int] = field(default_factory=dict)
    resized: dict[str, int] = field(default_factory=dict)
    new: dict[str, int] = field(default_factory=dict)
    recomputed: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)

    @property
    def untrained(self) -> list[str]:
        """Names of parameters with at least some untrained values."""
        return [*self.resized, *self.new]

    def describe(self) -> list[str]:
        """Return a line of text for each origin that occurs."""
        lines = []
        for kind in ("reused", "resized", "new", "recomputed", "left_out"):
            weights = getattr(self, kind)
            if weights:
                reasons = dict.fromkeys(self.why[name] for name in weights if name in self.why)
                because = f" ({'; '.join(reasons)})" if reasons else ""
                names = ", ".join(_groups(weights))
                what = {"left_out": "left out of the file"}.get(kind, kind)
                lines.append(f"{what}: {sum(weights.values()):,} weights, {names}{because}")
        return lines


def check_same_blocks(found: DiTConfig, wanted: DiTConfig, path: str | Path) -> None:
    """Raise ValueError, which names the differences, unless both models have the same blocks. The blocks of a DiT also
    fit a vDiT."""
    ours, theirs = ({f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for c in (wanted, found))
    differs = [
        f"{name} {theirs.get(name)} there, {ours.get(name)} here"
        for name in dict.fromkeys([*ours, *theirs])
        if name not in AROUND_THE_BLOCKS and ours.get(name) != theirs.get(name)
    ]
    specs = [getattr(config, "spec", None) for config in (found, wanted)]  # None except for public models
    if specs[0] != specs[1] and not differs:
        differs.append("its config.json describes them otherwise")
    kinds = (found.kind, wanted.kind)
    if found.kind != wanted.kind and kinds != (DiTConfig.kind, VDiTConfig.kind):
        differs.insert(0, f"kind {found.kind} there, {wanted.kind} here")
    if differs:
        raise ValueError(
            f"--pretrained: {path} has other blocks than this run's model ({', '.join(differs)}); repeat its flags"
        )


@torch.no_grad()
def adapt(
    model: DiT,
    weights: Weights,
    found: DiTConfig,
    class_names: Sequence[str] = (),
    *,
    fresh: Callable[[str], Tensor],
) -> Adaptation:
    """Decide for every parameter and buffer of ``model`` whether it comes from ``weights``, is resized or is new. The
    model is not changed and may be on the meta device.

    - A tensor with the same name and shape is reused, unless it belongs to another text encoder.
    - Label table for other classes: rows of classes with the same name are reused, and the null class's row if the file
    has one. The other rows are new.
    - Head: the channels of a learned variance are dropped, or added as zeros.
    - Patch filters: a DiT's filter is spread over the frames of a patch with several frames. Filters for channels of
      conditioning frames are zeros.
    - Learned positions are interpolated linearly along each axis. From pictures to clips, rows and columns are reused
    and the table of frames is new. From clips to pictures, the table of frames is left out.
    - Sine-cosine tables are always computed.

    Only tensors that are resized are read from the file: a label table, patch filters, a head, learned positions.

    Args:
        model: The model to initialise.
        weights: The weights in the file.
        found: Configuration of the file's model.
        class_names: Names of the model's classes.
        fresh: Function that returns the complete initial values of a parameter, fp32 in host memory. It is only called
            for the label table.
    """
    done, config, theirs = Adaptation(), model.config, weights.shapes
    unused = dict.fromkeys(theirs)  # keys in the order of the file
    buffers = {name for name, _ in model.named_buffers()}
    other_words = _text_name(found) != _text_name(config)
    for name, own in model.state_dict().items():
        stored, shape, made, why = _stored_as(name, found, config), tuple(own.shape), None, None
        there = theirs[stored] if stored in unused else None
        unused.pop(stored, None)
        if name in buffers:
            done.recomputed[name] = own.numel()
            continue
        if there is not None and other_words and name.startswith(("y_embedder.", "text_encoder.")):
            done.left_out[name], there = math.prod(there), None
        if there is not None and name == TABLE:
            before = weights.info.get("class_names") or ()
            if not _same_table(shape, there, before, class_names, found.null_class):
                made, why = _relabelled(fresh(name), weights.state[stored], before, class_names, found.null_class)
        elif there is not None and there != shape:
            made, why = _resized(name, shape, weights.state[stored], found, config)
        if made is not None and why is not None:
            done.resized[name], done.made[name], done.why[name] = own.numel(), made, why
        elif there is not None and why is None:
            done.reused[name], done.stored[name] = own.numel(), stored
        else:
            done.new[name] = own.numel()
    done.left_out.update((name, math.prod(theirs[name])) for name in unused)
    return done


def _stored_as(name: str, found: DiTConfig, config: DiTConfig) -> str:
    """Return the name that the parameter ``name`` has in weights of ``found``. Learned positions have one table for
    each axis. Table 0 is that of time for clips, and that of rows for pictures."""
    axis = re.fullmatch(r"learned_positions\.axes\.(\d+)\.weight", name)
    if axis is None:
        return name
    return f"learned_positions.axes.{int(axis[1]) + len(found.grid) - len(config.grid)}.weight"


def _text_name(config: DiTConfig) -> str | None:
    return config.text and config.text.name


def _same_classes(before: Sequence[str], after: Sequence[str]) -> bool:
    return not before or not after or list(before) == list(after)


def _same_table(
    own: Sequence[int], there: Sequence[int], before: Sequence[str], after: Sequence[str], null_class: bool
) -> bool:
    """Return True if the file's label table can be reused: it has the model's shape and classes, and a row for the null
    class."""
    return own == there and null_class and _same_classes(before, after)


def _relabelled(
    own: Tensor, value: Tensor, before: Sequence[str], after: Sequence[str], null_class: bool
) -> tuple[Tensor, str]:
    """Return a label table, whose last row is the null class, and an explanation.

    own: initial values. value: the file's table. null_class: True if the file's last row is its null class."""
    if own.shape[1] != value.shape[1]:
        return own, "the null class too"
    made, rows, classes = own.clone(), {name: row for row, name in enumerate(before)}, len(own) - 1
    if not null_class and len(value) == classes and _same_classes(before, after):
        made[:-1] = value
        return made, f"all {classes} classes are kept, and the null class, which the file does not have, is fresh"
    if null_class:
        made[-1] = value[-1]
    known = [(row, rows[name]) for row, name in enumerate(after) if name in rows]
    for row, source in known:
        made[row] = value[source]
    kept = f"{classes} classes, of which {len(known)} by the same name"
    return made, f"{kept}, and the null class are kept" if null_class else f"{kept} are kept, and no null class"


def _resized(
    name: str, shape: tuple[int, ...], value: Tensor, found: DiTConfig, config: DiTConfig
) -> tuple[Tensor | None, str]:
    """Return ``value`` resized to ``shape``, and an explanation; (None, "") if the tensor can't be resized."""
    if name == PATCHES and found.in_channels == config.in_channels and shape[-2:] == value.shape[-2:]:
        return _filters(shape, value)
    if name.startswith(HEAD) and found.in_channels == config.in_channels and found.patch[-2:] == config.patch[-2:]:
        channels, rest = min(found.out_channels, config.out_channels), value.shape[1:]
        # The head's rows are ordered by position in the patch (frame, row, column), then by channel.
        rows = value.view(-1, found.out_channels, *rest)[:, :channels]
        made = torch.zeros(shape, device="cpu").view(-1, config.out_channels, *rest)
        frames = config.patch[0] if config.is_video and not found.is_video else 1
        if frames * len(rows) == len(made):
            made[:, :channels] = rows.repeat(frames, *(1,) * (rows.dim() - 1))
            return made.view(shape), "the head" + _variance(found, config)
    if name.startswith("learned_positions.") and shape[1] == value.shape[1]:
        table = F.interpolate(value.float().t()[None], shape[0], mode="linear", align_corners=True)
        return table[0].t(), "interpolated linearly"
    return None, ""


def _filters(shape: tuple[int, ...], value: Tensor) -> tuple[Tensor | None, str]:
    """Return patch filters (D, channels, [frames,] rows, columns) resized to other channels or more frames, and an
    explanation; (None, "") if this is impossible."""
    how = []
    if value.dim() < len(shape):
        value = (value.unsqueeze(2) / shape[2]).expand(*value.shape[:2], *shape[2:])
        how.append("a picture's filter, spread over the frames")
    if value.shape[2:] != shape[2:] or len(value) != shape[0]:
        return None, ""
    if value.shape[1] != shape[1]:
        made, kept = torch.zeros(shape, device="cpu"), min(value.shape[1], shape[1])
        made[:, :kept] = value[:, :kept]
        how.append("of given frames, which begin at zero" if kept < shape[1] else "without those of given frames")
        value = made
    return value, ", ".join(how)


def _variance(found: DiTConfig, config: DiTConfig) -> str:
    if found.learn_sigma == config.learn_sigma:
        return ""
    return ", its learned variance dropped" if found.learn_sigma else ", with a learned variance that begins at zero"


def _groups(names) -> list[str]:
    """Return the names of the parameters' modules, without repetition. Modules of all blocks count as one, such as
    blocks.*.attn."""
    groups = (re.sub(r"^blocks\.\d+\.", "blocks.*.", name).split(".") for name in names)
    apart = ("blocks", "learned_positions")  # list the children of these modules separately
    return list(dict.fromkeys(".".join(parts[: 3 if parts[0] in apart else 1]) for parts in groups))
