"""Test public models with fused kernels on a GPU against torch in fp32 on the CPU: the output and all gradients."""

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels.select import select_kernels
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


def gradients(model: PublicDiT, family: str, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the output as "" and the gradients by name, for a batch of three captions of unequal lengths."""
    y, _, _, _ = batch(family, 0)
    x = torch.randn(3, model.config.in_channels, *SIZES[family], generator=torch.Generator().manual_seed(1))
    output = model(x.to(device), torch.tensor(TIMES, device=device), y.to(device, dtype)).float()
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (output * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if is_read(family, name)}
    return {name: g.detach().float().cpu() for name, g in ({"": output} | found).items()}


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", VALUES)
def test_the_output_and_every_gradient(family, dtype):
    torch.set_float32_matmul_precision("highest")
    wanted = gradients(model_of(family), family, "cpu", torch.float32)
    model, device = model_of(family), torch.device(DEVICE)
    kernels = select_kernels(SpeedFlags(True, True, True), device, dtype, model.config.head_dim, model.config.tokens)
    model.place(device, dtype).use(ops=kernels.ops, attend=kernels.attend)
    found = gradients(model, family, DEVICE, dtype)
    off = {name: ((found[name] - want).norm() / want.norm()).item() for name, want in wanted.items()}
    assert not {name: value for name, value in off.items() if not value < BOUNDS[dtype]}
