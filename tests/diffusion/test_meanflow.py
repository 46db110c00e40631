"""MeanFlow with a known flow, its derivative compared with finite differences, and runs of train.py."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import sample
import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.diffusion.objectives.meanflow import MeanFlowObjective, network_times
from opendit.diffusion.random import initial_noise
from opendit.models.layers import BlockOps
from opendit.models.zoo import build_model, model_config
from opendit.training.runners import TargetNetwork
from tests.checkpoint.test_resume import ARGV, assert_same_bits, losses, run_of, trainings
from tests.models.test_dit import randomised
from tests.ranks import run_ranks

SPREAD = 0.3  # standard deviation of the data


def deviation(t: Tensor) -> Tensor:
    """Return the standard deviation of x_t for Gaussian data, whose paths are x_t = deviation(t) * constant."""
    return ((1 - t) ** 2 * SPREAD**2 + t**2).sqrt()


def speed(t: Tensor) -> Tensor:
    """Return v / x_t on such a path."""
    return (t - (1 - t) * SPREAD**2) / deviation(t) ** 2


def mean_speed(t: Tensor, before: Tensor) -> Tensor:
    """Return u / x_t on such a path, which a perfect network predicts."""
    same = t == before
    apart = torch.where(same, torch.ones_like(t), t - before)
    return torch.where(same, speed(t), (1 - deviation(before) / deviation(t)) / apart)


def perfect(x: Tensor, time: Tensor, *_) -> Tensor:
    t, other = time.to(x.dtype).unbind(1)
    return x * mean_speed(t, t + other + 1).view(-1, 1, 1, 1)


class Perfect:
    """A network without error that offers the methods MeanFlow's targets need."""

    dropped = torch.tensor([False, False, True])

    def __call__(self, x: Tensor, time: Tensor, rows: Tensor) -> Tensor:
        return perfect(x, time)

    def unconditional(self, x: Tensor, time: Tensor) -> Tensor:
        return -perfect(x, time)

    def derivative(self, x: Tensor, time: Tensor, dx: Tensor, dtime: Tensor, rows: Tensor) -> Tensor:
        step = 1e-4
        ahead, behind = (perfect(x + s * dx, time.double() + s * dtime.double()) for s in (step, -step))
        return (ahead - behind) / (2 * step)


