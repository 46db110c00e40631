"""Test public models against diffusers' networks: outputs and gradients, single mistakes, sizes, configurations."""

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models import attention, layers, positions
from opendit.models.blocks import Block, JointBlock
from opendit.models.conditioning import TextCondition, give, give_beside, times_of_frames, with_given
from opendit.models.families import FAMILIES, network
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import PublicConfig, public_config
from opendit.models.layers import BlockOps, RMSNorm, layer_norm
from opendit.models.positions import grid_coordinates, sincos_positions
from opendit.models.zoo import config_from_dict
from tests.models.families.oracles import (
    COSMOS2,
    FLUX,
    FLUX2,
    LTX,
    LUMINA2,
    ORACLES,
    QWEN_IMAGE,
    SD3,
    WAN,
    Z_IMAGE,
    Inputs,
    Oracle,
    by_our_names,
    difference,
    in_double_precision,
    inputs,
    is_read,
    load,
    networks,
    ours,
    output_and_gradients,
)

TINY = {
    "flux": FLUX,
    "z_image": Z_IMAGE,
    "wan": WAN,
    "lumina2": LUMINA2,
    "qwen_image": QWEN_IMAGE,
    "flux2": FLUX2,
    "ltx": LTX,
    "sd3": SD3,
    "cosmos2": COSMOS2,
}
SHAPES = {name: {"wan": (4, 3, 6, 10), "flux2": (8, 3, 5), "ltx": (6, 3, 3, 5)}.get(name, (4, 6, 10)) for name in TINY}
FLUX_1 = dict(
    patch_size=1, in_channels=64, num_layers=19, num_single_layers=38, attention_head_dim=128, num_attention_heads=24,
    joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=False,
)  # fmt: skip
Z_IMAGE_6B = dict(
    all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=3840, n_layers=30, n_refiner_layers=2, n_heads=30,
    n_kv_heads=30, norm_eps=1e-5, qk_norm=True, cap_feat_dim=2560, rope_theta=256.0, t_scale=1000.0,
    axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512],
)  # fmt: skip
WAN_14B = dict(
    patch_size=(1, 2, 2), num_attention_heads=40, attention_head_dim=128, in_channels=16, out_channels=16,
    text_dim=4096, freq_dim=256, ffn_dim=13824, num_layers=40, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
    eps=1e-6, image_dim=None, added_kv_proj_dim=None, rope_max_seq_len=1024,
)  # fmt: skip
QWEN_IMAGE_20B = dict(
    patch_size=2, in_channels=64, out_channels=16, num_layers=60, attention_head_dim=128, num_attention_heads=24,
    joint_attention_dim=3584, guidance_embeds=False, axes_dims_rope=[16, 56, 56],
)  # fmt: skip
FLUX2_DEV = dict(
    patch_size=1, in_channels=128, out_channels=None, num_layers=8, num_single_layers=48, attention_head_dim=128,
    num_attention_heads=48, joint_attention_dim=15360, timestep_guidance_channels=256, mlp_ratio=3.0,
    axes_dims_rope=[32, 32, 32, 32], rope_theta=2000, eps=1e-6, guidance_embeds=True,
)  # fmt: skip
KLEIN_4B = FLUX2_DEV | dict(
    num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False
)
KLEIN_9B = KLEIN_4B | dict(num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288)
LUMINA2_2B = dict(
    sample_size=128, patch_size=2, in_channels=16, hidden_size=2304, num_layers=26, num_refiner_layers=2,
    num_attention_heads=24, num_kv_heads=8, multiple_of=256, ffn_dim_multiplier=None, norm_eps=1e-5,
    scaling_factor=1.0, axes_dim_rope=(32, 32, 32), axes_lens=(300, 512, 512), cap_feat_dim=2304,
)  # fmt: skip
LTX_2B = dict(
    in_channels=128, out_channels=128, patch_size=1, patch_size_t=1, num_attention_heads=32, attention_head_dim=64,
    cross_attention_dim=2048, num_layers=28, activation_fn="gelu-approximate", qk_norm="rms_norm_across_heads",
    norm_elementwise_affine=False, norm_eps=1e-6, caption_channels=4096, attention_bias=True, attention_out_bias=True,
)  # fmt: skip
SD35_LARGE = dict(
    sample_size=128, patch_size=2, in_channels=16, num_layers=38, attention_head_dim=64, num_attention_heads=38,
    joint_attention_dim=4096, caption_projection_dim=2432, pooled_projection_dim=2048, out_channels=16,
    pos_embed_max_size=192, dual_attention_layers=(), qk_norm="rms_norm",
)  # fmt: skip
COSMOS2_2B = dict(
    in_channels=16, out_channels=16, num_attention_heads=16, attention_head_dim=128, num_layers=28, mlp_ratio=4.0,
    text_embed_dim=1024, adaln_lora_dim=256, max_size=(128, 240, 240), patch_size=(1, 2, 2), rope_scale=(1.0, 4.0, 4.0),
    concat_padding_mask=True, extra_pos_embed_type=None,
)  # fmt: skip

TOLERANCE = 1e-5  # for single precision, relative to a tensor's largest entry

# ------------------------------------------------------------------------------------------------ outputs, gradients

# Layers whose outputs are normalised, in all families.
BEFORE_NORMS = (
    r"\bto_[qk]\b|add_[qk]_proj|x_embedder|context_embedder|cap_embedder|patch_embedding|to_(add_)?out|w2|n_norm2"
    r"|img_in|txt_in|proj_in|patch_embed\b"
    r"|forward.linear_2|\bnorm2"
)


@dataclass(frozen=True)
class Case:
    """A tiny network of a family, and the sizes of its inputs.

    Attributes:
        values: entries of config.json that differ from the usual ones.
        padded: length to which captions are padded.
        small: True for small weights before norms, so that epsilons matter in single precision, too.
    """

    family: str
    lengths: tuple[int, ...]
    values: dict[str, Any] = field(default_factory=dict, hash=False)
    shape: tuple[int, ...] | None = None
    padded: int | None = None
    small: bool = False

    def oracle(self, dtype: torch.dtype) -> Oracle:
        oracle = ORACLES[self.family](dtype, **self.values)
        with torch.no_grad():
            for name, parameter in oracle.module.named_parameters():
                if self.small and re.search(BEFORE_NORMS, name):
                    parameter.mul_(0.03)
        return oracle

    def inputs(self, oracle, dtype: torch.dtype):
        return inputs(oracle, dtype, list(self.lengths), self.padded, self.shape)


