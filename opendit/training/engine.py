"""The model on its plugin, as a run's specification says."""

import torch

from opendit.checkpoint.pretrained import FirstWeights
from opendit.models import DiT, empty_model
from opendit.models.adapt import adapt
from opendit.models.lora import add_lora
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import Engine, Values, build_engine
from opendit.parallel.experts import expert_group
from opendit.parallel.initial import InitialValues
from opendit.parallel.tensor import allocate, tensor_group
from opendit.training.specification import RunSpecification


def build_model_and_engine(spec: RunSpecification) -> Engine:
    flags = spec.flags
    torch.set_float32_matmul_precision("high")  # TF32 for what is left in fp32 on a GPU
    mesh = spec.mesh
    cut = flags.plugin == "fsdp" and mesh.dims.size("loss") > 1
    with mesh.device:  # a model that is cut is nowhere whole, nor one whose layers or blocks are divided
        model = empty_model(spec.model_config, parameters=not cut and mesh.tp_size * mesh.pp_size == 1)
    initial = _first_values(spec, model)
    apply_parallel(
        model,
        ops=spec.kernels.ops,
        attend=spec.kernels.attend,
        varlen=spec.kernels.varlen,
        sequence=spec.sequence,
        tensor=tensor_group(mesh),
        experts=expert_group(mesh),
        stages=spec.stages,
        recompute=flags.recompute,
        grad_checkpoint=flags.grad_checkpoint,
        compiled=spec.why_not_compiled is None,
    )
    if not cut:
        allocate(model, mesh.device)
    return build_engine(
        model.train(),
        mesh,
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


def _first_values(spec: RunSpecification, model: DiT) -> Values:
    """Return the first values of ``model``'s parameters, of which each rank takes its part: initial values, or those of
    --pretrained that fit. With --lora this adds the LoRA layers to the model."""
    seed = spec.flags.global_seed
    initial = InitialValues(model, seed)
    if spec.initial is None or spec.initial_config is None:
        return initial
    start = adapt(model, spec.initial, spec.initial_config, spec.dataset.class_names, fresh=initial.whole)
    spec.notes += [f"--pretrained: {line}" for line in start.describe()]
    if spec.lora is not None:
        add_lora(model, spec.lora, start.untrained, seed)
        initial = InitialValues(model, seed)
    return FirstWeights(start, spec.initial.state, initial)
