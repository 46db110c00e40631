"""Find, verify and read weights, and load them into models or shards.

OpenDiT's safetensors files have a configuration in the metadata. For other formats see
opendit/checkpoint/foreign.py."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from opendit.checkpoint import foreign, tensor_set
from opendit.checkpoint.lora import CAPTION_LENGTH, PEFT_FILE, Merged, Products, of_file, of_run
from opendit.checkpoint.matched import MatchedTensors, fill
from opendit.checkpoint.run_folders import MANIFEST, checkpoints_in, named_checkpoint
from opendit.common.stages import Background
from opendit.common.utils import shown
from opendit.config.architectures import canonical_name as canonical_model
from opendit.config.architectures import unsupported
from opendit.config.names import PARTS, SHARDS, WHOLE
from opendit.encoders.folder import CONFIG, PIPELINE_INDEX
from opendit.encoders.text import MOST_TEXT_TOKENS
from opendit.models.dit import DiT, DiTConfig
from opendit.models.finetuning import Adaptation, adapt, block_differences, check_lora, same_network
from opendit.models.initialization import canonical_name
from opendit.models.positions import sincos_position_table
from opendit.models.zoo import Weights, empty_model
from opendit.parallel.engines import Values
from opendit.parallel.layout import InitialValues, Layout, Shard
from opendit.parallel.mesh import ControlGroup, Mesh
from opendit.parallel.tensor import divide, layout_of, tensor_group

METADATA_KEY = "opendit"
WeightedLora = tuple[str | Path, float]  # a path, and the factor for its LoRA products
ALONE = Mesh(0, 1, 0, torch.device("cpu"))
T = TypeVar("T")
ROUNDING = 1e-6  # largest accepted difference from position tables in Meta's files


def find_weights(path: str | Path, which: str = "ema") -> Path:
    """Find the weights at a path: a file, a folder with weights, a checkpoint, a run (its newest checkpoint), or a
    folder of a public model, a DiTPipeline or a LoRA by peft.

    Return a .safetensors or .pt file, an index of several files, or a folder's model_index.json or config.json. If a
    checkpoint's weights file is missing, return its path, so that :func:`read_weights` reports the loss.

    Raises FileNotFoundError without weights. Raises ValueError for a model that is not supported, or if ``latest`` or
    ``best`` names no checkpoint."""
    path = named_checkpoint(Path(path))
    if path.is_file():
        return path
    newest = next((folder for folder in checkpoints_in(path) if _elsewhere(folder) is None), path)
    if foreign.is_published(path):  # first, because a public model's weights may be named like a checkpoint's
        names = (PIPELINE_INDEX, f"{foreign.TRANSFORMER}/{CONFIG}", CONFIG)
        return next(path / name for name in names if (path / name).is_file())
    if why := unsupported(path):
        raise ValueError(why)
    for folder in (newest, path):
        file = weights_in(folder, which)
        if file.is_file() or (folder / MANIFEST).is_file() or folder != path:
            return file
    if len(indices := list(path.glob(f"*{PARTS}"))) == 1:
        return indices[0]
    for name in (PIPELINE_INDEX, PEFT_FILE):
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(
        f"{path}: no checkpoint there. Give a .safetensors or .pt file, a folder with {which}.safetensors or one "
        f"*{PARTS}, a run folder with checkpoints/latest, or a folder of diffusers (docs/public_models.md)"
    )


def folder_of(path: Path) -> Path | None:
    """Return the public model's folder if ``path`` is the model's configuration or pipeline index, else None."""
    if path.name not in (PIPELINE_INDEX, CONFIG):
        return None
    alone = path.parent.name != foreign.TRANSFORMER or foreign.expert_of(path.parent) is not None
    folder = path.parent if alone else path.parent.parent
    return folder if foreign.is_published(folder) else None


def _elsewhere(folder: Path) -> str | None:
    """Return an error message if ``folder`` is a link to something other than a checkpoint, else None."""
    try:
        named_checkpoint(folder)
    except ValueError as error:
        return str(error)
    return None


def weights_in(folder: Path, which: str) -> Path:
    """Return the file or index of a checkpoint's weights ``which``, such as "ema", even if it is missing."""
    names = [which + suffix for suffix in (WHOLE, SHARDS, PARTS)]
    missing = SHARDS if any(folder.glob(f"{which}-shard-*")) else WHOLE
    return folder / next((name for name in names if (folder / name).is_file()), which + missing)


