"""Check the checkpoint that a run resumes from."""

from opendit.checkpoint.load import Checkpoint
from opendit.checkpoint.pretrained import read_info, table_notes
from opendit.checkpoint.schema import compare
from opendit.diffusion import Objective, objective_from_dict
from opendit.models import DiTConfig, config_from_dict
from opendit.models.shapes import model_shapes


def check_resume(checkpoint: Checkpoint, config: DiTConfig, objective: Objective, adds: bool) -> list[str]:
    """Check that a checkpoint holds what this run trains; return the notes to print.

    adds: the run trains only the layers of ``--lora``.

    Raises:
        ValueError: it holds another model, weights that are not those of its configuration, or a model that learned
            another objective.
    """
    folder, info = checkpoint.folder, read_info(checkpoint.model)
    if "config" not in info:
        raise ValueError(f"--load: {checkpoint.model} does not say which model it holds; load another checkpoint")
    found = config_from_dict(info["config"])
    if ("lora" in info) != adds:
        raise ValueError(f"--load: {folder} was made with{'out' if adds else ''} --lora; do so again")
    if found != config:
        differences = [
            f"{key} {value} there, {config.to_dict()[key]} here"
            for key, value in found.to_dict().items()
            if value != config.to_dict()[key]
        ]
        raise ValueError(
            f"--load: {folder} is a checkpoint of another model ({', '.join(differences)}); give that model's flags"
        )
    if not adds:
        _check_shapes(checkpoint, config)
    then = objective_from_dict(info.get("objective") or checkpoint.state.get("objective")).predicts
    if then != objective.predicts:
        flags = " ".join(f"--{name} {value}" for name, value in then.items())
        raise ValueError(
            f"--load: the model in {folder} learned another objective; repeat its {flags}, or give it to --pretrained "
            "to start from its weights"
        )
    with checkpoint.open(checkpoint.model.name) as tensors:
        notes = table_notes(config, tensors, checkpoint.model)
    if not checkpoint.damaged:
        return notes
    return [*notes, f"--load: {'; '.join(checkpoint.damaged)}; going on from {folder}, the newest that is intact"]


def _check_shapes(checkpoint: Checkpoint, config: DiTConfig) -> None:
    """Raises ValueError unless the weights and averages are those of such a model; from the files' headers."""
    own = model_shapes(config)[0]
    for name in (checkpoint.model.name, *checkpoint.state["ema"]["files"]):
        with checkpoint.open(name) as tensors:
            tensors.check_floats()
            theirs = {key: shape for key, shape in tensors.shapes.items() if key in own}
        compare(own, theirs, checkpoint.folder / name)
