"""Test the model with kernels, and the engine, on a GPU."""

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.parallel.engines.test_engines import engine_run, plain_run, used_rows
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradients(model, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(3, 4, 16, 16, device="cuda", generator=generator)
    weight = torch.randn(3, 8, 16, 16, device="cuda", generator=generator)
    t, y = torch.tensor([3, 500, 999], device="cuda"), torch.tensor([0, 10, 3], device="cuda")
    model.zero_grad()
    output = model(x, t, y)
    (output.float() * weight).sum().backward()
    return output.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "speed", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_with_kernels_is_the_model_without(speed, dtype, bound, checkpointed):
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    config = model_config("DiT-S/2", input_size=(16, 16), in_channels=4, num_classes=10)
    exact = randomised(DiT(config)).cuda().double()
    reference, reference_grads = gradients(exact.float() if dtype == torch.float32 else exact, torch.float64)
    positions = exact.pos_embed.float()
    model = exact.to(dtype)
    model.pos_embed = positions
    kernels = select_kernels(SpeedFlags(*speed), torch.device("cuda"), dtype, 64, config.tokens)
    model.use(ops=kernels.ops, attend=kernels.attend).grad_checkpoint = checkpointed
    output, grads = gradients(model, dtype)
    assert (output - reference).norm() / reference.norm() < bound
    for name, grad in reference_grads.items():
        if not name.endswith("qkv.bias"):  # the part for the keys is rounding noise
            assert (grads[name] - grad).norm() / grad.norm() < 4 * bound, name


@pytest.mark.parametrize("plugin", ["zero2", "ddp", "gemini"])
def test_every_plugin_and_precision_follows_the_plain_curve(plugin):
    losses, weights, _ = plain_run()
    for precision in ("fp32", "bf16", "fp16"):
        if (plugin, precision) == ("gemini", "fp32"):
            continue
        for accumulation in (1, 2):
            ((curve, masters, _),) = run_ranks(1, engine_run, plugin, precision, accumulation)
            assert off_by(curve, losses) < (1e-5 if precision == "fp32" else 2e-3)
            if precision == "fp32":
                for name, weight in weights.items():
                    used = used_rows(name)
                    assert torch.allclose(masters[name].cpu()[used], weight[used], rtol=1e-3, atol=1e-4), name