def read_newest(path: str | Path, which: str = "ema", notes: list[str] | None = None, mesh: Mesh = ALONE) -> Weights:
    """Read the weights that :func:`find_weights` finds. All ranks of ``mesh`` must call this, and divide the
    verification. With ``notes``, a run's folder means the newest intact checkpoint, and damaged newer ones are reported
    in ``notes``. Raises FileNotFoundError or ValueError, on every rank, if no intact weights are found."""
    return use_newest(path, which, notes, ControlGroup(mesh), lambda weights: weights)


def use_newest(
    path: str | Path, which: str, notes: list[str] | None, group: ControlGroup, use: Callable[[Weights], T]
) -> T:
    """Return ``use(weights)`` for the weights that :func:`read_newest` finds. A thread verifies the weights during
    ``use``. If they are damaged, the result or error of ``use`` is discarded, and the next older checkpoint is used."""
    folders, damaged = group.gather([] if Path(path).is_file() else checkpoints_in(Path(path)))[0], []
    if not folders or notes is None:
        return _use_intact(group.together(lambda: find_weights(path, which), ValueError, OSError), group, use)
    for folder in folders:
        problem, made = _elsewhere(folder), None
        if problem is None:
            problem, made = _use(weights_in(folder, which), group, use)
        if problem:
            damaged.append(problem)
            continue
        if damaged:
            notes.append(f"{'; '.join(damaged)}; taken is {folder}, the newest that is intact")
        return cast(T, made)  # None only if there is a problem
    raise ValueError(f"{path} has no intact checkpoint: {'; '.join(damaged)}")


def read_info(path: Path) -> dict[str, Any]:
    """Read and check an OpenDiT file's metadata, or derive metadata from a public model's folder; {} for other files.
    Raises ValueError with one line that names the file and the field."""
    if folder := folder_of(path):
        return foreign.read_published(folder).info
    if not tensor_set.is_set(path):
        return {}
    with tensor_set.open_set(path) as tensors:
        return _info(tensors)


def _info(tensors: tensor_set.TensorSet) -> dict[str, Any]:
    from opendit.checkpoint.schema import checked_metadata  # slow: imports pydantic

    text = tensors.metadata.get(METADATA_KEY)
    return {} if text is None else checked_metadata(text, tensors.path)


def read_config(path: Path) -> DiTConfig | None:
    """Return the configuration of a weights file or public model; None if there is none, or the file is damaged."""
    try:
        return Weights({}, path, read_info(path)).config
    except (ValueError, KeyError, TypeError):
        return None


def read_weights(path: Path) -> Weights:
    """Read the weights of a file or an index, and verify a checkpoint's. Tensors in safetensors files are read on
    access.

    Raises ValueError if a file is damaged or has no state dict, or weights are not finite or don't match the
    metadata."""
    return _use_intact(path, ControlGroup(ALONE), lambda weights: weights)


def _use_intact(path: Path, group: ControlGroup, use: Callable[[Weights], T]) -> T:
    """Return ``use(weights)``. If the weights are damaged, a ValueError names the newest intact earlier checkpoint."""
    problem, made = _use(path, group, use)
    if problem is None:
        return cast(T, made)  # None only if there is a problem

    def fix() -> str:
        which = path.name.removesuffix(SHARDS).removesuffix(WHOLE)
        earlier = tensor_set.intact_before(path.parent, lambda folder: _damaged_part(weights_in(folder, which), 0, 1))
        return f"take {earlier}, whose weights are intact" if earlier else "take another checkpoint"

    raise ValueError(f"{problem}; {group.gather(fix() if group.mesh.is_main else None)[0]}")


def _use(path: Path, group: ControlGroup, use: Callable[[Weights], T]) -> tuple[str | None, T | None]:
    """Return (None, ``use(weights)``), or (description of the damage, None). A thread computes the checksums during
    ``use``, because they take as long as the copy to a GPU."""
    mesh = group.mesh
    checking = Background(lambda: _damaged_part(path, mesh.rank, mesh.world_size), name="checksums")
    made: Future[T] = Future()
    try:
        made.set_result(use(_read_part(path, mesh.rank, mesh.world_size)))
    except Exception as error:  # damaged weights may be the cause and are reported first
        made.set_exception(error)
    if problem := next(filter(None, group.gather(checking.result())), None):
        return problem, None
    return None, group.together(made.result, ValueError, OSError)


