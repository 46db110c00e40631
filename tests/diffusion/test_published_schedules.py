"""Public models' schedules are compared with diffusers' schedulers, called as in the pipelines."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opendit.diffusion.objectives import FlowObjective, objective_from_dict
from opendit.diffusion.objectives.flow import discrete_times, published_schedule, sampling_times
from tests.diffusion.states import sample_with_states

DYNAMIC = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
EULER = {
    "FLUX.1-schnell": {**DYNAMIC, "shift": 1.0, "use_dynamic_shifting": False},
    "FLUX.1-dev": {**DYNAMIC, "shift": 3.0},
    "Z-Image-Turbo": {"shift": 3.0, "use_dynamic_shifting": False},
    "Z-Image": {"shift": 6.0, "use_dynamic_shifting": False},
    "Qwen-Image": {**DYNAMIC, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
}
WAN = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


def euler(**settings) -> tuple[FlowMatchEulerDiscreteScheduler, dict]:
    """Return diffusers' scheduler and its configuration as stored in a folder."""
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    return scheduler, json.loads(scheduler.to_json_string())


def unipc(**settings) -> tuple[UniPCMultistepScheduler, dict]:
    scheduler = UniPCMultistepScheduler(**{**WAN, **settings})
    return scheduler, json.loads(scheduler.to_json_string())


def begin(scheduler, steps: int, tokens: int = 1024) -> None:
    """Set the timesteps like the pipelines of FLUX, Qwen-Image, Z-Image or Wan."""
    if isinstance(scheduler, UniPCMultistepScheduler):
        return scheduler.set_timesteps(steps)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(tokens, *(scheduler.config[name] for name in names))
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)


def velocity(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Return a stand-in for a network's output that is nonlinear in x and distinguishes times 999, 999.5 and 1000."""
    t = timestep.to(x.dtype).view(-1, *(1,) * (x.dim() - 1))
    return 0.6 * torch.sin(2 * x + t) + 0.4 * torch.tanh(x) - 0.5 * x + torch.cos(t / 300)


def noise(dtype=torch.float32, shape=(3, 4, 5, 6)) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def path_of(scheduler, steps: int, x: torch.Tensor, tokens: int = 1024) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return every x that diffusers' loop evaluates, and the final x."""
    begin(scheduler, steps, tokens)
    states = []
    for t in scheduler.timesteps:
        states.append(x)
        x = scheduler.step(velocity(x, t.expand(len(x))), t, x, return_dict=False)[0]
    return states, x


def compare_paths(scheduler, config, steps: int, dtype, tolerance: float, tokens: int = 1024) -> None:
    published = published_schedule(config)
    trajectory = published.objective.for_tokens(tokens).trajectory(steps)
    x = noise(dtype)
    expected, last = path_of(scheduler, steps, x, tokens)
    got, states = sample_with_states(published.sampler, velocity, x, trajectory)
    assert len(states) == len(expected) == steps and got.dtype == dtype
    for k, (ours, theirs) in enumerate(zip([*states, got], [*expected, last], strict=True)):
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < tolerance, f"x {k} of {steps}: {error:.2e}"


# Times


@pytest.mark.parametrize("name", EULER)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 28, 50])
@pytest.mark.parametrize("tokens", [256, 1000, 4096, 9216])
def test_times_of_euler_are_those_of_diffusers(name, steps, tokens):
    scheduler, config = euler(**EULER[name])
    if name == "Qwen-Image" and steps == 1:
        return  # diffusers divides by zero
    begin(scheduler, steps, tokens)
    published = published_schedule(config)
    trajectory = published.objective.for_tokens(tokens).trajectory(steps)
    assert published.sampler == "euler" and trajectory.times[-1] == 0
    # diffusers computes in float32, where numbers near 1 are 6e-8 apart; stretching adds an operation.
    tolerance = 2e-7 if name == "Qwen-Image" else 1.2e-7
    np.testing.assert_allclose(trajectory.times, scheduler.sigmas.double(), rtol=0, atol=tolerance)
    points = trajectory.points(noise())[:-1, 0]
    torch.testing.assert_close(points, scheduler.timesteps, rtol=0, atol=2.5e-4)


