"""Tiny networks of diffusers with random weights, as references for OpenDiT's networks, and inputs for both."""

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from opendit.models.conditioning import TextCondition
from opendit.models.families import FAMILIES
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config

FLUX = dict(
    in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=12, num_attention_heads=2,
    joint_attention_dim=14, pooled_projection_dim=10, guidance_embeds=True, axes_dims_rope=(2, 4, 6),
)  # fmt: skip
Z_IMAGE = dict(
    in_channels=4, dim=36, n_layers=2, n_refiner_layers=2, n_heads=3, n_kv_heads=3, cap_feat_dim=14,
    axes_dims=[4, 2, 6], axes_lens=[128, 16, 16],
)  # fmt: skip
WAN = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=14, in_channels=4, out_channels=4, text_dim=10,
    freq_dim=16, ffn_dim=36, num_layers=2, rope_max_seq_len=16,
)  # fmt: skip
QWEN_IMAGE = dict(
    in_channels=16, out_channels=4, num_layers=2, attention_head_dim=12, num_attention_heads=2, joint_attention_dim=14,
    axes_dims_rope=(2, 4, 6),
)  # fmt: skip
FLUX2 = dict(
    in_channels=8, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
    joint_attention_dim=14, timestep_guidance_channels=16, mlp_ratio=2.5, axes_dims_rope=(2, 4, 4, 6),
    guidance_embeds=True,
)  # fmt: skip
LUMINA2 = dict(
    sample_size=8, patch_size=2, in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=2,
    num_attention_heads=4, num_kv_heads=2, multiple_of=20, axes_dim_rope=(4, 2, 6), axes_lens=(96, 16, 16),
    cap_feat_dim=14,
)  # fmt: skip
LTX = dict(
    in_channels=6, out_channels=6, num_attention_heads=2, attention_head_dim=10, cross_attention_dim=20, num_layers=2,
    caption_channels=14,
)  # fmt: skip
SD3 = dict(
    sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=12, num_attention_heads=2,
    joint_attention_dim=14, caption_projection_dim=24, pooled_projection_dim=10, out_channels=4, pos_embed_max_size=7,
    qk_norm="rms_norm",
)  # fmt: skip
COSMOS2 = dict(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=14, num_layers=2, text_embed_dim=10,
    adaln_lora_dim=4, rope_scale=(1.0, 4.0, 3.0), extra_pos_embed_type=None,
)  # fmt: skip


@dataclass
class Oracle:
    """A tiny network of diffusers, to compare with OpenDiT's network for the same inputs.

    Attributes:
        family: name of the family.
        values: diffusers' configuration.
        shape: shape of a sample's latents.
        module: diffusers' network.
        theirs: function that calls diffusers' network on (x, t, y), with t in [0, 1000], and returns noise - data, like
            OpenDiT's network.
    """

    family: str
    values: dict[str, Any]
    shape: tuple[int, ...]
    module: torch.nn.Module
    theirs: Callable[[Tensor, Tensor, TextCondition], Tensor]


def networks() -> Any:
    """Import diffusers quietly."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import diffusers

    logging.disable(logging.NOTSET)
    return diffusers


def randomise(module: torch.nn.Module, seed: int = 0, std: float = 0.1) -> None:
    """Add noise to every parameter, because a value such as 0 or 1 could hide an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)


def flux(dtype: torch.dtype, **values: Any) -> Oracle:
    values = FLUX | values
    module = networks().FluxTransformer2DModel(**values).eval()
    randomise(module)
    module.to(dtype)

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        h, w = x.shape[2] // 2, x.shape[3] // 2
        ids = torch.zeros(h, w, 3)
        ids[..., 1], ids[..., 2] = torch.arange(h)[:, None], torch.arange(w)[None]
        out = module(
            hidden_states=packed(x), encoder_hidden_states=y.tokens, pooled_projections=y.pooled, timestep=t / 1000,
            guidance=y.guidance, img_ids=ids.reshape(-1, 3), txt_ids=torch.zeros(y.tokens.shape[1], 3),
            return_dict=False,
        )[0]  # fmt: skip
        return unpacked(out, x.shape)

    return Oracle("flux", values, (4, 6, 10), module, theirs)


def packed(x: Tensor) -> Tensor:
    """Convert x (B, C, H, W) to tokens (B, N, 4 C) of 2 x 2 patches, as diffusers' pipelines do."""
    B, C, H, W = x.shape
    return x.view(B, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, 4 * C)


