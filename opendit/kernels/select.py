"""Which kernels a run uses, and why."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.models.layers import BlockOps, local_attention


@dataclass(frozen=True)
class KernelChoice:
    """What to hand to ``model.use`` and one line each that says why."""

    ops: BlockOps
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ops_note: str
    attention_note: str


def select_kernels(flags, device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int) -> KernelChoice:
    return KernelChoice(BlockOps(), local_attention, "torch", "torch's own choice")
