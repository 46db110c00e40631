"""Metrics of features against closed forms, scipy's matrix root and formulas in numpy."""

from functools import reduce

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

from opendit.evaluation import metrics
from opendit.evaluation.figures import share_interval
from opendit.evaluation.metrics import (
    Gaussian,
    Moments,
    frechet_distance,
    inception_score,
    jackknife_error,
    kernel_distance,
    precision_recall,
)


def features(count: int, width: int, seed: int = 0, mean: float = 0.0) -> torch.Tensor:
    """Return correlated features of unequal scales."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(width, width)) * np.logspace(-2, 1, width)
    return torch.from_numpy(rng.normal(size=(count, width)) @ mixing + mean)


def gaussian(x: torch.Tensor) -> Gaussian:
    return Moments.of(x).gaussian()


# ------------------------------------------------------------------------------------------ Fréchet distance


@pytest.mark.parametrize("width", [1, 3, 64])
def test_distance_of_known_moments(width):
    """For covariances with common eigenvectors, the distance follows from the means and the roots of the
    eigenvalues."""
    rng = np.random.default_rng(width)
    basis, _ = np.linalg.qr(rng.normal(size=(width, width)))
    first, second = (np.exp(rng.normal(size=width) * 3) for _ in range(2))
    means = rng.normal(size=(2, width)) * 5
    a, b = (
        Gaussian(torch.from_numpy(mean), torch.from_numpy(basis * values @ basis.T))
        for mean, values in zip(means, (first, second), strict=True)
    )
    expected = ((means[0] - means[1]) ** 2).sum() + ((np.sqrt(first) - np.sqrt(second)) ** 2).sum()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("n", "m", "width"), [(500, 400, 20), (2000, 900, 48), (70, 90, 64)])
def test_distance_as_scipy_s_matrix_root_has_it(n, m, width):
    a, b = features(n, width, 1).numpy(), features(m, width, 2, mean=0.3).numpy()
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = np.asarray(scipy.linalg.sqrtm(ca @ cb)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * root)
    got = frechet_distance(gaussian(torch.from_numpy(a)), gaussian(torch.from_numpy(b)))
    assert got == pytest.approx(expected, rel=1e-6)


def test_distance_of_singular_covariances():
    """With fewer samples than features, compare with the exact root in the subspaces of the samples."""
    a, b = features(20, 100, 1), features(30, 100, 2)
    # tr (Ca Cb)^(1/2) is the nuclear norm of the centred data's product, for any rank.
    x, y = ((f - f.mean(0)) / (len(f) - 1) ** 0.5 for f in (a, b))
    expected = (a.mean(0) - b.mean(0)).square().sum() + x.square().sum() + y.square().sum()
    expected -= 2 * torch.linalg.svdvals(x @ y.T).sum()
    assert frechet_distance(gaussian(a), gaussian(b)) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(("count", "width"), [(50, 512), (3000, 200)])
def test_identical_sets_have_no_distance(count, width):
    one = gaussian(features(count, width, mean=3.0).abs())
    assert abs(frechet_distance(one, one)) <= 1e-9 * float(one.covariance.trace())


def test_what_has_no_distance():
    with pytest.raises(ValueError, match="features of 4 and of 5"):
        frechet_distance(gaussian(features(9, 4)), gaussian(features(9, 5)))
    bad = features(9, 4)
    bad[3, 1] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        frechet_distance(gaussian(bad), gaussian(features(9, 4)))
    with pytest.raises(ValueError, match="1 samples have no covariance"):
        gaussian(features(1, 4))


def test_the_error_is_that_of_other_draws():
    """Compare with the spread of the distance over independently drawn sets."""
    reference = gaussian(features(20_000, 8, 100))
    rng = torch.Generator().manual_seed(1)
    pool = features(200_000, 8, 100) * 1.1
    draws = [pool[torch.randint(len(pool), (1500,), generator=rng)] for _ in range(60)]
    spread = np.std([frechet_distance(gaussian(x), reference) for x in draws])
    told = np.mean([jackknife_error(x, reference) for x in draws[:20]])
    assert 0.7 < told / spread < 1.4


def test_the_error_is_the_jackknife_s():
    """Leave out each of the same groups in turn, and compute the distance itself."""
    x, reference = features(203, 6, 1), gaussian(features(400, 6, 2))
    order = torch.randperm(203, generator=torch.Generator().manual_seed(0))
    left = [torch.cat([g for j, g in enumerate(order.chunk(7)) if j != i]) for i in range(7)]
    distances = np.array([frechet_distance(gaussian(x[rows]), reference) for rows in left])
    expected = np.sqrt(6 / 7 * ((distances - distances.mean()) ** 2).sum())
    assert jackknife_error(x, reference, groups=7) == pytest.approx(expected, rel=1e-6)


def test_moments_in_batches_are_those_of_one_pass():
    x = features(1001, 9, mean=1e4)
    moments = reduce(Moments.merged, map(Moments.of, x.split(37)))
    np.testing.assert_allclose(moments.mean, x.numpy().mean(0), rtol=1e-13)
    np.testing.assert_allclose(moments.gaussian().covariance, np.cov(x.numpy(), rowvar=False), rtol=1e-9, atol=1e-9)


def test_frames_of_a_clip_are_no_more_samples():
    """Repeating every sample as the frames of a clip changes the error of the distance very little."""
    x, reference = features(400, 5, 1), gaussian(features(400, 5, 2))
    frames = x[:, None].expand(-1, 7, -1)
    assert jackknife_error(frames, reference) == pytest.approx(jackknife_error(x, reference), rel=0.02)
    assert jackknife_error(frames.flatten(0, 1), reference) < 0.6 * jackknife_error(x, reference)


# ------------------------------------------------------------------------------------------ scores


def test_inception_score_is_adm_s():
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1230, 11)) * 3)
    p = np.exp(logits.numpy())
    p /= p.sum(1, keepdims=True)
    scores = []
    for first in range(0, len(p), 500):  # as written in ADM's evaluator
        part = p[first : first + 500]
        kl = part * (np.log(part) - np.log(np.expand_dims(part.mean(0), 0)))
        scores.append(np.exp(np.mean(kl.sum(1))))
    value, spread = inception_score(logits, split=500)
    assert value == pytest.approx(np.mean(scores), rel=1e-12) and spread == pytest.approx(np.std(scores), rel=1e-10)
    assert inception_score(logits)[1] is None
    sure = torch.eye(5).repeat(3, 1) * 1e4  # certain predictions with every class equally often
    assert inception_score(sure)[0] == pytest.approx(5)


@pytest.mark.parametrize("right, count", [(0, 5), (3, 40), (20, 40), (98, 100), (7, 7)])
def test_the_interval_of_a_share_is_scipys(right, count):
    low, high = share_interval(right / count, count)
    expected = scipy.stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-6) and 0 <= low < high <= 1


def test_kernel_distance_is_the_mean_over_pairs():
    x, y = features(23, 6, 1).numpy() / 10, features(23, 6, 2).numpy() / 10

    def kernel(a, b):
        return (a @ b / len(a) + 1) ** 3

    n = len(x)
    pairs = [(i, j) for i in range(n) for j in range(n)]
    xx = np.mean([kernel(x[i], x[j]) for i, j in pairs if i != j])
    yy = np.mean([kernel(y[i], y[j]) for i, j in pairs if i != j])
    expected = xx + yy - 2 * np.mean([kernel(x[i], y[j]) for i, j in pairs])
    value, spread = kernel_distance(torch.from_numpy(x), torch.from_numpy(y), subsets=3, size=1000)
    assert value == pytest.approx(expected, rel=1e-10) and spread < 1e-12 * abs(expected) + 1e-12


def test_the_spread_of_the_kernel_distance_is_that_of_its_subsets():
    """With two subsets, the spread is half their distance, which is the uncorrected deviation from their mean."""
    x, y = features(23, 6, 1), features(23, 6, 2)
    first, alone = kernel_distance(x, y, subsets=1, size=7)
    value, spread = kernel_distance(x, y, subsets=2, size=7)
    second = 2 * value - first
    assert alone == 0 and first != second
    assert spread == pytest.approx(abs(first - second) / 2)


def test_kernel_distance_is_unbiased():
    """Two draws from one distribution have distance 0 on average, for small and for large subsets."""
    x, y = torch.randn(2, 2000, 5, generator=torch.Generator().manual_seed(3))
    for size in (10, 400):
        value, spread = kernel_distance(x, y, size=size)
        assert abs(value) < 4 * spread / 10
    shifted, spread = kernel_distance(x + 0.5, y, size=400)
    assert shifted > 4 * spread / 10


# ------------------------------------------------------------------------------------------ precision and recall


def brute_force(samples: np.ndarray, reference: np.ndarray, k: int) -> tuple[float, float]:
    def radius(x, i):
        return sorted(np.linalg.norm(x[i] - other) for other in x)[k]  # [0] is itself

    def share(x, others):
        radii = [radius(others, i) for i in range(len(others))]
        return np.mean([any(np.linalg.norm(a - b) <= r for b, r in zip(others, radii, strict=True)) for a in x])

    return share(samples, reference), share(reference, samples)


@pytest.mark.parametrize("k", [1, 3])
def test_precision_and_recall_by_brute_force(k, monkeypatch):
    monkeypatch.setattr(metrics, "CPU_BLOCK", 500)  # several blocks, the last one smaller
    rng = np.random.default_rng(k)
    samples, reference = rng.normal(size=(67, 3)) * 0.8 + 40, rng.normal(size=(41, 3)) + 40
    samples[5] = samples[6]  # a pair of copies
    got = precision_recall(torch.from_numpy(samples), torch.from_numpy(reference), k)
    assert got == pytest.approx(brute_force(samples, reference, k), abs=1e-12)
    assert got[0] != got[1]


def test_the_surface_of_a_ball_belongs_to_it():
    """The definition (Kynkaanniemi et al. 2019) says "at most as far as the k-th neighbour". All numbers are exact."""
    reference = torch.tensor([[-3.0], [-1.0], [1.0], [3.0]], dtype=torch.float64)  # balls with radius 2
    samples = torch.tensor([[5.0], [5.25], [-5.0], [-5.25]], dtype=torch.float64)  # balls with radius 0.25
    assert precision_recall(samples, reference, 1) == (0.5, 0)
    copies = reference[[0, 0, 3, 3]]  # balls with radius 0 around points of the reference
    assert precision_recall(copies, reference, 1) == (1, 0.5)


def test_precision_without_recall():
    """The samples have one of two modes, or the reference has."""
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 200, 2)) + np.array([[[0, 0]], [[50, 50]]])
    both = torch.from_numpy(np.concatenate([one, other]))
    precision, recall = precision_recall(torch.from_numpy(one), both)
    assert precision == 1 and recall == 0.5
    assert precision_recall(both, torch.from_numpy(one)) == (0.5, 1)
    with pytest.raises(ValueError, match="more than 3 samples, not 3"):
        precision_recall(both[:3], both)