def unpacked(tokens: Tensor, shape: torch.Size) -> Tensor:
    B, C, H, W = shape
    return tokens.view(B, H // 2, W // 2, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(shape)


def z_image(dtype: torch.dtype, **values: Any) -> Oracle:
    values = Z_IMAGE | values
    module = networks().ZImageTransformer2DModel(**values).eval()
    randomise(module)
    module.to(dtype)

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        captions = [tokens[mask] for tokens, mask in zip(y.tokens, y.mask, strict=True)]
        out = module(x=list(x.unsqueeze(2)), t=1 - t / 1000, cap_feats=captions, return_dict=False)[0]
        return -torch.stack(list(out)).squeeze(2)

    return Oracle("z_image", values, (4, 6, 10), module, theirs)


def wan(dtype: torch.dtype, **values: Any) -> Oracle:
    values = WAN | values
    module = networks().WanTransformer3DModel(**values).eval()
    randomise(module)
    module.to(dtype)

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        return module(hidden_states=x, timestep=t, encoder_hidden_states=y.tokens, return_dict=False)[0]

    return Oracle("wan", values, (4, 3, 6, 10), module, theirs)


def qwen_image(dtype: torch.dtype, **values: Any) -> Oracle:
    values = QWEN_IMAGE | values
    module = networks().QwenImageTransformer2DModel(**values).eval()
    randomise(module)
    module.to(dtype)
    time = module.time_text_embed.time_proj
    thousand, time.scale = (time.scale, 1) if dtype == torch.float32 else (1, time.scale)  # it rounds once more

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        shapes = [[(1, x.shape[2] // 2, x.shape[3] // 2)]] * len(x)
        out = module(
            hidden_states=packed(x), encoder_hidden_states=y.tokens, encoder_hidden_states_mask=y.mask,
            timestep=t * thousand / 1000, img_shapes=shapes, return_dict=False,
        )[0]  # fmt: skip
        return unpacked(out, x.shape)

    return Oracle("qwen_image", values, (4, 6, 10), module, theirs)


def flux2(dtype: torch.dtype, **values: Any) -> Oracle:
    values = FLUX2 | values
    module = networks().Flux2Transformer2DModel(**values).eval()
    randomise(module)
    module.to(dtype)

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        (h, w), tokens = x.shape[2:], y.tokens.shape[1]
        one = torch.arange(1)
        out = module(
            hidden_states=x.flatten(2).transpose(1, 2), encoder_hidden_states=y.tokens, timestep=t / 1000,
            img_ids=torch.cartesian_prod(one, torch.arange(h), torch.arange(w), one),
            txt_ids=torch.cartesian_prod(one, one, one, torch.arange(tokens)), guidance=y.guidance, return_dict=False,
        )[0]  # fmt: skip
        return out.transpose(1, 2).reshape(x.shape)

    return Oracle("flux2", values, (8, 3, 5), module, theirs)


def lumina2(dtype: torch.dtype, **values: Any) -> Oracle:
    values = LUMINA2 | values
    module = networks().Lumina2Transformer2DModel(**values).eval()
    randomise(module)
    module.to(dtype)

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        return -module(x, 1 - t / 1000, y.tokens, y.mask, return_dict=False)[0]

    return Oracle("lumina2", values, (4, 6, 10), module, theirs)


def ltx(dtype: torch.dtype, **values: Any) -> Oracle:
    values = LTX | values
    module = networks().LTXVideoTransformer3DModel(**values).eval()
    randomise(module)
    module.to(dtype)

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        frames, height, width = x.shape[2:]
        out = module(
            hidden_states=x.flatten(2).transpose(1, 2), encoder_hidden_states=y.tokens, timestep=t,
            encoder_attention_mask=y.mask, num_frames=frames, height=height, width=width,
            rope_interpolation_scale=(8 / 25, 32, 32), return_dict=False,
        )[0]  # fmt: skip
        return out.transpose(1, 2).unflatten(2, (frames, height, width))

    return Oracle("ltx", values, (6, 3, 3, 5), module, theirs)


def sd3(dtype: torch.dtype, **values: Any) -> Oracle:
    values = SD3 | values
    module = networks().SD3Transformer2DModel(**values).eval()
    randomise(module)
    module.to(dtype)

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        return module(x, y.tokens, y.pooled, t, return_dict=False)[0]

    return Oracle("sd3", values, (4, 6, 10), module, theirs)


def cosmos2(dtype: torch.dtype, **values: Any) -> Oracle:
    values = COSMOS2 | values
    module = networks().CosmosTransformer3DModel(**values).eval()
    randomise(module)
    module.to(dtype)

    def theirs(x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
        mask = x.new_zeros(1, 1, *x.shape[2:])
        return module(x.unsqueeze(2), t / 1000, y.tokens, padding_mask=mask, return_dict=False)[0].squeeze(2)

    return Oracle("cosmos2", values, (4, 6, 10), module, theirs)


ORACLES = {
    "flux": flux,
    "z_image": z_image,
    "wan": wan,
    "qwen_image": qwen_image,
    "lumina2": lumina2,
    "flux2": flux2,
    "ltx": ltx,
    "sd3": sd3,
    "cosmos2": cosmos2,
}
# Names of the width of caption tokens in the configurations.
WIDTHS = "joint_attention_dim", "cap_feat_dim", "text_dim", "caption_channels", "text_embed_dim"
# OpenDiT's weights without influence on the output: those for the last block's caption tokens, which are unused.
UNREAD = {"qwen_image": r"blocks\.1\.text\.(attn\.(proj|q_norm)|mlp)\.", "sd3": r"blocks\.2\.text\.attn\.q_norm\."}


def is_read(family: str, name: str) -> bool:
    """Return False for a weight that does not affect the output of the family's oracle."""
    return family not in UNREAD or not re.match(UNREAD[family], name)


def captions(
    family: str, values: Mapping[str, Any], lengths: list[int], dtype: torch.dtype, padded: int | None = None
) -> TextCondition:
    """Create random captions with these lengths in the form of the family's encoders.

    The captions are padded to the longest, or to ``padded`` tokens.
    """
    width = next(key for key in WIDTHS if key in values)
    longest, count = padded or max(lengths), len(lengths)
    tokens = torch.randn(count, longest, values[width], dtype=dtype)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    if family not in ("flux", "flux2", "sd3"):
        tokens = tokens * mask.unsqueeze(-1)
    pooled = torch.randn(count, values.get("pooled_projection_dim", 0), dtype=dtype)
    guided = family in ("flux", "flux2") and values["guidance_embeds"]
    guidance = torch.linspace(1.5, 4.5, count, dtype=dtype) if guided else None
    return TextCondition(tokens, mask, pooled, guidance)


def ours(oracle: Oracle, dtype: torch.dtype) -> PublicDiT:
    """Return OpenDiT's network with the oracle's weights."""
    config = public_config(oracle.family, oracle.values, oracle.shape[1:])
    model = PublicDiT(config).to(dtype)
    load(model, oracle.module.state_dict())
    return model


def load(model: PublicDiT, theirs: Mapping[str, Tensor]) -> None:
    """Copy published weights into OpenDiT's network, using only the family's table of names."""
    state = model.state_dict()
    for name, value in by_our_names(model, theirs).items():
        assert state[name].shape == value.shape, (name, state[name].shape, value.shape)
        state[name].copy_(value)


def by_our_names(model: PublicDiT, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return published weights, or their gradients, by OpenDiT's names. Every name is matched exactly once."""
    left, state, found = set(theirs).difference(FAMILIES[model.config.family].constants), model.state_dict(), {}
    for match in FAMILIES[model.config.family].names(model.config.spec):
        for mine, published in match.names():
            assert left.issuperset(published) and found.keys().isdisjoint(mine), (mine, published)
            left.difference_update(published)
            joined = torch.cat([theirs[name] for name in published], dim=match.dim)
            if len(mine) == len(published) == 1 and joined.dim() + 1 == state[mine[0]].dim():
                joined = joined.unsqueeze(0)  # a table, which has a leading dimension in OpenDiT only
            sizes = [state[name].shape[match.dim] for name in mine]
            found.update(zip(mine, joined.split(sizes, dim=match.dim), strict=True))
    assert not left and found.keys() == state.keys(), (sorted(left), sorted(state.keys() - found.keys()))
    return found


# ------------------------------------------------------------------------------------------------------- comparisons


@contextlib.contextmanager
def in_double_precision() -> Iterator[None]:
    """Replace float32 by float64, and complex64 by complex128, inside the context.

    Both networks compute sinusoids, norms and rotations in float32 for every dtype of the weights.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "complex64", torch.complex128)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@dataclass
class Inputs:
    """Inputs of both networks, and weights of the output sum whose gradients are compared."""

    x: Tensor
    t: Tensor
    y: TextCondition
    weights: Tensor


def inputs(
    oracle: Oracle,
    dtype: torch.dtype,
    lengths: list[int],
    padded: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> Inputs:
    """Create a batch with one sample for each caption, at most three. All times are exact after / 1000 in float32."""
    torch.manual_seed(1)
    x = torch.randn(len(lengths), *(shape or oracle.shape), dtype=dtype)
    t = torch.tensor([703.125, 296.875, 921.875], dtype=dtype)[: len(lengths)]
    return Inputs(x, t, captions(oracle.family, oracle.values, lengths, dtype, padded), torch.randn_like(x))


def output_and_gradients(
    network: Callable[[Tensor, Tensor, TextCondition], Tensor], module: torch.nn.Module, given: Inputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a network's output, and the gradients of the output's weighted sum.

    The gradients are those of all parameters and of "x", "tokens" and "pooled". A gradient is zero if the output does
    not depend on the tensor.
    """
    leaves = {"x": given.x, "tokens": given.y.tokens, "pooled": given.y.pooled}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    y = replace(given.y, tokens=leaves["tokens"], pooled=leaves["pooled"])
    output = network(leaves["x"], given.t, y)
    leaves = {**leaves, **dict(module.named_parameters())}
    found = torch.autograd.grad((output * given.weights).sum(), list(leaves.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return output.detach(), gradients


def difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference relative to the largest entry; 0 for two tensors of zeros."""
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
    if not theirs.numel() or not theirs.any():
        return 0.0 if not mine.any() else float("inf")
    return float((mine - theirs).abs().max() / theirs.abs().max())
