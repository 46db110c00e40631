"""diffusers' own classes with tiny configurations and random weights, and the arguments of both networks."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opendit.models.conditioning import TextCondition
from opendit.models.families import FAMILIES
from opendit.models.families.network import PublicDiT, public_config

FLUX = dict(
    in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=12, num_attention_heads=2,
    joint_attention_dim=14, pooled_projection_dim=10, guidance_embeds=True, axes_dims_rope=(4, 4, 4),
)  # fmt: skip
Z_IMAGE = dict(
    in_channels=4, dim=36, n_layers=2, n_refiner_layers=2, n_heads=3, n_kv_heads=3, cap_feat_dim=14,
    axes_dims=[4, 2, 6], axes_lens=[128, 16, 16],
)  # fmt: skip
WAN = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=14, in_channels=4, out_channels=4, text_dim=10,
    freq_dim=16, ffn_dim=36, num_layers=2, rope_max_seq_len=16,
)  # fmt: skip


@dataclass
class Oracle:
    """A tiny network of diffusers, and how both are called with the same latents, times and captions.

    theirs: calls diffusers' network on (x, t, y), with t in [0, 1000], and returns noise - data as ours does.
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
    """Add noise to every parameter, so that none is at a value that hides it."""
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
        (B, C, H, W), (h, w) = x.shape, (x.shape[2] // 2, x.shape[3] // 2)
        packed = x.view(B, C, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, 4 * C)
        ids = torch.zeros(h, w, 3)
        ids[..., 1], ids[..., 2] = torch.arange(h)[:, None], torch.arange(w)[None]
        out = module(
            hidden_states=packed, encoder_hidden_states=y.tokens, pooled_projections=y.pooled, timestep=t / 1000,
            guidance=y.guidance, img_ids=ids.reshape(-1, 3), txt_ids=torch.zeros(y.tokens.shape[1], 3),
            return_dict=False,
        )[0]  # fmt: skip
        return out.view(B, h, w, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)

    return Oracle("flux", values, (4, 6, 10), module, theirs)


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


ORACLES = {"flux": flux, "z_image": z_image, "wan": wan}


def captions(family: str, values: dict[str, Any], lengths: list[int], dtype: torch.dtype) -> TextCondition:
    """Make captions of these lengths, as the family's encoders give them."""
    width = {"flux": "joint_attention_dim", "z_image": "cap_feat_dim", "wan": "text_dim"}[family]
    longest, count = max(lengths), len(lengths)
    tokens = torch.randn(count, longest, values[width], dtype=dtype)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    if family != "flux":
        tokens = tokens * mask.unsqueeze(-1)
    pooled = torch.randn(count, values.get("pooled_projection_dim", 0), dtype=dtype)
    guided = family == "flux" and values["guidance_embeds"]
    guidance = torch.linspace(1.5, 4.5, count, dtype=dtype) if guided else None
    return TextCondition(tokens, mask, pooled, guidance)


def ours(oracle: Oracle, dtype: torch.dtype) -> PublicDiT:
    """Return our network with the oracle's weights."""
    config = public_config(oracle.family, oracle.values, oracle.shape[1:])
    model = PublicDiT(config).to(dtype)
    load(model, oracle.module.state_dict())
    return model


def load(model: PublicDiT, theirs: dict[str, Tensor]) -> None:
    """Copy published weights, by the family's names alone."""
    left, state = set(theirs), model.state_dict()
    missing = set(state)
    for match in FAMILIES[model.config.family].names(model.config.spec):
        for mine, published in match.names():
            joined = (
                torch.cat([theirs[name] for name in published], dim=match.dim)
                if len(published) > 1
                else theirs[published[0]]
            )
            sizes = [state[name].shape[match.dim] for name in mine]
            for name, part in zip(mine, joined.split(sizes, dim=match.dim), strict=True):
                assert state[name].shape == part.shape, (name, state[name].shape, part.shape)
                state[name].copy_(part)
            left -= set(published)
            missing -= set(mine)
    assert not left and not missing, (sorted(left), sorted(missing))
