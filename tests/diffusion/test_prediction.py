"""DDPM's v-prediction and min-SNR weights are compared with diffusers, the papers' identities and noise prediction."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from torch import Tensor

from opendit.diffusion.objectives import DDPMObjective
from opendit.diffusion.objectives.ddpm import DDPM, EpsModel, min_snr_weight, training_loss
from tests.diffusion.test_samplers import NAMES, SCHEDULE, along, along_with_states, gaussian_model, in_float64, randn
from tests.objectives import losses_of

TIMES = torch.tensor([0, 1, 250, 700, 999])
ALPHA = SCHEDULE.alphas_cumprod[TIMES].sqrt().view(-1, 1, 1, 1)
SIGMA = (1 - SCHEDULE.alphas_cumprod[TIMES]).sqrt().view(-1, 1, 1, 1)
SNR = (ALPHA / SIGMA).square().flatten()


def velocity_model(schedule: DDPM, learned: bool):
    """Return a model of the exact v for test_samplers' Gaussian data: v = (eps - sigma x) / alpha."""
    exact = gaussian_model(schedule, learned)

    def model(x: Tensor, t: Tensor) -> Tensor:
        ac = SCHEDULE.alphas_cumprod[t].view(-1, *(1,) * (x.ndim - 1))
        output = exact(x, t)
        eps, rest = output[:, : x.shape[1]], output[:, x.shape[1] :]
        return torch.cat(((eps - (1 - ac).sqrt() * x) / ac.sqrt(), rest), 1)

    return model


