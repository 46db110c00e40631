"""Colossal-AI's side of training: its optimizers, Gemini with what had to be corrected, the Booster.

Import it by ``opendit.parallel.colossal.load()``, which makes the imports below work.
"""

import warnings
from typing import Any, cast

import torch
import torch.distributed as dist
from colossalai.amp.naive_amp.mixed_precision_mixin import BF16MixedPrecisionMixin
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    low_level_zero_plugin,
)
from colossalai.zero.gemini import gemini_optimizer
from torch import nn

from opendit.kernels.common import kernels_available
from opendit.parallel.adamw import FusedAdamW
from opendit.parallel.colossal.fsdp import FSDPPlugin
from opendit.parallel.colossal.zero import ZeroOptimizer

__all__ = ["FSDPPlugin", "boost", "boost_with", "build_optimizer", "register"]

# ------------------------------------------------------------------------------------------ optimizers


def build_optimizer(
    module: nn.Module, plugin: str, *, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer for ``plugin`` and one line that says which and why.

    zero2 and fsdp need of it only the settings and the state (OnePassAdamW does the step).
    """
    optimizer = FusedAdamW(
        [p for p in module.parameters() if p.requires_grad], lr=lr, weight_decay=weight_decay, betas=betas, eps=1e-8
    )
    if plugin not in ("zero2", "fsdp"):
        return optimizer, "torch's fused AdamW"
    available, why = kernels_available("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    kind = "AdamW, averages and working weights in one kernel" if available else "AdamW by torch"
    return optimizer, f"{kind} ({why})"


def register() -> None:
    """Makes Colossal-AI's plugins take the optimizers of this project."""
    gemini_optimizer._AVAIL_OPTIM_LIST.add(FusedAdamW)
    low_level_zero_plugin.LowLevelZeroOptimizer = ZeroOptimizer


# ------------------------------------------------------------------------------------------ Gemini


class _FiniteBF16(BF16MixedPrecisionMixin):
    """bf16 without loss scaling whose step is skipped, on all ranks alike, when a gradient is not finite.

    Gemini counts non-finite gradient chunks in every precision but looks at the count in fp16 only.
    """

    def __init__(self, manager):
        self.manager = manager

    def should_skip_step(self) -> bool:
        count = self.manager.overflow_counter.clone()
        dist.all_reduce(count, group=dist.group.WORLD)
        return count.item() > 0

    def pre_zero_grad(self) -> None:
        self.manager.overflow_counter.zero_()


# ------------------------------------------------------------------------------------------ Booster


def boost(
    plugin: str,
    precision: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    grad_clip: float,
    accumulate: bool,
    group: dist.ProcessGroup | None = None,
    initial_scale: float = 2.0**16,
    bucket: int | None = None,
) -> tuple[Any, Any]:
    """Wraps ``module`` and ``optimizer`` for ``plugin`` (zero2, ddp, gemini) and returns both.

    The module's parameters become the plugin's working weights on this process's device. ``grad_clip`` 0
    means none; ``ddp`` neither casts nor clips (the engine does). ``group``: ranks over which zero2 and ddp average
    gradients, and zero2 divides state; None: all. ``bucket``: elements of gradients that zero2 reduces together; None:
    as many as Colossal-AI does.
    """
    on_gpu = torch.cuda.is_available()
    built: Any  # each has arguments of its own
    if plugin == "zero2":
        built = LowLevelZeroPlugin(
            stage=2,
            precision=precision,
            max_norm=grad_clip,
            initial_scale=initial_scale,
            overlap_communication=False,  # Colossal-AI's; ZeroOptimizer overlaps by itself
            cast_inputs=False,
        )
    elif plugin == "gemini":
        size = sum(p.numel() for p in module.parameters()) / 2**20
        built = GeminiPlugin(
            precision=precision,
            # A clip bound no gradient reaches: Gemini computes the norm only when it clips.
            max_norm=grad_clip or 1e30,
            initial_scale=initial_scale,
            enable_gradient_accumulation=accumulate,
            # Chunks of 32 Mi elements would make a small model one chunk that is never sharded.
            min_chunk_size_m=min(32.0, max(0.005, size / 16)),
            search_range_m=32 if size > 64 else 1,
            placement_policy="static",
            pin_memory=on_gpu,  # its constructor turns this on with asynchronous reduction anyway, and warns
            enable_async_reduce=on_gpu,
        )
        # With it every rank keeps a page-locked copy of its shard of every chunk, weights and masters, which nothing
        # reads while no chunk is offloaded: 6 bytes x parameters of host memory for all ranks together, and minutes
        # before the first step of a model of 7B.
        built.gemini_config["pin_memory"] = False
    elif plugin == "ddp":
        built = TorchDDPPlugin(broadcast_buffers=False, gradient_as_bucket_view=True)
    else:
        raise ValueError(f"--plugin {plugin}: none of Colossal-AI's; choose zero2, ddp or gemini")
    if bucket is not None and plugin == "zero2":
        built.zero_optim_kwargs["reduce_bucket_size"] = bucket
    if group is not None and plugin == "zero2":
        built.zero_optim_kwargs["dp_process_group"] = group
    elif group is not None:
        built.ddp_kwargs["process_group"] = group
    model, boosted = boost_with(built, module, optimizer)
    if plugin == "gemini" and precision == "bf16":
        boosted.mix_precision_mixin = _FiniteBF16(model.chunk_manager)
    if plugin == "ddp":
        _settle_buckets(model.module)
    return model, boosted


def boost_with(plugin: Plugin, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Boost a module and its optimizer with Colossal-AI's Booster and this plugin."""
    with warnings.catch_warnings():  # torch's advice on DDP arguments that TorchDDPPlugin passes
        warnings.simplefilter("ignore")
        boosted = Booster(plugin=plugin).boost(module, optimizer)
    return boosted[0], boosted[1]


def _settle_buckets(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Lets torch choose its gradient buckets before the first step.

    It lays them out anew after the first backward pass, in the order in which gradients became ready, and the layout
    decides in which order more than two ranks are summed: the first step of a resumed run would round differently. A
    pass of zeros is that first one. Autograd walks the sum from its end, so that the buckets begin with the last
    layers, whose gradients are ready first in a real pass too.
    """
    params = [p for p in ddp.parameters() if p.requires_grad]
    ddp.reducer.prepare_for_backward([])
    cast(torch.Tensor, sum(p.sum() * 0 for p in params)).backward()
    ddp.zero_grad(set_to_none=True)
