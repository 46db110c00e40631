"""torch's FSDP2 as a plugin of Colossal-AI's Booster."""

from typing import Any, NoReturn

from colossalai.booster.plugin import Plugin
from torch import nn

from opendit.models import DiT
from opendit.parallel.adamw import FusedAdamW
from opendit.parallel.apply import Sharding, apply_shards, float8_weights
from opendit.parallel.float8_gather import Float8Shards
from opendit.parallel.loss_scale import LossScale
from opendit.parallel.mesh import Mesh
from opendit.parallel.sharded_optimizer import ShardedOptimizer
from opendit.parallel.tensor.gradients import ReplicatedGradients


class FSDPPlugin(Plugin):
    """A plugin that shards a model by :func:`opendit.parallel.apply.apply_shards`, and wraps its optimizer in a
    :class:`ShardedOptimizer`.

    Where no other rank has the same weights, nothing is cut: ``fully_shard`` would copy every weight and gradient of
    every step. The weights are kept in ``sharding.dtype`` then, beside fp32 masters, as under zero2.

    loss_scale: for training in fp16. offload, replicated: see :class:`ShardedOptimizer`.
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
            if any(parameter.is_meta for parameter in model.parameters()):
                model.to_empty(device=self.mesh.device)  # its shards; the engine fills them
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
                float8=float8,
                replicated=self.replicated,
            )
        return model, sharded, criterion, dataloader, lr_scheduler

    def control_device(self) -> bool:
        return True

    def control_precision(self) -> bool:
        return True

    def control_checkpoint_io(self) -> bool:
        return False  # opendit/checkpoint writes checkpoints, whatever the plugin

    def supported_devices(self) -> list[str]:
        return ["cuda", "cpu"]

    def supported_precisions(self) -> list[str]:
        return ["fp16", "bf16", "fp32"]

    def support_no_sync(self) -> bool:
        return False  # the engine's micro_batch() steers reductions

    def support_lora(self) -> bool:
        return False  # opendit/models/lora.py adds it before

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