@pytest.mark.parametrize("steps", [6, 34])
def test_cosmos_loop_is_that_of_diffusers(steps):
    """The reference uses the pipeline's preconditioning and Euler steps; its last step has no length and is skipped."""
    scheduler, config = euler(use_karras_sigmas=True)
    scheduler.register_to_config(sigma_min=0.002, sigma_max=80.0)
    scheduler.set_timesteps(sigmas=torch.linspace(0, 1, steps + 1, dtype=torch.float64))
    scheduler.sigmas[-1] = scheduler.sigmas[-2]
    found = published_schedule(config | {"sigma_max": 80.0, "final_sigmas_type": "sigma_min"}, karras=True)
    trajectory, x = found.objective.trajectory(steps), noise()
    got, states = sample_with_states(found.sampler, velocity, trajectory.start(x), trajectory)
    x = x * 80.0
    form, point = trajectory.slope_weights(2), trajectory.points(x)[2]
    stated = form.x * x + form.output * velocity(trajectory.input_scale(2) * x, point)
    torch.testing.assert_close(stated, trajectory.slope(velocity, x, point), rtol=0, atol=1e-3)
    for k, t in enumerate(scheduler.timesteps):
        error = (([*states, got])[min(k, steps)] - x).abs().max() / x.abs().max()
        assert error < 2e-5, f"x {k} of {steps}: {error:.2e}"  # rounding t near 1 changes 1 - t by a relative 5e-6
        sigma = scheduler.sigmas[k]
        t_k = sigma / (sigma + 1)
        denoised = (1 - t_k) * x - t_k * velocity(x * (1 - t_k), 1000 * t_k.expand(len(x)))
        x = scheduler.step((x - denoised) / sigma, t, x, return_dict=False)[0]
    assert (got - x).abs().max() < 2e-5 * x.abs().max() and len(states) == steps


def test_karras_levels_are_asked_for_by_the_pipeline():
    _, config = euler(use_karras_sigmas=False)
    with pytest.raises(ValueError, match="use_karras_sigmas False: not supported; give true"):
        published_schedule(config, karras=True)
    with pytest.raises(ValueError, match="only a shift of 1 is supported"):
        published_schedule(euler(use_karras_sigmas=True, shift=3.0)[1], karras=True)


@pytest.mark.parametrize("steps", [2, 4, 50])
@pytest.mark.parametrize("tokens", [1, 1024, 4300, 4301])
def test_times_of_flux2_are_those_of_diffusers(tokens, steps):
    scheduler, _ = euler(**EULER["FLUX.1-dev"])
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=compute_empirical_mu(tokens, steps))
    objective = FlowObjective(empirical_tokens=0).for_tokens(tokens)
    times = objective.trajectory(steps).times
    np.testing.assert_allclose(times, scheduler.sigmas.double(), rtol=0, atol=1.2e-7)
    u = torch.rand(5, dtype=torch.float64)
    assert torch.equal(objective.times_at(u), FlowObjective(math.exp(compute_empirical_mu(tokens, 50))).times_at(u))
    with pytest.raises(ValueError, match="number of tokens is not known"):
        FlowObjective(empirical_tokens=0).trajectory(steps)


@given(
    base=st.floats(-1, 2),
    more=st.floats(0, 2),
    few=st.integers(1, 1000),
    between=st.integers(500, 10_000),
    tokens=st.integers(1, 20_000),
    steps=st.integers(2, 60),
    terminal=st.sampled_from([None, 0.02, 0.1]),
)
@settings(deadline=None, max_examples=60)
def test_dynamic_shifts_are_those_of_diffusers(base, more, few, between, tokens, steps, terminal):
    scheduler, config = euler(
        use_dynamic_shifting=True,
        base_shift=base,
        max_shift=base + more,
        base_image_seq_len=few,
        max_image_seq_len=few + between,
        shift_terminal=terminal,
    )
    mu = base + more * (tokens - few) / between
    objective = published_schedule(config).objective
    assume(mu < 5)  # float32 is too coarse beyond; models use a quarter of this
    begin(scheduler, steps, tokens)
    times = objective.for_tokens(tokens).trajectory(steps).times
    # diffusers computes in float32, and stretching divides by 1 minus the last time.
    unstretched = sampling_times(steps, math.exp(mu))[-2].item()
    tolerance = 2e-7 if terminal is None else 2e-7 + 2e-7 / (1 - unstretched)
    np.testing.assert_allclose(times, scheduler.sigmas.double(), rtol=0, atol=tolerance)
    if terminal is not None:
        assert times[-2] == pytest.approx(terminal) and times[0] == 1 and times[-1] == 0


