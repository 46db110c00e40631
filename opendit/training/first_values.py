"""The values of a run's parameters before the first training step."""

from opendit.checkpoint.fill import DeviceReader
from opendit.checkpoint.matched import MatchedTensors
from opendit.checkpoint.pretrained import FirstWeights
from opendit.models.adapt import adapt
from opendit.models.dit import DiT
from opendit.models.lora import add_lora
from opendit.parallel.engines import Values
from opendit.parallel.initial import InitialValues
from opendit.training.specification import RunSpecification


def first_values(spec: RunSpecification, model: DiT) -> Values:
    """Return the values of ``model``'s parameters before training: weights from --pretrained where they fit, otherwise
    random initial values.

    With --lora, this function also adds the LoRA matrices to the model.
    """
    seed = spec.flags.global_seed
    initial = InitialValues(model, seed)
    if spec.initial is None or spec.initial_config is None:
        return initial
    start = adapt(model, spec.initial, spec.initial_config, spec.dataset.describe().class_names, fresh=initial.whole)
    told = [f"--pretrained: {line}" for line in start.describe()]
    spec.notes += [line for line in told if line not in spec.notes]
    if spec.lora is not None:
        add_lora(model, spec.lora, start.untrained, seed)
        initial = InitialValues(model, seed)
    if isinstance(spec.initial.state, MatchedTensors) and not start.made and spec.flags.offloaded_state == "none":
        return DeviceReader(spec.initial.state, spec.mesh.device, otherwise=initial)
    return FirstWeights(start, spec.initial.state, initial)
