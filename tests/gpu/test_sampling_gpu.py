"""Test the sampling engine on a GPU: recorded steps give the same bits as unrecorded ones."""

import pytest
import torch
import torch.nn.functional as F

from opendit.config.components import SpeedFlags
from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.kernels import fp8_inference
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.linear import linear_gelu
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.layers import Projection
from opendit.models.variants import MovieGenConfig, STDiTConfig, VDiTConfig
from opendit.models.zoo import build_model
from opendit.sampling import sampling_engine
from opendit.sampling.sampling_engine import SamplingEngine
from tests.kernels import test_sampling_step as ends
from tests.kernels import test_short_attention as short
from tests.models.test_dit import randomised
from tests.sampling.test_sampling_engine import conditions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PICTURE = {"input_size": (16, 16), "patch_size": 2, "in_channels": 4, "hidden_size": 144, "depth": 3, "num_heads": 2}
CLIP = PICTURE | {"input_size": (4, 8, 8), "patch_size": (2, 2, 2)}
TEXT = TextConfig("t5", 32, 7, True)
LABELS = DiTConfig(**PICTURE, num_classes=5)
CONFIGS = {
    "DiT": LABELS,
    "vDiT, captions": VDiTConfig(**CLIP, text=TEXT),
    "ST-DiT": STDiTConfig(**CLIP, text=TEXT, qk_norm=True, positions="rope"),
    "MovieGen": MovieGenConfig(**CLIP, text=TEXT),
}
CASES = [
    (DDPMObjective(), "ddim", {}),
    (DDPMObjective(), "ddpm", {"cfg_interval": (0.3, 5.0)}),
    (FlowObjective(3.0), "euler", {"cfg_scale": 1.0}),
    (EDMObjective(), "heun", {"cfg_channels": 3}),
    (FlowObjective(3.0, discrete_times=True), "unipc", {}),
]


def model_of(config, objective, dtype, fp8: bool = False, seed: int = 0):
    torch.manual_seed(seed)
    config = type(config)(**{**vars(config), "learn_sigma": objective.learn_sigma})
    model = randomised(build_model(config)).eval()
    speed = SpeedFlags(True, True, True, fp8=fp8)
    kernels = select_kernels(speed, torch.device("cuda"), dtype, config.head_dim, config.tokens, inference=True)
    return model.place("cuda", dtype).use(ops=kernels.ops, attend=kernels.attend)


def batch(config, count: int, first: int = 0):
    y, null = conditions(config, count)
    return y.to("cuda"), null.to("cuda"), torch.arange(first, first + count)


def same(model, objective, bound: float, **settings) -> None:
    recorded, eager = (SamplingEngine(model, objective, steps=6, record=record, **settings) for record in (True, False))
    for seed, count in enumerate((3, 3, 2)):
        given = batch(model.config, count, 5 * seed)
        got, want = recorded.sample(*given, seed), eager.sample(*given, seed)
        assert recorded.records and torch.equal(got, want), (objective.name, settings, count)
        index = given[2].to("cuda")
        exact = sample_latents(model, *given[:2], index, objective=objective, seed=seed, steps=6, **settings)
        assert (got - exact).norm() < bound * exact.norm(), (got - exact).norm() / exact.norm()
    assert all(loop.recordings for loop in recorded.loops.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}, {case[1]}")
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=["fp32", "bf16"])
def test_recorded_steps_are_the_steps(case, dtype, bound):
    objective, sampler, settings = case
    torch.set_float32_matmul_precision("highest")
    same(model_of(LABELS, objective, dtype), objective, bound, sampler=sampler, **settings)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_kind_of_model(config):
    objective = DDPMObjective()
    same(model_of(config, objective, torch.bfloat16), objective, 0.1, sampler="ddim")


APPROXIMATIONS = [{"cache": "taylor:3"}, {"cache": "first_block:10"}, {"guidance_every": 3}]


def approximated(model, objective, asked: dict, **settings) -> None:
    """Assert that an approximation gives the same bits when recorded, and differs from the exact sampler."""
    engines = [SamplingEngine(model, objective, steps=12, record=r, **asked, **settings) for r in (True, False)]
    exact = SamplingEngine(model, objective, steps=12, record=False, **settings)
    for seed, count in enumerate((3, 3, 2)):
        given = batch(model.config, count, 5 * seed)
        got, want = (engine.sample(*given, seed) for engine in engines)
        assert engines[0].records and torch.equal(got, want), (objective.name, asked, settings, count)
        assert not torch.equal(got, exact.sample(*given, seed))
    assert engines[0].share_evaluated == engines[1].share_evaluated < 1


@pytest.mark.parametrize("asked", APPROXIMATIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}, {case[1]}")
def test_recorded_approximations(asked, case):
    objective, sampler, settings = case
    if "guidance_every" in asked and settings.get("cfg_scale") == 1.0:
        settings = {}
    approximated(model_of(LABELS, objective, torch.bfloat16), objective, asked, sampler=sampler, **settings)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_recorded_approximations_of_every_kind_of_model(config):
    objective = FlowObjective()
    approximated(model_of(config, objective, torch.bfloat16), objective, {"cache": "taylor:2:1"})


def test_a_recorded_first_block_that_never_reuses():
    objective = DDPMObjective()
    model, given = model_of(LABELS, objective, torch.bfloat16), batch(LABELS, 3)
    settings = {"steps": 8, "sampler": "ddim"}
    engines = [SamplingEngine(model, objective, record=r, cache="first_block:0", **settings) for r in (True, False)]
    want = SamplingEngine(model, objective, **settings).sample(*given, 0)
    for _ in range(2):
        got, eager = (engine.sample(*given, 0) for engine in engines)
        assert torch.equal(got, eager) and (got - want).norm() < 0.1 * want.norm()
    assert engines[0].records and engines[0].share_evaluated == 1