@given(steps=st.integers(1, 999), shift=st.sampled_from([1.0, 3.0, 5.0, 8.0]) | st.floats(0.2, 12))
@settings(deadline=None, max_examples=100)
def test_discrete_times_are_those_of_diffusers_unipc(steps, shift):
    """Times must be equal to the bit, because a different rounding gives the network another timestep."""
    scheduler, config = unipc(flow_shift=shift)
    scheduler.set_timesteps(steps)
    published = published_schedule(config)
    trajectory = published.objective.trajectory(steps)
    assert published.sampler == "unipc" and published.objective.for_tokens(7) == published.objective
    assert trajectory.times == scheduler.sigmas.tolist()
    assert trajectory.points(noise())[:-1, 2].tolist() == scheduler.timesteps.tolist()
    assert all(math.isfinite(level) for level in trajectory.levels)


def test_discrete_times_are_cut_and_begin_at_999():
    times, told = discrete_times(4, 3.0)
    assert told.tolist() == [999, 900, 750, 500, 0] and times[0] == pytest.approx(1 - 1e-6, abs=1e-7)
    assert times.tolist()[1:] == pytest.approx([3 * t / (1 + 2 * t) for t in (0.75025, 0.5005, 0.25075, 0)])
    assert sampling_times(4, 3.0).tolist() == pytest.approx([1, 0.9, 0.75, 0.5, 0])


# Paths


@pytest.mark.parametrize("name", EULER)
@pytest.mark.parametrize("steps", [3, 8, 28])
def test_euler_draws_what_diffusers_draws(name, steps):
    """The error is from rounding the network's time by up to 1e-4; the stand-in turns by 1 rad per unit."""
    compare_paths(*euler(**EULER[name]), steps, torch.float32, 3e-5, tokens=1536)


@pytest.mark.parametrize("flow_shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 20, 50])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_unipc_draws_what_diffusers_draws(flow_shift, steps, dtype, tolerance):
    compare_paths(*unipc(flow_shift=flow_shift), steps, dtype, tolerance)


# Reading


WAN_FILE = {  # of Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.33.0.dev0",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "disable_corrector": [],
    "dynamic_thresholding_ratio": 0.995,
    "final_sigmas_type": "zero",
    "flow_shift": 3.0,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "rescale_betas_zero_snr": False,
    "sample_max_value": 1.0,
    "solver_order": 2,
    "solver_p": None,
    "solver_type": "bh2",
    "steps_offset": 0,
    "thresholding": False,
    "timestep_spacing": "linspace",
    "trained_betas": None,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}
FLUX_FILE = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, **DYNAMIC, "shift": 3.0}


def test_files_are_read_and_survive_a_checkpoint():
    wan = published_schedule(WAN_FILE)
    assert wan == (FlowObjective(3.0, discrete_times=True), "unipc")
    assert wan.objective.to_dict() == {"name": "flow", "shift": 3.0, "times_are": "uniform", "discrete_times": True}
    flux = published_schedule(FLUX_FILE).objective
    assert flux == FlowObjective(math.exp(0.5), shift_tokens=256, shift_growth=(1.15 - 0.5) / (4096 - 256))
    assert flux.for_tokens(4096).shift == pytest.approx(math.exp(1.15)) and flux.for_tokens(4096).shift_tokens is None
    qwen = published_schedule({**FLUX_FILE, **EULER["Qwen-Image"]}).objective
    for objective in (wan.objective, flux, qwen):
        assert objective_from_dict(json.loads(json.dumps(objective.to_dict()))) == objective
    assert published_schedule({"_class_name": "FlowMatchEulerDiscreteScheduler"}).objective == FlowObjective()
    assert FlowObjective().to_dict() == {"name": "flow", "shift": 1.0, "times_are": "uniform"}


