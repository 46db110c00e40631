"""Metrics of features: Fréchet distance, Inception score, kernel distance, precision and recall, CLIP score.

FID is the Fréchet distance between Inception's features of two sets of pictures (Heusel et al. 2017). sFID uses spatial
features (Nash et al. 2021), and FVD features of clips (Unterthiner et al. 2018).
"""

from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 8192  # feature rows to convert to float64 at once
GROUPS = 10  # groups in the jackknife
NORMAL_95 = 1.959964  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Gaussian:
    """A mean (D,) and a covariance (D, D), in float64. ``count`` is the number of samples, or None if unknown."""

    mean: Tensor
    covariance: Tensor
    count: int | None = None

    @property
    def width(self) -> int:
        return len(self.mean)

    def to(self, device: torch.device | str) -> "Gaussian":
        return Gaussian(self.mean.to(device), self.covariance.to(device), self.count)


@dataclass(frozen=True)
class Moments:
    """Count, mean and scatter of vectors, in float64. The scatter is the sum of the deviations' outer products."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Moments":
        """Compute the moments of features (N, D), on their device."""
        return reduce(Moments.merged, map(cls._of_part, features.split(ROWS)))

    @classmethod
    def _of_part(cls, features: Tensor) -> "Moments":
        rows = features.double()
        mean = rows.mean(dim=0)
        rows = rows - mean
        return cls(len(rows), mean, rows.T @ rows)

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of both sets (Chan, Golub and LeVeque 1979). This is precise even for a large mean."""
        total, difference = self.count + other.count, other.mean - self.mean
        between = torch.outer(difference, difference) * (self.count * other.count / total)
        mean = self.mean + difference * (other.count / total)
        return Moments(total, mean, self.scatter + (other.scatter + between))

    def gaussian(self) -> Gaussian:
        """Return the mean and the unbiased covariance, as in numpy.cov. Raises ValueError for fewer than 2 vectors."""
        if self.count < 2:
            raise ValueError(f"{self.count} samples have no covariance; at least 2 are needed")
        return Gaussian(self.mean, self.scatter / (self.count - 1), self.count)


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """Return |mean_a - mean_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) (Dowson and Landau 1982).

    The root's trace equals the sum of the singular values of C_a^(1/2) C_b^(1/2), also if a covariance is singular.
    Raises ValueError if widths differ or a number is not finite."""
    if a.width != b.width:
        raise ValueError(
            f"features of {a.width} and of {b.width} numbers can't be compared: they are of other networks"
        )
    for gaussian in (a, b):
        if not (gaussian.mean.isfinite().all() and gaussian.covariance.isfinite().all()):
            raise ValueError("the mean or the covariance of features is not finite")
    cross = torch.linalg.svdvals(covariance_root(a.covariance).T @ covariance_root(b.covariance)).sum()
    return _distance(a, b, cross)


def covariance_root(covariance: Tensor) -> Tensor:
    """Return a matrix R (D, rank) with R R^T = covariance. Eigenvalues at the level of rounding errors are dropped."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    kept = values > values[-1].clamp_min(0) * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()


def _distance(a: Gaussian, b: Gaussian, cross: Tensor) -> float:
    squares = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()
    return float(squares - 2 * cross)


def jackknife_error(features: Tensor, reference: Gaussian, groups: int = GROUPS) -> float:
    """Return the standard error of the Fréchet distance to ``reference``, by the delete-a-group jackknife. The error
    excludes the bias from a finite N. features: (N, D), or (N, T, D) for clips.

    Samples may be sorted by class, so they are assigned to groups at random, with a fixed seed. A clip's frames stay in
    one group."""
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0)).to(features.device)
    parts = [Moments.of(features[rows].flatten(0, -2)) for rows in order.chunk(groups)]
    root = covariance_root(reference.covariance)
    distances = []
    for left_out in range(groups):
        rest = reduce(Moments.merged, (part for number, part in enumerate(parts) if number != left_out)).gaussian()
        cross = torch.linalg.eigvalsh(root.T @ rest.covariance @ root).clamp_min(0).sqrt().sum()
        distances.append(_distance(rest, reference, cross))
    spread = torch.tensor(distances, dtype=torch.float64)
    return float(((groups - 1) / groups * (spread - spread.mean()).square().sum()).sqrt())


SPLIT = 5000  # samples per split for the Inception score, as in ADM
SUBSETS, SUBSET = 100, 1000  # number and size of the subsets for the kernel distance, as in torch-fidelity


def inception_score(logits: Tensor, split: int = SPLIT) -> tuple[float, float | None]:
    """Return the Inception score exp(E_x KL(p(y|x) || p(y))) (Salimans et al. 2016), and its standard deviation.

    logits: (N, classes). The score is the mean over splits of ``split`` consecutive samples, as in ADM. The standard
    deviation over the splits is None for one split."""
    scores = []
    for part in logits.split(split):
        log_p = part.double().log_softmax(dim=1)
        p = log_p.exp()
        marginal = p.mean(dim=0)
        # xlogy gives 0 for a class with probability 0, where p * log(p) would be NaN
        divergence = (p * log_p).sum(dim=1).mean() - torch.special.xlogy(marginal, marginal).sum()
        scores.append(divergence.exp())
    scores = torch.stack(scores)
    return float(scores.mean()), float(scores.std(correction=0)) if len(scores) > 1 else None


def kernel_distance(
    samples: Tensor, reference: Tensor, subsets: int = SUBSETS, size: int = SUBSET
) -> tuple[float, float]:
    """Return KID and its standard deviation over random subsets. KID is the unbiased squared maximum mean discrepancy
    with the kernel (x.y / D + 1)^3 (Binkowski et al. 2018).

    samples: (N, D). reference: (M, D). size: number of samples and of reference features in a subset. The subsets
    depend only on N, M and ``size``."""
    size = min(size, len(samples), len(reference))
    if size < 2:
        raise ValueError(f"the kernel distance needs at least 2 samples, not {size}")
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(subsets):
        x, y = (
            features[torch.randperm(len(features), generator=generator)[:size].to(features.device)].double()
            for features in (samples, reference)
        )
        values.append(_unbiased_mmd(x, y))
    values = torch.stack(values)
    return float(values.mean()), float(values.std(correction=0))


def _unbiased_mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return mean k(x, x') + mean k(y, y') - 2 mean k(x, y). The first two means are over different rows."""
    n = len(x)
    xx, yy, xy = (_kernel(x, x), _kernel(y, y), _kernel(x, y))
    within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (n * (n - 1))
    return within - 2 * xy.mean()


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


