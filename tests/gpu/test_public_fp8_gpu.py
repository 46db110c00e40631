"""Test FP8 in the blocks of public models on a GPU: the cases of tests/kernels/test_public_fp8.py at larger sizes."""

import pytest
import torch

from opendit.kernels import fp8_inference
from opendit.kernels.common import interpreting
from opendit.kernels.fp8_linear import float8_available
from tests.kernels import test_public_fp8 as cases
from tests.models.families.oracles import COSMOS2, FLUX, FLUX2, LTX, QWEN_IMAGE, SD3, WAN, Z_IMAGE
from tests.ranks import run_ranks

AVAILABLE, REASON = float8_available("cuda", torch.bfloat16)
pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason=REASON)

# TINY has heads of 64 channels, MIDDLE mostly the published 128. The numbers of tokens are odd.
SIZES = {
    "flux": (14, 28), "z_image": (14, 30), "wan": (3, 14, 30), "qwen_image": (14, 30), "flux2": (7, 15),
    "ltx": (3, 7, 15), "sd3": (14, 30), "cosmos2": (14, 30),
}  # fmt: skip
TINY = {
    "flux": FLUX | dict(num_layers=1, num_single_layers=2, attention_head_dim=64, num_attention_heads=4,
                        axes_dims_rope=(16, 24, 24)),
    "z_image": Z_IMAGE | dict(dim=384, n_heads=6, n_kv_heads=6, n_layers=1, n_refiner_layers=1, axes_dims=[16, 24, 24]),
    "wan": WAN | dict(attention_head_dim=64, num_attention_heads=4, ffn_dim=528),
    "qwen_image": QWEN_IMAGE | dict(attention_head_dim=64, num_attention_heads=4, axes_dims_rope=(16, 24, 24)),
    "flux2": FLUX2 | dict(num_layers=1, num_single_layers=2, attention_head_dim=64, num_attention_heads=4,
                          axes_dims_rope=(16, 16, 16, 16)),
    "ltx": LTX | dict(attention_head_dim=64, num_attention_heads=4, cross_attention_dim=256),
    "sd3": SD3 | dict(attention_head_dim=64, num_attention_heads=4, caption_projection_dim=256, pos_embed_max_size=20),
    "cosmos2": COSMOS2 | dict(attention_head_dim=64, num_attention_heads=4),
}  # fmt: skip
MIDDLE = {
    "flux": FLUX | dict(num_layers=2, num_single_layers=2, attention_head_dim=128, num_attention_heads=8,
                        axes_dims_rope=(16, 56, 56)),
    "z_image": Z_IMAGE | dict(dim=1152, n_heads=9, n_kv_heads=9, n_layers=2, n_refiner_layers=1,
                              axes_dims=[32, 48, 48]),
    "wan": WAN | dict(attention_head_dim=128, num_attention_heads=12, ffn_dim=8960),
    "qwen_image": QWEN_IMAGE | dict(attention_head_dim=128, num_attention_heads=8, axes_dims_rope=(16, 56, 56)),
    "flux2": FLUX2 | dict(num_layers=2, num_single_layers=2, attention_head_dim=128, num_attention_heads=8,
                          axes_dims_rope=(32, 32, 32, 32)),
    "ltx": LTX | dict(attention_head_dim=64, num_attention_heads=32, cross_attention_dim=2048),
    "sd3": SD3 | dict(attention_head_dim=64, num_attention_heads=38, caption_projection_dim=2432,
                      pos_embed_max_size=20),
    "cosmos2": COSMOS2 | dict(attention_head_dim=128, num_attention_heads=8, adaln_lora_dim=256),
}  # fmt: skip


@pytest.fixture(autouse=True, params=("tiny", "middle"))
def on_the_gpu(request, monkeypatch):
    monkeypatch.setattr(cases, "DEVICE", "cuda")
    monkeypatch.setattr(cases, "ACTIVATIONS", torch.bfloat16)
    monkeypatch.setattr(cases, "STEPS", 6)
    monkeypatch.setattr(cases, "SIZES", SIZES)
    monkeypatch.setattr(cases, "VALUES", TINY if request.param == "tiny" else MIDDLE)
    torch.set_float32_matmul_precision("highest")


@cases.every_family
def test_output_and_gradients_are_near_fp32(family):
    """The bounds are 1.5 times those of tests/gpu/test_fp8_gpu.py."""
    cases.check_gradients(family, 0.15, 0.375)


@cases.every_family
def test_every_large_linear_layer_is_multiplied_in_float8(family, monkeypatch):
    cases.test_every_large_linear_layer_is_multiplied_in_float8(family, monkeypatch)


@cases.every_family
def test_sampling(family, monkeypatch):
    cases.test_sampling_is_near_and_keeps_its_weights(family, monkeypatch, bound=0.1)


@pytest.mark.parametrize("plugin", ("zero2", "ddp", "fsdp"))
@pytest.mark.parametrize("family", ("flux", "z_image", "wan"))
def test_training_follows_the_curve_of_bf16(family, plugin):
    ((want, got),) = run_ranks(1, cases.curves, family, plugin, 10, 2e-4, cases.SIZES, cases.VALUES)
    assert want[-1] < 0.95 * want[0]
    assert got == pytest.approx(want, rel=0.09)


@cases.every_family
def test_recorded_steps_draw_the_same(family, monkeypatch):
    """Steps are recorded as a CUDA graph, which must not cast the weights again."""
    monkeypatch.setattr(fp8_inference, "CAST_FROM", 0)
    model = cases.in_float8(cases.model_of(family).eval().to(torch.bfloat16), torch.bfloat16, inference=True)
    _, _, y = cases.given(family, torch.bfloat16, 2)
    drawn = []
    for record in (True, False):
        engine = cases.SamplingEngine(model, cases.FlowObjective(3.0), steps=4, cfg_scale=1.0, record=record)
        drawn.append(engine.sample(y, y[:1], torch.arange(2), seed=0))
        print(engine.note)
    assert cases.error(*drawn) < 1e-3 and drawn[0].isfinite().all()
