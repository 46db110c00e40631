"""The model on its plugin, as a run's specification says."""

import torch

from opendit.models import empty_model
from opendit.models.adapt import adapt
from opendit.models.initialization import initialize
from opendit.models.lora import add_lora
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import Engine, build_engine
from opendit.parallel.initial import InitialValues
from opendit.training.specification import RunSpecification


def build_model_and_engine(spec: RunSpecification) -> Engine:
    flags = spec.flags
    torch.set_float32_matmul_precision("high")  # TF32 for what is left in fp32 on a GPU
    fresh, cut = spec.initial is None, flags.plugin == "fsdp" and spec.mesh.world_size > 1
    with spec.mesh.device:  # a fresh model that is cut is nowhere whole
        model = empty_model(spec.model_config, parameters=not (fresh and cut))
    initial = None  # what the model will hold
    if fresh:
        initial = InitialValues(model, flags.global_seed)  # of a rank's own shards, which is all that it needs
    else:
        initialize(model, flags.global_seed)
        start = adapt(model, spec.initial, spec.initial_config, spec.dataset.class_names)
        spec.notes += [f"--pretrained: {line}" for line in start.describe()]
        if spec.lora is not None:
            add_lora(model, spec.lora, start.untrained, flags.global_seed)
    apply_parallel(
        model,
        ops=spec.kernels.ops,
        attend=spec.kernels.attend,
        sequence=spec.sequence,
        recompute=flags.recompute,
        grad_checkpoint=flags.grad_checkpoint,
        compiled=spec.why_not_compiled is None,
    )
    return build_engine(
        model.train(),
        spec.mesh,
        plugin=flags.plugin,
        precision=flags.mixed_precision,
        lr=flags.lr,
        weight_decay=flags.weight_decay,
        betas=(flags.adam_beta1, flags.adam_beta2),
        grad_clip=flags.grad_clip,
        grad_accumulation=flags.grad_accumulation,
        sharding=spec.sharding,
        offload=flags.offload,
        initial=initial,
    )
