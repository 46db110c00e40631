"""The zoo: sizes by closed formulas, work by torch's counter, and what all architectures have in common."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from opendit.kernels.recompute import recomputing
from opendit.models import (
    NAMES,
    VIDEO_NAMES,
    DiTConfig,
    ECDiTConfig,
    MovieGenConfig,
    STDiTConfig,
    TextCondition,
    TextConfig,
    VDiTConfig,
    build_model,
    canonical_name,
    config_from_dict,
    encode_bytes,
    is_video,
    model_config,
)
from opendit.models.attention import Attention, TokenGrid
from opendit.models.layers import TORCH_OPS
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


# ------------------------------------------------------------------------------------------- what all have in common


@every_config
def test_counts_are_those_of_torch(config):
    model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters()
    # In plain operations, because torch does not count its fused attention on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(*inputs(config, 1, torch.float32))
    assert counter.get_total_flops() == config.forward_flops()


@every_config
def test_every_parameter_learns(config):
    model = model_of(config)
    model(*inputs(config)).square().mean().backward()
    one_frame = config.input_size[0] == 1  # along time there is one key: queries have no gradient
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 0 or one_frame and "temporal_attn" in name, name


@every_config
def test_a_fresh_model_predicts_nothing_and_learns(config):
    """Zero gates at first, but none behind another: after two steps every weight has moved."""
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
        # (A row of a table that this batch did not look up stays.)
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
    """A picture that is moved does not give the moved prediction."""
    model, (x, t, y) = model_of(config), inputs(config)
    step = config.patch[-1]
    moved = model(x.roll(step, -1), t, y).roll(-step, -1)
    assert (moved - model(x, t, y)).abs().max() > 1e-3


@every_config
def test_recomputed_and_compiled_blocks_change_nothing(config):
    model, arguments, grads = model_of(config), inputs(config), []
    for way in ("plain", "checkpointed", "compiled"):
        model.grad_checkpoint = way == "checkpointed"
        if way == "compiled":
            torch.compiler.reset()  # torch compiles a function, here that of all kinds of blocks, only so many times
            model.compile_blocks(backend="aot_eager", fullgraph=True)
        model.zero_grad()
        model(*arguments).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads[:2], strict=True))
    for name, a, b in zip(dict(model.named_parameters()), grads[0], grads[2], strict=True):
        torch.testing.assert_close(b, a, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.can_recompute], ids=lambda config: config.kind)
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
    # A token whose affinity to an expert is nearly another's may lose its place to that one.
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
    """m_i = (M + B_i A_i) SiLU(c) + b, as a full modulation of every block; M and b are the same in all of them."""
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


# ------------------------------------------------------------------------------------------------------ names and sizes


def build(name: str, **options):
    clips = is_video(name)
    return model_config(name, input_size=(32, 32), in_channels=4, frames=16 if clips else None, **options)


@pytest.mark.parametrize("name", [*NAMES, *VIDEO_NAMES])
@pytest.mark.parametrize("condition", [{"num_classes": 1000}, {"text": TextConfig("t5", 4096, 120, True)}])
def test_every_model_has_the_parameters_it_says(name, condition):
    config = build(name, **condition)
    with torch.device("meta"):
        model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters()
    assert canonical_name(name) == name


def attention(d, kv=None):
    return 2 * d * d + 2 * d * (kv or d)


# Weights of matrices alone, in closed form: NeMo's sizes, class-conditional; per block, modulation included.
PUBLISHED = {
    "DiT-7B/2": (32, attention(3072) + 8 * 3072**2 + 6 * 3072**2),
    "DiT-28B/2": (32, attention(6144) + 8 * 6144**2 + 6 * 6144**2),
    "MovieGen-1B/122": (16, attention(2048, 512) + 3 * 2048 * 8192 + 6 * 2048**2),  # 8 of 32 heads
    "MovieGen-3B/122": (28, attention(3072, 1024) + 3 * 3072 * 8192 + 6 * 3072**2),  # 8 of 24
    "MovieGen-5B/122": (32, attention(3072, 1024) + 3 * 3072 * 8192 + 6 * 3072**2),
    "MovieGen-30B/122": (48, attention(6144, 1024) + 3 * 6144 * 16384 + 6 * 6144**2),
    "ST-DiT-XL/122": (28, 2 * attention(1152) + 8 * 1152**2 + 9 * 1152**2),
    "ST-DiT-B/122": (12, 2 * attention(768) + 8 * 768**2 + 9 * 768**2),
    "EC-DiT-1B/2": (28, attention(1152) + 7.5 * 1152**2 + 6 * 1152**2 + 64 * (2 * 1152 * 144 + 1152)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_in_closed_form(name):
    depth, block = PUBLISHED[name]
    config = build(name, num_classes=1000)
    assert config.depth == depth
    with torch.device("meta"):
        blocks = build_model(config).blocks
    assert sum(p.numel() for p in blocks.parameters() if p.dim() > 1) == depth * block


# Width, depth, heads, heads of keys and values, width of the MLP: DiT's of Peebles & Xie, table 1; 7B, 28B and MovieGen
# NeMo's; EC-DiT, ST-DiT and Ti our own.
SHAPES = {
    "DiT-Ti/2": (128, 4, 4, 4, 512), "DiT-S/2": (384, 12, 6, 6, 1536), "DiT-B/4": (768, 12, 12, 12, 3072),
    "DiT-L/2": (1024, 24, 16, 16, 4096), "DiT-XL/2": (1152, 28, 16, 16, 4608), "vDiT-XL/222": (1152, 28, 16, 16, 4608),
    "DiT-7B/2": (3072, 32, 24, 24, 12288), "DiT-28B/2": (6144, 32, 48, 48, 24576), "vDiT-Ti/122": (128, 4, 4, 4, 512),
    "vDiT-7B/122": (3072, 32, 24, 24, 12288), "vDiT-28B/122": (6144, 32, 48, 48, 24576),
    "ST-DiT-Ti/122": (128, 4, 4, 4, 512), "ST-DiT-B/122": (768, 12, 12, 12, 3072),
    "ST-DiT-XL/122": (1152, 28, 16, 16, 4608), "EC-DiT-Ti/2": (128, 4, 4, 4, 384),
    "EC-DiT-1B/2": (1152, 28, 16, 16, 4320), "MovieGen-Ti/122": (128, 4, 4, 2, 341),
    "MovieGen-1B/122": (2048, 16, 32, 8, 8192), "MovieGen-3B/122": (3072, 28, 24, 8, 8192),
    "MovieGen-5B/122": (3072, 32, 24, 8, 8192), "MovieGen-30B/122": (6144, 48, 48, 8, 16384),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_the_published_ones(name):
    config = build(name, num_classes=3)
    with torch.device("meta"):
        block = build_model(config).blocks[0]
    attention = next(part for part in block.modules() if isinstance(part, Attention))
    mlp = block.mlp.fc2.in_features
    made = (attention.proj.out_features, config.depth, attention.num_heads, attention.kv_heads, mlp)
    assert made == SHAPES[name]
    assert attention.qkv.out_features == made[0] + 2 * made[3] * made[0] // made[2]
    assert (config.hidden_size, config.depth, config.num_heads, config.mlp_hidden) == (*made[:3], made[4])


def test_every_size_is_pinned():
    assert {name.partition("/")[0] for name in (*NAMES, *VIDEO_NAMES)} - {f"vDiT-{s}" for s in "SBL"} == {
        name.partition("/")[0] for name in SHAPES
    }
    for size in "SBL":
        clip, picture = build(f"vDiT-{size}/222", num_classes=3), build(f"DiT-{size}/2", num_classes=3)
        assert (clip.hidden_size, clip.depth, clip.num_heads) == (
            picture.hidden_size,
            picture.depth,
            picture.num_heads,
        )
    experts = build("EC-DiT-1B/2", num_classes=3)
    assert (experts.experts, experts.expert_hidden, experts.expert_capacity) == (64, 144, 2.0)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("MovieGen")])
def test_all_of_moviegen_in_closed_form(name):
    """Weights and work of a class-conditional model of 16 x 32 x 32 latents of 4 channels: 16 x 16 x 16 tokens."""
    d, depth, heads, kv, hidden = SHAPES[name]
    shared, n = kv * d // heads, 16**3
    block = 2 * d * d + 2 * d * shared + 3 * d * hidden + 6 * d * d
    embedders = (16 * d + d) + (256 * d + d + d * d + d) + 1001 * d + 3 * 16 * d
    final = (2 * d * d + 2 * d) + (32 * d + 32)
    config = build(name, num_classes=1000)
    assert config.parameters() == depth * (block + 2 * d) + embedders + final
    products = 2 * n * (2 * d * d + 2 * d * shared + 3 * d * hidden) + 4 * n * n * d + 2 * 6 * d * d
    around = 2 * n * 16 * d + 2 * (256 * d + d * d) + 2 * n * 32 * d + 2 * 2 * d * d
    assert config.forward_flops() == depth * products + around


@pytest.mark.parametrize("rank", [64, 256])
def test_adaln_lora_in_closed_form(rank):
    d = 1152
    full, low = (build("DiT-XL/2", num_classes=1000, adaln_lora=r).parameters() for r in (None, rank))
    of_blocks = 28 * 6 * d * (d + 1)  # with biases
    assert full - low == of_blocks - (6 * d * (d + 1) + 28 * rank * 7 * d)


def test_revision_1_of_named_models():
    """As they were: heads of their own for every head of queries, but in 30B and Ti."""
    for name, kv in (("MovieGen-1B/122", None), ("MovieGen-5B/122", None), ("MovieGen-30B/122", 8)):
        config = build(name, num_classes=3, revision=1)
        assert (config.revision, config.kv_heads, config.positions_in_blocks) == (1, kv, False)
        assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert build("DiT-S/2", num_classes=3, revision=1) == build("DiT-S/2", num_classes=3)  # no difference
    low = build("DiT-S/2", num_classes=3, revision=1, adaln_lora=8)
    assert low.revision == 1 and not low.shared_modulation and config_from_dict(low.to_dict()) == low
    for revision in (0, 3):
        with pytest.raises(ValueError, match=f"of revision {revision}: this version knows 1 to 2; use a newer"):
            config_from_dict(low.to_dict() | {"revision": revision})


def test_experts_cost_what_a_dense_mlp_does():
    dense, sparse = build("DiT-XL/2", num_classes=1000), build("EC-DiT-1B/2", num_classes=1000)
    assert 1 < sparse.forward_flops() / dense.forward_flops() < 1.01  # the router
    assert sparse.parameters() > 1.2e9


@pytest.mark.parametrize(
    "name,hint",
    [
        ("ECDiT-1B/2", "EC-DiT-1B/2"),
        ("EC-DiT-1B/3", "EC-DiT-1B/2"),
        ("STDiT-XL/222", "ST-DiT-XL/222"),
        ("ST-DiT-XL/2", "ST-DiT-XL/222"),
        ("MovieGen-7B/122", "MovieGen-"),
        ("moviegen-5B/122", "MovieGen-5B/122"),
        ("DiT-28/2", "DiT-28B/2"),
        ("vDiT-7b/222", "vDiT-7B/222"),
        ("dit-xl/2", "DiT-XL/2"),
        ("VDIT-XL/122", "vDiT-XL/122"),
        ("st-dit-ti/222", "ST-DiT-Ti/222"),
    ],
)
def test_names_that_do_not_exist(name, hint):
    with pytest.raises(ValueError, match=f"--model {name}: no such model; did you mean {hint}"):
        canonical_name(name)


def test_kinds_of_pictures_and_clips():
    assert not is_video("MovieGen-Ti/2") and is_video("MovieGen-5B/1x2x2") and is_video("EC-DiT-Ti/222")
    assert canonical_name("ST-DiT-XL/1x2x2") == "ST-DiT-XL/122"
    with pytest.raises(ValueError, match="for clips use EC-DiT-1B/122"):
        model_config("EC-DiT-1B/2", input_size=(8, 8), frames=4, in_channels=4, num_classes=3)
    with pytest.raises(ValueError, match="for pictures use DiT-XL/2"):
        model_config("ST-DiT-XL/122", input_size=(8, 8), in_channels=4, num_classes=3)


def test_captions_are_attended_to_where_the_architecture_does():
    text = TextConfig("t5", 8, 4)
    assert not build("DiT-S/2", text=text).cross_attention and not build("EC-DiT-Ti/2", text=text).cross_attention
    assert build("ST-DiT-Ti/222", text=text).cross_attention and build("MovieGen-Ti/122", text=text).cross_attention


def test_options_by_name():
    config = build("MovieGen-30B/122", num_classes=3, bias=None, positions=None, qk_norm=True)
    assert (config.kv_heads, config.mlp_hidden, config.bias, config.positions, config.qk_norm) == (
        8, 16384, False, "learned", True,
    )  # fmt: skip
    assert build("EC-DiT-1B/2", num_classes=3, expert_capacity=4.0).expert_capacity == 4
    for name, options, message in (
        ("DiT-S/2", {"full_attention": True}, "--full_attention is not for --model DiT-S/2; it is for ST-DiT"),
        ("ST-DiT-B/122", {"expert_capacity": 2.0}, "--expert_capacity is not for .* it is for EC-DiT"),
        ("DiT-S/2", {"adaln_lora": 384}, "--adaln_lora 384: a rank from 1 to below the width, 384"),
        ("DiT-S/2", {"positions": "alibi"}, "--positions alibi: choose one of sincos, learned, rope"),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, num_classes=3, **options)


def test_what_can_not_be_combined():
    sequence = {
        ("EC-DiT-Ti/2", "ulysses"): {},
        ("ST-DiT-Ti/222", "ring"): {},
        ("DiT-S/2", "ring"): {"qk_norm": True},
        ("DiT-B/2", "usp"): {"positions": "rope"},
    }
    for (name, kind), options in sequence.items():
        config = build(name, num_classes=3, **options)
        with pytest.raises(ValueError, match="--sequence_parallel_"):
            config.check_sequence_parallel(kind)
        assert config.sequence_types == (("fastseq", "ulysses") if options else ())
        if not options:  # so that auto has nothing to choose from
            with pytest.raises(ValueError, match="--sequence_parallel_size: "):
                config.check_sequence_parallel("auto")
    for kind in ("fastseq", "ulysses"):
        build("DiT-S/2", num_classes=3, qk_norm=True, positions="rope", bias=False).check_sequence_parallel(kind)
    for kind in ("fastseq", "ulysses", "ring", "usp"):
        build("MovieGen-5B/122", num_classes=3).check_sequence_parallel(kind)
    for name, options in (("EC-DiT-Ti/2", {}), ("MovieGen-Ti/2", {}), ("DiT-S/2", {"bias": False})):
        with pytest.raises(ValueError, match="--fp8 does not work with"):
            build(name, num_classes=3, **options).check_speed(True, "none")
    for name, options in (("MovieGen-Ti/2", {}), ("DiT-S/2", {"bias": False})):
        with pytest.raises(ValueError, match="--recompute cheap does not work with .* use --grad_checkpoint"):
            build(name, num_classes=3, **options).check_speed(False, "cheap")
    build("ST-DiT-Ti/222", num_classes=3, qk_norm=True).check_speed(True, "none")