def test_unknown_settings_that_are_off_are_accepted():
    newer = {"use_magic": False, "magic_factor": None, "magic_steps": []}
    assert published_schedule({**FLUX_FILE, **newer}) == published_schedule(FLUX_FILE)
    assert published_schedule({**WAN_FILE, **newer, "use_karras_sigmas": None}) == published_schedule(WAN_FILE)


@pytest.mark.parametrize("made", [euler, unipc])
def test_every_setting_of_diffusers_is_known(made):
    """Every setting is read, supported in one value, or irrelevant to flows; unknown settings are refused."""
    scheduler, written = made()
    published_schedule(written)
    with pytest.raises(ValueError, match="^magic 1: not known to this version$"):
        published_schedule({**written, "magic": 1})
    for key in scheduler.config:
        try:
            published_schedule({**written, key: "magic"})
        except ValueError as error:
            assert str(error).startswith(f"{key} 'magic'") and "not known" not in str(error)


BAD = [
    (FLUX_FILE, {"_class_name": "DDIMScheduler"}, "_class_name 'DDIMScheduler'"),
    (FLUX_FILE, {"_class_name": None}, "_class_name None"),
    (FLUX_FILE, {"num_train_timesteps": 999}, "num_train_timesteps 999"),
    (FLUX_FILE, {"use_karras_sigmas": True}, "use_karras_sigmas True"),
    (FLUX_FILE, {"use_exponential_sigmas": True}, "use_exponential_sigmas True"),
    (FLUX_FILE, {"use_beta_sigmas": True}, "use_beta_sigmas True"),
    (FLUX_FILE, {"stochastic_sampling": True}, "stochastic_sampling True"),
    (FLUX_FILE, {"invert_sigmas": True}, "invert_sigmas True"),
    (FLUX_FILE, {"time_shift_type": "linear"}, "time_shift_type 'linear'"),
    (FLUX_FILE, {"shift": "3", "use_dynamic_shifting": False}, "shift '3'"),
    (FLUX_FILE, {"shift": 0, "use_dynamic_shifting": False}, "shift 0"),
    (FLUX_FILE, {"base_shift": math.nan}, "base_shift nan"),
    (FLUX_FILE, {"base_shift": 1000.0}, "base_shift 1000"),
    (FLUX_FILE, {"max_image_seq_len": 256}, "base_image_seq_len 256"),
    (FLUX_FILE, {"base_image_seq_len": 0}, "base_image_seq_len 0"),
    (FLUX_FILE, {"shift_terminal": 1.0}, "shift_terminal 1"),
    (FLUX_FILE, {"shift_curve": "cubic"}, "shift_curve 'cubic'"),
    (WAN_FILE, {"prediction_type": "epsilon"}, "prediction_type 'epsilon'"),
    (WAN_FILE, {"use_flow_sigmas": False}, "use_flow_sigmas False"),
    (WAN_FILE, {"flow_shift": -1}, "flow_shift -1"),
    (WAN_FILE, {"solver_order": 3}, "solver_order 3"),
    (WAN_FILE, {"solver_type": "bh1"}, "solver_type 'bh1'"),
    (WAN_FILE, {"predict_x0": False}, "predict_x0 False"),
    (WAN_FILE, {"thresholding": True}, "thresholding True"),
    (WAN_FILE, {"lower_order_final": False}, "lower_order_final False"),
    (WAN_FILE, {"disable_corrector": [0]}, r"disable_corrector \[0\]"),
    (WAN_FILE, {"final_sigmas_type": "sigma_min"}, "final_sigmas_type 'sigma_min'"),
    (WAN_FILE, {"use_dynamic_shifting": True}, "use_dynamic_shifting True"),
    (WAN_FILE, {"shift_terminal": 0.02}, "shift_terminal 0.02"),
    (WAN_FILE, {"use_karras_sigmas": True}, "use_karras_sigmas True"),
]


@pytest.mark.parametrize(("config", "change", "message"), BAD)
def test_what_is_not_supported_is_named(config, change, message):
    with pytest.raises(ValueError, match=f"^{message}: [^\n]*$"):
        published_schedule({**config, **change})