NEIGHBOURS = 3
BLOCK = 1 << 28  # number of squared distances in memory on a GPU: 1 GiB of float32
CPU_BLOCK = 1 << 24


def precision_recall(samples: Tensor, reference: Tensor, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """Return improved precision and recall (Kynkäänniemi et al. 2019) for features (N, D) and reference (M, D).

    Each feature is the centre of a ball. Its radius is the distance to the ``neighbours``-th nearest other feature in
    its set. Precision is the share of samples inside the reference's balls. Recall is the share of the reference
    inside the samples' balls. Distances are float32. Raises ValueError for a set with ``neighbours`` features or
    fewer."""
    for features in (samples, reference):
        if len(features) <= neighbours:
            raise ValueError(f"precision and recall need more than {neighbours} samples, not {len(features)}")
    # Distances come from products, so centre the features to lose fewer digits.
    centre = reference.mean(dim=0)
    samples, reference = samples.float() - centre, reference.float() - centre
    return (
        float(_inside(samples, reference, _radii(reference, neighbours)).double().mean()),
        float(_inside(reference, samples, _radii(samples, neighbours)).double().mean()),
    )


def _radii(features: Tensor, neighbours: int) -> Tensor:
    """Return the squared radius (N,) of each feature's ball."""
    found = []
    for first, squares in _squared_distances(features, features):
        rows = torch.arange(len(squares), device=squares.device)
        squares[rows, first + rows] = 0  # exactly 0 for a feature's distance to itself
        found.append(squares.kthvalue(neighbours + 1, dim=1).values)
    return torch.cat(found)


def _inside(features: Tensor, others: Tensor, radii: Tensor) -> Tensor:
    """Return (N,) bool: True if a row of ``features`` (N, D) lies in a ball with centre ``others`` (M, D) and squared
    radius ``radii`` (M,)."""
    return torch.cat([(squares <= radii).any(dim=1) for _, squares in _squared_distances(features, others)])


def _squared_distances(features: Tensor, others: Tensor):
    """Yield (first row, squared distances (rows, M) to ``others``) for blocks of ``features``."""
    rows = max(1, (BLOCK if features.device.type == "cuda" else CPU_BLOCK) // len(others))
    norms = others.square().sum(dim=1)
    for first in range(0, len(features), rows):
        block = features[first : first + rows]
        squares = torch.addmm(norms.expand(len(block), -1), block, others.T, alpha=-2)
        yield first, squares.add_(block.square().sum(dim=1, keepdim=True)).clamp_min_(0)


def clip_scores(pictures: Tensor, captions: Tensor) -> Tensor:
    """Return CLIP scores (N,), 100 max(cos, 0), without the factor 2.5 in Hessel et al. 2021. pictures: embeddings (N,
    D), or (N, T, D) for clips, where the score is the mean over frames. captions: embeddings (N, D)."""
    pictures, captions = F.normalize(pictures.double(), dim=-1), F.normalize(captions.double(), dim=-1)
    if pictures.ndim == 2:
        pictures = pictures[:, None]
    return 100 * (pictures * captions[:, None]).sum(dim=-1).clamp_min(0).mean(dim=1)