def _damaged_part(path: Path, part: int, parts: int) -> str | None:
    """Return how the files at ``path`` differ from the manifest, or None. Caller number ``part`` of ``parts`` computes
    its share of the checksums."""
    if not tensor_set.is_set(path) or (path.is_file() and not (path.parent / MANIFEST).is_file()):
        return None
    if problem := tensor_set.damage(path.parent, part, parts, only=[path.name]):
        return problem
    try:
        if problem := tensor_set.damage(path.parent, part, parts, only=tensor_set.files_of(path)):
            return problem
        if path.name.endswith(SHARDS):
            with tensor_set.open_set(path) as tensors:
                tensors.check_files(part, parts)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _read_part(path: Path, part: int, parts: int) -> Weights:
    """Read weights. Check headers and numbers of number ``part`` of ``parts`` shares of the file."""
    if published := folder_of(path):
        return foreign.read_published(published)
    if path.name == PIPELINE_INDEX:
        return refuse_unless_finite(foreign.read_pipeline(path.parent), part, parts)
    if not tensor_set.is_set(path):
        state, num_classes = foreign.read_pickled(path)
        return refuse_unless_finite(Weights(state, path, num_classes=num_classes), part, parts)
    tensors = tensor_set.open_set(path)
    tensors.check_floats()
    tensors.check_files(part, parts)
    weights = Weights(tensors, path, _info(tensors))
    if weights.config is not None and "lora" not in weights.info:
        tensor_set.check_shapes(weights.config, tensors.shapes, path)
    return refuse_unless_finite(weights, part, parts)


def refuse_unless_finite(weights: Weights, part: int = 0, parts: int = 1) -> Weights:
    """Return ``weights``. Raises ValueError for a NaN or an infinity in this caller's share of the tensors."""
    state = weights.state
    stored = isinstance(state, tensor_set.TensorSet)
    tensors = state.as_stored(part, parts) if stored else list(state.items())[part::parts]
    if name := next((name for name, tensor in tensors if tensor_set.not_finite({name: tensor})), None):
        raise ValueError(
            f"{weights.path}: {name} holds values that are not finite (NaN or infinity); take an earlier checkpoint"
        )
    return weights


def other_tables(config: DiTConfig, state: Mapping[str, Tensor]) -> dict[str, float]:
    """Return name -> largest absolute difference for each position table in ``state`` that differs from the computed
    table. Tables that are missing or have another size are not compared."""
    found = {}
    for name, (dim, sizes) in config.tables.items():
        made = sincos_position_table(dim, *sizes).unsqueeze(0)
        if name in state and (stored := state[name]).shape == made.shape:
            off = (stored.to(made) - made).abs().max().item()
            if not off <= ROUNDING:
                found[name] = off
    return found


def table_notes(config: DiTConfig, state: Mapping[str, Tensor], path: Path) -> list[str]:
    """Return a message for each table of the file at ``path`` that :func:`other_tables` finds."""
    return [
        f"{path}: its table {name} is not the computed one (numbers differ by up to {off:.2g}), which is used in its "
        "place"
        for name, off in other_tables(config, state).items()
    ]


class FirstWeights:
    """Initial values for parameter shards when training starts from pretrained weights. Values come from the weights
    file, from small tensors that the adaptation ``start`` computed, or from the random ``initial``."""

    def __init__(self, start: Adaptation, state: Mapping[str, Tensor], initial: Values):
        self._stored, self._made, self._state, self._initial = start.stored, start.made, state, initial

    def __call__(self, name: str, shard: Shard) -> Tensor:
        """Return a shard of a parameter, (shard.shape) fp32 in host memory, perhaps a view of the file. Raises
        ValueError or OSError if the file has changed since it was opened."""
        name = canonical_name(name)
        if name in self._stored:
            return read_shard(self._state, self._stored[name], shard).float()
        return shard.take(self._made[name]) if name in self._made else self._initial(name, shard)

    @torch.no_grad()
    def fill(self, model: DiT) -> None:
        """Set all parameters of a model that is not divided between ranks."""
        for name, parameter in model.named_parameters():
            parameter.copy_(self(name, Shard(tuple(parameter.shape), ())))


