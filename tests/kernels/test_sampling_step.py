"""Test the kernels at both ends of a sampling step: from x to tokens, and from tokens to the next x. These tests run in
Triton's interpreter; tests/gpu/test_sampling_gpu.py runs the same on a GPU."""

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.diffusion.objectives import DDPMObjective, EDMObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.kernels.sampling_step import (
    embed_patches,
    embed_patches_reference,
    gather_rows,
    guided_update,
    guided_update_reference,
    take_step,
    take_step_reference,
    unpatchify_reference,
)
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiTConfig
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.test_dit import randomised

DEVICE = "cpu"
SHAPES = {  # (C, sides, patch, D)
    "picture": (4, (8, 12), (2, 2), 72),
    "patch of 4": (3, (8, 4), (4, 4), 200),
    "clip": (4, (4, 6, 10), (2, 2, 1), 64),
    "many channels": (16, (2, 4, 4), (1, 2, 2), 136),
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # (the interpreter can't multiply bf16)
def test_patches_are_embedded(shape, dtype):
    C, sides, patch, D = shape
    x, weight = normal(3, C, *sides), normal(D, C, *patch, seed=1).to(dtype)
    bias, tokens = normal(D, seed=2).to(dtype), embed_patches_reference(x, weight, weight[:, 0].flatten(1)[:, 0], None)
    positions, scale = normal(1, tokens.shape[1], D, seed=3), normal(3, 5, seed=4)[:, 2]
    bound = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for given in ((None, None, 1), (positions, None, 2), (positions.to(dtype), scale, 2), (None, scale, 1)):
        got = embed_patches(x, weight, bias, *given)
        exact = [None if part is None else part.double() for part in (x, weight, bias, *given[:2])]
        exact[0] = exact[0] if given[1] is None else (x * scale.view(-1, *(1,) * (x.dim() - 1))).double()
        exact[0] = exact[0].to(dtype).double()  # the network's input is rounded
        want = embed_patches_reference(*exact[:4], None, given[2])
        assert got.dtype == dtype and got.shape == want.shape == (given[2] * 3, tokens.shape[1], D)
        assert (got - want).abs().max() <= bound * want.abs().max()
        assert (got - want).norm() <= bound * want.norm()
        ours = embed_patches_reference(x, weight, bias, *given)
        assert ours.dtype == dtype and (ours - want).norm() <= bound * want.norm()


@pytest.mark.parametrize(
    "config",
    [
        DiTConfig((8, 12), 2, 4, 72, 1, 2, num_classes=3),
        VDiTConfig((4, 4, 6), (2, 2, 1), 4, 64, 1, 2, num_classes=3),
    ],
    ids=["picture", "clip"],
)
def test_the_reference_is_the_networks(config):
    torch.manual_seed(0)
    model = build_model(config).double()
    model.x_embedder.proj.bias.data.normal_()
    x = torch.randn(2, 4, *config.input_size, dtype=torch.float64)
    layer, positions = model.x_embedder.proj, model.positions(config.grid_of(config.input_size))
    got = embed_patches_reference(x, layer.weight, layer.bias, positions)
    torch.testing.assert_close(got, model.embed(x)[0])
    tokens = torch.randn(2, got.shape[1], 8 * layer.weight[0, 0].numel(), dtype=torch.float64)
    want = model.unpatchify(tokens, config.grid_of(config.input_size))
    assert torch.equal(unpatchify_reference(tokens, 8, tuple(config.patch), config.input_size), want)


CASES = {  # old and new tensors; guided channels (None: all, 0: no guidance); noise; learned variance
    "deterministic": (1, 1, None, False, False),
    "without guidance": (1, 1, 0, True, False),
    "three channels": (1, 1, 3, False, False),
    "two parts": (2, 2, None, False, False),
    "a middle": (1, 2, None, True, False),
    "three parts": (3, 2, 2, True, True),
    "learned variance": (1, 1, None, True, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_update(case, shape, dtype):
    (old_count, new_count, channels, noisy, learned), (C, sides, patch, _) = case, shape
    B, outputs = 3, C * (1 + learned)
    count = torch.Size(sides).numel() // torch.Size(patch).numel()
    values = outputs * torch.Size(patch).numel()
    halves = 1 if channels == 0 else 2
    tokens = normal(halves * B, count, values, seed=1).to(dtype)
    old = [normal(B, C, *sides, seed=2 + i) for i in range(old_count)]
    terms = old_count + 1 + noisy
    numbers = normal(B, 40, seed=9)
    coefficients = numbers[:, 3 : 3 + new_count * terms].unflatten(1, (new_count, terms))
    options = {"channels": channels or None}
    if channels != 0:
        options["guidance"] = normal(B, seed=10)
    if noisy:
        options |= {"noise": normal(7, C, *sides, seed=11), "noise_rows": torch.tensor([5, 0, 6], device=DEVICE)}
    if learned:
        options["variance"] = numbers[:, 30:32]
    exact = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in options.items()}
    want = [torch.empty(B, C, *sides, dtype=torch.float64, device=DEVICE) for _ in range(new_count)]
    guided_update_reference(tokens.double(), [x.double() for x in old], want, coefficients.double(), patch, **exact)
    apart = [torch.full((B, C, *sides), float("nan"), device=DEVICE) for _ in range(new_count)]
    ours = [part.clone() for part in apart]
    guided_update_reference(tokens, old, ours, coefficients, patch, **options)
    guided_update(tokens, old, apart, coefficients, patch, **options)
    for got in (apart, ours):
        for part, exactly in zip(got, want, strict=True):
            assert (part - exactly).abs().max() < 1e-6 * exactly.abs().max()
    # Update a single sample, in place.
    one = slice(1, 2)
    alone = {k: v[one] if k in ("guidance", "variance", "noise_rows") else v for k, v in options.items()}
    rows = [1, B + 1][:halves]
    single = [part[one].clone() for part in old]
    into = [*single, torch.empty_like(single[0])][:new_count]
    guided_update(tokens[rows].contiguous(), single, into, coefficients[one], patch, **alone)
    for part, whole in zip(into, apart, strict=True):
        assert torch.equal(part, whole[one])


@pytest.mark.parametrize("halves", [1, 2])
def test_every_sample_takes_its_own_step(halves):
    step, numbers = torch.tensor([0, 3, 1, 4, 2], device=DEVICE), normal(6, 37)
    rows = torch.tensor([[0, 1, 2, 3, 4], [5, 5, 5, 5, 5]], device=DEVICE)[:halves]
    ours = step.clone()
    for _ in range(2):
        got, want = take_step(step, rows, 12, numbers), take_step_reference(ours, rows, 12, numbers)
        assert all(map(torch.equal, got, want)) and torch.equal(step, ours)
    assert step.tolist() == [2, 5, 3, 6, 4] and got[0][1].item() == 1 + 4 * 12 and got[2][1].item() == 4 * 5 + 1
    assert torch.equal(got[1][0], numbers[1])


@pytest.mark.parametrize("width", [5, 2048, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_gathered(width, dtype):
    table, rows = normal(7, width).to(dtype), torch.tensor([6, 0, 0, 3], device=DEVICE)
    assert torch.equal(gather_rows(table, rows), table[rows])
    for some in (table[:, 3:], table[:, : width // 2], table[:, -2:]):  # columns of a wider table
        assert torch.equal(gather_rows(some, rows), some[rows])


@pytest.mark.parametrize(
    ("objective", "sampler"), [(DDPMObjective(), "ddpm"), (EDMObjective(), "heun")], ids=["ddpm", "edm"]
)
def test_the_engine_takes_them(objective, sampler):
    torch.manual_seed(0)
    config = DiTConfig((4, 6), 2, 4, 64, 1, 2, num_classes=3, learn_sigma=objective.learn_sigma)
    model = randomised(build_model(config)).place(DEVICE, torch.float32).eval()
    given = torch.tensor([2, 0], device=DEVICE), torch.tensor([3], device=DEVICE), torch.arange(2, device=DEVICE)
    settings = {"steps": 3, "sampler": sampler, "cfg_channels": 3}
    want = sample_latents(model, *given, objective=objective, seed=0, **settings)
    on = SpeedFlags(True, True, True)
    kernels = select_kernels(on, torch.device(DEVICE), torch.float32, 32, config.tokens, inference=True)
    engine = SamplingEngine(model.use(ops=kernels.ops, attend=kernels.attend), objective, **settings, record=False)
    got = engine.sample(*given, 0)
    (loop,) = engine.loops.values()
    assert loop.fused is not None and (got - want).norm() < 1e-4 * want.norm()
    rest = (part[1:] for part in (given[0], given[2]))
    alone = engine.sample(next(rest), given[1], next(rest), 0)
    assert (alone - got[1:]).norm() < 1e-4 * alone.norm()