def test_velocity_matches_diffusers_and_turns_into_noise():
    x0, noise = randn(5, 2, 3, 4), randn(5, 2, 3, 4, seed=1)
    xt, velocity = SCHEDULE.q_sample(x0, TIMES, noise), SCHEDULE.velocity(x0, TIMES, noise)
    reference = in_float64(DDPMScheduler(beta_start=1e-4, beta_end=0.02, prediction_type="v_prediction"))
    torch.testing.assert_close(velocity, reference.get_velocity(x0, noise, TIMES), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(velocity, ALPHA * noise - SIGMA * x0, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(SCHEDULE.eps_of_velocity(xt, TIMES, velocity), noise, rtol=1e-6, atol=1e-6)


def one_step(name: str, schedule: DDPM, model, x: Tensor, noises) -> list[Tensor]:
    got, states = along_with_states(schedule, name, EpsModel(model, SCHEDULE), x, noise_fn=lambda k: noises[k])
    return [*states, got]


@pytest.mark.parametrize(
    ("name", "scheduler", "options"),
    [
        ("ddpm", DDPMScheduler, {"variance_type": "fixed_small", "clip_sample": False}),
        ("ddim", DDIMScheduler, {"clip_sample": False}),
        ("dpmpp", DPMSolverMultistepScheduler, {"final_sigmas_type": "zero"}),
    ],
)
def test_each_step_of_a_velocity_model_matches_diffusers(name, scheduler, options):
    schedule, x = SCHEDULE.respaced(28), randn(2, 3, 4, 4).float()  # a stride of 37, as in DDIMScheduler
    reference = in_float64(scheduler(beta_start=1e-4, beta_end=0.02, prediction_type="v_prediction", **options))
    timesteps = schedule.timestep_map.flip(0).tolist()
    if name == "ddim":
        reference.num_inference_steps = 1000 // 37
    else:
        reference.set_timesteps(timesteps=timesteps)

    def model(x, t):
        return torch.sin(2 * x + t.view(-1, 1, 1, 1) / 1000) + 0.2 * x

    ours, generator = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    noises = [torch.randn(x.shape, generator=ours) for _ in timesteps]
    states = one_step(name, schedule, model, x, noises)
    for k, t in enumerate(timesteps):
        noise = {"generator": generator} if name == "ddpm" else {}
        expected = reference.step(model(states[k], torch.tensor([t, t])), t, states[k], **noise).prev_sample
        # in float32 at t = 999, x_0 is 157 times the difference of two terms
        torch.testing.assert_close(states[k + 1], expected, rtol=1e-4, atol=1e-4, msg=lambda m, t=t: f"t = {t}: {m}")


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_velocity_model_draws_what_the_noise_model_draws(name, learned):
    schedule, x = SCHEDULE.respaced(20), randn(6, 1)
    how = {"noise_fn": lambda k: randn(6, 1, seed=k)}
    by_noise = along(schedule, name, gaussian_model(schedule, learned), x, **how)
    by_velocity = along(schedule, name, EpsModel(velocity_model(schedule, learned), SCHEDULE), x, **how)
    torch.testing.assert_close(by_velocity, by_noise, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_shifted_objective_draws_from_the_noise_it_trains_on(name):
    """The model knows only one picture; its angle is arctan(sigma / alpha), with 4 times the usual tangent."""
    objective, picture, asked = DDPMObjective("v", shift=4.0), randn(1, 2, 3), []

    def model(x, t):
        asked.append(t)
        angle = torch.arctan(4 * SCHEDULE.noise_level(t).double()).view(-1, 1, 1)
        noise = (x - angle.cos() * picture) / angle.sin()
        return torch.cat((angle.cos() * noise - angle.sin() * picture, torch.zeros_like(noise)), 1).float()

    drawn = objective.sample(model, torch.arange(3), (2, 3), seed=1, steps=50, sampler=name, progress=None)
    torch.testing.assert_close(drawn.double(), picture.expand(3, -1, -1), rtol=0, atol=1e-3 if name != "ddpm" else 0.1)
    how = lambda x, t: model(x.double(), t), picture, torch.tensor([200]), randn(1, 2, 3, seed=5)
    assert losses_of(objective, *how).item() < 1e-3 < 0.1 < losses_of(DDPMObjective("v"), *how).item()
    assert max(int(t.max()) for t in asked) == 999


def test_the_objective_samples_by_its_prediction():
    how = dict(seed=1, steps=25, sampler="ddim", progress=None)
    schedule, index = SCHEDULE.respaced(25), torch.arange(5)

    def flat(model):
        return lambda x, t: model(x.double(), t).float()

    by_noise = DDPMObjective().sample(flat(gaussian_model(schedule, True)), index, (1,), **how)
    by_velocity = DDPMObjective("v").sample(flat(velocity_model(schedule, True)), index, (1,), **how)
    torch.testing.assert_close(by_velocity, by_noise, rtol=1e-3, atol=1e-3)
    wrong = DDPMObjective().sample(flat(velocity_model(schedule, True)), index, (1,), **how)
    assert (wrong - by_noise).abs().max() > 0.1


def losses(prediction: str, min_snr: float | None, error: Tensor, learned: bool = False):
    """Return the loss when the prediction of x_0 is off by ``error``, and the gradient of the output."""
    x0, noise = randn(5, 2, 3, 4), randn(5, 2, 3, 4, seed=1)
    xt = SCHEDULE.q_sample(x0, TIMES, noise)
    wrong = (xt - ALPHA * (x0 + error)) / SIGMA
    output = wrong if prediction == "eps" else ALPHA * wrong - SIGMA * (x0 + error)
    if learned:
        output = torch.cat((output, 0.3 * randn(5, 2, 3, 4, seed=2)), 1)
    output = output.detach().requires_grad_()
    loss = training_loss(SCHEDULE, output, x0, xt, TIMES, noise, prediction=prediction, min_snr=min_snr)
    loss.loss.sum().backward()
    return loss, output.grad


@pytest.mark.parametrize("gamma", [0.5, 5.0, 1e9])
@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_min_snr_weighs_the_error_of_x0(prediction, gamma):
    """For both predictions the loss is min(SNR, gamma) |x_0 - its prediction|^2 ([M])."""
    error = 0.1 * randn(5, 2, 3, 4, seed=3)
    loss, _ = losses(prediction, gamma, error)
    expected = SNR.clamp(max=gamma) * error.square().flatten(1).mean(1)
    torch.testing.assert_close(loss.loss, expected, rtol=2e-3, atol=0)


def test_weights_are_those_of_the_paper():
    eps = min_snr_weight(SCHEDULE, TIMES, 5.0, "eps").double()
    torch.testing.assert_close(eps, (5 / SNR).clamp(max=1), rtol=1e-5, atol=0)
    v = min_snr_weight(SCHEDULE, TIMES, 5.0, "v").double()
    torch.testing.assert_close(v, SNR.clamp(max=5) / (SNR + 1), rtol=1e-5, atol=0)


def test_another_prediction_is_refused():
    with pytest.raises(ValueError, match="one of eps, v, got x0"):
        losses("x0", None, torch.zeros(5, 2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_without_weights_the_error_is_that_of_the_prediction(prediction):
    error = 0.1 * randn(5, 2, 3, 4, seed=3)
    loss, _ = losses(prediction, None, error)
    factor = SNR if prediction == "eps" else SNR + 1
    torch.testing.assert_close(loss.loss, factor * error.square().flatten(1).mean(1), rtol=2e-3, atol=0)


def test_the_variance_is_trained_alike_whatever_is_predicted_and_weighted():
    error = 0.1 * randn(5, 2, 3, 4, seed=3)
    plain, gradient = losses("eps", None, error, learned=True)
    for prediction, gamma in (("v", None), ("eps", 5.0), ("v", 5.0)):
        loss, other = losses(prediction, gamma, error, learned=True)
        torch.testing.assert_close(loss.vb, plain.vb, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(other[:, 2:], gradient[:, 2:], rtol=1e-3, atol=1e-6)
        alone, without = losses(prediction, gamma, error, learned=False)
        torch.testing.assert_close(loss.mse, alone.mse)
        torch.testing.assert_close(other[:, :2], without)  # the bound only trains the variance


def test_the_default_is_noise_prediction_with_weights_of_one():
    x0, noise = randn(5, 2, 3, 4), randn(5, 2, 3, 4, seed=1)

    def model(x, t):
        return torch.cat((x, 0.1 * x), 1)

    objective = DDPMObjective()
    xt = SCHEDULE.q_sample(x0, TIMES, noise)
    expected = training_loss(SCHEDULE, model(xt, TIMES), x0, xt, TIMES, noise).loss
    assert torch.equal(losses_of(objective, model, x0, TIMES, noise), expected)
    changed = [DDPMObjective("v"), DDPMObjective(min_snr=5.0), DDPMObjective("v", 5.0)]
    all_losses = [losses_of(o, model, x0, TIMES, noise).sum().item() for o in [objective, *changed]]
    assert len(set(all_losses)) == 4
