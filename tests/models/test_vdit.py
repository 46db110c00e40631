"""Test vDiT against an independent implementation; also pictures as clips of one frame, sizes, names and counts."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.plain_dit import Block, PlainVDiT, modulate
from opendit.checkpoint.foreign import infer_config
from opendit.config.architectures import SIZES, canonical_name, is_video, patch_size
from opendit.models.conditioning import TextCondition, TextConfig, encode_bytes
from opendit.models.dit import DiTConfig
from opendit.models.variants import VDiT, VDiTConfig
from opendit.models.zoo import build_model, config_from_dict, model_config
from tests.models.test_dit import randomised


class CrossBlock(Block):
    """timm's block with torch's multi-head attention to the text in the middle."""

    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.norm_cross = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.cross = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x, c, tokens, mask):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_a, scale_a))
        x = x + self.cross(self.norm_cross(x), tokens, tokens, key_padding_mask=~mask)[0]
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class PlainTextVDiT(PlainVDiT):
    """The plain vDiT, which takes (tokens, mask, pooled) as y if the configuration has a text."""

    def __init__(self, config):
        text, dim = config.text, config.hidden_size
        cross = bool(text and text.cross_attention)
        super().__init__(
            config.input_size,
            config.patch_size,
            config.in_channels,
            dim,
            config.depth,
            config.num_heads,
            config.num_classes,
            CrossBlock if cross else Block,
        )
        self.caption = self.words = None
        if text:
            self.caption = nn.Sequential(nn.Linear(text.width, dim), nn.SiLU(), nn.Linear(dim, dim))
            self.words = nn.Linear(text.width, dim) if cross else None
            self.norm = nn.LayerNorm(text.width, elementwise_affine=False, eps=1e-6)

    def condition(self, t, y):
        if self.caption is None:
            return super().condition(t, y)
        tokens, mask, pooled = y
        c = self.t_embedder(t) + self.caption(self.norm(pooled))
        return c, () if self.words is None else (self.words(self.norm(tokens)), mask)


def to_plain(named: dict) -> dict:
    """Return our weights or gradients by the plain model's names, with its shapes."""
    plain = {}
    for name, tensor in named.items():
        name = name.replace("x_embedder.proj", "embed")
        name = name.replace("y_embedder.mlp", "caption").replace("y_embedder.tokens", "words")
        if name.startswith("embed."):
            tensor = tensor.flatten(1) if tensor.dim() > 1 else tensor
        if ".cross_attn.q." in name:  # torch keeps q, k and v in one matrix
            tensor = torch.cat([tensor, named[name.replace(".q.", ".kv.")]])
            name = name.replace("cross_attn.q.", "cross.in_proj_")
        elif ".cross_attn.kv." in name:
            continue
        plain[name.replace("cross_attn.proj", "cross.out_proj")] = tensor
    return plain


