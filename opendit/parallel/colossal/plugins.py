"""Training with Colossal-AI: optimizers, the Booster, corrections of Gemini, and FSDP2 as a plugin.

Import this module with ``opendit.parallel.colossal.load()``, which makes the imports below work.
"""

import warnings
from typing import Any, NoReturn, cast

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
from opendit.models.dit import DiT
from opendit.parallel.apply import Sharding, apply_shards, float8_weights
from opendit.parallel.colossal.zero import ZeroOptimizer
from opendit.parallel.float8_gather import Float8Shards
from opendit.parallel.host_shards import hosted_parameters, move_to_host
from opendit.parallel.mesh import Mesh
from opendit.parallel.optimizer import FusedAdamW, LossScale, ShardedOptimizer
from opendit.parallel.tensor import ReplicatedGradients

__all__ = ["FSDPPlugin", "boost", "boost_with", "build_optimizer", "register"]

# ------------------------------------------------------------------------------------------ optimizers


def build_optimizer(
    module: nn.Module,
    plugin: str,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eight_bits: bool = False,
) -> tuple[torch.optim.Optimizer, str]:
    """Return the optimizer for ``plugin``, and a line that names the optimizer and the reason for it.

    Under zero2 and fsdp, OnePassAdamW computes the steps, and uses only the settings and state of this optimizer.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    settings = dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=1e-8)
    optimizer = FusedAdamW(trained, eight_bits, **settings)
    moments = ", moments in 8 bits between steps" if eight_bits else ""
    if plugin not in ("zero2", "fsdp"):
        return optimizer, f"torch's fused AdamW{moments}"
    available, why = kernels_available("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    kind = "AdamW, averages and working weights in one kernel" if available else "AdamW by torch"
    return optimizer, f"{kind}{moments} ({why})"


def register() -> None:
    """Make Colossal-AI's plugins accept the optimizers of this project."""
    gemini_optimizer._AVAIL_OPTIM_LIST.add(FusedAdamW)
    low_level_zero_plugin.LowLevelZeroOptimizer = ZeroOptimizer


# ------------------------------------------------------------------------------------------ Gemini


class _FiniteBF16(BF16MixedPrecisionMixin):
    """Precision mixin for bf16 without loss scaling. All ranks skip a step if a gradient of any rank is not finite.

    In every precision, Gemini counts the gradient chunks that are not finite, but it reads the count only in fp16.
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
    """Wrap ``module`` and ``optimizer`` for ``plugin`` (zero2, ddp, gemini) and return both.

    The module's parameters become the plugin's working weights on this process's device.

    Args:
        grad_clip: bound of the gradient norm; 0 for none. ``ddp`` ignores ``grad_clip`` and ``precision``, because its
            engine casts and clips.
        accumulate: True if a step has several micro-batches.
        group: ranks over which zero2 and ddp average gradients, and zero2 divides state; None for all ranks.
        initial_scale: initial loss scale in fp16.
        bucket: number of gradient elements that zero2 reduces together; None for Colossal-AI's default.
    """
    on_gpu = torch.cuda.is_available()
    built: Any  # Any, because each plugin has different arguments
    if plugin == "zero2":
        built = LowLevelZeroPlugin(
            stage=2,
            precision=precision,
            max_norm=grad_clip,
            initial_scale=initial_scale,
            overlap_communication=False,  # ZeroOptimizer overlaps communication in another way
            cast_inputs=False,
        )
    elif plugin == "gemini":
        size = sum(p.numel() for p in module.parameters()) / 2**20
        built = GeminiPlugin(
            precision=precision,
            # Without clipping, pass a bound that no gradient exceeds, because Gemini computes the norm only if it
            # clips.
            max_norm=grad_clip or 1e30,
            initial_scale=initial_scale,
            enable_gradient_accumulation=accumulate,
            # With chunks of 32 Mi elements, a small model would be a single chunk, which is never sharded.
            min_chunk_size_m=min(32.0, max(0.005, size / 16)),
            search_range_m=32 if size > 64 else 1,
            placement_policy="static",
            pin_memory=on_gpu,  # asynchronous reduction requires pinned memory
            enable_async_reduce=on_gpu,
        )
        # Otherwise every rank would keep page-locked copies of its shards of weights and masters, which are read only
        # if chunks are offloaded. The copies take 6 bytes of host memory for each parameter, summed over all ranks, and
        # delay the first step of a 7B model by minutes.
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
        _fix_buckets(model.module)
    return model, boosted


def boost_with(plugin: Plugin, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Wrap a module and its optimizer with Colossal-AI's Booster and this plugin. Return both."""
    with warnings.catch_warnings():  # torch warns about DDP arguments that TorchDDPPlugin passes
        warnings.simplefilter("ignore")
        boosted = Booster(plugin=plugin).boost(module, optimizer)
    return boosted[0], boosted[1]


