"""The Inception score and the kernel distance (KID) of features."""

import torch
from torch import Tensor

SPLIT = 5000  # samples of one Inception score; that of more is the mean over such splits (ADM)
SUBSETS, SUBSET = 100, 1000  # of the kernel distance, and the samples of each (torch-fidelity's)


def inception_score(logits: Tensor, split: int = SPLIT) -> tuple[float, float | None]:
    """exp(E_x KL(p(y|x) || p(y))) of a classifier's logits (N, classes), in float64 (Salimans et al. 2016).

    The mean over splits of ``split`` samples in their order, the last one perhaps smaller, as ADM's evaluator has it;
    and the standard deviation over the splits, None of a single one.
    """
    scores = []
    for part in logits.split(split):
        log_p = part.double().log_softmax(dim=1)
        p = log_p.exp()
        marginal = p.mean(dim=0)
        # xlogy: a class that no sample has adds nothing.
        divergence = (p * log_p).sum(dim=1).mean() - torch.special.xlogy(marginal, marginal).sum()
        scores.append(divergence.exp())
    scores = torch.stack(scores)
    return float(scores.mean()), float(scores.std(correction=0)) if len(scores) > 1 else None


def kernel_distance(
    samples: Tensor, reference: Tensor, subsets: int = SUBSETS, size: int = SUBSET
) -> tuple[float, float]:
    """KID (Binkowski et al. 2018): the unbiased squared maximum mean discrepancy of features (N, D) and (M, D) under
    the kernel (x.y / D + 1)^3; mean and standard deviation over drawn subsets of ``size`` samples of each.

    The subsets are always the same for the same numbers of samples. Unlike FID's its mean does not depend on how many
    samples there are.
    """
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
    """Compute the unbiased MMD of x and y, (n, D) each: the sum over both sets of the mean kernel between different
    samples of the set, minus twice the mean kernel between the sets."""
    n = len(x)
    xx, yy, xy = (_kernel(x, x), _kernel(y, y), _kernel(x, y))
    within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (n * (n - 1))
    return within - 2 * xy.mean()


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3