def read_shard(state: Mapping[str, Tensor], name: str, shard: Shard) -> Tensor:
    """Read only a shard of a file's tensor, in its stored dtype. The result may be a view of the file."""
    return state.read(name, shard) if isinstance(state, tensor_set.TensorSet) else shard.take(state[name])


def load_state(
    model: DiT,
    weights: Weights,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    layout: Layout | None = None,
) -> None:
    """Load weights into a model with equal names and shapes. Buffers keep their computed values (see
    ``DiTConfig.tables``). A parameter on the meta device gets memory on ``device``, in ``dtype``. layout: required if
    the model has slices of its parameters. Raises ValueError with the first differences of names or shapes."""
    if isinstance(weights.state, MatchedTensors):
        return fill(model, weights.state, device, dtype, layout)
    own, shards = model.state_dict(), {} if layout is None else {name: layout.local(name) for name in layout.shapes}
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()} | (layout.shapes if layout else {})
    tensor_set.compare(shapes, weights.shapes, weights.path)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            shard = shards.get(name)
            stored = weights.state[name] if shard is None else read_shard(weights.state, name, shard)
            if not tensor.is_meta:
                tensor.copy_(stored)
                continue
            # The device casts the values. On the CPU, copy them, because another program could change the mapped file.
            there = stored.to(device)
            made = there.to(dtype, copy=there is stored)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(made, tensor.requires_grad))