def known_pair(x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return x0 and noise whose velocity equals the flow's at x_t."""
    t = t.view(-1, 1, 1, 1)
    velocity = speed(t) * x_t
    return x_t - t * velocity, x_t + (1 - t) * velocity


def test_the_identity_holds_where_the_flow_is_known():
    objective = MeanFlowObjective()
    t, x_t = torch.tensor([[0.9, 0.2], [0.6, 0.6], [1.0, 0.0]]).double(), torch.randn(3, 2, 4, 4).double()
    x0, noise = known_pair(x_t, t[:, 0])
    prepared = objective.prepare(x0, t, noise)
    torch.testing.assert_close(prepared.x_t, x_t)
    completed = objective.complete(prepared, Perfect())
    want = perfect(x_t, prepared.timestep)
    torch.testing.assert_close(completed.context.target, want, rtol=1e-4, atol=1e-5)
    assert (objective.loss(want, completed) < 1e-8).all()
    apart = (prepared.context.target - want).abs().flatten(1).amax(1)
    assert apart[0] > 0.1 and apart[1] < 1e-6 and apart[2] > 0.1  # it would differ without the derivative


def test_guidance_is_in_the_target_of_samples_that_have_a_class():
    objective = MeanFlowObjective(guidance=1.5)
    t, x_t = torch.full((3, 2), 0.7).double(), torch.randn(3, 2, 4, 4).double()
    prepared = objective.prepare(*[(x := known_pair(x_t, t[:, 0]))[0], t, x[1]])
    target, velocity = objective.complete(prepared, Perfect()).context.target, speed(t[0, 0]) * x_t
    torch.testing.assert_close(target[:2], 1.5 * velocity[:2] - 0.5 * -velocity[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(target[2], velocity[2])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_any_number_of_steps_arrives_where_the_flow_does(steps):
    index, shape = torch.arange(3), (2, 4, 4)
    drawn = MeanFlowObjective().sample(perfect, index, shape, seed=1, steps=steps)
    torch.testing.assert_close(drawn, SPREAD * initial_noise(1, index, shape), rtol=1e-4, atol=1e-5)


def test_times_are_keyed_ordered_and_apart_for_their_share():
    objective = MeanFlowObjective(share=0.25)
    t, before = objective.times(3, 7, torch.arange(4000)).unbind(1)
    assert (before <= t).all() and (t < 1).all() and (before > 0).all()
    assert (before < t).double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(objective.times(3, 7, torch.arange(5, 9)), torch.stack((t, before), 1)[5:9])


def test_gradients_of_the_loss_are_divided_by_its_power_and_its_value_is_the_error():
    target, output = torch.randn(2, 3, 4, 4).double(), torch.randn(2, 3, 4, 4).double().requires_grad_()
    objective, plain = MeanFlowObjective(), MeanFlowObjective(power=0.0)
    prepared = objective.prepare(torch.zeros_like(target), torch.full((2, 2), 0.5).double(), target)
    (found,) = torch.autograd.grad(objective.loss(output, prepared).sum(), output)
    (want,) = torch.autograd.grad(plain.loss(output, prepared).sum(), output)
    error = (output - target).square().flatten(1).mean(1).detach()
    torch.testing.assert_close(found, want / (error + 1e-3).view(-1, 1, 1, 1))
    torch.testing.assert_close(objective.loss(output, prepared), plain.loss(output, prepared))


@pytest.mark.parametrize("block", [{}, {"norm": "rms", "mlp": "swiglu", "positions": "rope", "qk_norm": True}])
def test_the_derivative_through_the_network_is_that_of_finite_differences(block):
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=2, num_classes=5, learn_sigma=False, **block)
    torch.manual_seed(0)
    model = randomised(build_model(config)).double()
    engine = SimpleNamespace(module=model, autocast=contextlib.nullcontext)
    network = TargetNetwork(engine, torch.tensor([0, 5, 2]))
    x, dx = torch.randn(2, 2, 2, 8, 8).double()
    time, rows = network_times(torch.tensor([0.8, 0.3]), torch.tensor([0.5, 0.1])).double(), torch.tensor([0, 2])
    dtime, step = torch.tensor([1.0, -1.0]).double().expand(2, 2), 1e-3
    ops = model.blocks[0].ops
    found = network.derivative(x, time, dx, dtime, rows)
    ahead, behind = (network(x + s * dx, time + s * dtime, rows) for s in (step, -step))
    want = (ahead - behind).double() / (2 * step)
    assert (found - want).norm() < 1e-3 * want.norm()  # times are embedded in fp32
    assert model.blocks[0].ops is ops and network.dropped.tolist() == [False, True, False]


def test_kernels_are_left_out_of_the_derivative_only():
    def kernel(*args):
        raise RuntimeError("a kernel has no forward-mode derivative")

    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=2, num_classes=5, learn_sigma=False)
    x, time, labels = torch.randn(2, 2, 8, 8), torch.tensor([[0.8, -0.7], [0.3, -0.8]]), torch.tensor([0, 2])
    found = []
    for use in ({}, {"ops": BlockOps(layernorm_modulate=kernel)}, {"attend": kernel}):
        torch.manual_seed(0)
        model = randomised(build_model(config)).use(**use)
        network = TargetNetwork(SimpleNamespace(module=model, autocast=contextlib.nullcontext), labels)
        found.append(network.derivative(x, time, x, time, torch.arange(2)))
        with pytest.raises(RuntimeError, match="a kernel") if use else contextlib.nullcontext():
            network(x, time, torch.arange(2))
    assert found[0].norm() > 0 and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        ("--enable_modulate_kernel", True),
        ("--enable_layernorm_kernel", True),
        ("--fp8", True),
        ("", False),
        ("--objective flow --enable_modulate_kernel", False),
    ],
)
def test_a_run_with_kernels_says_that_the_derivative_has_none(flags, noted):
    flags = ["--objective", "meanflow", "--mixed_precision", "bf16", *flags.split()]
    _, notes = parse(TrainConfig, flags).resolve(1, has_gpu=True)
    told = "--objective meanflow: the derivative through the network is computed by torch, without kernels"
    assert (told in notes) == noted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plugin", "fsdp"], "--objective meanflow: does not work with --plugin fsdp"),
        (["--compile"], "--objective meanflow: does not work with --compile"),
        (["--tensor_parallel_size", "2"], "--objective meanflow: does not work with --tensor_parallel_size"),
        (["--meanflow_guidance", "2", "--label_drop", "0"], "give --label_drop 0.1"),
    ],
)
def test_what_it_does_not_work_with_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse(TrainConfig, ["--objective", "meanflow", *flags]).resolve(2, has_gpu=True)


def test_runs_resume_and_ranks_agree_and_samples_are_drawn_in_one_step(tmp_path):
    argv = [*ARGV, "--vae", "none", "--warmup_steps", "1", "--mixed_precision", "fp32", "--objective", "meanflow"]
    argv += ["--meanflow_guidance", "2", "--meanflow_share", "0.5", "--ckpt_every", "2"]
    two = [*argv, "--batch_size", "4", "--plugin", "ddp"]
    whole, parts, alone = (tmp_path / name for name in ("whole", "parts", "alone"))
    runs = [[*two, "--max_steps", "4", "--outputs", str(whole)], [*two, "--max_steps", "2", "--outputs", str(parts)]]
    runs.append([*two, "--max_steps", "4", "--outputs", str(parts), "--load", "latest"])
    run_ranks(2, trainings, runs)
    assert losses(parts) == losses(whole)
    assert_same_bits(run_of(whole) / "checkpoints/latest", run_of(parts) / "checkpoints/latest")
    train.main([*argv, "--batch_size", "8", "--max_steps", "4", "--outputs", str(alone)])
    assert losses(alone) == pytest.approx(losses(whole), rel=1e-4)
    flags = ["--ckpt", str(run_of(whole)), "--num_samples", "2", "--output", str(tmp_path / "drawn")]
    sample.main([*flags, "--num_sampling_steps", "1"])
    assert list((tmp_path / "drawn").glob("*.png"))
