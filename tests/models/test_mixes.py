"""Test every mix of norm, MLP, positions and QK-norm in DiT and vDiT against a plain float64 network. Also test
checkpoints with mixes, and errors for unsupported ones."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from opendit.checkpoint.pretrained import METADATA_KEY, load_pretrained
from opendit.export.conversion import refuse_unless_plain
from opendit.models.conditioning import TextCondition, TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.finetuning import check_same_blocks
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model, config_from_dict, model_config

D, HEADS, DEPTH, HIDDEN, CLASSES, L, WIDTH = 24, 2, 2, 36, 3, 4, 8
# latents and patches, with a different grid size for every axis
SIZES = {2: ((4, 6), (2, 2)), 3: ((3, 4, 2), (1, 2, 2))}
MIXES = list(itertools.product(("layer", "rms"), ("gelu", "swiglu"), ("sincos", "learned", "rope"), (False, True)))


def config_of(axes: int, captions: bool, norm: str, mlp: str, positions: str, qk_norm: bool) -> DiTConfig:
    size, patch = SIZES[axes]
    condition = {"text": TextConfig("t5", WIDTH, L, True)} if captions else {"num_classes": CLASSES}
    parts = {"norm": norm, "mlp": mlp, "positions": positions, "qk_norm": qk_norm, "mlp_ratio": HIDDEN / D}
    shape = {"in_channels": 2, "hidden_size": D, "depth": DEPTH, "num_heads": HEADS}
    if axes == 2:
        return DiTConfig(size, patch[0], **shape, **condition, **parts)
    return VDiTConfig(size, patch, **shape, **condition, **parts)


def inputs(axes: int, captions: bool):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, *SIZES[axes][0], generator=generator, dtype=torch.float64)
    tokens = torch.randn(2, L, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True, False, False, False], [True, True, True, False]])
    return x, torch.tensor([1, 3]), (TextCondition(tokens, mask, tokens[:, 1]) if captions else torch.tensor([0, 3]))


# ------------------------------------------------------------------------------------------------- the plain reference


def linear(P: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ P[f"{name}.weight"].flatten(1).T + P[f"{name}.bias"]


def layer(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def series(count: int) -> Tensor:
    return 10000.0 ** -(torch.arange(count, dtype=torch.float64) / count)


def rounded(x: Tensor) -> Tensor:
    """Round as a table that is kept in fp32."""
    return x.float().double()


def sincos(at: Tensor, channels: int) -> Tensor:
    angles = at[:, None] * series(channels // 2)
    return rounded(torch.cat([angles.sin(), angles.cos()], 1))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of channels (2 i, 2 i + 1) of x (B, N, H, d), as complex numbers, by angles (N, d / 2)."""
    turn = torch.complex(rounded(angles.cos()), rounded(angles.sin()))[:, None]
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
    return torch.view_as_real(turned).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return attention (B, N, D) for q, k, v (B, N, H, d)."""
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -math.inf)
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(2)


def network(P: dict[str, Tensor], x: Tensor, t: Tensor, y, norm: str, mlp: str, positions: str, qk_norm: bool):
    """Compute the network for x (B, C, ...), t (B,) and y: labels, or (tokens, mask, pooled) of captions."""
    axes = x.dim() - 2
    patch = SIZES[axes][1]
    grid = [side // p for side, p in zip(x.shape[2:], patch, strict=True)]
    places = torch.tensor(list(itertools.product(*map(range, grid))))
    at = places.double().unbind(1)

    cut = x.reshape(*x.shape[:2], *(part for pair in zip(grid, patch, strict=True) for part in pair))
    order = [0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2)]
    h = linear(P, "x_embedder.proj", cut.permute(order).flatten(1 + axes).flatten(1, axes))
    if positions == "sincos":
        h = h + torch.cat([sincos(at[-1], D // 2), sincos(at[-2], D // 2)], 1)
        h = h + sincos(at[0], D) if axes == 3 else h
    if positions == "learned":
        h = h + sum(P[f"learned_positions.axes.{i}.weight"][places[:, i]] for i in range(axes))
    pairs = D // HEADS // 2
    shares = [pairs - pairs // axes * (axes - 1)] + [pairs // axes] * (axes - 1)
    angles = torch.cat([a[:, None] * series(share) for a, share in zip(at, shares, strict=True)], 1)

    times = t.float()[:, None] * torch.exp(-math.log(10000.0) * torch.arange(128.0) / 128)  # in fp32
    c = torch.cat([times.cos(), times.sin()], 1).double()
    c = linear(P, "t_embedder.mlp.2", silu(linear(P, "t_embedder.mlp.0", c)))
    if isinstance(y, Tensor):
        c = c + P["y_embedder.embedding_table.weight"][y]
    else:
        words, mask, pooled = y
        c = c + linear(P, "y_embedder.mlp.2", silu(linear(P, "y_embedder.mlp.0", layer(pooled))))
        words = linear(P, "y_embedder.tokens", layer(words))

    def normed(x: Tensor, name: str) -> Tensor:
        return layer(x) if norm == "layer" else rms(x, P[f"{name}.weight"])

    def scaled(q: Tensor, k: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return (rms(q, P[f"{name}.q_norm.weight"]), rms(k, P[f"{name}.k_norm.weight"])) if qk_norm else (q, k)

    for i in range(DEPTH):
        block = f"blocks.{i}"
        m = linear(P, f"{block}.adaLN_modulation.1", silu(c))[:, None].chunk(6, -1)
        z = normed(h, f"{block}.attn_norm") * (1 + m[1]) + m[0]
        q, k, v = linear(P, f"{block}.attn.qkv", z).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = scaled(q, k, f"{block}.attn")
        if positions == "rope":
            q, k = rotated(q, angles), rotated(k, angles)
        h = h + m[2] * linear(P, f"{block}.attn.proj", attend(q, k, v))
        if not isinstance(y, Tensor):
            z = normed(h, f"{block}.cross_norm")
            q = linear(P, f"{block}.cross_attn.q", z).unflatten(-1, (HEADS, -1))
            k, v = linear(P, f"{block}.cross_attn.kv", words).unflatten(-1, (2, HEADS, -1)).unbind(2)
            h = h + linear(P, f"{block}.cross_attn.proj", attend(*scaled(q, k, f"{block}.cross_attn"), v, mask))
        z = linear(P, f"{block}.mlp.fc1", normed(h, f"{block}.mlp_norm") * (1 + m[4]) + m[3])
        if mlp == "swiglu":
            z = silu(z[..., :HIDDEN]) * z[..., HIDDEN:]
        else:
            z = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        h = h + m[5] * linear(P, f"{block}.mlp.fc2", z)
    shift, scale = linear(P, "final_layer.adaLN_modulation.1", silu(c))[:, None].chunk(2, -1)
    out = linear(P, "final_layer.linear", layer(h) * (1 + scale) + shift).unflatten(1, grid).unflatten(-1, (*patch, 4))
    order = [0, 1 + 2 * axes, *(axis for i in range(axes) for axis in (1 + i, 1 + axes + i))]
    return out.permute(order).reshape(len(x), 4, *x.shape[2:])


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(map(str, mix)))
def test_outputs_and_every_gradient(mix):
    for axes, captions in itertools.product(SIZES, (False, True)):
        config = config_of(axes, captions, *mix)
        model, generator = build_model(config, seed=0).double(), torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2, generator=generator)
        assert sum(p.numel() for p in model.parameters()) == config.parameters()
        x, t, y = inputs(axes, captions)
        ours = model(x, t, y)
        P = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        expected = network(P, x, t, (y.tokens, y.mask, y.pooled) if captions else y, *mix)
        cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        found = torch.autograd.grad((ours * cotangent).sum(), list(model.parameters()))
        wanted = torch.autograd.grad((expected * cotangent).sum(), list(P.values()), allow_unused=True)
        assert (ours - expected).norm() / expected.norm() < 1e-10
        for name, ours, expected in zip(P, found, wanted, strict=True):
            assert expected is not None and expected.norm() > 0, name
            assert (ours - expected).norm() / expected.norm() < 1e-9, (axes, captions, name)


def test_a_mix_travels_with_its_weights(tmp_path):
    for mix in (
        ("rms", "swiglu", "rope", True),
        ("rms", "gelu", "sincos", False),
        ("layer", "swiglu", "learned", True),
    ):
        config = config_of(2, False, *mix)
        assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config
        model, path = build_model(config, seed=3), tmp_path / "weights.safetensors"
        about = {"model": "DiT-Ti/2", "config": config.to_dict(), "class_names": [], "image_size": 8}
        save_file(model.state_dict(), path, {METADATA_KEY: json.dumps(about)})
        loaded = load_pretrained(path)[0]
        assert loaded.config == config
        x, t, y = inputs(2, False)
        assert torch.equal(loaded(x.float(), t, y), model(x.float(), t, y))
        with pytest.raises(ValueError, match="no --norm rms or --mlp swiglu"):
            refuse_unless_plain(config_of(2, False, *mix[:2], "sincos", False), {}, "diffusers")
        with pytest.raises(ValueError, match="norm rms there" if mix[0] == "rms" else "mlp swiglu there"):
            check_same_blocks(config, config_of(2, False, "layer", "gelu", *mix[2:]), path)


def test_what_a_kind_has_of_its_own_is_not_written():
    """Defaults of a kind are not written to files, so older files keep their meaning."""
    for name, own in (("DiT-Ti/2", ("layer", "gelu")), ("MovieGen-Ti/2", ("rms", "swiglu"))):
        config = model_config(name, input_size=(8, 8), in_channels=2, num_classes=3)
        assert (config.norm, config.mlp) == own and not config.exchanged
        assert not {"norm", "mlp"} & config.to_dict().keys() and config_from_dict(config.to_dict()) == config
        other = model_config(name, input_size=(8, 8), in_channels=2, num_classes=3, norm="layer", mlp="swiglu")
        assert config_from_dict(other.to_dict()) == other and other.exchanged == {
            key: value for key, value in (("norm", "layer"), ("mlp", "swiglu")) if value not in own
        }


def test_another_mlp_has_about_as_many_weights():
    for name in ("DiT-Ti/2", "DiT-S/2", "DiT-L/2", "DiT-XL/2", "DiT-7B/2", "vDiT-28B/122", "MovieGen-5B/122"):
        shape = dict(input_size=(8, 8), in_channels=4, num_classes=10, frames=4 if name[-3] == "1" else None)
        configs = [model_config(name, **shape, mlp=mlp) for mlp in ("gelu", "swiglu")]
        assert all(config.mlp_hidden % 64 == 0 for config in configs)
        gelu, swiglu = (config.parameters() for config in configs)
        assert abs(swiglu / gelu - 1) < (0.01 if "Ti" not in name else 0.06)
    assert (
        configs[1].mlp_hidden == 8192
        and model_config("DiT-XL/2", **shape | {"frames": None}, mlp="swiglu").mlp_hidden == 3072
    )


@pytest.mark.parametrize(
    ("name", "parts", "fp8", "recompute", "message"),
    [
        ("DiT-S/2", {"norm": "rms"}, True, "none", "--fp8: does not work with --norm rms; leave it out"),
        ("DiT-S/2", {"mlp": "swiglu"}, True, "none", "--fp8: does not work with --mlp swiglu; leave it out"),
        ("MovieGen-Ti/2", {"norm": "layer"}, True, "none", "--fp8: does not work with --norm layer"),
    ],
)
def test_what_a_mix_can_not_do(name, parts, fp8, recompute, message):
    config = model_config(name, input_size=(8, 8), in_channels=2, num_classes=3, **parts)
    with pytest.raises(ValueError, match=message):
        config.check_speed(fp8, recompute)


def test_mixes_that_there_are_not():
    shape = dict(input_size=(8, 8), in_channels=2, num_classes=3)
    for name, parts, message in (
        ("DiT-S/2", {"norm": "batch"}, "--norm batch: no such norm; choose layer or rms"),
        ("DiT-S/2", {"mlp": "relu"}, "--mlp relu: no such mlp; choose gelu or swiglu"),
        ("EC-DiT-Ti/2", {"mlp": "swiglu"}, "--mlp swiglu: not for EC-DiT"),
    ):
        with pytest.raises(ValueError, match=message):
            model_config(name, **shape, **parts)