def load_pretrained(
    path: str | Path,
    name: str | None = None,
    which: str = "ema",
    lora: Sequence[WeightedLora] = (),
    num_classes: int | None = None,
    notes: list[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    stage: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    mesh: Mesh = ALONE,
) -> tuple[DiT, Weights]:
    """Build a model and load its weights from a checkpoint, a public model's folder, or Meta's .pt file.

    A --lora run's checkpoint is merged into its base.

    Args:
        path: a path that :func:`find_weights` accepts.
        name: the model's name; needed if the file does not have it.
        which: a checkpoint's set of weights, such as "ema".
        lora: (checkpoint of a --lora run, factor) to merge into the weights of ``path``. For a public model, other
            programs' LoRA files also work. Classes, size and objective come from the first run, or from a run with
            fully trained layers.
        num_classes: number of classes, for a file that does not have it (see :func:`infer_config`).
        notes: list to which messages for the user are added.
        stage: returns the context manager for a named stage of the work.
        mesh: the ranks. With tensor parallelism, the model gets this rank's slices.

    Raises FileNotFoundError or ValueError if the weights are missing, unreadable, or belong to another model.
    """
    says_itself = (
        f"--num_classes {num_classes}: {lora[0][0] if lora else path} says itself what it draws; leave the flag out"
    )

    def made(weights: Weights) -> tuple[DiT, Weights]:
        if num_classes is not None and "config" in weights.info:
            raise ValueError(says_itself)
        if "lora" in weights.info:
            return _with_lora(_base_of(weights), [(weights, 1.0)], name, notes, device, dtype, mesh)
        config = weights.config
        if config is None:
            if name is None:
                foreign.check_dit(weights.state, weights.path)
                raise ValueError(f"{weights.path} does not say which model it is; name it with --model, e.g. DiT-XL/2")
            weights.num_classes = num_classes or weights.num_classes
            config = foreign.infer_config(weights.state, name, weights.path, weights.num_classes)
        else:
            check_name(weights, name)
        with stage("model: built"):
            model = empty_model(config, parameters=False)
            layout = _divide(model, mesh)
        with stage("model: weights to the device"):
            load_state(model, weights, device, dtype, layout)
            return model.place(device, dtype), weights

    if lora:
        if num_classes is not None:
            raise ValueError(says_itself)
        added = [(read_newest(each, which, notes), weight) for each, weight in lora]
        base = read_newest(path, which, notes)
        if "lora" in base.info:  # ``path`` is also a checkpoint of a run with --lora
            added, base = [(base, 1.0), *added], _base_of(base)
        model, weights = _with_lora(base, added, name, notes, device, dtype, mesh)
        if base.path.is_dir():  # a pipeline's folder: use its VAE and text encoder, too
            own = {key: base.info[key] for key in ("vae", "text_encoder") if key in base.info}
            weights = replace(weights, path=base.path, info=weights.info | own)
        return model, weights

    with stage("checkpoint: found and verified"):
        model, weights = use_newest(path, which, notes, ControlGroup(ALONE), made)
    if notes is not None:
        notes += table_notes(model.config, weights.state, weights.path)
    return model, weights


def _divide(model: DiT, mesh: Mesh) -> Layout | None:
    """Reduce each layer to this rank's slice, and return the layout. Without tensor parallelism, return None."""
    if mesh.tp_size == 1:
        return None
    group = tensor_group(mesh)
    assert group is not None
    divide(model, group)
    return layout_of(model, mesh)


def check_name(weights: Weights, name: str | None) -> None:
    if name is not None and weights.info["model"] != canonical_model(name):
        raise ValueError(f"{weights.path} is a checkpoint of {weights.info['model']}, not of {name}; give its --model")


def _base_of(added: Weights) -> Weights:
    base = Path(added.info["lora"]["base"])
    if not (base.is_file() or foreign.is_published(base)):
        raise ValueError(f"{added.path} adds to {base}, which is not there; give its new place to --ckpt, and --lora")
    return read_newest(base)


def _with_lora(
    base: Weights,
    added: Sequence[tuple[Weights, float]],
    name: str | None,
    notes: list[str] | None,
    device: torch.device | str,
    dtype: torch.dtype,
    mesh: Mesh,
) -> tuple[DiT, Weights]:
    """Build the model of ``base`` and merge ``added``, (LoRA, factor) pairs. Return the model, and the weights that
    describe it: the first LoRA run with fully trained layers, else the first LoRA run, else ``base``."""
    found = base.config
    products: Products = {}
    full: dict[str, Tensor] = {}
    first, lengths = base, []
    for each, weight in added:
        if "lora" in each.info:
            check_name(each, name)
            assert each.config is not None  # metadata with "lora" always have a configuration
            found = found or foreign.infer_config(base.state, each.info["model"], base.path, base.num_classes)
            if differs := block_differences(found, each.config):
                raise ValueError(
                    f"--lora {each.path}: was trained on {shown(each.info['model'])}, {base.path} is another model "
                    f"({', '.join(differs)}); draw with the model of its training"
                )
            same = same_network(found, each.config)
            tensor_set.check_size(each.config if same else found, base.shapes | each.shapes, each.path)
            check_lora(each)
            more, trained = of_run(each, weight)
            if trained and full:
                raise ValueError(
                    f"--lora {each.path}: it and {first.path} trained whole layers ({min(trained)}), and a model has "
                    "one of them; leave one out"
                )
            if same and (first is base or trained):
                first = each
            full |= trained
        elif each.info:
            raise ValueError(f"--lora {each.path}: holds a whole model, not what --lora trains; use --ckpt")
        elif not isinstance(base.state, MatchedTensors):
            raise ValueError(
                f"--lora {each.path}: is of no run, and {base.path} is no public model; give a run of train.py --lora"
            )
        else:
            metadata = each.state.metadata if isinstance(each.state, tensor_set.TensorSet) else {}
            opened = foreign.open_published(base.path)
            more = of_file(opened, each.state, metadata, each.path, weight, notes)
            opened.close()
            stated = metadata.get(CAPTION_LENGTH, "")
            if stated.isdecimal() and len(stated) < 6 and 0 < int(stated) <= MOST_TEXT_TOKENS:
                lengths.append(int(stated) + opened.family.text.beside)
        for key, several in more.items():
            products.setdefault(key, []).extend(several)
    if first is base and lengths:  # captions as long as in the LoRA's training
        first = replace(base, info=base.info | {"config": base.info["config"] | {"max_tokens": max(lengths)}})
    config = first.config
    assert found is not None and config is not None
    if notes is not None:
        notes += table_notes(found, base.state, base.path)
    merged = Merged(base.state, products, full)
    if isinstance(base.state, MatchedTensors):  # no new parameters, so each rank reads only its slices
        model = empty_model(config, parameters=False)
        layout = _divide(model, mesh)
        fill(model, base.state, device, dtype, layout)
        merged.add_to(model, layout)
        return model.place(device, dtype), first
    model = empty_model(config)
    initial = InitialValues(model, seed=0)  # for new parameters; --lora trains them too
    start = adapt(model, base, found, first.info.get("class_names") or (), fresh=initial.whole)
    FirstWeights(start, base.state, initial).fill(model)
    merged.add_to(model)
    _divide(model, mesh)
    return model.place(device, dtype), first
