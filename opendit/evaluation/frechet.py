"""The Fréchet distance between Gaussians, and the mean and covariance of features that it is taken of.

FID is this distance between Inception's features of two sets of pictures (Heusel et al. 2017), sFID the same of
features that keep their place in the picture (Nash et al. 2021), FVD of clips' features (Unterthiner et al. 2018).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 8192  # of features that are taken to float64 at once
GROUPS = 10  # of samples, each of which is left out once for an interval
NORMAL_95 = 1.959964  # standard errors on either side that hold 95 % of a normal distribution


@dataclass(frozen=True)
class Gaussian:
    """A mean (D,) and a covariance (D, D), float64. count: of the samples they were taken of; None if not known."""

    mean: Tensor
    covariance: Tensor
    count: int | None = None

    @property
    def width(self) -> int:
        return len(self.mean)

    def to(self, device: torch.device | str) -> "Gaussian":
        return Gaussian(self.mean.to(device), self.covariance.to(device), self.count)


class Moments:
    """Count, mean and scatter (the sum of outer products of deviations from the mean) of vectors, in float64.

    They are merged by the formula of Chan, Golub and LeVeque (1979), which loses nothing when the mean is large:
    batches of any size, on any number of ranks, give what one pass over all vectors gives, up to float64's rounding.
    """

    def __init__(self, width: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.mean = torch.zeros(width, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(width, width, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, features: Tensor) -> "Moments":
        """Compute the moments of all rows of features (N, D), on their device."""
        moments = cls(features.shape[1], features.device)
        for part in features.split(ROWS):
            moments.add(part)
        return moments

    def add(self, features: Tensor) -> None:
        """More vectors, (B, D)."""
        if not len(features):
            return
        rows = features.to(self.mean.device, torch.float64)
        mean = rows.mean(dim=0)
        rows = rows - mean
        self._merge(len(rows), mean, rows.T @ rows)

    def merge(self, other: "Moments") -> None:
        """The vectors of ``other``, too: of another rank, or of another part of the samples."""
        if other.count:
            self._merge(other.count, other.mean.to(self.mean.device), other.scatter.to(self.mean.device))

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        total = self.count + count
        difference = mean - self.mean
        self.scatter += scatter + torch.outer(difference, difference) * (self.count * count / total)
        self.mean += difference * (count / total)
        self.count = total

    def gaussian(self) -> Gaussian:
        """With the unbiased covariance, as numpy.cov has it. Raises ValueError for fewer than two vectors."""
        if self.count < 2:
            raise ValueError(f"{self.count} samples have no covariance; at least 2 are needed")
        return Gaussian(self.mean, self.scatter / (self.count - 1), self.count)


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """|mean_a - mean_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) (Dowson and Landau 1982).

    The trace of the matrix root is the sum of the singular values of C_a^(1/2) C_b^(1/2). So it needs no root of a
    matrix that is not symmetric, and of covariances without full rank nothing but their own subspaces is computed with.

    Raises ValueError if the two are of different widths, or not finite.
    """
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
    """A matrix R (D, rank) with R R^T = covariance; eigenvalues that are rounding alone are left out."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    kept = values > values[-1].clamp_min(0) * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()


def _distance(a: Gaussian, b: Gaussian, cross: Tensor) -> float:
    squares = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()
    return float(squares - 2 * cross)


def jackknife_error(features: Tensor, reference: Gaussian, groups: int = GROUPS) -> float:
    """The standard error of the Fréchet distance of features (N, D), or of clips' frames (N, T, D), by leaving out one
    of ``groups`` groups of samples at a time (the delete-a-group jackknife). The groups are drawn, always alike:
    samples may be sorted by class. Frames of one clip stay together, for they are alike.

    It says how far another draw of as many samples would differ, not how far fewer samples bias the distance.
    """
    whole = _shuffled_groups(features, groups)
    root = covariance_root(reference.covariance)
    distances = []
    for left_out in range(groups):
        rest = _merged(moments for number, moments in enumerate(whole) if number != left_out).gaussian()
        cross = torch.linalg.eigvalsh(root.T @ rest.covariance @ root).clamp_min(0).sqrt().sum()
        distances.append(_distance(rest, reference, cross))
    spread = torch.tensor(distances, dtype=torch.float64)
    return float(((groups - 1) / groups * (spread - spread.mean()).square().sum()).sqrt())


def _shuffled_groups(features: Tensor, groups: int) -> Sequence[Moments]:
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0)).to(features.device)
    return [Moments.of(features[rows].flatten(0, -2)) for rows in order.chunk(groups)]


def _merged(all_moments: Iterable[Moments]) -> Moments:
    first, *others = all_moments
    merged = Moments(len(first.mean), first.mean.device)
    for moments in (first, *others):
        merged.merge(moments)
    return merged
