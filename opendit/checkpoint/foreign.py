"""The configuration of weights that do not say what they are: Meta's files."""

import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from opendit.config.architectures import SIZES, is_video
from opendit.models.configuration import DiTConfig
from opendit.models.weights import Weights
from opendit.models.zoo import model_config

LABELS, IMAGENET_CLASSES = "y_embedder.embedding_table.weight", 1000


def infer_config(state: Mapping[str, Tensor], name: str, path: Path, num_classes: int | None = None) -> DiTConfig:
    """The configuration of a named DiT on labels from its weights' shapes (square inputs).

    The last layer's rows say whether it predicts a variance too. The label table's do not say whether its last row is
    a class or the null class of class dropout: ``num_classes`` does; without it a table of 1000 rows is ImageNet's
    classes alone, and any other one is taken to end with the null class (see :func:`assumption`).

    Raises:
        ValueError: the weights are another model's; the message names the model they fit, if any.
    """
    if is_video(name):
        raise ValueError(f"{path} says nothing of the frames that --model {name} takes; give a checkpoint of OpenDiT")
    dimensions = {"x_embedder.proj.weight": 4, "pos_embed": 3, LABELS: 2, "final_layer.linear.weight": 2}
    for key, number in dimensions.items():
        if key not in state:
            raise ValueError(f"{path} does not hold a DiT: it has no {key!r}")
        if state[key].dim() != number or 0 in state[key].shape:
            raise ValueError(f"{path} does not hold a DiT: {key} is of shape {list(state[key].shape)[:8]}")
    hidden, channels, patch, _ = state["x_embedder.proj.weight"].shape
    side = math.isqrt(state["pos_embed"].shape[1]) * patch
    try:
        rows, predicted = len(state[LABELS]), len(state["final_layer.linear.weight"])
        if num_classes is None:
            num_classes = rows if rows == IMAGENET_CLASSES else rows - 1
        if num_classes < 1 or rows - num_classes not in (0, 1):
            raise ValueError(f"it has a label table of {rows} rows, which is none of {num_classes} classes")
        if predicted not in (patch**2 * channels, 2 * patch**2 * channels):
            raise ValueError(
                f"it predicts {predicted} numbers a patch: neither the noise of its {patch} x {patch} x "
                f"{channels} ones alone nor with their variance"
            )
        config = model_config(
            name,
            input_size=(side, side),
            in_channels=channels,
            num_classes=num_classes,
            null_class=rows > num_classes,
            learn_sigma=predicted > patch**2 * channels,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    if (config.hidden_size, config.depth, config.patch_size) != (hidden, depth, patch):
        fits = [f"DiT-{k}/{patch}" for k, v in SIZES.items() if v[:2] == (hidden, depth)]
        raise ValueError(
            f"--model {name}: does not fit {path}, which holds {depth} blocks of width {hidden}, patch {patch}; use "
            f"{f'--model {fits[0]}' if fits else 'other weights'}"
        )
    return config


def assumption(weights: Weights, config: DiTConfig) -> list[str]:
    """The note, if there is one to give, on what :func:`infer_config` has taken for granted."""
    rows = 0 if config.num_classes is None else config.num_classes + config.null_class
    if (
        weights.config is not None
        or weights.num_classes is not None
        or rows in (IMAGENET_CLASSES, IMAGENET_CLASSES + 1)
    ):
        return []
    return [
        f"{weights.path} does not say how many classes it has: the last of its {rows} rows is taken for the null class "
        f"of guidance; if it was trained without class dropout, sample.py needs --num_classes {rows}"
    ]
