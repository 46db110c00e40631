"""Test public models with fused kernels on a GPU against torch in fp32: the output and all gradients."""

import statistics

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import give, times_of_frames, with_given
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from tests.models.families.oracles import is_read, randomise
from tests.sampling.public import SIZES, VALUES, batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 0.08}
TIMES = [703.125, 296.875, 921.875]


def model_of(family: str) -> PublicDiT:
    torch.manual_seed(0)
    model = PublicDiT(public_config(family, VALUES[family], SIZES[family]))
    randomise(model, std=0.05 if family in ("z_image", "lumina2") else 0.1)
    return model


def gradients(
    model: PublicDiT, family: str, device: str, dtype: torch.dtype, first_frame: bool = False
) -> dict[str, torch.Tensor]:
    """Return the output as "" and the gradients by name, for a batch of three captions of unequal lengths.

    With ``first_frame``, two of the clips have a clean first frame, whose tokens have time 0.
    """
    y, _, _, _ = batch(family, 0)
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(3, model.config.in_channels, *model.config.input_size, generator=generator), torch.tensor(TIMES)
    if first_frame:
        given = give(torch.randn(x.shape, generator=generator), torch.tensor([1, 0, 1]))
        x, t = with_given(x, given), times_of_frames(t, given)
    output = model(x.to(device), t.to(device), y.to(device, dtype)).float()
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (output * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if is_read(family, name)}
    return {name: g.detach().float().cpu() for name, g in ({"": output} | found).items()}


def with_kernels(model: PublicDiT) -> PublicDiT:
    device, dtype, config = torch.device(DEVICE), model.x_embedder.proj.weight.dtype, model.config
    kernels = select_kernels(SpeedFlags(True, True, True), device, dtype, config.head_dim, config.tokens)
    return model.use(ops=kernels.ops, attend=kernels.attend)


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "first_frame"), [*((family, False) for family in VALUES), ("wan", True)])
def test_the_output_and_every_gradient(family, first_frame, dtype):
    torch.set_float32_matmul_precision("highest")
    wanted = gradients(model_of(family), family, "cpu", torch.float32, first_frame)
    found = gradients(with_kernels(model_of(family).place(DEVICE, dtype)), family, DEVICE, dtype, first_frame)
    off = {name: ((found[name] - want).norm() / want.norm()).item() for name, want in wanted.items()}
    assert not {name: value for name, value in off.items() if not value < BOUNDS[dtype]}


# Eight heads of width 128, and latents of about 1,000 tokens.
HEADS = dict(attention_head_dim=128, num_attention_heads=8)
LARGER = {
    "flux": (HEADS | dict(axes_dims_rope=[16, 56, 56]), (64, 64)),
    "wan": (HEADS | dict(ffn_dim=4096), (5, 28, 32)),
}


@pytest.mark.parametrize("family", LARGER)
def test_kernels_in_bf16_are_no_less_accurate_than_torch_s_operations(family):
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    values, size = LARGER[family]
    model = PublicDiT(public_config(family, VALUES[family] | values, size))
    randomise(model, std=0.02)
    model.bfloat16().to(DEVICE, torch.float32)
    wanted = gradients(model, family, DEVICE, torch.float32)
    found = []
    for use in (PublicDiT.use, with_kernels):
        model.zero_grad()
        given = gradients(use(model.bfloat16()), family, DEVICE, torch.bfloat16)
        output, *others = [((given[name] - want).norm() / want.norm()).item() for name, want in wanted.items()]
        found.append((output, statistics.median(others)))
    (plain_output, plain_gradient), (output, gradient) = found
    assert 0 < output < plain_output and 0 < gradient < plain_gradient, found