def _fix_buckets(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Let torch arrange its gradient buckets before the first step.

    After the first backward pass, torch rearranges the buckets in the order in which gradients became ready. The
    arrangement determines the order in which gradients are summed over more than two ranks. So the first step of a
    resumed run would round differently. To prevent that, this function runs a first backward pass with zero gradients.
    Autograd processes the sum below from its end. So the buckets begin with the last layers, whose gradients are also
    ready first in a real pass.
    """
    params = [p for p in ddp.parameters() if p.requires_grad]
    ddp.reducer.prepare_for_backward([])
    cast(torch.Tensor, sum(p.sum() * 0 for p in params)).backward()
    ddp.zero_grad(set_to_none=True)


class FSDPPlugin(Plugin):
    """Plugin of Colossal-AI's Booster for torch's FSDP2. It shards a model with
    :func:`opendit.parallel.apply.apply_shards`, and wraps the optimizer in a :class:`ShardedOptimizer`.

    If no other rank has the same weights, the plugin does not shard the weights, because ``fully_shard`` would copy
    every weight and gradient in every step. The working weights are then in ``sharding.dtype``, with separate fp32
    masters, as under zero2.

    Args:
        mesh: mesh of the run.
        sharding: settings of ``fully_shard``.
        grad_clip, offload, replicated: see :class:`ShardedOptimizer`.
        loss_scale: loss scale for training in fp16; None in other precisions.
    """

    def __init__(
        self,
        mesh: Mesh,
        sharding: Sharding,
        *,
        grad_clip: float,
        loss_scale: LossScale | None = None,
        offload: str = "none",
        replicated: ReplicatedGradients | None = None,
    ):
        self.mesh, self.sharding, self.grad_clip = mesh, sharding, grad_clip
        self.loss_scale, self.offload, self.replicated = loss_scale, offload, replicated

    def configure(
        self,
        model: DiT,
        optimizer: FusedAdamW | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, ...]:
        float8 = sharded = None
        if self.mesh.dims.size("loss") > 1:
            apply_shards(model, self.mesh, self.sharding)
            if self.sharding.hosted:
                move_to_host(model, hosted_parameters(model, self.sharding.hosted), self.mesh.device)
            # Allocate the other shards; the engine sets the values.
            model._apply(lambda each: torch.empty_like(each, device=self.mesh.device) if each.is_meta else each)
            if self.sharding.gather_float8 and (names := float8_weights(model)):
                float8 = Float8Shards(model, names, self.sharding.dtype, self.mesh.group("fsdp"))
        else:
            model.to(self.mesh.device)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(self.sharding.dtype)
        if optimizer is not None:
            trained: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
            sharded = ShardedOptimizer(
                optimizer,
                trained,
                self.mesh.group("fsdp"),
                grad_clip=self.grad_clip,
                loss_scale=self.loss_scale,
                offload=self.offload,
                device=self.mesh.device,
                float8=float8,
                replicated=self.replicated,
            )
        return model, sharded, criterion, dataloader, lr_scheduler

    def control_device(self) -> bool:
        return True

    def control_precision(self) -> bool:
        return True

    def control_checkpoint_io(self) -> bool:
        return False  # opendit/checkpoint, not the plugin, writes checkpoints

    def supported_devices(self) -> list[str]:
        return ["cuda", "cpu"]

    def supported_precisions(self) -> list[str]:
        return ["fp16", "bf16", "fp32"]

    def support_no_sync(self) -> bool:
        return False  # the engine's micro_batch(), not the plugin, controls reductions

    def support_lora(self) -> bool:
        return False  # opendit/models/lora.py, not the plugin, adds LoRA

    def get_checkpoint_io(self) -> NoReturn:
        raise NotImplementedError("checkpoints are written by opendit.checkpoint")

    def no_sync(self, model: Any, optimizer: Any) -> NoReturn:
        raise NotImplementedError("the engine's micro_batch() steers reductions")

    def enable_lora(
        self, model: Any, pretrained_dir: Any, lora_config: Any, bnb_quantization_config: Any = None
    ) -> NoReturn:
        raise NotImplementedError("opendit.models.lora adds LoRA before the Booster")

    def prepare_dataloader(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("opendit.data reads the samples")