@pytest.mark.skipif(not float8_available("cuda", torch.bfloat16)[0], reason="needs a GPU with FP8")
@pytest.mark.parametrize("name", ["DiT", "vDiT, captions", "ST-DiT"])
@pytest.mark.parametrize("cast_from", [0, 1 << 20])
def test_in_fp8(name, cast_from, monkeypatch):
    monkeypatch.setattr(fp8_inference, "CAST_FROM", cast_from)
    objective = DDPMObjective()
    for dtype in (torch.bfloat16, torch.float16):
        same(model_of(CONFIGS[name], objective, dtype, fp8=True), objective, 0.1, sampler="ddim")


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
@pytest.mark.parametrize("rows,width,hidden", [(1, 72, 288), (37, 144, 577), (512, 1152, 4608)])
def test_gelu_in_the_product(dtype, bound, rows, width, hidden):
    torch.set_float32_matmul_precision("highest")
    generator = torch.Generator().manual_seed(0)
    layer = Projection(width, hidden).to("cuda", dtype)
    layer.bias.data.normal_()
    x = torch.randn(2, rows, width, generator=generator).to("cuda", dtype)
    with torch.inference_mode():
        got = linear_gelu(x, layer)
        want = F.gelu(F.linear(x.double(), layer.weight.double(), layer.bias.double()), approximate="tanh")
    assert got.shape == want.shape and got.dtype == dtype
    assert (got - want).norm() < bound * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_of_short_sequences(dtype, monkeypatch):
    monkeypatch.setattr(short, "DEVICE", "cuda")
    monkeypatch.setattr(short, "BOUND", 8e-3 if dtype == torch.bfloat16 else 1e-3)
    made = short.made
    monkeypatch.setattr(short, "made", lambda *shape: made(*shape, dtype=dtype))
    for size in (16, 24, 64, 72, 96, 128):
        for tokens in (1, 37, 256, 1000):
            for packed in (True, False):
                short.test_it_is_attention(size, tokens, packed)
    short.test_large_scores_do_not_overflow()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_ends_of_a_step(dtype, monkeypatch):
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(ends, "DEVICE", "cuda")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for shape in ends.SHAPES.values():
        ends.test_patches_are_embedded(shape, dtype)
        for case in ends.CASES.values():
            ends.test_the_update(case, shape, dtype)
    for width in (5, 2048, 195_840):
        ends.test_rows_are_gathered(width, dtype)
    for halves in (1, 2):
        ends.test_every_sample_takes_its_own_step(halves)


# UniPC's steps have three state tensors, more than the kernel can write.
@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1] != "unipc"], ids=lambda case: f"{case[0].name}, {case[1]}"
)
def test_steps_in_few_kernels(case, monkeypatch):
    """The fused kernels are used, and draw the same samples as unfused steps up to fp32 rounding."""
    torch.set_float32_matmul_precision("highest")
    objective, sampler, settings = case
    model = model_of(LABELS, objective, torch.float32)
    given = batch(LABELS, 3)
    engine = SamplingEngine(model, objective, steps=6, sampler=sampler, **settings)
    got = engine.sample(*given, 0)
    assert all(loop.fused is not None for loop in engine.loops.values())
    monkeypatch.setattr(sampling_engine, "can_fuse", lambda *_: False)
    plain = SamplingEngine(model, objective, steps=6, sampler=sampler, **settings)
    want = plain.sample(*given, 0)
    assert all(loop.fused is None for loop in plain.loops.values())
    assert (got - want).norm() < 1e-4 * want.norm(), (got - want).norm() / want.norm()


def test_two_models_one_after_the_other():
    objective, given = DDPMObjective(), batch(LABELS, 2)
    engines, eager = [], []
    for seed in (0, 1):
        model = model_of(LABELS, objective, torch.bfloat16, seed=seed)
        engines.append(SamplingEngine(model, objective, steps=5, sampler="ddim"))
        eager.append(SamplingEngine(model, objective, steps=5, sampler="ddim", record=False).sample(*given, 0))
    for _ in range(3):
        for engine, want in zip(engines, eager, strict=True):
            assert torch.equal(engine.sample(*given, 0), want)
    assert not torch.equal(*eager)


def test_memory_does_not_grow():
    """Memory does not grow over batches of varying sizes, of which only some are kept, and is freed in the end."""
    objective = DDPMObjective()
    model = model_of(LABELS, objective, torch.bfloat16)
    before, after = torch.cuda.memory_allocated(), []
    engine = SamplingEngine(model, objective, steps=4, sampler="ddpm", loops=2)
    for call in range(20):
        engine.sample(*batch(LABELS, 1 + call % 3), call)
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_reserved())
    assert len(engine.loops) == 2 and max(after[12:]) <= max(after[6:12]), after  # both ranges have the same sizes
    del engine
    assert torch.cuda.memory_allocated() - before < 64 << 20  # library workspaces


def test_a_step_that_cannot_be_recorded_runs_kernel_by_kernel(caplog):
    objective = DDPMObjective()
    model = model_of(LABELS, objective, torch.bfloat16)
    want = SamplingEngine(model, objective, steps=5, sampler="ddim", record=False).sample(*batch(LABELS, 2), 0)
    of_tokens = model.of_tokens

    def waits(tokens, *rest):
        float(model.final_layer.linear.bias.sum())
        return of_tokens(tokens, *rest)

    model.of_tokens = waits
    engine = SamplingEngine(model, objective, steps=5, sampler="ddim")
    for _ in range(2):
        assert torch.equal(engine.sample(*batch(LABELS, 2), 0), want)
    (message,) = caplog.messages
    assert "recording failed" in message and not engine.records
