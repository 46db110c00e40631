"""Rectified flow is compared with closed forms for Gaussian data N(MU, S^2)."""

import itertools
import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from scipy import stats
from torch import Tensor

from opendit.config.command_line import parse
from opendit.config.names import ALL_SAMPLERS
from opendit.config.train import TrainConfig
from opendit.diffusion.objectives import DDPMObjective, FlowObjective, flow, objective_from_dict
from opendit.diffusion.objectives.flow import FlowTrajectory
from opendit.diffusion.samplers import sample
from tests.diffusion.states import sample_with_states
from tests.objectives import losses_of

MU, S = 0.7, 0.3


def gaussian_velocity(x: Tensor, timestep: Tensor) -> Tensor:
    """E[noise - x_0 | x_t] for x_0 ~ N(MU, S^2): x_t has mean (1-t) MU and variance (1-t)^2 S^2 + t^2."""
    t = (timestep.double() / 1000).view(-1, *(1,) * (x.dim() - 1))
    variance = (1 - t) ** 2 * S**2 + t**2
    z = x.double() - (1 - t) * MU
    return t / variance * z - (MU + (1 - t) * S**2 / variance * z)


def exact_end(x: Tensor) -> Tensor:
    """Return the exact path's end at t = 0. Paths keep quantiles, so N(0, 1) becomes N(MU, S^2)."""
    return MU + S * x


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2)])
def test_samplers_converge_at_their_order(name, order):
    x = torch.linspace(-2.5, 2.5, 101, dtype=torch.float64).view(1, 1, 101)
    paths = [FlowTrajectory(flow.sampling_times(n)) for n in (40, 80, 160)]
    errors = [(sample(name, gaussian_velocity, x, path) - exact_end(x)).abs().max() for path in paths]
    observed = [math.log2(a / b) for a, b in zip(errors, errors[1:], strict=False)]
    assert all(abs(seen - order) < 0.2 for seen in observed), (errors, observed)


@pytest.mark.parametrize("shift", [0.5, 3.0, 6.0])
def test_shifted_times_lead_to_the_same_place(shift):
    x = torch.linspace(-2, 2, 11, dtype=torch.float64).view(1, 1, 11)
    times = flow.sampling_times(400, shift)
    assert times[0] == 1 and times[-1] == 0 and (times.diff() < 0).all()
    got = sample("heun", gaussian_velocity, x, FlowTrajectory(times))
    torch.testing.assert_close(got, exact_end(x), atol=2e-4, rtol=0)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_matches_diffusers(shift):
    """diffusers' default times end at 1 / 1000; the pipelines of SD3 and FLUX pass 1 to 1 / n before the shift."""
    reference = FlowMatchEulerDiscreteScheduler(shift=shift)
    reference.set_timesteps(sigmas=np.linspace(1, 1 / 25, 25).tolist())
    times, told = flow.sampling_times(25, shift), []
    torch.testing.assert_close(times.float(), reference.sigmas, atol=1e-5, rtol=0)

    def model(x, timestep):
        told.append(timestep[0])
        return torch.sin(2 * x + timestep.view(-1, 1, 1, 1) / 200) - x

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    got, states = sample_with_states("euler", model, x, FlowTrajectory(times))
    torch.testing.assert_close(torch.stack(told), reference.timesteps, atol=1e-2, rtol=0)  # 1e-5 of 1000
    assert torch.equal(states[0], x) and len(states) == 25
    for k, t in enumerate(reference.timesteps):
        expected = reference.step(model(states[k], t.expand(2)), t, states[k]).prev_sample
        after = states[k + 1] if k + 1 < 25 else got
        torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5, msg=lambda m, t=t: f"t = {t}: {m}")


def test_heun_evaluates_the_second_time_where_the_step_leads():
    seen = []

    def model(x, t):
        seen.append((x.clone(), t[0].item()))
        return torch.full_like(x, 2.0)

    sample("heun", model, torch.ones(1, 1, 1), FlowTrajectory(torch.tensor([1.0, 0.5, 0.0])))
    assert [round(t) for _, t in seen] == [1000, 500, 500, 0]
    assert [x.item() for x, _ in seen] == [1.0, 0.0, 0.0, -1.0]


