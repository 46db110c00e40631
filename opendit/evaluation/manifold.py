"""Improved precision and recall of samples (Kynkäänniemi et al. 2019), as ADM's evaluator has them."""

import torch
from torch import Tensor

NEIGHBOURS = 3
BLOCK = 1 << 28  # squared distances that are in memory at once, on a GPU: 1 GiB of float32
CPU_BLOCK = 1 << 24


def precision_recall(samples: Tensor, reference: Tensor, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """(precision, recall) of features (N, D) against (M, D), where they are.

    A set's manifold is the union of balls around its features, each as wide as the distance to the ``neighbours``-th
    nearest other feature. Precision is the share of samples in the manifold of the reference, recall the share of the
    reference in the manifold of the samples. Distances are float32; ADM's are float16, which moves the third digit.

    Raises ValueError if either set has not more than ``neighbours`` features.
    """
    for features in (samples, reference):
        if len(features) <= neighbours:
            raise ValueError(f"precision and recall need more than {neighbours} samples, not {len(features)}")
    centre = reference.mean(dim=0)  # distances come from products, which are more exact near the origin
    samples, reference = samples.float() - centre, reference.float() - centre
    return (
        float(_inside(samples, reference, _radii(reference, neighbours)).double().mean()),
        float(_inside(reference, samples, _radii(samples, neighbours)).double().mean()),
    )


def _radii(features: Tensor, neighbours: int) -> Tensor:
    """The squared radius (N,) of each feature's ball."""
    found = []
    for first, squares in _squared_distances(features, features):
        rows = torch.arange(len(squares), device=squares.device)
        squares[rows, first + rows] = 0  # a feature is its own nearest, whatever the rounding
        found.append(squares.kthvalue(neighbours + 1, dim=1).values)
    return torch.cat(found)


def _inside(features: Tensor, others: Tensor, radii: Tensor) -> Tensor:
    """Return, for each of features (N, D), True if it lies in the ball of any of the others: (N,) bool."""
    return torch.cat([(squares <= radii).any(dim=1) for _, squares in _squared_distances(features, others)])


def _squared_distances(features: Tensor, others: Tensor):
    """Yields (first row, (rows, M) squared distances) of blocks of rows."""
    rows = max(1, (BLOCK if features.device.type == "cuda" else CPU_BLOCK) // len(others))
    norms = others.square().sum(dim=1)
    for first in range(0, len(features), rows):
        block = features[first : first + rows]
        squares = torch.addmm(norms.expand(len(block), -1), block, others.T, alpha=-2)
        yield first, squares.add_(block.square().sum(dim=1, keepdim=True)).clamp_min_(0)
