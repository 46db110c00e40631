"""Test packs on a GPU: kernels by segment, varlen attention, and models in bf16 and FP8, against separate samples."""

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels.attention import resolve_varlen
from opendit.kernels.common import interpreting, kernels_available
from opendit.kernels.recompute import recompute_in
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.public_config import public_config
from opendit.models.segments import Segments, segment_attention
from opendit.models.zoo import build_model, model_config
from tests.kernels.cases import BOUNDS, DTYPES, MODULATED, check, make_inputs
from tests.models.packs import Samples, assert_same, samples
from tests.models.test_dit import randomised

AVAILABLE, REASON = kernels_available("cuda", torch.bfloat16)
pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason=REASON)
CUDA = torch.device("cuda")
SIZES = [(4, 16, 16)] * 3 + [(2, 16, 16)] * 2 + [(1, 16, 16)] * 5 + [(2, 8, 12), (1, 12, 8), (1, 4, 4), (1, 4, 4)]


@pytest.mark.parametrize("op", MODULATED.values(), ids=MODULATED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", ((8192, 8192, 4096, 1024, 255, 256, 0, 17, 1, 1), (1,) * 700, (3000,)), ids=len)
def test_operations_by_segment(op, dtype, lengths):
    for width in (72, 1152):
        check(op, *make_inputs(op, 0, 0, width, dtype, "cuda", lengths=lengths))


@pytest.mark.parametrize("head_dim", (64, 72, 128))
@pytest.mark.parametrize("lengths", ((512,) * 4 + (300, 300, 77, 33, 33, 1), (1024, 512, 512, 3)), ids=len)
def test_attention_by_runs_and_varlen(head_dim, lengths):
    varlen, why = resolve_varlen(CUDA, torch.bfloat16, head_dim)
    assert varlen is not None, why
    packed = Segments(tuple((1, 1, length) for length in lengths), sum(lengths) + 5).place(CUDA)
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(1, sum(lengths) + 5, 3, 2, head_dim, device=CUDA, generator=generator).bfloat16()
    leaves = [x.detach().requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4).unbind()]
    grad = torch.randn(1, 2, len(qkv[0]), head_dim, device=CUDA, generator=generator).bfloat16()
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = segment_attention(*exact, packed, attend)
    wanted = [out, *torch.autograd.grad(out, exact, grad.double())]
    for kernel in (None, varlen):
        out = segment_attention(*leaves, packed, attend, kernel)
        for got, want in zip([out, *torch.autograd.grad(out, leaves, grad)], wanted, strict=True):
            assert (got.double() - want).norm() / want.norm() < 1e-2
        assert not out[:, :, sum(lengths) :].any()


# Models with captions among the tokens. Pooled vectors have the width of caption tokens.
JOINT = {
    "flux": dict(in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=64, num_attention_heads=4,
                 joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(16, 24, 24)),
    "z_image": dict(in_channels=4, dim=384, n_layers=2, n_refiner_layers=1, n_heads=6, n_kv_heads=6, cap_feat_dim=32,
                    axes_dims=[16, 24, 24]),
}  # fmt: skip


def case(dtype: torch.dtype, of: str) -> tuple[DiT, DiT, Samples]:
    """Return the model in ``dtype``, the same model in fp32, and samples."""
    if of in JOINT:
        config: DiTConfig = public_config(of, JOINT[of], (32, 32), max_tokens=70)
        sizes = [(size[1] * 2, size[2] * size[0]) for size in SIZES]
    else:
        condition = {"text": TextConfig("t5", 32, 9, True)} if of == "captions" else {"num_classes": 7}
        config = model_config("vDiT-S/222", input_size=(16, 16), frames=4, in_channels=4, **condition)
        sizes = SIZES
    torch.manual_seed(0)
    exact = randomised(build_model(config)).cuda()
    made = build_model(config).cuda()
    made.load_state_dict(exact.state_dict())
    given = samples(config, sizes, torch.float32)
    moved = [x.cuda() for x in given.latents], given.t.cuda(), given.y.to(CUDA), [w.cuda() for w in given.weights]
    return made.place(CUDA, dtype), exact, Samples(*moved)


@pytest.mark.parametrize("of", ("labels", "captions", *JOINT))
@pytest.mark.parametrize("recompute", ("none", "mlp"))
@pytest.mark.parametrize("how", ("kernels", "torch", "fp8"))
def test_a_model_on_packs_is_the_model_one_by_one(how, recompute, of):
    if how == "fp8" and recompute != "none":
        pytest.skip("--recompute falls back to none with --fp8")
    torch.set_float32_matmul_precision("highest")
    model, exact, given = case(torch.bfloat16, of)
    on = how != "torch"
    flags = SpeedFlags(on, on, on, fp8=how == "fp8")
    kernels = select_kernels(flags, CUDA, torch.bfloat16, model.config.head_dim, 1024, packs=True)
    if how == "fp8" and not kernels.ops.float8:
        pytest.skip(kernels.ops_note)
    model.use(ops=kernels.ops, attend=kernels.attend, varlen=kernels.varlen)
    recompute_in(model, recompute)
    wanted = given.one_by_one(exact)
    gradients = given.gradients(exact, wanted)
    found = given.packed(model, padding=13)
    bound = 10 * BOUNDS[torch.bfloat16] if how != "fp8" else 0.15
    assert_same(found, wanted, bound, " (output)")
    for name, gradient in given.gradients(model, found).items():
        if not name.endswith("qkv.bias"):  # the part for the keys is rounding noise
            assert (gradient.float() - gradients[name]).norm() < 4 * bound * gradients[name].norm(), name