USUAL = {
    "flux": Case("flux", (3, 7, 5), padded=9),
    "z_image": Case("z_image", (5, 40, 33)),
    "wan": Case("wan", (4, 6, 1), padded=8),
    "qwen_image": Case("qwen_image", (3, 7, 5), padded=9),
    "flux2": Case("flux2", (3, 7, 5), padded=9),
    "lumina2": Case("lumina2", (5, 8, 2), padded=9),
    "ltx": Case("ltx", (4, 6, 1), padded=8),
    "sd3": Case("sd3", (3, 7, 5), padded=9),
    "cosmos2": Case("cosmos2", (4, 6, 1), padded=8),
}
SMALL = {family: replace(case, small=True) for family, case in USUAL.items()}
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
    "flux2 without guidance": Case("flux2", (3, 7), {"guidance_embeds": False, "rope_theta": 10000}, (8, 5, 1)),
    "flux2, wider": Case(
        "flux2",
        (6, 1),
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 20,
            "num_attention_heads": 3,
            "axes_dims_rope": (8, 2, 6, 4),
            "in_channels": 12,
            "joint_attention_dim": 5,
            "mlp_ratio": 3.0,
        },
        (12, 2, 6),
    ),
    "qwen_image, wider": Case(
        "qwen_image",
        (6, 1),
        {
            "num_layers": 3,
            "attention_head_dim": 20,
            "num_attention_heads": 3,
            "axes_dims_rope": (8, 2, 10),
            "in_channels": 24,
            "out_channels": 6,
            "joint_attention_dim": 5,
        },
        (6, 10, 4),
    ),
    "lumina2 with a head of keys a head": Case(
        "lumina2", (5, 5), {"num_kv_heads": 4, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-6}, (4, 8, 6)
    ),
    "ltx, wider, without channels that stay": Case(
        "ltx", (6, 6), {"num_attention_heads": 3, "attention_head_dim": 8, "cross_attention_dim": 24}, (6, 1, 2, 6)
    ),
    "sd3 without norms, of two blocks": Case(
        "sd3", (4, 6), {"qk_norm": None, "num_layers": 2, "sample_size": 12, "pos_embed_max_size": 5}, (4, 10, 2)
    ),
    "cosmos2 without the channel of zeros": Case(
        "cosmos2", (6, 1), {"concat_padding_mask": False, "num_attention_heads": 3, "attention_head_dim": 20}, (4, 2, 6)
    ),
    "wan with other patches": Case("wan", (4, 6), {"patch_size": (2, 3, 1)}, (4, 4, 6, 5)),
}
BOTH = USUAL | {f"{family} with small weights": case for family, case in SMALL.items()}
CASES = BOTH | VARIANTS