def test_the_loss_of_the_true_velocity_is_that_of_chance():
    """The loss is zero for one data point, and S^2 / ((1-t)^2 S^2 + t^2), noise - x_0's variance, for N(MU, S^2)."""
    torch.manual_seed(0)
    noise, t = torch.randn(50_000, 1, 2, 2, dtype=torch.float64), torch.full((50_000,), 0.4, dtype=torch.float64)
    x0 = MU + S * torch.randn_like(noise)
    loss = losses_of(FlowObjective(), gaussian_velocity, x0, t, noise)
    expected = S**2 / (0.6**2 * S**2 + 0.4**2)
    assert loss.shape == (50_000,) and abs(loss.mean() / expected - 1) < 0.01

    def to_the_point(x, timestep):
        return (x - MU) / (timestep.double() / 1000).view(-1, 1, 1, 1)

    point = losses_of(FlowObjective(), to_the_point, torch.full_like(noise, MU), t, noise)
    assert point.max() < 1e-9


def test_the_loss_refuses_what_does_not_fit():
    x, t = torch.zeros(3, 2, 4, 4), torch.full((3,), 0.5)
    with pytest.raises(ValueError, match="velocity has the shape"):
        losses_of(FlowObjective(), lambda x, t: torch.cat((x, x), 1), x, t, x)
    with pytest.raises(ValueError, match="don't fit"):
        FlowObjective().prepare(x, t[:2], x)


@pytest.mark.parametrize(
    ("name", "cdf"),
    [
        ("uniform", lambda t: t),
        ("logit_normal", lambda t: stats.norm.cdf(math.log(t / (1 - t)))),
    ],
)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_times_have_their_distribution(name, cdf, shift):
    index = torch.arange(20_000)
    t = FlowObjective(shift=shift, times_are=name).times(1, 2, index)
    assert t.min() > 0 and t.max() < 1
    for point in (0.1, 0.5, 0.9):
        moved = shift * point / (1 + (shift - 1) * point)
        assert abs((t < moved).double().mean().item() - cdf(point)) < 0.012


def test_mode_times_peak_in_the_middle_and_reach_both_ends():
    u = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    t = flow.mode_times(u)
    assert t[0] == 1 and abs(t[-1]) < 1e-12 and (t.diff() < 0).all()  # monotonic
    counts = torch.histc(t, 10, 0, 1)
    assert counts[4:6].min() > counts[[0, 9]].max() * 1.5
    torch.testing.assert_close(flow.mode_times(u, scale=0.0), 1 - u)


def test_the_shift_follows_a_samples_tokens():
    objective, index = FlowObjective(shift=3.0, times_are="logit_normal", shift_tokens=256), torch.arange(4)
    for tokens in (64, 256, 1024):
        alone = FlowObjective(shift=3.0 * math.sqrt(tokens / 256), times_are="logit_normal")
        assert objective.for_tokens(tokens) == alone
        torch.testing.assert_close(objective.times(1, 2, index, [tokens] * 4), alone.times(1, 2, index))
    mixed = objective.times(1, 2, index, (64, 256, 1024, 64))
    wanted = [objective.for_tokens(m).times(1, 2, index)[i] for i, m in enumerate((64, 256, 1024, 64))]
    torch.testing.assert_close(mixed, torch.stack(wanted))
    for unknown in (lambda: objective.times(1, 2, index), lambda: objective.trajectory(5)):
        with pytest.raises(ValueError, match="--flow_shift_tokens"):
            unknown()
    assert objective.samplers == alone.samplers and objective.choose("heun") == "heun"
    assert objective_from_dict(objective.to_dict()) == objective and "shift_tokens" not in alone.to_dict()
    assert FlowObjective().for_tokens(7) == FlowObjective()


def test_times_depend_on_the_sample_alone():
    for objective in (DDPMObjective(), FlowObjective(shift=3.0)):
        whole = objective.times(5, 7, torch.arange(12))
        assert torch.equal(objective.times(5, 7, torch.tensor([9, 4])), whole[[9, 4]])
        assert not torch.equal(objective.times(5, 8, torch.arange(12)), whole)


def test_objectives_survive_a_checkpoint_and_refuse_the_others_samplers():
    flow_objective = FlowObjective(shift=6.0, times_are="mode")
    assert objective_from_dict(flow_objective.to_dict()) == flow_objective
    assert objective_from_dict(None) == DDPMObjective() == objective_from_dict({"name": "ddpm"})
    assert set(ALL_SAMPLERS) == {"ddpm", "ddim", "dpmpp", "euler", "heun", "unipc"}
    with pytest.raises(ValueError, match="--sampler ddim.*euler or heun or unipc"):
        flow_objective.choose("ddim")
    with pytest.raises(ValueError, match="objective 'edm9'"):
        objective_from_dict({"name": "edm9"})
    assert flow_objective.choose(None) == "euler" and DDPMObjective().choose("ddim") == "ddim"