def text_batch(batch, length, width, lengths, seed=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(batch, length, width, generator=generator, dtype=dtype) * 3 + 1
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    return tokens, mask, torch.randn(batch, width, generator=generator, dtype=dtype)


def compare(config: DiTConfig, x, t, y, plain_y) -> None:
    """Compare the output and all gradients in float64."""
    ours, plain = randomised(build_model(config)).double(), PlainTextVDiT(config).double()
    plain.load_state_dict(to_plain(dict(ours.named_parameters())), strict=True)
    a, b = ours(x, t, y), plain(x, t, plain_y)
    weights = torch.randn(a.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (a * weights).sum().backward()
    (b * weights).sum().backward()
    assert a.shape == (len(x), config.out_channels, *x.shape[2:])
    assert (a - b).norm() / b.norm() < 1e-9 and b.std() > 0.05
    grads_a = to_plain({n: p.grad for n, p in ours.named_parameters()})
    grads_b = {n: p.grad for n, p in plain.named_parameters()}
    assert grads_a.keys() == grads_b.keys()
    for name, expected in grads_b.items():
        scale = expected.norm()
        if name.endswith(("qkv.bias", "in_proj_bias")):  # the part for the keys is only rounding error
            assert torch.allclose(grads_a[name], expected, atol=1e-9 * scale.item())
        else:
            assert scale > 0, name
            assert (grads_a[name] - expected).norm() / scale < 1e-9, name


@pytest.mark.parametrize(
    "size,patch,channels,hidden,heads",
    [
        ((4, 8, 8), (2, 2, 2), 4, 48, 4),
        ((3, 6, 10), (1, 2, 2), 3, 36, 3),
        ((6, 4, 9), (3, 2, 3), 1, 24, 1),
        ((2, 4, 4), (2, 4, 1), 2, 32, 2),  # the grid has length one along two axes
        ((1, 4, 4), (1, 2, 2), 2, 32, 2),
    ],
)
def test_output_and_every_gradient_equal_the_independent_model(size, patch, channels, hidden, heads):
    config = VDiTConfig(size, patch, channels, hidden, 2, heads, num_classes=7)
    x = torch.randn(5, channels, *size, dtype=torch.float64)
    y = torch.tensor([0, 7, 2, 6, 1])
    compare(config, x, torch.tensor([0, 3, 500, 998, 999]), y, y)


@pytest.mark.parametrize("cross", [False, True])
def test_text_model_equals_the_independent_model(cross):
    config = VDiTConfig((4, 4, 6), (2, 2, 2), 3, 24, 2, 2, text=TextConfig("t5", 20, 9, cross))
    y = text_batch(3, 9, 20, (1, 4, 9))
    x = torch.randn(3, 3, 4, 4, 6, dtype=torch.float64)
    compare(config, x, torch.tensor([0, 3, 500]), TextCondition(*y), y)


# ---------------------------------------------------------------- sizes at call time


def test_any_size_that_divides_and_positions_that_start_at_zero():
    config = VDiTConfig((4, 8, 8), (2, 2, 2), 2, 32, 2, 2, num_classes=3)
    model = randomised(VDiT(config))  # one model for all sizes, so its tables must not be mixed up
    y, t = torch.tensor([1, 2]), torch.tensor([10, 20])
    for size in ((2, 8, 8), (2, 6, 8), (8, 4, 8), (4, 2, 14), (6, 10, 6)):
        other = VDiTConfig(size, (2, 2, 2), 2, 32, 2, 2, num_classes=3)
        native = VDiT(other)
        native.load_state_dict({**dict(model.named_parameters()), **dict(native.named_buffers())})
        x = torch.randn(2, 2, *size)
        assert torch.equal(model(x, t, y), native(x, t, y))
        assert torch.equal(model(x, t, y), native(x, t, y))  # from the cache
        assert model.state_dict().keys() == native.state_dict().keys()
    for size, what in (((3, 8, 8), "3 x 8 x 8"), ((4, 7, 8), "4 x 7 x 8"), ((4, 8, 5), "4 x 8 x 5")):
        with pytest.raises(ValueError, match=f"{what} does not divide by patch size 2 x 2 x 2"):
            model(torch.randn(1, 2, *size), t[:1], y[:1])


def test_tables_made_while_sampling_serve_training():
    model = randomised(VDiT(VDiTConfig((4, 4, 4), (2, 2, 2), 2, 32, 1, 2, num_classes=3)))
    x, t, y = torch.randn(1, 2, 2, 8, 4), torch.tensor([3]), torch.tensor([0])
    with torch.inference_mode():
        model(x, t, y)
    model(x, t, y).sum().backward()


def test_positions_tell_frames_rows_and_columns_apart():
    model = VDiT(VDiTConfig((3, 4, 5), (1, 1, 1), 1, 16, 1, 2, num_classes=3))
    table = model.positions((3, 4, 5))
    assert table.shape == (1, 60, 16) and len(torch.unique(table[0], dim=0)) == 60
    assert torch.equal(model.positions((2, 4, 5))[0], table[0, :40])


def test_frames_talk_to_each_other_and_to_no_other_sample():
    model = randomised(VDiT(VDiTConfig((4, 4, 4), (2, 2, 2), 2, 32, 2, 2, num_classes=3)))
    x, t, y = torch.randn(2, 2, 4, 4, 4), torch.tensor([3, 700]), torch.tensor([0, 1])
    base = model(x, t, y)
    x[0, :, 3, 3, 3] += 1
    moved = model(x, t, y)
    assert (moved[0, :, 0, 0, 0] != base[0, :, 0, 0, 0]).all() and torch.equal(moved[1], base[1])


# ---------------------------------------------------------------- pictures


def test_a_picture_is_a_repeated_frame_counted_once():
    config = VDiTConfig((6, 4, 4), (3, 2, 2), 2, 32, 2, 2, num_classes=3)
    model = randomised(VDiT(config)).double()
    x, t, y = torch.randn(2, 2, 1, 4, 4).double(), torch.tensor([3, 700]), torch.tensor([0, 1])
    clip = model(x.repeat(1, 1, 3, 1, 1), t, y)
    picture = model(x, t, y)
    assert picture.shape == (2, 4, 1, 4, 4) and clip.shape == (2, 4, 3, 4, 4)
    torch.testing.assert_close(picture, (clip[:, :, :1] + clip[:, :, 1:2] + clip[:, :, 2:]) / 3)
    assert (clip[:, :, 0] - clip[:, :, 1]).abs().max() > 0.01  # the mean is over different frames
    picture.square().sum().backward()
    per_frame = model.final_layer.linear.weight.grad.view(3, -1).norm(dim=1)
    assert (per_frame > 0).all()
    alone = VDiT(VDiTConfig((1, 4, 4), (3, 2, 2), 2, 32, 2, 2, num_classes=3))
    assert alone.config.grid == (1, 2, 2) and alone.config.tokens == 4
    assert alone.double()(x, t, y).shape == picture.shape


def test_a_picture_of_a_model_without_temporal_patches_is_a_clip():
    model = randomised(VDiT(VDiTConfig((2, 4, 4), (1, 2, 2), 2, 32, 1, 2, num_classes=3)))
    x, t, y = torch.randn(2, 2, 1, 4, 4), torch.tensor([3, 700]), torch.tensor([0, 1])
    assert model(x, t, y).shape == (2, 4, 1, 4, 4)


# ---------------------------------------------------------------- precision, recomputation, injected parts


@pytest.mark.parametrize("cross", [False, True])
def test_recomputation_changes_nothing(cross):
    text = TextConfig("bytes", 32, 12, cross)
    config = VDiTConfig((4, 4, 4), (2, 2, 2), 2, 32, 3, 2, text=text)
    model = randomised(build_model(config))
    x, t, y = torch.randn(3, 2, 4, 4, 4), torch.tensor([1, 20, 300]), encode_bytes(["", "a b", "seven"], 12)
    grads = []
    for model.grad_checkpoint in (False, True):
        model.zero_grad()
        model(x, t, y).square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    assert all(grad.any() for grad in grads[0].values())


def test_half_precision_weights_keep_their_positions():
    config = VDiTConfig((4, 8, 8), (2, 2, 2), 2, 32, 2, 2, text=TextConfig("bytes", 32, 12, True))
    model = randomised(build_model(config))
    x, t, y = torch.randn(2, 2, 4, 8, 8), torch.tensor([1, 999]), encode_bytes(["a", "seven"], 12)
    expected, tables = model(x, t, y), dict(model.named_buffers())
    assert model.place("cpu", torch.bfloat16) is model
    for name, table in model.named_buffers():
        assert table.dtype == torch.float32 and torch.equal(table, tables[name]), name
    assert tables.keys() == {"pos_embed", "temporal_embed", "text_encoder.positions"}
    output = model(x, t, y)
    assert output.dtype == torch.bfloat16 and model(x[:, :, :1], t, y).dtype == torch.bfloat16
    assert (output - expected).norm() / expected.norm() < 0.05


def test_attention_is_injected():
    model = randomised(VDiT(VDiTConfig((4, 4, 4), (2, 2, 2), 2, 32, 2, 2, num_classes=3)))
    shapes = []

    def attend(q, k, v):
        shapes.append(tuple(q.shape))
        return nn.functional.scaled_dot_product_attention(q, k, v)

    x, t, y = torch.randn(3, 2, 4, 4, 4), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 3])
    expected = model(x, t, y)
    assert torch.equal(model.use(attend=attend)(x, t, y), expected)
    assert shapes == [(3, 2, 8, 16)] * 2


