"""--optimizer adamw8bit under each plugin is compared with a plain AdamW with moments in 8 bits on one process.

The plain optimizer is written here from T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from opendit.config.parallel_sizes import ParallelDims
from opendit.kernels import eight_bit_moments
from opendit.models.dit import DiT, DiTConfig
from opendit.parallel.engines import build_engine
from opendit.parallel.mesh import init_mesh
from tests.models.test_dit import randomised
from tests.parallel.engines.test_engines import BETAS, CLIP, GLOBAL_BATCH, LR, loss_of
from tests.parallel.engines.test_fsdp import FREED, backward, gathered
from tests.ranks import run_ranks

STEPS, DECAY, UNIT = 4, 0.01, 256
# Each of up to four ranks holds complete units of 256 numbers, so the units don't depend on the number of ranks.
CONFIG = DiTConfig((4, 6), 2, 3, 32, depth=2, num_heads=2, num_classes=6)
WAYS = {  # plugin, fsdp replicas, micro-batches
    1: [("zero2", 1, 1), ("fsdp", 1, 2)],
    2: [("zero2", 1, 2), ("ddp", 1, 1), ("fsdp", 1, 1), ("fsdp", 2, 1)],
    4: [("zero2", 1, 1), ("ddp", 1, 1), ("fsdp", 1, 1), ("fsdp", 2, 1)],
}


def build_model() -> DiT:
    torch.manual_seed(0)
    return randomised(DiT(CONFIG))


@cache
def codebook(signed: bool) -> Tensor:
    """Return the 256 values of dynamic tree quantization (section 1.3), in fp64. A code has a sign bit, if ``signed``,
    a decimal exponent as a number of zeros, an indicator bit, and the rest is a linear fraction from 0.1 to 1."""
    values = [0.0, 1.0]
    for zeros in range(7):
        fractions = 2 ** ((7 if signed else 8) - zeros - 1)
        positive = [10.0**-zeros * (0.1 + 0.9 * (i + 0.5) / fractions) for i in range(fractions)]
        values += positive + [-value for value in positive if signed]
    return torch.tensor(values, dtype=torch.float64)


def rounded(moment: Tensor, signed: bool) -> Tensor:
    """Quantize and dequantize: in every unit, divide by the largest magnitude and take the nearest value."""
    units = moment.double().view(-1, UNIT)
    scales = units.abs().amax(1, keepdim=True).clamp(min=1e-12)
    values = codebook(signed)
    nearest = ((units / scales).unsqueeze(2) - values).abs().argmin(2)
    return (values[nearest] * scales).view(moment.shape).to(moment.dtype)


class Plain8bitAdamW:
    """AdamW (Loshchilov and Hutter, 2019) for one tensor, whose moments are rounded to 8 bits after every step."""

    def __init__(self, p: Tensor, quantised: bool):
        self.p, self.quantised, self.t = p, quantised, 0
        self.m, self.v = torch.zeros_like(p), torch.zeros_like(p)

    @torch.no_grad()
    def step(self, grad: Tensor) -> None:
        self.t += 1
        m, v = (b * old + (1 - b) * new for b, old, new in zip(BETAS, (self.m, self.v), (grad, grad**2), strict=True))
        m_hat, v_hat = m / (1 - BETAS[0] ** self.t), v / (1 - BETAS[1] ** self.t)
        self.p -= LR * (DECAY * self.p + m_hat / (v_hat.sqrt() + 1e-8))
        self.m, self.v = (rounded(m, True), rounded(v, False)) if self.quantised else (m, v)


@cache
def plain_run(quantised: bool) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = build_model(), []
    moments = {
        name: Plain8bitAdamW(p, quantised and p.numel() >= 2 * UNIT and p.numel() % UNIT == 0)
        for name, p in model.named_parameters()
    }
    for step in range(STEPS):
        loss = loss_of(model, step, torch.arange(GLOBAL_BATCH))
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        for name, p in model.named_parameters():
            moments[name].step(p.grad)
        model.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def test_the_plain_optimizer_is_torchaos():
    theirs = pytest.importorskip("torchao.optim.adam")
    torch.manual_seed(0)
    own = torch.randn(8, UNIT)
    other, optimizer = own.clone(), Plain8bitAdamW(own, quantised=True)
    start = own.clone()
    state = [theirs.OptimState8bit.zeros(own.shape, signed, UNIT, dtype=own.dtype) for signed in (True, False)]
    for step in range(STEPS):
        grad = torch.randn_like(own)
        optimizer.step(grad)
        settings = None, torch.tensor(LR), *BETAS, DECAY, 1e-8, True, False
        with torch.no_grad():
            theirs.single_param_adam(other, grad, torch.tensor(step + 1.0), *state, *settings)
    assert (own - other).norm() < 0.01 * (own - start).norm()


def all_trained(mesh, ways) -> list[tuple]:
    eight_bit_moments.LEAST = UNIT  # this model's parameters are small
    found = []
    for plugin, copies, accumulation in ways:
        own = init_mesh(dims=ParallelDims.fill(mesh.world_size, dp_replicate=copies)) if copies > 1 else mesh
        settings = dict(lr=LR, weight_decay=DECAY, betas=BETAS, grad_clip=CLIP, sharding=FREED, eight_bits=True)
        engine = build_engine(
            build_model(), own, plugin=plugin, precision="fp32", grad_accumulation=accumulation, **settings
        )
        losses = []
        for step in range(STEPS):
            loss = backward(engine, own, step, accumulation)
            assert engine.step().finite
            losses.append(own.sum(loss).item() / own.world_size)
        kept = [moment for state in engine.adam.state.values() for moment in state.values()]
        assert sum(isinstance(moment, eight_bit_moments.EightBits) for moment in kept) > 8 * CONFIG.depth
        found.append((losses, gathered(engine, engine.masters())))
    return found


@pytest.mark.parametrize("world", sorted(WAYS))
def test_curves_are_those_of_one_plain_process(world):
    losses, weights = plain_run(True)
    start, exact = dict(build_model().named_parameters()), plain_run(False)[1]

    def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        """Return the distance between weights relative to the distance that they moved."""
        of_blocks = [name for name in weights if name.startswith("blocks") and name.endswith(".weight")]
        return max(((one[n] - other[n]).norm() / (other[n] - start[n].detach()).norm()).item() for n in of_blocks)

    quantisation = apart(exact, weights)
    assert quantisation > 0.02
    for way, (got, masters) in zip(WAYS[world], run_ranks(world, all_trained, WAYS[world])[0], strict=True):
        assert got == pytest.approx(losses, rel=1e-4), way
        assert apart(masters, weights) < 0.1 * quantisation, (way, quantisation)
