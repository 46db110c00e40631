"""Test models with the kernels in Triton's interpreter against models with torch's operations."""

import functools
import statistics

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextCondition, TextConfig, give, times_of_frames, with_given
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.network import PublicDiT
from opendit.models.layers import TORCH_OPS, BlockOps
from opendit.models.variants import MovieGenConfig, STDiTConfig
from opendit.models.zoo import build_model
from tests.models.families.oracles import captions, difference
from tests.models.test_dit import randomised
from tests.ranks import run_ranks
from tests.sampling.public import SIZES, VALUES, network

CONFIG = DiTConfig((4, 4), 2, 2, 72, 2, 3, num_classes=3)
MOVIEGEN = functools.partial(MovieGenConfig, (2, 4, 4), (1, 2, 2), 2, 72, 2, 3)
ALL = SpeedFlags(enable_modulate_kernel=True, enable_layernorm_kernel=True, enable_flashattn=True)


def with_kernels(model: DiT, flags: SpeedFlags = ALL, dtype: torch.dtype = torch.float32) -> DiT:
    choice = select_kernels(flags, torch.device("cpu"), dtype, 24, CONFIG.tokens)
    return model.use(ops=choice.ops, attend=choice.attend)


def with_vectors(model: DiT) -> DiT:
    """Set biases and norm weights to random values, because zeros and ones would hide that a vector is ignored."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(std=0.5)
    return model


def inputs(config: DiTConfig = CONFIG):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, *config.input_size, generator=generator)
    y = torch.tensor([0, 1, 3])
    if config.text is not None:
        tokens = torch.randn(3, config.text.max_tokens, config.text.width, generator=generator)
        y = TextCondition(tokens, torch.arange(config.text.max_tokens) <= y[:, None], tokens[:, 0])
    return x, torch.tensor([1, 20, 300]), y


def gradients(model: DiT) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(*inputs(model.config))
    output.square().mean().backward()
    return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_flags_choose_the_operations():
    by_flags = {
        (True, False, False): {
            "layernorm_modulate",
            "linear_gelu",
            "linear_gate_residual",
            "residual_rmsnorm_modulate",
            "swiglu",
            "add_table",
            "normalise_rotate",
            "join_heads",
        },
        (False, False, True): {"linear_heads"},
        (True, True, True): set(BlockOps.names()) - {"linear", "pack_heads"},  # pack_heads has no gradient
    }
    for flags, replaced in by_flags.items():
        ops = with_kernels(DiT(CONFIG), SpeedFlags(*flags)).blocks[0].ops
        others = [name for name in BlockOps.names() if getattr(ops, name) is not getattr(TORCH_OPS, name)]
        assert set(others) == replaced and ops.replaced == others


@pytest.mark.parametrize("config", (CONFIG, MOVIEGEN(num_classes=3, positions="rope")), ids=("DiT", "MovieGen"))
def test_a_cut_stack_is_the_uncut_one(config):
    """Compare blocks that add their residual at the end with blocks that fuse it with the next norm."""
    model = with_kernels(with_vectors(randomised(build_model(config))))
    want, want_grads = gradients(model)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: None)
    got, got_grads = gradients(model)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("flags", ((True, True, True), (True, False, False), (False, False, True)))
@pytest.mark.parametrize("checkpointed", (False, True))
def test_a_model_with_kernels_is_the_model_without(flags, checkpointed):
    model = with_vectors(randomised(DiT(CONFIG)))
    want, want_grads = gradients(model)
    keys = set(model.state_dict())
    with_kernels(model, SpeedFlags(*flags)).grad_checkpoint = checkpointed
    got, got_grads = gradients(model)
    assert set(model.state_dict()) == keys
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    with torch.no_grad():
        assert torch.equal(model(*inputs()), got)


@pytest.mark.parametrize(
    "config",
    (
        STDiTConfig((2, 4, 4), (1, 2, 2), 2, 72, 1, 3, num_classes=3, bias=False, qk_norm=True, positions="rope"),
        DiTConfig((4, 4), 2, 2, 72, 2, 3, num_classes=3, norm="rms", mlp="swiglu", qk_norm=True, positions="rope"),
        DiTConfig((4, 4), 2, 2, 72, 2, 3, text=TextConfig("t5", 8, 5, True), norm="rms"),
        MOVIEGEN(num_classes=3, kv_heads=1),
        MOVIEGEN(num_classes=3, bias=True, mlp_ratio=1.5),
        MOVIEGEN(text=TextConfig("t5", 8, 5, True)),
    ),
    ids=(
        "ST-DiT without biases",
        "DiT, mixed",
        "DiT with RMSNorm",
        "MovieGen",
        "MovieGen with biases",
        "MovieGen with cross-attention",
    ),
)
@pytest.mark.parametrize("flags", (ALL, SpeedFlags(enable_modulate_kernel=True)), ids=("all", "modulate"))
def test_other_blocks_with_kernels(config, flags):
    model = with_vectors(randomised(build_model(config)))
    want, want_grads = gradients(model)
    got, got_grads = gradients(with_kernels(model, flags))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def public_gradients(
    model: PublicDiT, dtype: torch.dtype = torch.float32, first_frame: bool = False
) -> list[torch.Tensor]:
    """Return the output and the gradients of all parameters.

    With ``first_frame``, the first of the two clips has a clean first frame, whose tokens have time 0.
    """
    family = model.config.family
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, *SIZES[family])[..., :2, :4], captions(family, VALUES[family], [5, 5], torch.float32)
    weights, t = torch.randn_like(x), torch.tensor([300.0, 700.0])
    if first_frame:
        given = give(torch.randn_like(x), torch.tensor([1, 0]))
        x, t = with_given(x, given), times_of_frames(t, given)
    output = model(x, t, y.to(dtype))
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), list(model.parameters()))]


@pytest.mark.parametrize(
    ("family", "first_frame"), (("flux", False), ("z_image", False), ("wan", False), ("wan", True))
)
def test_public_models_with_kernels(family, first_frame):
    """Test with fused blocks, and with blocks cut so that each adds its own last branch."""
    model, found = network(family).requires_grad_(), []
    for kernels, cut in ((False, False), (True, False), (True, True)):
        model.grad_checkpoint = cut
        found.append(public_gradients(with_kernels(model) if kernels else model.use(), first_frame=first_frame))
    names = ["output", *(name for name, _ in model.named_parameters())]
    for name, wanted, *others in zip(names, *found, strict=True):
        assert wanted.any() or name.endswith("filling")
        assert max(difference(other, wanted) for other in others) < 1e-4, name


@pytest.mark.parametrize("family", ("flux", "wan"))
def test_kernels_in_bf16_are_no_less_accurate_than_torch_s_operations(family):
    model, found = network(family).bfloat16().float().requires_grad_(), []
    wanted = public_gradients(model)
    for use in (PublicDiT.use, functools.partial(with_kernels, dtype=torch.bfloat16)):
        both = zip(public_gradients(use(model.bfloat16()), torch.bfloat16), wanted, strict=True)
        output, *gradients = [((value - want).norm() / want.norm()).item() for value, want in both]
        found.append((output, statistics.median(gradients)))
    (plain_output, plain_gradient), (output, gradient) = found
    assert 0 < output < plain_output and 0 < gradient < plain_gradient, found


@pytest.mark.parametrize("config", (CONFIG, MOVIEGEN(num_classes=3)), ids=("DiT", "MovieGen"))
def test_compiled_blocks_with_kernels(config):
    model = with_kernels(randomised(build_model(config)))
    want, want_grads = gradients(model)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    got, got_grads = gradients(model)
    torch.testing.assert_close(got, want)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, msg=lambda m, n=name: f"{n}: {m}")


def engine_curve(mesh, config: DiTConfig, plugin: str, precision: str, kernels: bool) -> list[float]:
    from opendit.parallel.engines import build_engine

    torch.manual_seed(0)
    model = randomised(build_model(config))
    engine = build_engine(with_kernels(model) if kernels else model, mesh, plugin=plugin, precision=precision, lr=3e-3)
    losses = []
    for _ in range(4):
        with engine.micro_batch(last=True):
            loss = (engine.forward(*inputs(config)).float() - 1).square().mean()
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("config", "plugin", "precision"),
    (
        (CONFIG, "zero2", "fp32"),
        (CONFIG, "ddp", "bf16"),
        (CONFIG, "gemini", "bf16"),
        (MOVIEGEN(num_classes=3), "gemini", "bf16"),
    ),
    ids=lambda value: getattr(value, "kind", value),
)
def test_plugins_reach_the_weights_that_kernels_took_over(config, plugin, precision):
    (want,), (got,) = (run_ranks(1, engine_curve, config, plugin, precision, kernels) for kernels in (False, True))
    assert want[-1] < 0.8 * want[0]  # it learns, so the gradients matter
    assert got == pytest.approx(want, rel=1e-4 if precision == "fp32" else 2e-2)
