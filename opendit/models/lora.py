"""LoRA: y = W x + (alpha / rank) B A x with W frozen, for the linear layers of a model's attention and MLPs (Hu et al.,
"LoRA: Low-Rank Adaptation of Large Language Models", 2021). peft trains it; opendit.checkpoint.lora merges it.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from opendit.common.torch_utils import on_meta
from opendit.models.dit import DiT, DiTConfig
from opendit.models.initialization import initialize_parameter
from opendit.models.layers import Projection
from opendit.models.parameter_names import canonical_name
from opendit.models.weights import Weights
from opendit.models.zoo import build_model, model_shapes

LAYERS = ("qkv", "q", "kv", "proj", "fc1", "fc2")
A, B = ".lora_A.default.weight", ".lora_B.default.weight"  # in peft's names of parameters


@dataclass(frozen=True)
class Lora:
    """The LoRA of a run, which is stored in its checkpoints. base: the weights file that it is added to."""

    rank: int
    alpha: float
    base: str

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"LoRA of rank {self.rank}, alpha {self.alpha:g}"


def check_peft() -> None:
    """Raises ValueError if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--lora: needs the package peft ({error}); pip install 'opendit[lora]'") from error


def targets(model: DiT) -> list[str]:
    """The linear layers of attention and MLP in all blocks, without modulation, routers and experts."""
    named = model.blocks.named_modules(prefix="blocks")
    return [name for name, layer in named if isinstance(layer, nn.Linear) and name.split(".")[-1] in LAYERS]


def lora_parameters(config: DiTConfig, rank: int) -> int:
    """Count the weights that ``add_lora`` adds to a model: (in + out) x rank for each target. None is made."""
    with on_meta():
        model = build_model(config)
    layers = [cast(nn.Linear, model.get_submodule(name)) for name in targets(model)]
    return rank * sum(layer.in_features + layer.out_features for layer in layers)


def add_lora(model: DiT, lora: Lora, train_too: Collection[str], seed: int) -> None:
    """Puts peft's layers around the targets, with the initial weights of ``seed``, and leaves only their weights and
    ``train_too`` to be trained."""
    from peft import LoraConfig, inject_adapter_in_model

    alpha: Any = lora.alpha  # peft's annotation says int, and it takes any number
    config = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=targets(model), bias="none")
    config._register_custom_module({Projection: _lora_projection()})
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if name.endswith((A, B)):
            initialize_parameter(model, seed, name)
        elif canonical_name(name) in train_too:
            parameter.requires_grad_(True)


@functools.cache
def _lora_projection() -> type[Any]:
    """peft's layer around a ``Projection``, which operations may take apart; peft takes seconds to import."""
    from peft.tuners.lora import Linear

    class LoraProjection(Linear):
        def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = F.linear) -> Tensor:
            """W x + (alpha / rank) B A x, (..., out) for x (..., in); as ``Projection.product``, with peft's order of
            sums and casts."""
            product = adapted = cast(Projection, self.base_layer).product(x, bias, multiply)
            for name in self.active_adapters:
                a, b = cast(nn.Linear, self.lora_A[name]), self.lora_B[name]
                adapted = adapted + b(a(x.to(a.weight.dtype))) * self.scaling[name]
            return adapted.to(product.dtype)

    return LoraProjection


def check_lora(weights: "Weights") -> None:
    """Raises ValueError that names the file if what a run of --lora left does not fit its own configuration."""
    lora, state = Lora(**weights.info["lora"]), weights.state
    assert weights.config is not None, "what a run of --lora left is a file of ours"
    parameters, buffers = model_shapes(weights.config)
    wanted = dict(parameters | buffers)
    for name in parameters:
        layer, shape = name.removesuffix(".weight"), parameters[name]
        if layer != name and len(shape) == 2:
            wanted |= {layer + A: (lora.rank, shape[1]), layer + B: (shape[0], lora.rank)}
    for name, value in state.items():
        pair = name.endswith(A) and name.removesuffix(A) + B
        if wanted.get(name) != tuple(value.shape) or (pair and pair not in state):
            raise ValueError(
                f"{weights.path}: {name[:100]} of shape {list(value.shape)[:8]} fits no layer of the model it adds to"
            )
