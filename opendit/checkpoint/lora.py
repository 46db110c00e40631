"""Read LoRA's low-rank products B A from OpenDiT runs and other programs' files, and add them to weights.

Programs divide weights into layers differently: q, k and v are one layer in OpenDiT, but three in diffusers. So each
product has a position in its weight. Renaming a product can change its position."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from math import isfinite, prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opendit.checkpoint.foreign import PublishedFolder
from opendit.checkpoint.matched import Pair
from opendit.common.json_file import MIB, read_json
from opendit.common.utils import shown
from opendit.models.dit import DiT
from opendit.models.families.base import Family
from opendit.models.finetuning import A, B, Lora
from opendit.models.zoo import Weights
from opendit.parallel.layout import Layout

Shapes = Mapping[str, tuple[int, ...]]
DOTTED = ("transformer.", "diffusion_model.", "base_model.model.", "model.")
FLAT = ("lora_unet_", "lora_transformer_", "lycoris_")  # prefixes of keys in which _ replaces every dot
ENDINGS = {
    ".lora_A.weight": "A",
    ".lora_A.default.weight": "A",
    ".lora_down.weight": "A",
    ".lora.down.weight": "A",
    ".lora_B.weight": "B",
    ".lora_B.default.weight": "B",
    ".lora_up.weight": "B",
    ".lora.up.weight": "B",
    ".alpha": "alpha",
}
OF_TEXT_ENCODERS = re.compile(r"(text_encoders?\d?|te\d?|lora_te\d?|text_encoder_\d|text_model)[._]")
PEFT_FILE = "adapter_model.safetensors"
ARCHITECTURE = "modelspec.architecture"
CAPTION_LENGTH = "max_sequence_length"  # metadata key: caption tokens in training, if not the default
KINDS_NOT_READ = {
    "dora_scale": "DoRA",
    "magnitude_vector": "DoRA",
    "hada_": "LyCORIS (LoHa)",
    "lokr_": "LyCORIS (LoKr)",
    "oft_": "LyCORIS (OFT)",
    ".diff": "whole differences of weights",
}


@dataclass(frozen=True)
class PlacedLowRank:
    """The product ``scale`` B A, to add to a rectangle in a two-dimensional weight."""

    a: Tensor  # (rank, columns)
    b: Tensor  # (rows, rank)
    scale: float
    # first row and column of the rectangle
    row: int = 0
    column: int = 0

    def within(self, dim: int, start: int, stop: int) -> "PlacedLowRank | None":
        """Return the product within a range of rows (dim 0) or columns (dim 1), with its position relative to
        ``start``. Return None if the product does not overlap with the range. A factor that is not cut is not
        copied."""
        at, size = (self.row, len(self.b)) if dim == 0 else (self.column, self.a.shape[1])
        first, last = max(at, start), min(at + size, stop)
        if first >= last:
            return None
        if dim == 0:
            b = self.b if last - first == size else self.b.narrow(0, first - at, last - first)
            return replace(self, b=b, row=first - start)
        a = self.a if last - first == size else self.a.narrow(1, first - at, last - first)
        return replace(self, a=a, column=first - start)


Products = dict[str, list[PlacedLowRank]]  # weight's name -> products to add


def moved(products: Products, pairs: Iterable[Pair], here: Shapes, there: Shapes) -> Products:
    """Convert products for the weights ``here`` to products for ``there``, another layout of these weights. here,
    there: name -> shape. pairs: (names here, names there, dimension). Both lists concatenate to equal tensors."""
    found: Products = {}
    for ours, theirs, dim in pairs:
        starts = accumulate((here[name][dim] for name in ours), initial=0)
        for name, start in zip(ours, starts, strict=False):
            for product in products.get(name, ()):
                joined = replace(
                    product, row=product.row + start * (dim == 0), column=product.column + start * (dim == 1)
                )
                first = 0
                for other in theirs:
                    size = there[other][dim]
                    if part := joined.within(dim, first, first + size):
                        found.setdefault(other, []).append(part)
                    first += size
    return found


def as_one(products: Sequence[PlacedLowRank], shape: tuple[int, ...], scaled: bool = False) -> tuple[Tensor, Tensor]:
    """Return A (rank, columns) and B (rows, rank). B A is the sum of ``products`` for one weight of this shape.
    Products with equal A and column share rows of A. scaled: multiply B by the scales."""
    starts: dict[tuple[int, int], int] = {}
    rank = 0
    for product in products:
        if (key := (id(product.a), product.column)) not in starts:
            starts[key], rank = rank, rank + len(product.a)
    a, b = products[0].a.new_zeros(rank, prod(shape[1:])), products[0].b.new_zeros(shape[0], rank)
    for product in products:
        start = starts[id(product.a), product.column]
        ranks = slice(start, start + len(product.a))
        a[ranks, product.column : product.column + product.a.shape[1]] = product.a
        b[product.row : product.row + len(product.b), ranks] += product.b * (product.scale if scaled else 1)
    return a, b


class Merged(Mapping[str, Tensor]):
    """Base weights plus LoRA products, by OpenDiT's names. A weight is computed on access: products are added in fp32,
    and the sum is cast to the base's dtype. full: fully trained weights, to replace base weights."""

    def __init__(self, base: Mapping[str, Tensor], products: Products, full: Mapping[str, Tensor]):
        self._base, self._products, self._full = base, products, full

    @property
    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]] | None:
        """Return name -> (dtype, shape) of every weight, or None if the base does not know them."""
        return getattr(self._base, "kinds", None)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._base[name]
        if name in self._full:
            return self._full[name].to(weight.dtype)
        if name not in self._products:
            return weight
        return (weight.float() + self._difference(name, tuple(weight.shape))).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def _difference(self, name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        total = torch.zeros(shape[0], prod(shape[1:]), device=device)
        for product in self._products[name]:
            a, b = (factor.to(device).float() for factor in (product.a, product.b))
            rows, columns = total.narrow(0, product.row, len(b)), slice(product.column, product.column + a.shape[1])
            rows[:, columns].addmm_(b, a, alpha=product.scale)
        return total.view(shape)

    @torch.no_grad()
    def add_to(self, model: DiT, layout: Layout | None = None) -> None:
        """Merge products and full weights into a model with base weights. Each weight is computed on the model's
        device. layout: required if the model has slices of its weights."""
        for name, parameter in model.named_parameters():
            if name in self._products:
                shape = tuple(parameter.shape) if layout is None else tuple(layout.shapes[name])
                whole = self._difference(name, shape, parameter.device)
            elif name in self._full:
                whole = self._full[name].to(parameter.device)
            else:
                continue
            part = whole if layout is None else layout.local(name).take(whole)
            parameter.add_(part) if name in self._products else parameter.copy_(part)


def of_run(weights: Weights, weight: float = 1.0) -> tuple[Products, dict[str, Tensor]]:
    """Return a --lora run's products and its fully trained weights. weight: factor for the products."""
    lora, state = Lora(**weights.info["lora"]), weights.state
    products = {
        f"{name.removesuffix(A)}.weight": [
            PlacedLowRank(state[name], state[name.removesuffix(A) + B], weight * lora.scale)
        ]
        for name in state
        if name.endswith(A)
    }
    return products, {name: value for name, value in state.items() if not name.endswith((A, B))}


def original_layers(family: Family, shapes: Shapes) -> dict[str, tuple[str, ...]]:
    """Return the authors' layer names -> published layers with slices of the rows. shapes: of published weights."""
    found = {}
    for pattern, parts in family.original.items():
        for number in count():
            layers = [part.replace("*", str(number)) for part in ((parts,) if isinstance(parts, str) else parts)]
            if all(f"{layer}.weight" in shapes for layer in layers):
                found[pattern.replace("*", str(number))] = tuple(layers)
            if "*" not in pattern or f"{layers[0]}.weight" not in shapes:
                break
    return found


def with_halves_exchanged(products: Products, family: Family) -> Products:
    """Swap the upper and lower half of the rows in the layers ``family.exchanged``: they are published swapped."""
    return {
        name: [replace(product, b=product.b.roll(len(product.b) // 2, 0)) for product in parts]
        if name.removesuffix(".weight") in family.exchanged
        else parts
        for name, parts in products.items()
    }


def of_file(
    opened: PublishedFolder,
    state: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    path: Path,
    weight: float = 1.0,
    notes: list[str] | None = None,
) -> Products:
    """Return a LoRA file's products for the public model ``opened``, times ``weight``, by OpenDiT's names.

    The file may use the names of diffusers, peft, ComfyUI or kohya's trainers. Alpha comes from the file, else from the
    metadata or peft's configuration file, else it is the rank. Keys of text encoders are ignored with a message in
    ``notes``. They are errors if ``notes`` is None or there are no other keys.

    Raises ValueError for any other file. Each layer must have A and B once, in the right shapes."""
    published: Shapes = opened.files.shapes
    layers = {name.removesuffix(".weight"): (name.removesuffix(".weight"),) for name in published}
    layers |= original_layers(opened.family, published)
    spelled = {name.replace(".", "_"): name for name in layers} | {name: name for name in layers}
    found: dict[str, dict[str, Tensor]] = {}
    strange, of_text = [], []
    for key, value in state.items():
        name, part = _layer_and_part(key)
        if OF_TEXT_ENCODERS.match(key):
            of_text.append(key)
        elif part is None or name not in spelled:
            strange.append(key)
        elif found.setdefault(spelled[name], {}).setdefault(part, value) is not value:
            raise ValueError(f"{path}: {spelled[name][:100]} has its {part} twice, under two names")
    if of_text and (notes is None or not found):
        strange += of_text
    if strange:
        raise ValueError(f"{path}: {_refusal(strange, metadata, opened)}")
    if of_text and notes is not None:
        notes.append(f"{path}: {_belong(of_text)} to a text encoder, which stays as it is")
    named: Products = {}
    here, pairs, scale = {}, [], _scales(metadata, path)
    for name, parts in found.items():
        theirs = tuple(f"{layer}.weight" for layer in layers[name])
        shape = (sum(published[each][0] for each in theirs), prod(published[theirs[0]][1:]))
        _check(name, parts, shape, path, _trained_on(metadata))
        a, b = parts["A"].flatten(1), parts["B"].flatten(1)
        factor = parts["alpha"].item() / len(a) if "alpha" in parts else scale(name, len(a))
        named[f"{name}.weight"] = [PlacedLowRank(a, b, weight * factor)]
        here[f"{name}.weight"] = shape
        pairs.append(((f"{name}.weight",), theirs, 0))
    products = moved(with_halves_exchanged(named, opened.family), pairs, here, published)
    for name, several in products.items():
        if len(several) > 1:
            raise ValueError(f"{path}: {name} is there twice, alone and joined with others")
    back = [(theirs, ours, dim) for ours, theirs, dim in opened.pairs]
    return moved(products, back, published, opened.shapes())


def _layer_and_part(key: str) -> tuple[str, str | None]:
    """Split a key into (layer's name, "A", "B" or "alpha"). Return (key, None) for any other kind of key."""
    ending = next((ending for ending in ENDINGS if key.endswith(ending)), None)
    if ending is None:
        return key, None
    name = key.removesuffix(ending)
    while prefix := next((prefix for prefix in DOTTED + FLAT if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name, ENDINGS[ending]


def _belong(keys: Sequence[str]) -> str:
    return f"{keys[0][:100]} belongs" if len(keys) == 1 else f"{len(keys):,} keys ({keys[0][:100]}, ...) belong"


def _refusal(strange: Sequence[str], metadata: Mapping[str, str], opened: PublishedFolder) -> str:
    for mark, kind in KINDS_NOT_READ.items():
        if marked := [key for key in strange if mark in key]:
            return f"{_belong(marked)} to {kind}, which is not read; a file of LoRA's A and B alone is needed"
    place = opened.pipeline or opened.transformer
    return f"{_belong(strange)} to no layer of {place}; a LoRA of this model is needed{_trained_on(metadata)}"


def _trained_on(metadata: Mapping[str, str]) -> str:
    base = next((metadata[key] for key in ("base", "ss_base_model_version", ARCHITECTURE) if metadata.get(key)), None)
    return f" (this one was trained on {shown(base)})" if base else ""


def _scales(metadata: Mapping[str, str], path: Path) -> Callable[[str, int], float]:
    """Return a function (layer, rank) -> scale. It reads diffusers' metadata or peft's configuration file. Without
    either, the scale is 1. Raises OSError or ValueError for a damaged configuration."""
    beside = path.with_name("adapter_config.json")
    try:
        found: Any = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    except ValueError:
        found = {}
    if path.name == PEFT_FILE and beside.is_file():
        found = read_json(beside, MIB)
    pairs = found.items() if isinstance(found, dict) else ()
    settings = {key.removeprefix("transformer."): value for key, value in pairs}
    patterns = settings.get("alpha_pattern")
    alphas = patterns if isinstance(patterns, dict) else {}

    def scale(name: str, rank: int) -> float:
        own = next((alpha for key, alpha in alphas.items() if f".{name}".endswith(f".{key}")), None)
        alpha = settings.get("lora_alpha") if own is None else own
        if not isinstance(alpha, int | float) or not isfinite(alpha):
            return 1.0
        return alpha / (sqrt(rank) if settings.get("use_rslora") is True else rank)

    return scale


def _check(name: str, parts: Mapping[str, Tensor], shape: tuple[int, int], path: Path, trained_on: str) -> None:
    if "A" not in parts or "B" not in parts:
        raise ValueError(f"{path}: {name} has one matrix of a LoRA without the other")
    a, b = parts["A"].flatten(1), parts["B"].flatten(1)
    if (len(b), a.shape[1]) != shape or len(a) != b.shape[1] or not len(a):
        raise ValueError(
            f"{path}: {name} has matrices of {list(b.shape)} and {list(a.shape)}, which do not make {list(shape)}; a "
            f"LoRA of this model is needed{trained_on}"
        )
    if "alpha" in parts and parts["alpha"].numel() != 1:
        raise ValueError(f"{path}: {name}.alpha is not one number")