# ---------------------------------------------------------------- names, configurations, counts

sizes = st.sampled_from(sorted(SIZES))
sides = st.integers(1, 8)


@given(sizes, sides, sides, sides)
def test_names_are_read_either_way(size, t, h, w):
    short, long = f"vDiT-{size}/{t}{h}{w}", f"vDiT-{size}/{t}x{h}x{w}"
    assert patch_size(short) == patch_size(long) == (t, h, w)
    assert canonical_name(long) == canonical_name(short) == short
    assert is_video(short) and is_video(long) and not is_video(f"DiT-{size}/2")
    config = model_config(long, input_size=(h * 2, w), frames=t, in_channels=4, num_classes=10)
    assert config == model_config(short, input_size=(h * 2, w), frames=t, in_channels=4, num_classes=10)
    assert (config.patch_size, config.input_size, config.hidden_size) == ((t, h, w), (t, h * 2, w), SIZES[size][0])
    assert config.grid == (1, 2, 1)


@pytest.mark.parametrize(
    "name,hint",
    [
        ("vDiT-XL/2", "vDiT-XL/222"),
        ("vDiT-XXL/222", "vDiT-XL/222"),
        ("vdit-XL/222", "vDiT-XL/222"),
        ("vDiT-S/2x2", "vDiT-S/222"),
        ("vDiT-S/022", "vDiT-S/222"),
        ("vDiT-S/292", "vDiT-S/222"),
        ("DiT-S/222", "vDiT-S/222"),
        ("DiT-S/٢", "DiT-S/"),
    ],
)
def test_names_that_do_not_exist(name, hint):
    with pytest.raises(ValueError, match=f"--model {name}: no such model; did you mean {hint}"):
        canonical_name(name)


