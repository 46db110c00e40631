"""Draw latents from a model and its conditions, with guidance, for training previews and for sample.py."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opendit.diffusion.guidance import cfg_model, guided_within
from opendit.diffusion.objectives.base import Objective

if TYPE_CHECKING:
    from opendit.models import Condition, DiT


@torch.inference_mode()
def sample_latents(
    model: "DiT",
    y: "Condition",
    null: "Condition",
    index: Tensor,
    *,
    objective: Objective,
    seed: int,
    steps: int,
    sampler: str | None = None,
    cfg_scale: float = 4.0,
    cfg_channels: int | None = None,
    cfg_interval: tuple[float, float] | None = None,
    size: tuple[int, ...] | None = None,
    forward: Callable[[Tensor, Tensor, "Condition"], Tensor] | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
) -> Tensor:
    """Draw fp32 latents: (B, C, h, w), or (B, C, t, h, w) for a clip model.

    Args:
        y: the conditions of the B samples, on the model's device.
        null: the null condition for guidance, as a batch of one.
        index: (B,) int64, indices of the samples in the whole job. A sample's noise depends only on ``seed`` and its
            index. So the noise is the same in any batch and on any number of processes.
        objective: the objective that the model was trained with.
        steps: number of sampling steps.
        sampler: one of the objective's samplers; None for its default.
        cfg_interval: range of noise levels in which guidance is applied, in the unit of ``Objective.noise_level``;
            None: everywhere.
        size: (h, w) or (t, h, w) of the latents; by default the model's input size.
        forward: called by guidance as ``forward(x, t, y)`` instead of the model, such as a parallel wrapper of it.
        progress: wraps the iterable of steps, e.g. tqdm.
    """
    shape = (model.config.in_channels, *(size or model.config.input_size))
    guided = cfg_model(forward or model, y, null, cfg_scale, cfg_channels, model.config.rescaled_guidance)
    if cfg_interval is not None:
        conditional = cfg_model(forward or model, y, null, 1.0)
        guided = guided_within(cfg_interval, objective.noise_level, guided, conditional)
    return objective.sample(guided, index, shape, seed=seed, steps=steps, sampler=sampler, progress=progress)


def sample_in_batches(
    model: "DiT", y: "Condition", null: "Condition", index: Tensor, batch_size: int, **settings: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (index, latents) for up to ``batch_size`` samples at a time; see :func:`sample_latents`.

    ``index`` may be on the CPU and is yielded unchanged.
    """
    for first in range(0, len(index), batch_size):
        rows = slice(first, first + batch_size)
        yield index[rows], sample_latents(model, y[rows], null, index[rows].to(model.device), **settings)
