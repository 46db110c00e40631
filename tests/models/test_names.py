"""Test models by name: published sizes in closed form, unknown names, and options that can't be combined."""

import json

import pytest
import torch

from opendit.config.architectures import NAMES, VIDEO_NAMES, canonical_name, is_video
from opendit.models.attention import Attention
from opendit.models.conditioning import TextConfig
from opendit.models.zoo import build_model, config_from_dict, model_config


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


# The number of weights in matrices, in closed form, for class-conditional models with NeMo's sizes. Modulation is
# counted in every block.
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


# Width, depth, heads, key and value heads, width of the MLP. The sizes of DiT are from Peebles & Xie, table 1, those of
# 7B, 28B and MovieGen from NeMo; EC-DiT, ST-DiT and Ti are our own.
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
    """Compare weights and FLOPs of a class-conditional model for 16 x 32 x 32 latents of 4 channels."""
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
    """In revision 1, all sizes except 30B and Ti have as many key and value heads as query heads."""
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
        ("DiT-S/2", {"full_attention": True}, "--full_attention: is not for --model DiT-S/2; it is for ST-DiT"),
        ("ST-DiT-B/122", {"expert_capacity": 2.0}, "--expert_capacity: is not for .* it is for EC-DiT"),
        ("DiT-S/2", {"adaln_lora": 384}, "--adaln_lora 384: out of range; give a rank from 1 to below the width, 384"),
        (
            "DiT-S/2",
            {"positions": "alibi"},
            "--positions alibi: no such positions; choose one of sincos, learned, rope",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, num_classes=3, **options)


def test_what_can_not_be_combined():
    along_axes = build("ST-DiT-Ti/222", num_classes=3)
    with pytest.raises(ValueError, match="--sequence_parallel_type ring: stdit models have no attention to all tokens"):
        along_axes.check_sequence_parallel("ring")
    along_axes.check_sequence_parallel("auto")
    for kind in ("fastseq", "ulysses", "ring", "usp"):
        build("MovieGen-5B/122", num_classes=3).check_sequence_parallel(kind)
        build("EC-DiT-1B/2", num_classes=3).check_sequence_parallel(kind)
        build("DiT-S/2", num_classes=3, qk_norm=True, positions="rope", bias=False).check_sequence_parallel(kind)
    for name, options in (("EC-DiT-Ti/2", {}), ("MovieGen-Ti/2", {}), ("DiT-S/2", {"bias": False})):
        with pytest.raises(ValueError, match="--fp8: does not work with"):
            build(name, num_classes=3, **options).check_speed(True, "none")
    with pytest.raises(
        ValueError, match="--recompute cheap: does not work with moviegen models; use --grad_checkpoint"
    ):
        build("MovieGen-Ti/2", num_classes=3).check_speed(False, "cheap")
    build("DiT-S/2", num_classes=3, bias=False).check_speed(False, "cheap")
    build("DiT-S/2", num_classes=3, norm="rms", mlp="swiglu").check_speed(False, "cheap")
    build("ST-DiT-Ti/222", num_classes=3, qk_norm=True).check_speed(True, "none")