@pytest.mark.parametrize("sampler", [None, "heun"])
def test_samples_depend_on_seed_and_index_alone(sampler):
    objective = FlowObjective(shift=3.0)
    settings = dict(seed=3, steps=5, sampler=sampler, progress=None)
    whole = objective.sample(gaussian_velocity, torch.arange(6), (1, 2, 2), **settings)
    part = objective.sample(gaussian_velocity, torch.tensor([5, 1]), (1, 2, 2), **settings)
    torch.testing.assert_close(part, whole[[5, 1]], atol=0, rtol=0)


@pytest.mark.parametrize("shift", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_the_objective_samples_at_its_shifted_times(shift, sampler):
    told = []

    def model(x, timestep):
        told.append(timestep[0].item())
        return x

    FlowObjective(shift=shift).sample(
        model, torch.arange(2), (1, 2, 2), seed=0, steps=4, sampler=sampler, progress=None
    )
    times = [1000 * shift * t / (1 + (shift - 1) * t) for t in (1, 0.75, 0.5, 0.25, 0)]
    expected = times[:-1] if sampler == "euler" else [t for pair in itertools.pairwise(times) for t in pair]
    assert told == pytest.approx(expected, abs=1e-3)


# ------------------------------------------------------------------------------------------ predictions of the sample


def gaussian_mean(x: Tensor, timestep: Tensor, scale: float = 1.0) -> Tensor:
    """Return E[x_0 | x_t] for x_0 ~ N(MU, S^2) and noise with standard deviation ``scale``."""
    t = (timestep.double() / 1000).view(-1, *(1,) * (x.dim() - 1))
    gain = (1 - t) * S**2 / ((1 - t) ** 2 * S**2 + (scale * t) ** 2)
    return MU + gain * (x.double() - (1 - t) * MU)


@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_both_predictions_of_gaussian_data_have_the_same_field_and_draw_the_same(sampler):
    x = torch.linspace(-2, 2, 9, dtype=torch.float64).view(3, 1, 3)
    v, of_x = FlowObjective().trajectory(7), FlowObjective(prediction="x").trajectory(7)
    for k, point in enumerate(v.points(x)[:-1]):
        slope = of_x.slope(gaussian_mean, x, point)
        torch.testing.assert_close(slope, v.slope(gaussian_velocity, x, point), rtol=1e-5, atol=1e-5)  # times are fp32
        weights = of_x.slope_weights(k)
        torch.testing.assert_close(
            weights.x * x + weights.output * gaussian_mean(x, point), slope, rtol=1e-5, atol=1e-5
        )
    assert not of_x.has_slope(7) and v.has_slope(7)
    if sampler == "euler":
        drawn = [sample(sampler, *pair) for pair in ((gaussian_velocity, x, v), (gaussian_mean, x, of_x))]
        torch.testing.assert_close(*drawn, rtol=1e-5, atol=1e-5)
    fine = sample(sampler, gaussian_mean, x, FlowObjective(prediction="x").trajectory(2000))
    torch.testing.assert_close(fine, exact_end(x), atol=2e-3, rtol=0)


def test_the_loss_of_a_predicted_sample_is_that_of_its_velocity():
    torch.manual_seed(0)
    x0, noise = torch.randn(2, 6, 2, 3, 3, dtype=torch.float64)
    t = torch.tensor([1.0, 0.7, 0.3, 0.051, 0.05, 0.01], dtype=torch.float64)
    output = torch.randn_like(x0)
    for scale in (1.0, 2.5):
        objective = FlowObjective(prediction="x", noise_scale=scale)
        prepared = objective.prepare(x0, t, noise)
        at = t.view(-1, 1, 1, 1)
        torch.testing.assert_close(prepared.x_t, (1 - at) * x0 + at * scale * noise)
        velocity = (prepared.x_t - output) / at
        wanted = (velocity - (scale * noise - x0)).square().flatten(1).mean(1)
        wanted[-1] *= (0.01 / 0.05) ** 2  # the denominator is clipped
        torch.testing.assert_close(objective.loss(output, prepared), wanted)
        torch.testing.assert_close(objective.noise_level(prepared.timestep[1:]).double(), scale * t[1:] / (1 - t[1:]))


def test_scaled_noise_leads_to_the_same_data():
    x = torch.linspace(-2, 2, 9, dtype=torch.float64).view(3, 1, 3)
    path = FlowObjective(prediction="x", noise_scale=2.0).trajectory(3000)
    assert torch.equal(path.start(x), 2 * x) and path.levels[1] == 2 * path.times[1] / (1 - path.times[1])
    drawn = sample("heun", lambda x, t: gaussian_mean(x, t, 2.0), path.start(x), path)
    torch.testing.assert_close(drawn, exact_end(x), atol=2e-3, rtol=0)


def test_logit_normal_times_have_their_mean_and_deviation():
    t = FlowObjective(times_are="logit_normal", mean=0.8, std=0.6).times(1, 2, torch.arange(20_000))
    logits = (t / (1 - t)).log()
    assert abs(logits.mean() - 0.8) < 0.02 and abs(logits.std() - 0.6) < 0.02
    with pytest.raises(ValueError, match="--flow_mean, --flow_std: .*logit_normal"):
        FlowObjective(mean=0.5)


def test_what_a_sample_predicting_network_learns_is_stored():
    made = FlowObjective(prediction="x", noise_scale=2.0)
    assert objective_from_dict(made.to_dict()) == made and FlowObjective().predicts == {"objective": "flow"}
    assert made.predicts == {"objective": "flow", "flow_prediction": "x", "flow_noise_scale": 2.0}
    with pytest.raises(ValueError, match="--flow_prediction eps: not known"):
        FlowObjective(prediction="eps")


@pytest.mark.parametrize("prediction", ["v", "x"])
def test_contrast_drives_away_from_the_velocity_of_the_neighbour(prediction):
    torch.manual_seed(0)
    x0, noise, output = torch.randn(3, 5, 2, 3, 3, dtype=torch.float64)
    t = torch.tensor([0.2, 0.4, 0.6, 0.8, 0.9], dtype=torch.float64)
    objective = FlowObjective(prediction=prediction, contrast=0.05)
    prepared = objective.prepare(x0, t, noise)
    velocity = output if prediction == "v" else (prepared.x_t - output) / t.view(-1, 1, 1, 1)
    true = noise - x0
    wanted = [
        (velocity[row] - true[row]).square().mean() - 0.05 * (velocity[row] - true[other]).square().mean()
        for row, other in ((0, 1), (1, 0), (2, 3), (3, 2), (4, 4))
    ]
    torch.testing.assert_close(objective.loss(output, prepared), torch.stack(wanted))
    pair = objective.prepare(x0[2:4], t[2:4], noise[2:4])  # another rank's micro-batch
    torch.testing.assert_close(objective.loss(output[2:4], pair), torch.stack(wanted[2:4]))
    torch.testing.assert_close(
        FlowObjective(prediction=prediction).loss(output, FlowObjective(prediction=prediction).prepare(x0, t, noise)),
        FlowObjective(prediction=prediction, contrast=0.0).loss(
            output, prepared._replace(context=prepared.context[:2])
        ),
    )


def test_contrast_is_refused_where_samples_have_no_neighbours():
    for flags, said in (
        (["--batch_size", "5"], "--batch_size 5 is odd"),
        (["--bucket_tokens", "64"], "--bucket_tokens"),
    ):
        with pytest.raises(ValueError, match=f"--flow_contrast 0.05: .*{said}"):
            parse(TrainConfig, ["--objective", "flow", "--flow_contrast", "0.05", *flags]).resolve(1, has_gpu=True)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_min_snr_weighs_errors_of_the_sample_whatever_is_predicted(scale):
    torch.manual_seed(0)
    x0, noise, output = torch.randn(3, 4, 2, 3, 3, dtype=torch.float64)
    t = torch.tensor([0.01, 0.2, 0.5, 0.9], dtype=torch.float64)
    at = t.view(-1, 1, 1, 1)
    for prediction in ("v", "x"):
        objective = FlowObjective(prediction=prediction, noise_scale=scale, min_snr=5.0)
        prepared = objective.prepare(x0, t, noise)
        predicted = prepared.x_t - at * output if prediction == "v" else output
        snr = ((1 - t) / (scale * t)) ** 2
        wanted = snr.clamp(max=5.0) * (predicted - x0).square().flatten(1).mean(1)
        torch.testing.assert_close(objective.loss(output, prepared), wanted)
    with pytest.raises(ValueError, match="--flow_min_snr 0"):
        FlowObjective(min_snr=0.0)