def test_what_a_configuration_needs():
    with pytest.raises(ValueError, match="takes clips"):
        model_config("vDiT-S/222", input_size=(8, 8), in_channels=4, num_classes=3)
    with pytest.raises(ValueError, match="takes pictures.*vDiT-S/122"):
        model_config("DiT-S/2", input_size=(8, 8), frames=4, in_channels=4, num_classes=3)
    with pytest.raises(ValueError, match="5 x 8 x 8 don't divide"):
        model_config("vDiT-S/222", input_size=(8, 8), frames=5, in_channels=4, num_classes=3)
    assert model_config("vDiT-S/222", input_size=(8, 8), frames=1, in_channels=4, num_classes=3).tokens == 16
    for both in ({}, {"num_classes": 3, "text": TextConfig("clip", 8, 4)}):
        with pytest.raises(ValueError, match="num_classes or on text"):
            model_config("vDiT-Ti/222", input_size=(8, 8), frames=2, in_channels=4, **both)
        with pytest.raises(ValueError, match="num_classes or on text"):
            build_model(VDiTConfig((2, 8, 8), (2, 2, 2), 4, 32, 1, 2, **both))
    with pytest.raises(ValueError, match="kind 'udit'"):
        config_from_dict({"kind": "udit"})


CONFIGS = [
    DiTConfig((8, 6), 2, 3, 48, 2, 4, num_classes=5),
    DiTConfig((8, 6), 2, 3, 48, 2, 4, text=TextConfig("clip", 24, 7, True), learn_sigma=False),
    VDiTConfig((4, 8, 6), (2, 2, 3), 3, 48, 3, 4, num_classes=5),
    VDiTConfig((4, 8, 6), (2, 2, 3), 3, 48, 3, 4, text=TextConfig("t5", 24, 7, False)),
    VDiTConfig((4, 8, 6), (2, 2, 3), 3, 48, 3, 4, text=TextConfig("t5", 24, 7, True)),
    VDiTConfig((4, 8, 6), (2, 2, 3), 3, 48, 3, 4, text=TextConfig("bytes", 64, 7, False)),
    VDiTConfig((1, 8, 6), (2, 2, 3), 3, 48, 3, 4, text=TextConfig("bytes", 40, 7, True), mlp_ratio=3.0),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_counts_are_those_of_torch(config):
    model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters()
    y = torch.tensor([1])
    if config.text is not None:
        tokens, mask, pooled = text_batch(1, 7, config.text.width, (3,), dtype=torch.float32)
        y = encode_bytes(["abc"], 7) if config.text.inside else TextCondition(tokens, mask, pooled)
    # Use plain operations, because torch does not count its fused attention on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.randn(1, config.in_channels, *config.input_size), torch.tensor([5]), y)
    assert counter.get_total_flops() == config.forward_flops()


@pytest.mark.parametrize("config", CONFIGS)
def test_configurations_travel_through_json(config):
    values = json.loads(json.dumps(config.to_dict()))
    found = config_from_dict(values)
    assert found == config and type(found) is type(config) and hash(found) == hash(config)


def test_configurations_from_before_there_were_kinds():
    old = {"input_size": [8, 6], "patch_size": 2, "in_channels": 3, "hidden_size": 48, "depth": 2, "num_heads": 4}
    old |= {"num_classes": 5, "mlp_ratio": 4.0, "learn_sigma": True}
    assert config_from_dict(old) == CONFIGS[0]


def test_a_foreign_checkpoint_can_not_be_a_video_model(tmp_path):
    with pytest.raises(ValueError, match="says nothing of the frames"):
        infer_config({}, "vDiT-S/222", tmp_path / "x.pt")


def test_a_capital_v_is_the_same_model():
    assert canonical_name("VDiT-XL/2x2x2") == canonical_name("vDiT-XL/222") == "vDiT-XL/222"
