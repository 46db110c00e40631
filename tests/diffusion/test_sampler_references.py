"""Every sampler on random schedules is compared with its paper's formulas in numpy float64.

[H] Ho et al. 2020, [N] Nichol & Dhariwal 2021, [S] Song et al. 2021, [D] Lu et al. 2022 (DPM-Solver++), [K] Karras et
al. 2022, [U] Zhao et al. 2023 (UniPC). The references use no code under test.
"""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.diffusion.objectives.ddpm import DDPM, DDPMTrajectory, EpsModel
from opendit.diffusion.objectives.edm import EDMTrajectory
from opendit.diffusion.objectives.flow import FlowTrajectory
from opendit.diffusion.samplers import sample

SHAPES = st.sampled_from([(1, 1, 1), (2, 3, 5, 7), (3, 2, 2, 3, 5), (5, 1, 11)])
MANY = settings(deadline=None, max_examples=60)


def network(x: np.ndarray, t: float) -> np.ndarray:
    """Return a smooth stand-in's output for numpy arrays."""
    return 0.4 * np.tanh(x) + 0.5 * np.sin(2 * x + t / 100) + 0.1


def variance(x: np.ndarray, t: float) -> np.ndarray:
    return np.cos(3 * x + t / 50)


def of_numpy(function):
    """Wrap a function of arrays and one time as a model, and check that a batch gets a single time."""

    def model(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        assert t.shape == x.shape[:1] and (t == t[0]).all()
        return torch.from_numpy(function(x.double().numpy(), float(t[0]))).to(x.dtype)

    return model


def with_variance(x: np.ndarray, t: float) -> np.ndarray:
    return np.concatenate((network(x, t), variance(x, t)), 1)


def randn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@st.composite
def schedules(draw, largest: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Draw betas that leave some signal, and increasing timesteps for the network."""
    n = draw(st.integers(1, largest))
    betas = np.array(draw(st.lists(st.floats(0.01, 0.4), min_size=n, max_size=n)))
    jumps = draw(st.lists(st.integers(1, 90), min_size=n, max_size=n))
    return betas, np.cumsum(jumps)


@st.composite
def falling(draw, lowest: float, highest: float, to_zero: bool) -> np.ndarray:
    """Draw 2 to 9 falling numbers that differ by at least 5 %; the last is 0 if asked for."""
    ratios = draw(st.lists(st.floats(1.05, 6), min_size=1, max_size=8))
    values = highest / np.cumprod([1.0, *ratios])
    values = values[values >= lowest]
    return np.append(values, 0.0) if to_zero or len(values) < 2 else values


def trajectory_of(betas, timesteps) -> DDPMTrajectory:
    return DDPMTrajectory(DDPM.from_betas(torch.from_numpy(betas), torch.from_numpy(timesteps)))


def compare(got: torch.Tensor, expected: np.ndarray) -> None:
    """Compare with a tolerance for DDPM's float32 coefficients."""
    scale = max(1.0, np.abs(expected).max())
    assert got.dtype == torch.float64 and got.shape == expected.shape
    assert np.abs(got.numpy() - expected).max() < 1e-4 * scale


def predicted(x, t, ac) -> tuple[np.ndarray, np.ndarray]:
    """Return x_0 and eps."""
    eps = network(x, t)
    x0 = (x - math.sqrt(1 - ac) * eps) / math.sqrt(ac)
    return x0, eps


@given(schedule=schedules(), shape=SHAPES, seed=st.integers(0, 99), learned=st.booleans())
@MANY
def test_ddpm(schedule, shape, seed, learned):
    """The reference is [H] Algorithm 2 with eq. 6 and 7, and [N] eq. 15."""
    betas, timesteps = schedule
    n, kept = len(betas), np.cumprod(1 - betas)
    start, noises = randn(seed, *shape), randn(seed + 1000, n, *shape)
    x = start
    for k, i in enumerate(reversed(range(n))):
        before = kept[i - 1] if i else 1.0
        x0, _ = predicted(x, timesteps[i], kept[i])
        mean = math.sqrt(before) * betas[i] / (1 - kept[i]) * x0
        mean = mean + math.sqrt(1 - betas[i]) * (1 - before) / (1 - kept[i]) * x
        if i == 0:
            x = mean
            break
        tilde = (1 - before) / (1 - kept[i]) * betas[i]
        part = (variance(x, timesteps[i]) + 1) / 2 if learned else 0.0
        x = mean + np.sqrt(betas[i] ** part * tilde ** (1 - part)) * noises[k]
    model = of_numpy(with_variance if learned else network)
    noise_fn = torch.from_numpy(noises).__getitem__
    compare(sample("ddpm", model, torch.from_numpy(start), trajectory_of(*schedule), noise_fn=noise_fn), x)


@given(
    schedule=schedules(),
    shape=SHAPES,
    seed=st.integers(0, 99),
    eta=st.sampled_from([0.0, 0.31, 1.0]),
)
@MANY
def test_ddim(schedule, shape, seed, eta):
    """The reference is [S] eq. 12 and 16."""
    betas, timesteps = schedule
    n, kept = len(betas), np.cumprod(1 - betas)
    start, noises = randn(seed, *shape), randn(seed + 1000, n, *shape)
    x = start
    for k, i in enumerate(reversed(range(n))):
        after = kept[i - 1] if i else 1.0
        x0, eps = predicted(x, timesteps[i], kept[i])
        sigma = eta * math.sqrt((1 - after) / (1 - kept[i])) * math.sqrt(max(1 - kept[i] / after, 0))
        x = math.sqrt(after) * x0 + math.sqrt(max(1 - after - sigma**2, 0)) * eps + sigma * noises[k]
    how = dict(noise_fn=torch.from_numpy(noises).__getitem__, eta=eta)
    compare(sample("ddim", of_numpy(network), torch.from_numpy(start), trajectory_of(*schedule), **how), x)


@given(schedule=schedules(), shape=SHAPES, seed=st.integers(0, 99))
@MANY
def test_dpmpp_along_a_ddpm_schedule(schedule, shape, seed):
    """The reference is [D] Algorithm 2 in its variables: lambda = log(alpha / sigma), and x not divided by alpha."""
    betas, timesteps = schedule
    kept = np.append(np.cumprod(1 - betas)[::-1], 1.0)  # from noise to data
    alpha, sigma = np.sqrt(kept), np.sqrt(1 - kept)
    x = start = randn(seed, *shape)
    last = None
    for k in range(len(betas)):
        x0, _ = predicted(x, timesteps[::-1][k], kept[k])
        direction = x0
        if sigma[k + 1] > 0:
            h = np.log(alpha[k + 1] / sigma[k + 1]) - np.log(alpha[k] / sigma[k])
            if last is not None:
                r = (np.log(alpha[k] / sigma[k]) - np.log(alpha[k - 1] / sigma[k - 1])) / h
                direction = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * last
            x = sigma[k + 1] / sigma[k] * x - alpha[k + 1] * (np.exp(-h) - 1) * direction
        else:
            x = x0
        last = x0
    compare(sample("dpmpp", of_numpy(network), torch.from_numpy(start), trajectory_of(*schedule)), x)


@given(schedule=schedules(), shape=SHAPES, seed=st.integers(0, 99), name=st.sampled_from(["ddpm", "ddim", "dpmpp"]))
@MANY
def test_a_velocity_in_the_place_of_noise(schedule, shape, seed, name):
    """Models of v = alpha eps - sigma x_0 (Salimans & Ho 2022) and of the same noise give equal samples."""
    betas, _ = schedule
    schedule = DDPM.from_betas(torch.from_numpy(betas))
    kept = np.cumprod(1 - betas)

    def velocity(x, t):
        ac = kept[int(t)]
        x0, eps = predicted(x, t, ac)
        return math.sqrt(ac) * eps - math.sqrt(1 - ac) * x0

    x, noises = torch.from_numpy(randn(seed, *shape)), torch.from_numpy(randn(seed + 1000, len(betas), *shape))
    path = DDPMTrajectory(schedule)
    by_noise = sample(name, of_numpy(network), x, path, noise_fn=noises.__getitem__)
    by_velocity = sample(name, EpsModel(of_numpy(velocity), schedule), x, path, noise_fn=noises.__getitem__)
    compare(by_velocity, by_noise.numpy())


def denoised(x: np.ndarray, sigma: float, data: float) -> np.ndarray:
    """Return the denoised x by [K] eq. 7 and table 1."""
    total = sigma**2 + data**2
    output = network(x / math.sqrt(total), 1000 * math.log(sigma) / 4)
    return data**2 / total * x + sigma * data / math.sqrt(total) * output


@given(
    name=st.sampled_from(["euler", "heun", "dpmpp"]),
    sigmas=st.booleans().flatmap(lambda to_zero: falling(1e-3, 80.0, to_zero)),
    data=st.floats(0.2, 2),
    shape=SHAPES,
    seed=st.integers(0, 99),
)
@MANY
def test_edm(name, sigmas, data, shape, seed):
    """The reference is [K] Algorithm 1, its Euler step alone, or [D] Algorithm 2 with alpha = 1."""
    x = start = sigmas[0] * randn(seed, *shape)
    last = None
    for k, (now, after) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
        x0 = denoised(x, now, data)
        if name == "dpmpp":
            direction = x0
            if last is not None and after > 0:
                r = math.log(sigmas[k - 1] / now) / math.log(now / after)
                direction = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * last
            x, last = after / now * x - (after / now - 1) * direction, x0
            continue
        d = (x - x0) / now
        moved = x + (after - now) * d
        if name == "heun" and after != 0:
            d = d / 2 + (moved - denoised(moved, after, data)) / after / 2
        x = x + (after - now) * d
    got = sample(name, of_numpy(network), torch.from_numpy(start), EDMTrajectory(torch.from_numpy(sigmas), data))
    np.testing.assert_allclose(got.numpy(), x, rtol=1e-9, atol=1e-9)


@given(
    name=st.sampled_from(["euler", "heun"]),
    times=st.booleans().flatmap(lambda to_zero: falling(1e-3, 1.0, to_zero)),
    shape=SHAPES,
    seed=st.integers(0, 99),
)
@MANY
def test_flow(name, times, shape, seed):
    """The reference is Euler's or Heun's method for dx/dt = model(x, 1000 t), with float32 times for the network."""
    x = start = randn(seed, *shape)
    for now, after in zip(times[:-1], times[1:], strict=True):
        d = network(x, float(np.float32(1000 * now)))
        if name == "heun":
            d = (d + network(x + (after - now) * d, float(np.float32(1000 * after)))) / 2
        x = x + (after - now) * d
    got = sample(name, of_numpy(network), torch.from_numpy(start), FlowTrajectory(torch.from_numpy(times)))
    np.testing.assert_allclose(got.numpy(), x, rtol=1e-9, atol=1e-9)


def unipc(predict, times, levels, alphas, x: np.ndarray) -> np.ndarray:
    """Sample with [U]'s UniP-2 and UniC-2 for x_0 predictions and B_2(h), keeping the corrected x separate.

    ``predict`` returns x_0 from x and a time.
    """
    lambdas = -np.log(np.minimum(levels, 1e6), where=levels > 0, out=np.full_like(levels, -np.inf))
    found, corrected, steps = [], x, len(times) - 1
    for k in range(steps):
        found.append(predict(x, times[k]))
        if k > 0:
            corrected = updated(found, k, lambdas, times, alphas, corrected, orders(steps, k - 1), correct=True)
        x = updated(found, k + 1, lambdas, times, alphas, corrected, orders(steps, k), correct=False)
    return x


def orders(steps: int, k: int) -> int:
    return 2 if 0 < k < steps - 1 else 1


def updated(found, k, lambdas, times, alphas, x, order, correct):
    """Return x at point k from the corrected x at k - 1, with or without the x_0 predicted at k."""
    last = found[k - 1]
    if times[k] == 0:
        return last
    h = lambdas[k] - lambdas[k - 1]
    places, differences = [], []
    if order == 2:
        places.append((lambdas[k - 2] - lambdas[k - 1]) / h)
        differences.append((found[k - 2] - last) / places[0])
    if correct:
        places.append(1.0)
        differences.append(found[k] - last)
    # R(h) a = phi(h), where phi_n = h^n n! varphi_n+1 / B(h); a single unknown is 1/2 for any h.
    z, bound = -h, math.expm1(-h)
    phi, varphi = [], bound / z
    for n in range(1, len(places) + 1):
        varphi = (varphi - 1 / math.factorial(n)) / z
        phi.append(math.factorial(n) * z * varphi / bound)
    powers = np.array([[r**n for r in places] for n in range(len(places))])
    weights = [0.5] if len(places) == 1 else np.linalg.solve(powers, np.array(phi)) if places else []
    total = sum(a * d for a, d in zip(weights, differences, strict=True))
    return times[k] / times[k - 1] * x - alphas[k] * bound * (last + total)


@given(
    levels=st.booleans().flatmap(lambda to_zero: falling(1e-3, 80.0, to_zero)),
    data=st.floats(0.2, 2),
    shape=SHAPES,
    seed=st.integers(0, 99),
)
@MANY
def test_unipc_along_edms_levels(levels, data, shape, seed):
    start = levels[0] * randn(seed, *shape)
    expected = unipc(lambda x, sigma: denoised(x, sigma, data), levels, levels, np.ones_like(levels), start)
    got = sample("unipc", of_numpy(network), torch.from_numpy(start), EDMTrajectory(torch.from_numpy(levels), data))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-7, atol=1e-7)


@given(steps=st.integers(1, 9), shift=st.floats(0.5, 8), shape=SHAPES, seed=st.integers(0, 99))
@MANY
def test_unipc_along_a_flow(steps, shift, shape, seed):
    """It starts from t = 1, where lambda is that of t = 1 - 1e-6."""
    t = np.linspace(1, 0, steps + 1)
    times = shift * t / (1 + (shift - 1) * t)
    times[0] = 1
    levels = times / np.maximum(1 - times, 1e-6 / (1 + 1e-6))
    start = randn(seed, *shape)

    def predict(x, t):
        return x - t * network(x, np.float32(1000 * t))

    expected = unipc(predict, times, levels, 1 - times, start)
    got = sample("unipc", of_numpy(network), torch.from_numpy(start), FlowTrajectory(torch.from_numpy(times)))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)