def compared(case: Case, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Return our and diffusers' output, and all gradients."""
    oracle = case.oracle(dtype)
    model, given = ours(oracle, dtype), case.inputs(oracle, dtype)
    expected, their_gradients = output_and_gradients(oracle.theirs, oracle.module, given)
    output, gradients = output_and_gradients(model, model, given)
    inside = {name: their_gradients.pop(name) for name in ("x", "tokens", "pooled")}
    their_gradients = inside | by_our_names(model, their_gradients)
    assert gradients.keys() == their_gradients.keys()
    return {"output": (output, expected)} | {name: (gradients[name], their_gradients[name]) for name in gradients}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_diffusers_in_double_precision(name):
    with in_double_precision():
        found = compared(CASES[name], torch.float64)
    wrong = {name: error for name, pair in found.items() if (error := difference(*pair)) > 1e-12}
    assert not wrong


@pytest.mark.parametrize("name", BOTH)
def test_outputs_and_gradients_are_those_of_diffusers_in_single_precision(name):
    found = compared(CASES[name], torch.float32)
    wrong = {key: error for key, pair in found.items() if (error := difference(*pair)) > TOLERANCE}
    assert not wrong
    # all weights have an effect
    family = CASES[name].family
    assert not [one for one, (mine, _) in found.items() if mine.numel() and is_read(family, one) != bool(mine.any())]


GIVEN = {
    "in place": Case("wan", (4, 6, 1), padded=8),  # Wan 2.2 TI2V
    "beside": Case("wan", (4, 6, 1), {"in_channels": 12}, padded=8),  # Wan 2.2 I2V
    "beside, with a picture's tokens": Case(  # Wan 2.1 I2V, whose captions have 512 tokens
        "wan", (512, 509), {"in_channels": 12, "image_dim": 6, "added_kv_proj_dim": 28}, padded=512
    ),
}


@pytest.mark.parametrize("dtype, most", [(torch.float64, 1e-12), (torch.float32, TOLERANCE)])
@pytest.mark.parametrize("how", GIVEN)
def test_given_frames_are_those_of_diffusers(how, dtype, most):
    """ "In place" uses up to two given first frames, whose tokens have time 0; "beside" uses additional channels."""
    case = replace(GIVEN[how], shape=SHAPES["wan"])
    with in_double_precision() if dtype == torch.float64 else contextlib.nullcontext():
        oracle = case.oracle(dtype)
        model, batch = ours(oracle, dtype), case.inputs(oracle, dtype)
        latents = torch.randn_like(batch.x)
        placed = how == "in place"
        given = give(latents, torch.tensor([1, 0, 2])) if placed else give_beside(latents)
        if "tokens" in how:
            batch.y = replace(batch.y, pooled=torch.randn(2, 5, 6, dtype=dtype))

        def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
            mask = given[:, :1]
            if placed:
                t = (t.view(-1, 1, 1, 1, 1) * (1 - mask))[:, 0, :, ::2, ::2].flatten(1)
            x = mask * latents + (1 - mask) * x if placed else torch.cat([x, *[mask] * 4, latents], dim=1)
            picture = {"encoder_hidden_states_image": y.pooled} if y.pooled.dim() == 3 else {}
            return oracle.module(x, timestep=t, encoder_hidden_states=y.tokens, return_dict=False, **picture)[0]

        def mine(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
            return model(with_given(x, given), times_of_frames(t, given) if placed else t, y)

        expected, their_gradients = output_and_gradients(theirs, oracle.module, batch)
        output, gradients = output_and_gradients(mine, model, batch)
    inside = {name: their_gradients.pop(name) for name in ("x", "tokens", "pooled")}
    their_gradients = inside | by_our_names(model, their_gradients)
    assert difference(output, expected) < most and gradients["x"][0, :, :1].any() != placed
    assert not [name for name, gradient in gradients.items() if gradient.numel() and not gradient.any()]
    wrong = {name: error for name in gradients if (error := difference(gradients[name], their_gradients[name])) > most}
    assert not wrong


# --------------------------------------------------------------------------------------------------- single mistakes

# A change modifies our network after it has the oracle's weights, replaces a function, or returns other captions.
Change = Callable[[PublicDiT, pytest.MonkeyPatch, TextCondition], TextCondition | None]
WRONG: dict[tuple[str, str], Change] = {}


def wrong(what: str, *families: str) -> Callable[[Change], Change]:
    """Register a mistake for some families. The function is called with our network, monkeypatch and the captions, and
    returns other captions or None."""

    def register(change: Change) -> Change:
        for family in families:
            WRONG[family, what] = change
        return change

    return register


def respecify(model: PublicDiT, patch: pytest.MonkeyPatch, **values: Any) -> None:
    """Change the specification used by the network's forward pass."""
    spec = replace(model.config.spec, **values)
    patch.setattr(PublicConfig, "spec", property(lambda _: spec))


def blocks_of(model: PublicDiT) -> list[Block]:
    """Return all blocks, including refiners and the blocks of single streams."""
    return [module for module in model.modules() if isinstance(module, Block)]


def modulations_of(model: PublicDiT) -> list[nn.Sequential]:
    parts = (module for block in blocks_of(model) for module in block.adaLN_modulation.modules())
    return [module for module in parts if isinstance(module, nn.Sequential)]


def before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change a module's input with a hook."""
    module.register_forward_pre_hook(lambda _, arguments: (change(arguments[0]), *arguments[1:]))


def rms_norms(model: PublicDiT, pattern: str) -> Iterator[RMSNorm]:
    """Yield the RMSNorms whose names match the pattern."""
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm) and re.search(pattern, name):
            yield module


@wrong("final layer's halves swapped", "flux", "wan", "qwen_image", "flux2", "ltx", "sd3", "cosmos2")
def _(model, patch, y):
    model.final_layer.values = model.final_layer.values[::-1]


@wrong("final layer's scale taken for a shift", "z_image", "lumina2")
def _(model, patch, y):
    model.final_layer.ops = BlockOps(lambda x, shift, scale: layer_norm(x) + scale[:, None])


@wrong("no SiLU before the modulation", "flux", "qwen_image", "lumina2", "sd3", "cosmos2")
def _(model, patch, y):
    for sequential in modulations_of(model):
        sequential[0] = nn.Identity()


@wrong("SiLU before the modulation", "z_image")
def _(model, patch, y):
    for sequential in modulations_of(model):
        sequential.insert(0, nn.SiLU())


@wrong("no SiLU before the shared modulation", "wan", "flux2", "ltx")
def _(model, patch, y):
    model.shared_modulation[0] = nn.Identity()


@wrong(
    "no SiLU before the final layer's modulation", "flux", "z_image", "qwen_image", "lumina2", "flux2", "sd3", "cosmos2"
)
def _(model, patch, y):
    model.final_layer.adaLN_modulation[0] = nn.Identity()


@wrong("SiLU before the final layer's modulation", "wan", "ltx")
def _(model, patch, y):
    before(model.final_layer.adaLN_modulation, F.silu)


@wrong("time not reversed", "z_image", "lumina2")
def _(model, patch, y):
    model.t_embedder.reversed_from = None


@wrong("time reversed", "flux", "wan", "qwen_image", "flux2", "ltx", "sd3", "cosmos2")
def _(model, patch, y):
    model.t_embedder.reversed_from = 1000.0


@wrong("time in 0 ... 1", "flux", "z_image", "wan", "qwen_image", "flux2", "ltx", "sd3")
def _(model, patch, y):
    embedding = layers.timestep_embedding
    patch.setattr(layers, "timestep_embedding", lambda t, dim: embedding(t / 1000, dim))


@wrong("time in bfloat16", "flux", "z_image", "wan", "qwen_image", "flux2", "ltx", "sd3")
def _(model, patch, y):
    embedding = layers.timestep_embedding
    patch.setattr(layers, "timestep_embedding", lambda t, dim: embedding(t.bfloat16(), dim))


@wrong("sines before cosines", "flux", "z_image", "wan", "qwen_image", "lumina2", "flux2", "ltx", "sd3", "cosmos2")
def _(model, patch, y):
    embedding = layers.timestep_embedding
    patch.setattr(layers, "timestep_embedding", lambda t, dim: embedding(t, dim).roll(dim // 2, -1))


@wrong("time in 0 ... 1000", "lumina2", "cosmos2")
def _(model, patch, y):
    model.t_embedder.unit = 1.0


@wrong("guidance not scaled", "flux", "flux2")
def _(model, patch, y):
    before(model.guidance_embedder, lambda t: t / 1000)


@wrong("guidance forgotten", "flux", "flux2")
def _(model, patch, y):
    return replace(y, guidance=None)


@wrong("pooled vector forgotten", "flux", "sd3")
def _(model, patch, y):
    return replace(y, pooled=torch.zeros_like(y.pooled))


@wrong("output's sign", "z_image", "lumina2")
def _(model, patch, y):
    respecify(model, patch, reversed_time=False)


@wrong("epsilon of LayerNorm", "flux", "z_image", "wan", "qwen_image", "lumina2", "flux2", "ltx", "sd3", "cosmos2")
def _(model, patch, y):
    patch.setattr(layers, "layer_norm", lambda x: layer_norm(x, 1e-5))


@wrong(
    "epsilon of the norms of queries and keys",
    "flux",
    "z_image",
    "wan",
    "qwen_image",
    "lumina2",
    "flux2",
    "ltx",
    "sd3",
    "cosmos2",
)
def _(model, patch, y):
    for norm in rms_norms(model, "[qk]_norm"):
        norm.eps = {1e-6: 1e-5, 1e-5: 1e-6}[norm.eps]


@wrong("epsilon of RMSNorm", "z_image", "lumina2", "ltx")
def _(model, patch, y):
    for norm in rms_norms(model, "(attn|mlp)_norm|text_embedder"):
        norm.eps = {1e-5: 1e-6, 1e-6: 1e-5}[norm.eps]


@wrong("epsilon of the caption's norm", "wan")
def _(model, patch, y):
    for block in blocks_of(model):
        block.cross_norm.eps = 1e-5


@wrong("exact GELU", "flux", "wan", "qwen_image", "ltx", "sd3")
def _(model, patch, y):
    gelu = F.gelu
    patch.setattr(F, "gelu", lambda x, approximate: gelu(x))


@wrong("GELU in tanh form", "cosmos2")
def _(model, patch, y):
    gelu = F.gelu
    patch.setattr(F, "gelu", lambda x: gelu(x, approximate="tanh"))


@wrong("rotations of neighbours", "cosmos2")
def _(model, patch, y):
    for block in blocks_of(model):
        block.attn.halves = False


@wrong("bases not scaled", "cosmos2")
def _(model, patch, y):
    respecify(model, patch, rotary=replace(model.config.spec.rotary, bases=()))


@wrong("sinusoids not normalised", "cosmos2")
def _(model, patch, y):
    patch.setattr(model.t_embedder.norm, "forward", lambda x: x)


@wrong("the caption's gate forgotten", "cosmos2")
def _(model, patch, y):
    vectors = Block.vectors
    gates = lambda parts: [*parts[:1], (*parts[1][:2], torch.ones_like(parts[1][2])), *parts[2:]]  # noqa: E731
    patch.setattr(Block, "vectors", lambda self, m: iter(gates(list(vectors(self, m)))))


@wrong("the final layer's modulation not shared", "cosmos2")
def _(model, patch, y):
    modulate = model.final_layer.modulate
    patch.setattr(model.final_layer, "modulate", lambda c, shared: modulate(c))


@wrong("exact GELU in the caption's embedding", "wan", "ltx")
def _(model, patch, y):
    mlp = model.text_embedder.mlp
    patch.setattr(mlp, "forward", lambda x: mlp.fc2(F.gelu(mlp.fc1(x))))


@wrong("halves of SwiGLU swapped", "z_image", "lumina2", "flux2")
def _(model, patch, y):
    model.use(ops=BlockOps(swiglu=lambda x: layers.swiglu(x.roll(x.shape[-1] // 2, -1))))


@wrong("padding trimmed", "flux", "wan", "flux2", "sd3", "cosmos2")
def _(model, patch, y):
    longest = int(y.mask.sum(1).max())
    return replace(y, tokens=y.tokens[:, :longest], mask=y.mask[:, :longest])


@wrong("padding masked", "flux", "flux2")
def _(model, patch, y):
    enter = model.enter

    def masked(x, modulations, context):
        tokens, grid = enter(x, modulations, context)
        media = y.mask.new_ones(len(x), tokens.shape[1] - y.mask.shape[1])
        return tokens, replace(grid, keys=torch.cat([y.mask, media], dim=1))

    patch.setattr(model, "enter", masked)


@wrong("padding masked", "wan", "cosmos2")
def _(model, patch, y):
    for block in blocks_of(model):
        block.cross_attn.attends_padding = False


@wrong("padding attended to", "qwen_image")
def _(model, patch, y):
    return replace(y, mask=torch.ones_like(y.mask))


@wrong("padding not zeros", "wan", "cosmos2")
def _(model, patch, y):
    return replace(y, tokens=torch.where(y.mask.unsqueeze(-1), y.tokens, torch.ones_like(y.tokens)))


@wrong("zeros for the tokens that fill captions", "z_image")
def _(model, patch, y):
    model.text_embedder.filling.data.zero_()


@wrong("zeros for the tokens that fill pictures", "z_image")
def _(model, patch, y):
    model.x_embedder.filling.data.zero_()


@wrong("captions filled to a multiple of 16", "z_image")
def _(model, patch, y):
    respecify(model, patch, text=replace(model.config.spec.text, multiple=16))


@wrong("captions all filled to the longest", "z_image")
def _(model, patch, y):
    respecify(model, patch, text=replace(model.config.spec.text, multiple=64))


@wrong("pictures not filled", "z_image")
def _(model, patch, y):
    respecify(model, patch, media_multiple=1)


@wrong("filling of pictures placed as if it were a picture", "z_image")
def _(model, patch, y):
    place = network.grid_coordinates
    patch.setattr(network, "grid_coordinates", lambda h, w, device: place(h + 17 // w + 1, w, device=device)[:32])


@wrong("pictures at the place after the captions' own tokens", "z_image")
def _(model, patch, y):
    places = model.places

    def moved(size, context, batch, _):
        tokens, keys = context
        own = F.pad(y.mask, (0, keys.shape[1] - y.mask.shape[1]))
        (joint, alone), (padded, _) = places(size, (tokens, own), batch), places(size, context, batch)
        return replace(joint, keys=padded.keys), alone

    patch.setattr(model, "places", moved)


@wrong("all captions at place 0", "z_image", "lumina2")
def _(model, patch, y):
    respecify(model, patch, rotary=replace(model.config.spec.rotary, text="zero"))


@wrong("places of a picture counted from its corner", "qwen_image")
def _(model, patch, y):
    sides = network.media_places
    patch.setattr(network, "media_places", lambda rotary, at, size: sides(rotary, at, torch.zeros_like(size)))


@wrong("places of a picture counted from its middle, rounded the other way", "qwen_image")
def _(model, patch, y):
    sides = network.media_places
    patch.setattr(network, "media_places", lambda rotary, at, size: sides(rotary, at, size // 2 * 2))


@wrong("captions' places counted from the shorter side", "qwen_image")
def _(model, patch, y):
    sides = network.text_places
    patch.setattr(network, "text_places", lambda rotary, n, size: sides(rotary, n, size.amin().expand(2)))


@wrong("all captions at place 0", "qwen_image")
def _(model, patch, y):
    patch.setattr(network, "text_places", lambda rotary, n, _: torch.zeros(n, 3, dtype=torch.float64))


@wrong("captions' places on another axis", "flux2")
def _(model, patch, y):
    places = network.text_places
    patch.setattr(network, "text_places", lambda *args: places(*args).roll(1, -1))


@wrong("all captions at place 0", "flux2")
def _(model, patch, y):
    patch.setattr(network, "text_places", lambda rotary, n, _: torch.zeros(n, 4, dtype=torch.float64))


@wrong("places of a picture on other axes", "flux2")
def _(model, patch, y):
    places = network.media_places
    patch.setattr(network, "media_places", lambda *args: places(*args).roll(-1, -1))


@wrong("base of the rotations as in FLUX.1", "flux2")
def _(model, patch, y):
    respecify(model, patch, rotary=replace(model.config.spec.rotary, base=10000.0))


@wrong("captions' places counted from 0", "z_image")
def _(model, patch, y):
    places, first = network.text_places, torch.tensor([1.0, 0, 0])
    patch.setattr(network, "text_places", lambda *args: places(*args) - first)


@wrong("captions' places counted from 1", "lumina2")
def _(model, patch, y):
    places, first = network.text_places, torch.tensor([1.0, 0, 0])
    patch.setattr(network, "text_places", lambda *args: places(*args) + first)


@wrong("pictures at the place after the longest caption", "lumina2")
def _(model, patch, y):
    places = model.places

    def moved(size, context, *more):
        tokens, keys = context
        (joint, alone), (own, _) = places(size, (tokens, keys[:, :0]), *more), places(size, context, *more)
        return replace(joint, keys=own.keys), alone

    patch.setattr(model, "places", moved)


@wrong("padding attended to", "lumina2")
def _(model, patch, y):
    places = model.places
    patch.setattr(model, "places", lambda *a: tuple(replace(grid, keys=None) for grid in places(*a)))


@wrong("heads of keys shared by turns", "lumina2")
def _(model, patch, y):
    def by_turns(q, k, v):
        copies = 1, q.shape[1] // k.shape[1], 1, 1
        return k.repeat(copies), v.repeat(copies)

    patch.setattr(attention, "for_every_head", by_turns)


@wrong("every head turned by the first one's angles", "ltx")
def _(model, patch, y):
    rotations, pairs = model.rotations, model.config.head_dim // 2
    patch.setattr(model, "rotations", lambda grid: rotations(grid)[:, :pairs].contiguous())


@wrong("channels that stay are the last", "ltx")
def _(model, patch, y):
    rotations = model.rotations
    patch.setattr(model, "rotations", lambda grid: rotations(grid).roll(-1, 1))


@wrong("16 frames a second", "ltx")
def _(model, patch, y):
    rotary = model.config.spec.rotary
    respecify(model, patch, rotary=replace(rotary, steps=(8 / 16, *rotary.steps[1:])))


@wrong("a norm before the caption's branch", "ltx")
def _(model, patch, y):
    for block in blocks_of(model):
        block.spec = replace(block.spec, caption_norm=False)


@wrong("LayerNorm before the branches", "ltx")
def _(model, patch, y):
    for norm in rms_norms(model, "(attn|mlp)_norm"):
        patch.setattr(norm, "forward", lambda x: layer_norm(x))


@wrong("padding attended to, across", "ltx")
def _(model, patch, y):
    for block in blocks_of(model):
        block.cross_attn.attends_padding = True


@wrong("positions from the table's corner", "sd3")
def _(model, patch, y):
    side, unit = model.config.spec.table
    patch.setattr(model, "positions", lambda grid: sincos_positions(
        grid_coordinates(*grid).float() / (side / unit), model.config.hidden_size
    ))  # fmt: skip


@wrong("positions of whole patches", "sd3")
def _(model, patch, y):
    side, _ = model.config.spec.table
    respecify(model, patch, table=(side, side))


@wrong("the caption is no part of the last attention", "sd3")
def _(model, patch, y):
    last = model.blocks[-1]
    before(last.text.attn.qkv, torch.zeros_like)


@wrong("values of the caption's last modulation in another order", "sd3")
def _(model, patch, y):
    block = model.blocks[-1].text
    block.spec = replace(block.spec, values=("shift", "scale"))


@wrong("places of a picture counted from 1", "flux", "flux2")
def _(model, patch, y):
    place = network.grid_coordinates
    patch.setattr(network, "grid_coordinates", lambda *sizes, device: place(*sizes, device=device) + 1)


@wrong(
    "rows and columns exchanged", "flux", "z_image", "wan", "qwen_image", "lumina2", "flux2", "ltx", "sd3", "cosmos2"
)
def _(model, patch, y):
    place = network.grid_coordinates

    def exchanged(*sizes, device):
        at = place(*sizes, device=device)
        return torch.cat([at[:, :-2], at[:, [-1, -2]]], dim=1)

    patch.setattr(network, "grid_coordinates", exchanged)


@wrong("axes of the rotations in another order", "flux", "z_image", "wan", "qwen_image", "lumina2", "flux2", "cosmos2")
def _(model, patch, y):
    rotary = model.config.spec.rotary
    respecify(model, patch, rotary=replace(rotary, channels=rotary.channels[1:] + rotary.channels[:1]))


@wrong("base of the rotations", "flux", "z_image", "wan", "qwen_image", "lumina2")
def _(model, patch, y):
    rotary = model.config.spec.rotary
    respecify(model, patch, rotary=replace(rotary, base={256.0: 10000.0, 10000.0: 256.0}[rotary.base]))


@wrong("rotations of halves", "flux", "z_image", "wan", "qwen_image", "lumina2", "flux2", "ltx")
def _(model, patch, y):
    def halves(x, table):
        a, b = x.chunk(2, -1)
        cos, sin = table.unsqueeze(-3).unbind(-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    patch.setattr(positions, "rotate", halves)


@wrong("rotations the other way", "flux", "z_image", "qwen_image", "lumina2", "flux2", "ltx", "cosmos2")
def _(model, patch, y):
    rotate = positions.rotate
    patch.setattr(positions, "rotate", lambda x, table: rotate(x, torch.stack([table[..., 0], -table[..., 1]], -1)))


def normalise_by_head(model: PublicDiT, patch: pytest.MonkeyPatch, pattern: str) -> None:
    heads = model.config.num_heads
    for norm in rms_norms(model, pattern):

        def by_head(x: Tensor, norm: RMSNorm = norm) -> Tensor:
            x = x.unflatten(-1, (heads, -1))
            return F.rms_norm(x, x.shape[-1:], eps=norm.eps).flatten(-2) * norm.weight

        patch.setattr(norm, "forward", by_head)


@wrong("queries and keys normalised by head", "wan")
def _(model, patch, y):
    normalise_by_head(model, patch, r"\.attn\.[qk]_norm")


@wrong("the caption's queries and keys normalised by head", "wan", "ltx")
def _(model, patch, y):
    normalise_by_head(model, patch, r"\.cross_attn\.[qk]_norm")


@wrong("queries and keys normalised across heads", "flux", "z_image", "qwen_image", "flux2", "sd3", "cosmos2")
def _(model, patch, y):
    for module in model.modules():
        if isinstance(module, attention.Attention):
            module.across = True
            for norm in (module.q_norm, module.k_norm):
                norm.weight = nn.Parameter(norm.weight.repeat(module.num_heads))


@wrong("queries and keys normalised after they are rotated", "flux", "z_image", "qwen_image", "lumina2", "flux2")
def _(model, patch, y):
    def rotate_normalise(q, k, q_norm, k_norm, table, across):
        return q_norm(positions.rotate(q, table)), k_norm(positions.rotate(k, table))

    model.use(ops=replace(BlockOps(), normalise_rotate=rotate_normalise))


@wrong("channels of a patch the other way, in", "flux", "z_image", "wan", "qwen_image", "lumina2", "sd3", "cosmos2")
def _(model, patch, y):
    model.x_embedder.channels_last = not model.x_embedder.channels_last


@wrong("channels of a patch the other way, out", "flux", "z_image", "wan", "qwen_image", "lumina2", "sd3", "cosmos2")
def _(model, patch, y):
    first, last = model.config.spec.channels_last
    respecify(model, patch, channels_last=(first, not last))


@wrong(
    "values of the modulation in another order",
    "flux",
    "z_image",
    "wan",
    "qwen_image",
    "lumina2",
    "flux2",
    "ltx",
    "sd3",
    "cosmos2",
)
def _(model, patch, y):
    for block in blocks_of(model):
        values = block.spec.values
        block.spec = replace(block.spec, values=(values[1], values[0], *values[2:]))


@wrong(
    "modulation of attention and MLP exchanged",
    "flux",
    "z_image",
    "wan",
    "qwen_image",
    "lumina2",
    "flux2",
    "ltx",
    "sd3",
    "cosmos2",
)
def _(model, patch, y):
    vectors = Block.vectors
    patch.setattr(Block, "vectors", lambda self, m: reversed(list(vectors(self, m))))


@wrong("modulation of pictures and captions exchanged", "flux", "qwen_image", "flux2")
def _(model, patch, y):
    modulate = JointBlock.modulate
    patch.setattr(JointBlock, "modulate", lambda self, *c: (m := modulate(self, *c)).roll(m.shape[1] // 2, 1))


@wrong("scale without 1", "flux", "z_image", "wan", "qwen_image", "lumina2", "flux2", "ltx", "sd3", "cosmos2")
def _(model, patch, y):
    patch.setattr(layers, "modulate", lambda x, shift, scale, _=None: x * scale[:, None] + shift[:, None])


@wrong("gates without tanh", "z_image", "lumina2")
def _(model, patch, y):
    for block in blocks_of(model):
        block.spec = replace(block.spec, tanh_gates=False)


@wrong("no norms after the branches", "z_image", "lumina2")
def _(model, patch, y):
    for block in blocks_of(model):
        block.spec = replace(block.spec, norm_after=False)


@wrong("attention and MLP one after the other", "flux", "flux2")
def _(model, patch, y):
    for block in model.blocks[model.config.spec.stacks[0].count :]:

        def one_by_one(x, m, context, grid, block=block):
            shift, scale, gate = next(block.vectors(m))
            x.add(gate, block.attn.output(x.norm(block.ops, shift, scale), block.ops, grid), block.attn.proj)
            x.add(gate, block.mlp.hidden(x.norm(block.ops, shift, scale), block.ops), block.mlp.fc2)

        patch.setattr(block, "add_branches", one_by_one)


@wrong("the caption's norm before the MLP instead", "wan")
def _(model, patch, y):
    for block in blocks_of(model):
        before(block.mlp.fc1, lambda x, norm=block.cross_norm: x * norm.weight + norm.bias)
        norm = nn.LayerNorm(block.cross_norm.weight.shape[0], 1e-6).to(block.cross_norm.weight.dtype)
        block.cross_norm = norm


@wrong("blocks in another order", "flux", "z_image", "wan", "qwen_image", "lumina2", "flux2", "ltx", "cosmos2")
def _(model, patch, y):
    model.blocks[-1], model.blocks[-2] = model.blocks[-2], model.blocks[-1]


@functools.cache
def known(case: Case) -> tuple[Oracle, Inputs, Tensor]:
    """Return diffusers' network, its inputs and its output in double precision."""
    with in_double_precision(), torch.no_grad():
        oracle = case.oracle(torch.float64)
        given = case.inputs(oracle, torch.float64)
        return oracle, given, oracle.theirs(given.x, given.t, given.y)


@pytest.mark.parametrize(("family", "what"), WRONG)
def test_a_single_wrong_fact_moves_the_output_by_more_than_the_tolerance(family, what, monkeypatch):
    oracle, given, expected = known((SMALL if what.startswith("epsilon") else USUAL)[family])
    with in_double_precision(), torch.no_grad():
        model = ours(oracle, torch.float64)
        y = WRONG[family, what](model, monkeypatch, given.y) or given.y
        moved = difference(model(given.x, given.t, y), expected)
    assert moved > 2 * TOLERANCE


# -------------------------------------------------------------------------------------------------------------- sizes

# Contents of the hub's config.json files, and the number of weights in millions.
PUBLISHED = {
    "FLUX.1-dev": ("flux", FLUX_1 | {"guidance_embeds": True}, 11_901),
    "FLUX.1-schnell": ("flux", FLUX_1, 11_891),
    "Z-Image": ("z_image", Z_IMAGE_6B, 6_155),
    "Wan2.1-T2V-1.3B": ("wan", WAN_14B | {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}, 1_419),
    "Wan2.1-T2V-14B": ("wan", WAN_14B, 14_288),
    "Wan2.2-TI2V-5B": (
        "wan",
        WAN_14B | dict(num_attention_heads=24, num_layers=30, ffn_dim=14336, in_channels=48, out_channels=48),
        5_000,
    ),
    "Wan2.1-I2V-14B": ("wan", WAN_14B | dict(in_channels=36, image_dim=1280, added_kv_proj_dim=5120), 16_395),
    "Wan2.2-I2V-A14B": ("wan", WAN_14B | dict(in_channels=36), 14_289),
    "Qwen-Image": ("qwen_image", QWEN_IMAGE_20B, 20_430),
    "FLUX.2-dev": ("flux2", FLUX2_DEV, 32_223),
    "FLUX.2-klein-4B": ("flux2_klein", KLEIN_4B, 3_876),
    "FLUX.2-klein-9B": ("flux2_klein", KLEIN_9B, 9_079),
    "Lumina-Image-2.0": ("lumina2", LUMINA2_2B, 2_610),
    "LTX-Video": ("ltx", LTX_2B, 1_923),
    "Stable Diffusion 3.5 large": ("sd3", SD35_LARGE, 8_057),
    "Cosmos-Predict2-2B-Text2Image": ("cosmos2", COSMOS2_2B, 1_956),
    "Cosmos-Predict2-14B-Text2Image": ("cosmos2", COSMOS2_2B | dict(num_attention_heads=40, num_layers=36), 14_265),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_networks_of_published_sizes_have_all_weights_of_diffusers_by_their_names(name):
    family, values, millions = PUBLISHED[name]
    config = public_config(family, values)
    with torch.device("meta"):
        model = PublicDiT(config)
        theirs = getattr(networks(), FAMILIES[family].network).from_config(values)
    load(model, theirs.state_dict())  # compares names and shapes
    count = sum(parameter.numel() for parameter in theirs.parameters())
    assert round(count / 10**6) == millions
    assert count == sum(parameter.numel() for parameter in model.parameters()) == config.parameters()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_survive_json(name):
    family, values, _ = PUBLISHED[name]
    config = public_config(family, values, max_tokens=77)
    again = config_from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config) and type(again) is PublicConfig
    assert again.spec is config.spec and again.text.max_tokens == 77
    assert public_config(family, json.loads(json.dumps(values)), max_tokens=77) == config  # lists instead of tuples
    smaller = public_config(family, values, config.input_size[:-1] + (8,), 77)
    assert smaller != config and PublicConfig.from_dict(smaller.to_dict()) == smaller


def test_configurations_of_an_unknown_family_are_refused():
    with pytest.raises(
        ValueError, match="'flax'.* flux, z_image, wan, lumina2, qwen_image, flux2, ltx, sd3, cosmos2, flux2_klein"
    ):
        public_config("flax", {})


# ----------------------------------------------------------------------------------------------- configurations' keys

REFUSED = None
# An unusual value for every argument of diffusers' classes. It is refused, or has the same meaning as in diffusers,
# together with these other values.
UNUSUAL: dict[str, dict[str, tuple[Any, dict[str, Any] | None]]] = {
    "flux": {
        "patch_size": (2, REFUSED),
        "in_channels": (6, REFUSED),
        "out_channels": (8, REFUSED),
        "num_layers": (1, {}),
        "num_single_layers": (1, {}),
        "attention_head_dim": (16, {"axes_dims_rope": (4, 6, 6)}),
        "num_attention_heads": (3, {}),
        "joint_attention_dim": (6, {}),
        "pooled_projection_dim": (6, {}),
        "guidance_embeds": (False, {}),
        "axes_dims_rope": ((4, 4, 6), REFUSED),
    },
    "z_image": {
        "all_patch_size": ((4,), REFUSED),
        "all_f_patch_size": ((2,), REFUSED),
        "in_channels": (6, {}),
        "dim": (48, {"axes_dims": [4, 6, 6]}),
        "n_layers": (1, {}),
        "n_refiner_layers": (1, {}),
        "n_heads": (2, {"axes_dims": [6, 6, 6]}),
        "n_kv_heads": (1, {}),  # not used by diffusers
        "norm_eps": (1e-3, {}),
        "qk_norm": (False, {}),
        "cap_feat_dim": (6, {}),
        "siglip_feat_dim": (6, REFUSED),
        "rope_theta": (100.0, {}),
        "t_scale": (1.0, REFUSED),
        "axes_dims": ([4, 4, 6], REFUSED),
        "axes_lens": ([66, 3, 5], {}),  # the smallest that these positions need
    },
    "wan": {
        "patch_size": ((3, 1, 2), {}),
        "num_attention_heads": (3, {}),
        "attention_head_dim": (10, {}),
        "in_channels": (6, REFUSED),
        "out_channels": (6, REFUSED),
        "text_dim": (6, {}),
        "freq_dim": (6, {}),
        "ffn_dim": (6, {}),
        "num_layers": (1, {}),
        "cross_attn_norm": (False, REFUSED),
        "qk_norm": ("rms_norm", {}),  # not used by diffusers
        "eps": (1e-5, REFUSED),
        "image_dim": (6, REFUSED),
        "added_kv_proj_dim": (28, REFUSED),
        "rope_max_seq_len": (5, {}),
        "pos_embed_seq_len": (6, REFUSED),
    },
    "flux2": {
        "patch_size": (2, REFUSED),
        "in_channels": (12, {}),
        "out_channels": (12, REFUSED),
        "num_layers": (1, {}),
        "num_single_layers": (1, {}),
        "attention_head_dim": (20, {"axes_dims_rope": (4, 6, 6, 4)}),
        "num_attention_heads": (3, {}),
        "joint_attention_dim": (6, {}),
        "timestep_guidance_channels": (8, {}),
        "mlp_ratio": (1.7, {}),
        "axes_dims_rope": ((4, 4, 6, 4), REFUSED),
        "rope_theta": (100, {}),
        "eps": (1e-5, REFUSED),
        "guidance_embeds": (False, {}),
    },
    "qwen_image": {
        "patch_size": (1, REFUSED),
        "in_channels": (24, {"out_channels": 6}),
        "out_channels": (8, REFUSED),
        "num_layers": (1, {}),
        "attention_head_dim": (16, {"axes_dims_rope": (4, 6, 6)}),
        "num_attention_heads": (3, {}),
        "joint_attention_dim": (6, {}),
        "guidance_embeds": (True, REFUSED),
        "axes_dims_rope": ((4, 4, 6), REFUSED),
        "zero_cond_t": (True, REFUSED),
        "use_additional_t_cond": (True, REFUSED),
        "use_layer3d_rope": (True, REFUSED),
    },
    "lumina2": {
        "sample_size": (6, {}),  # not used by diffusers
        "patch_size": (4, REFUSED),
        "in_channels": (6, {}),
        "out_channels": (6, REFUSED),
        "hidden_size": (72, {"axes_dim_rope": (6, 6, 6)}),
        "num_layers": (1, {}),
        "num_refiner_layers": (1, {}),
        "num_attention_heads": (6, {"axes_dim_rope": (2, 2, 4)}),
        "num_kv_heads": (1, {}),
        "multiple_of": (7, {}),
        "ffn_dim_multiplier": (0.7, {}),
        "norm_eps": (1e-3, {}),
        "scaling_factor": (2.0, {}),  # not used by diffusers
        "axes_dim_rope": ((4, 4, 6), REFUSED),
        "axes_lens": ([9, 3, 5], {}),  # the smallest that these positions need
        "cap_feat_dim": (6, {}),
    },
    "ltx": {
        "in_channels": (8, {"out_channels": 8}),
        "out_channels": (8, REFUSED),
        "patch_size": (2, REFUSED),
        "patch_size_t": (2, REFUSED),
        "num_attention_heads": (3, {"cross_attention_dim": 30}),
        "attention_head_dim": (6, {"cross_attention_dim": 12}),
        "cross_attention_dim": (24, REFUSED),
        "num_layers": (1, {}),
        "activation_fn": ("gelu", REFUSED),
        "qk_norm": ("rms_norm", REFUSED),
        "norm_elementwise_affine": (True, REFUSED),
        "norm_eps": (1e-3, {}),
        "caption_channels": (6, {}),
        "attention_bias": (False, REFUSED),
        "attention_out_bias": (False, REFUSED),
    },
    "sd3": {
        "sample_size": (14, {}),
        "patch_size": (4, REFUSED),
        "in_channels": (6, {"out_channels": 6}),
        "num_layers": (1, {}),
        "attention_head_dim": (8, {"caption_projection_dim": 16}),
        "num_attention_heads": (3, {"caption_projection_dim": 36}),
        "joint_attention_dim": (6, {}),
        "caption_projection_dim": (12, REFUSED),
        "pooled_projection_dim": (6, {}),
        "out_channels": (6, REFUSED),
        "pos_embed_max_size": (6, {}),
        "dual_attention_layers": ((0,), REFUSED),
        "qk_norm": (None, {}),
    },
    "cosmos2": {
        "in_channels": (6, {"out_channels": 6}),
        "out_channels": (6, REFUSED),
        "num_attention_heads": (3, {}),
        "attention_head_dim": (18, {}),
        "num_layers": (1, {}),
        "mlp_ratio": (2.5, {}),
        "text_embed_dim": (6, {}),
        "adaln_lora_dim": (3, {}),
        "max_size": ((1, 6, 10), {}),  # the smallest that these positions need
        "patch_size": ((1, 1, 1), REFUSED),
        "rope_scale": ((2.0, 1.0, 0.5), {}),
        "concat_padding_mask": (False, {}),
        "extra_pos_embed_type": ("learnable", REFUSED),
        "use_crossattn_projection": (True, REFUSED),
        "crossattn_proj_in_channels": (6, {}),  # only for the projection above
        "encoder_hidden_states_channels": (6, {}),
        "controlnet_block_every_n": (1, REFUSED),
        "img_context_dim_in": (6, REFUSED),
        "img_context_num_tokens": (6, {}),  # only for the picture's tokens above
        "img_context_dim_out": (6, {}),
    },
}


@pytest.mark.parametrize("family", UNUSUAL)
def test_every_argument_of_diffusers_networks_is_known(family):
    arguments = inspect.signature(getattr(networks(), FAMILIES[family].network).__init__).parameters
    assert UNUSUAL[family].keys() == arguments.keys() - {"self"}


@pytest.mark.parametrize(
    ("family", "key", "value", "beside"),
    [(family, key, *found) for family, keys in UNUSUAL.items() for key, found in keys.items()],
)
def test_unusual_values_are_refused_or_mean_what_they_mean_to_diffusers(family, key, value, beside):
    case = USUAL[family]
    if beside is REFUSED:
        with pytest.raises(ValueError, match=rf"\b{key}\b"):
            public_config(family, TINY[family] | {key: value})
        return
    values = {key: value} | beside
    shape = (
        (values.get("out_channels", values["in_channels"]), *SHAPES[family][1:]) if "in_channels" in values else None
    )
    case = replace(case, values=values, shape=shape)
    with in_double_precision(), torch.no_grad():
        oracle = case.oracle(torch.float64)
        given = case.inputs(oracle, torch.float64)
        expected = oracle.theirs(given.x, given.t, given.y)
        assert difference(ours(oracle, torch.float64)(given.x, given.t, given.y), expected) < 1e-12


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("flux", "num_layers"),
        ("flux", "in_channels"),
        ("z_image", "axes_dims"),
        ("wan", "ffn_dim"),
        ("wan", "in_channels"),
    ],
)
def test_configurations_without_a_key_are_refused_by_its_name(family, key):
    values = {name: value for name, value in TINY[family].items() if name != key}
    with pytest.raises(ValueError, match=rf"\b{key}\b"):
        public_config(family, values)


@pytest.mark.parametrize(
    ("family", "values", "key"),
    [
        ("z_image", {"dim": 37}, "dim"),  # 3 heads of 12, and one channel left over
        ("wan", {"attention_head_dim": 13}, "attention_head_dim"),
        ("wan", {"patch_size": (2, 2)}, "patch_size"),
    ],
)
def test_values_that_make_no_network_are_refused(family, values, key):
    with pytest.raises(ValueError, match=rf"\b{key}\b"):
        public_config(family, TINY[family] | values)


def test_wan_whose_outputs_are_left_open_has_as_many_as_inputs():
    assert public_config("wan", WAN | {"out_channels": None}).spec == public_config("wan", WAN).spec
