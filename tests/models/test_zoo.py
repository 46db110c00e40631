"""Test the zoo: FLOPs against torch's counter, and properties shared by all architectures."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from opendit.kernels.recompute import recomputing
from opendit.models.attention import TokenGrid
from opendit.models.conditioning import TextCondition, TextConfig, encode_bytes
from opendit.models.dit import DiTConfig
from opendit.models.layers import TORCH_OPS
from opendit.models.variants import ECDiTConfig, MovieGenConfig, STDiTConfig, VDiTConfig
from opendit.models.zoo import build_model, config_from_dict
from tests.models.test_dit import randomised

TEXT = TextConfig("t5", 24, 7, True)
PICTURE = {"input_size": (8, 6), "patch_size": 2, "in_channels": 3, "hidden_size": 48, "depth": 2, "num_heads": 4}
CLIP = PICTURE | {"input_size": (4, 8, 6), "patch_size": (2, 2, 3)}
EXPERTS = {"experts": 5, "expert_hidden": 10, "mlp_ratio": 2.0}
OPTIONS = {"qk_norm": True, "adaln_lora": 6, "positions": "rope"}
CONFIGS = [
    DiTConfig(**PICTURE, num_classes=5, **OPTIONS),
    DiTConfig(**PICTURE, text=TEXT, positions="learned", bias=False),
    VDiTConfig(**CLIP, num_classes=5, positions="learned"),
    VDiTConfig(**CLIP, text=TEXT, bias=False, **OPTIONS),
    STDiTConfig(**CLIP, num_classes=5),
    STDiTConfig(**CLIP, text=TEXT, full_attention=True, **OPTIONS),
    STDiTConfig(**CLIP | {"input_size": (1, 8, 6)}, text=TEXT, adaln_lora=3, bias=False),
    MovieGenConfig(**CLIP, num_classes=5, kv_heads=2, mlp_ratio=8 / 3),
    MovieGenConfig(**CLIP, text=TEXT),
    MovieGenConfig(**PICTURE, text=TextConfig("bytes", 32, 7, True), kv_heads=1, bias=True, **OPTIONS),
    ECDiTConfig(**PICTURE, num_classes=5, **EXPERTS),
    ECDiTConfig(**CLIP, text=TEXT, expert_capacity=1.3, bias=False, **EXPERTS, **OPTIONS),
    DiTConfig(**PICTURE, text=TEXT, norm="rms", mlp="swiglu", mlp_ratio=8 / 3, patch_bottleneck=7, **OPTIONS),
    STDiTConfig(**CLIP, text=TEXT, full_attention=True, norm="rms", mlp="swiglu"),
    MovieGenConfig(**CLIP, text=TEXT, norm="layer", mlp="gelu"),
    ECDiTConfig(**PICTURE, num_classes=5, norm="rms", **EXPERTS),
]
NAMED = [f"{config.kind}{i}" for i, config in enumerate(CONFIGS)]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=NAMED)


def inputs(config: DiTConfig, batch: int = 3, dtype: torch.dtype = torch.float64) -> tuple:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, config.in_channels, *config.input_size, generator=generator, dtype=dtype)
    t = torch.arange(batch) * 300 + 5
    if config.text is None:
        return x, t, torch.arange(batch) % (config.num_classes + 1)
    if config.text.inside:
        return x, t, encode_bytes(["seven", "", "a b"][:batch], config.text.max_tokens)
    tokens = torch.randn(batch, config.text.max_tokens, config.text.width, generator=generator, dtype=dtype)
    mask = torch.arange(config.text.max_tokens) <= torch.arange(batch)[:, None] * 2
    return x, t, TextCondition(tokens, mask, tokens.mean(1))


def model_of(config: DiTConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return randomised(build_model(config)).double()


# ------------------------------------------------------------------------------------------------- shared properties


@every_config
def test_counts_are_those_of_torch(config):
    model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters()
    # Use plain operations, because torch does not count its fused attention on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(*inputs(config, 1, torch.float32))
    assert counter.get_total_flops() == config.forward_flops()


@every_config
def test_every_parameter_learns(config):
    model = model_of(config)
    model(*inputs(config)).square().mean().backward()
    one_frame = config.input_size[0] == 1  # with one key along time, queries have no gradient
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 0 or one_frame and "temporal_attn" in name, name


@every_config
def test_a_fresh_model_predicts_nothing_and_learns(config):
    """The output is zero at first, but after a few steps every weight has changed."""
    torch.manual_seed(0)
    model = build_model(config).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, t, y = inputs(config)
    assert not model(x, t, y).any()
    for _ in range(4):
        optimizer.zero_grad()
        (model(x, t, y) - 1).square().mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        # Table rows that the batch does not use stay unchanged.
        assert not torch.equal(parameter, before[name]) or "temporal_attn" in name, name


@every_config
def test_blocks_of_a_fresh_model_do_nothing(config):
    model, (_, t, y) = build_model(config).double(), inputs(config)
    c, context = model.condition(t, y)
    shared = None if model.shared_modulation is None else model.shared_modulation(c)
    grid = TokenGrid(config.grid, model.rotations(config.grid))
    x = torch.randn(3, config.tokens, config.hidden_size, dtype=torch.float64)
    for block in model.blocks:
        assert torch.equal(block(x, block.modulate(c, shared), context, grid), x)


@every_config
def test_a_sample_does_not_depend_on_the_others(config):
    model, (x, t, y) = model_of(config), inputs(config)
    whole = model(x, t, y)
    for row in range(3):
        torch.testing.assert_close(model(x[row : row + 1], t[row : row + 1], y[row : row + 1]), whole[row : row + 1])


@every_config
def test_places_are_told_apart(config):
    """Moving a picture does not just move the prediction."""
    model, (x, t, y) = model_of(config), inputs(config)
    step = config.patch[-1]
    moved = model(x.roll(step, -1), t, y).roll(-step, -1)
    assert (moved - model(x, t, y)).abs().max() > 1e-3


COMPILED = (0, 3, 5, 7, 11, 12)  # every kind of block, input, norm and MLP


@every_config
def test_recomputed_and_compiled_blocks_change_nothing(config):
    model, arguments, grads = model_of(config), inputs(config), []
    for way in ("plain", "checkpointed", "compiled")[: 3 if CONFIGS.index(config) in COMPILED else 2]:
        model.grad_checkpoint = way == "checkpointed"
        if way == "compiled":
            # torch limits how often a function is recompiled, and all kinds of blocks share one function
            torch.compiler.reset()
            model.compile_blocks(backend="aot_eager", fullgraph=True)
        model.zero_grad()
        model(*arguments).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads[:2], strict=True))
    for name, a, b in zip(dict(model.named_parameters()), grads[0], grads[-1], strict=True):
        torch.testing.assert_close(b, a, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.recomputable], ids=lambda config: config.kind)
@pytest.mark.parametrize("level", ["cheap", "mlp"])
def test_recomputed_parts_change_nothing(config, level):
    model, arguments, grads = model_of(config), inputs(config), []
    for ops in (TORCH_OPS, recomputing(TORCH_OPS, level)):
        model.use(ops=ops).zero_grad()
        model(*arguments).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@every_config
def test_half_precision_follows(config):
    model, (x, t, y) = model_of(config).float(), inputs(config, dtype=torch.float32)
    expected = model(x, t, y)
    output = model.place("cpu", torch.bfloat16)(x, t, y)
    assert output.dtype == torch.bfloat16
    # A token whose affinity is nearly equal to another's may be replaced by that one.
    assert (output - expected).norm() / expected.norm() < (0.2 if config.kind == "ecdit" else 0.06)


@every_config
def test_configurations_travel_through_json(config):
    found = config_from_dict(json.loads(json.dumps(config.to_dict())))
    assert found == config and type(found) is type(config) and hash(found) == hash(config)


def test_configurations_from_before_there_were_options():
    old = {key: value for key, value in DiTConfig(**PICTURE, num_classes=5).to_dict().items() if key in (
        "kind", "input_size", "patch_size", "in_channels", "hidden_size", "depth", "num_heads", "num_classes",
        "mlp_ratio", "learn_sigma", "text",
    )}  # fmt: skip
    assert config_from_dict(old) == DiTConfig(**PICTURE, num_classes=5)


def gradients(model: torch.nn.Module, output: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad((output * cotangent).sum(), parameters.values()), strict=True))


@pytest.mark.parametrize("text", [None, TEXT])
@pytest.mark.parametrize("kind,shape", [(DiTConfig, PICTURE), (STDiTConfig, CLIP), (MovieGenConfig, CLIP)])
def test_adaln_lora_adds_a_product_to_a_modulation_that_all_blocks_share(kind, shape, text):
    """m_i = (M + B_i A_i) SiLU(c) + b, compared with a full modulation in every block. All blocks share M and b."""
    condition = {"text": text} if text else {"num_classes": 5}
    low, full = (model_of(kind(**shape, **condition, adaln_lora=rank)) for rank in (6, None))
    state = low.state_dict()
    shared = state.pop("shared_modulation.1.weight")
    bias = state.pop("shared_modulation.1.bias", None)
    for block in ("blocks.0.adaLN_modulation", "blocks.1.adaLN_modulation"):
        state[f"{block}.1.weight"] = shared + state.pop(f"{block}.2.weight") @ state[f"{block}.1.weight"]
        if bias is not None:
            state[f"{block}.1.bias"] = bias
    full.load_state_dict(state, strict=True)
    low_out, full_out = low(*inputs(low.config)), full(*inputs(low.config))
    torch.testing.assert_close(full_out, low_out)
    cotangent = torch.randn_like(full_out)
    ours, grads = (gradients(model, out, cotangent) for model, out in ((low, low_out), (full, full_out)))
    of_blocks = [grads[f"blocks.{i}.adaLN_modulation.1.weight"] for i in range(2)]
    torch.testing.assert_close(ours["shared_modulation.1.weight"], sum(of_blocks))
    second = low.get_parameter("blocks.1.adaLN_modulation.2.weight")
    torch.testing.assert_close(ours["blocks.1.adaLN_modulation.1.weight"], second.T @ of_blocks[1])
    vectors = {"dit": 6, "stdit": 9 + 3 * bool(text), "moviegen": 6}[kind.kind]
    bias_too = kind is not MovieGenConfig
    saved = full.config.parameters() - low.config.parameters()
    assert saved == (2 - 1) * 48 * vectors * (48 + bias_too) - 2 * 6 * 48 * (1 + vectors)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.adaln_lora], ids=lambda config: config.kind)
def test_the_shared_modulation_is_made_once_a_forward_pass(config):
    model, calls = build_model(config), []
    model.shared_modulation.register_forward_hook(lambda *_: calls.append(1))
    for checkpointed in (False, True):
        model.grad_checkpoint = checkpointed
        model(*inputs(config, dtype=torch.float32)).sum().backward()
    assert len(calls) == 2


def test_a_modulation_of_low_rank_alone_is_revision_1():
    shape = dict(PICTURE, num_classes=5)
    first, second = (build_model(DiTConfig(**shape, adaln_lora=6, revision=r)) for r in (1, 2))
    assert first.shared_modulation is None and first.blocks[0].adaLN_modulation[-1].bias is not None
    assert second.blocks[0].adaLN_modulation[-1].bias is None
    extra = 48 * 6 * 49 - 2 * 48 * 6
    assert second.config.parameters() - first.config.parameters() == extra
    assert second.config.forward_flops() - first.config.forward_flops() == 2 * 48 * 6 * 48


def test_learned_positions_are_for_the_configured_size_and_smaller():
    model = model_of(MovieGenConfig(**CLIP, num_classes=5))
    x, t, y = inputs(model.config)
    whole = model.positions((2, 4, 2))
    assert torch.equal(model.positions((1, 4, 2)), whole[:, :8])
    assert model(x[:, :, :2, :4], t, y).shape == (3, 6, 2, 4, 6)
    with pytest.raises(ValueError, match="2 x 4 x 3 patches, but positions for 2 x 4 x 2"):
        model(torch.randn(3, 3, 4, 8, 9).double(), t, y)


def test_rotary_positions_of_another_size():
    model = model_of(DiTConfig(**PICTURE, num_classes=5, positions="rope"))
    _, t, y = inputs(model.config)
    assert model(torch.randn(3, 3, 12, 4).double(), t, y).shape == (3, 6, 12, 4)
    assert not dict(model.named_buffers())
