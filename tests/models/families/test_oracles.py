"""Public models against diffusers' own networks: outputs and gradients, single wrong facts, sizes, configurations."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.models.families.oracles import (
    ORACLES,
    difference,
    in_double_precision,
    by_our_names,
    inputs,
    ours,
    output_and_gradients,
)

# ------------------------------------------------------------------------------------------------ outputs, gradients


@dataclass(frozen=True)
class Case:
    """A tiny network of a family, and the sizes of its inputs.

    values: of its config.json beside the usual ones. padded: length to which captions are padded.
    """

    family: str
    lengths: tuple[int, ...]
    values: dict[str, Any] = field(default_factory=dict, hash=False)
    shape: tuple[int, ...] | None = None
    padded: int | None = None

    def inputs(self, oracle, dtype: torch.dtype):
        return inputs(oracle, dtype, list(self.lengths), self.padded, self.shape)


USUAL = {
    "flux": Case("flux", (3, 7, 5), padded=9),
    "z_image": Case("z_image", (5, 40, 33)),
    "wan": Case("wan", (4, 6, 1), padded=8),
}
VARIANTS = {
    "flux without guidance": Case("flux", (3, 7), {"guidance_embeds": False}, (4, 10, 2)),
    "flux of double blocks": Case("flux", (2, 4), {"num_layers": 3, "num_single_layers": 0}),
    "flux of single blocks": Case("flux", (2, 4), {"num_layers": 0, "num_single_layers": 2}),
    "flux, wider": Case(
        "flux",
        (6, 1),
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 20,
            "num_attention_heads": 3,
            "axes_dims_rope": (8, 2, 10),
            "in_channels": 24,
            "joint_attention_dim": 5,
            "pooled_projection_dim": 3,
        },
        (6, 2, 6),
    ),
    "z_image that needs no filling": Case("z_image", (32, 64), {}, (4, 8, 16)),
    "z_image with short captions": Case("z_image", (5, 31, 32), {}, (4, 6, 2)),
    "z_image without qk norm": Case("z_image", (5, 33), {"qk_norm": False, "norm_eps": 1e-6, "rope_theta": 10000.0}),
    "z_image without refiners": Case("z_image", (5, 33), {"n_refiner_layers": 0, "n_layers": 3}),
    "z_image, wider than its condition": Case(
        "z_image", (5, 33), {"dim": 264, "n_heads": 22, "n_kv_heads": 22, "n_layers": 1, "n_refiner_layers": 1}
    ),
    "z_image of a width that 3 does not divide": Case(
        "z_image",
        (5, 33),
        {"dim": 40, "n_heads": 4, "n_kv_heads": 4, "axes_dims": [2, 6, 2], "in_channels": 6, "n_refiner_layers": 1},
        (6, 6, 10),
    ),
    "wan of a picture": Case("wan", (4, 6), {"num_layers": 1}, (4, 1, 10, 6)),
    "wan, wider": Case(
        "wan",
        (4, 6),
        {
            "num_attention_heads": 3,
            "attention_head_dim": 22,
            "in_channels": 3,
            "out_channels": 3,
            "num_layers": 3,
            "text_dim": 7,
            "freq_dim": 32,
            "ffn_dim": 20,
        },
        (3, 3, 6, 10),
    ),
    "wan with other patches": Case("wan", (4, 6), {"patch_size": (2, 3, 1)}, (4, 4, 6, 5)),
}
CASES = USUAL | VARIANTS


def differences(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative differences of the output and of every gradient."""
    oracle = ORACLES[case.family](dtype, **case.values)
    model, given = ours(oracle, dtype), case.inputs(oracle, dtype)
    expected, their_gradients = output_and_gradients(oracle.theirs, oracle.module, given)
    output, gradients = output_and_gradients(model, model, given)
    inside = {name: their_gradients.pop(name) for name in ("x", "tokens", "pooled")}
    their_gradients = inside | by_our_names(model, their_gradients)
    assert gradients.keys() == their_gradients.keys()
    found = {name: difference(gradients[name], their_gradients[name]) for name in gradients}
    return {"output": difference(output, expected), **found}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_diffusers_in_double_precision(name):
    with in_double_precision():
        found = differences(CASES[name], torch.float64)
    print(name, "output", found.pop("output"), "worst", max(found.items(), key=lambda x: x[1]))


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_diffusers_in_single_precision(name):
    found = differences(CASES[name], torch.float32)
    print(name, "output", found.pop("output"), "worst", max(found.items(), key=lambda x: x[1]))
