"""Read weights of other programs: public models in diffusers' layout, Meta's .pt files, and DiTPipeline folders.

Files are not trusted: all contents are checked, and code in a pickle is never run. A public model's family
(opendit/models/families) translates the configuration and the weights' names. Opening a public model reads only the
headers of weight files."""

import argparse
import math
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from opendit.checkpoint.matched import MatchedTensors, Pair, check_matched
from opendit.checkpoint.tensor_set import TensorSet, check_shapes, file_size, open_set
from opendit.common.hub import folder_name, snapshot_of
from opendit.common.json_file import MIB, read_json
from opendit.common.tensor_files import open_safetensors, shapes_in
from opendit.common.utils import shown
from opendit.config.architectures import SIZES, is_video
from opendit.config.names import PARTS, WHOLE
from opendit.diffusion.objectives import objective_from_dict
from opendit.diffusion.objectives.flow import FlowObjective, published_schedule
from opendit.encoders.folder import (
    CONFIG,
    PIPELINE_INDEX,
    check_index,
    names_class,
    one_line,
    weight_files,
)
from opendit.models.dit import DiTConfig
from opendit.models.families import FAMILIES
from opendit.models.families.base import Family, Variant
from opendit.models.families.public_config import PublicConfig, public_config
from opendit.models.zoo import Shapes, Weights, empty_model, model_config, model_shapes

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LABELS, IMAGENET_CLASSES = "y_embedder.embedding_table.weight", 1000


# ------------------------------------------------------------------------------------------ .pt files


def read_pickled(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """Read a .pt file. Return its state dict, and the number of classes or None. Tensors are on the CPU.

    In Meta's training checkpoints, the state dict is the entry ``ema``. From a zip file, entries such as ``opt`` are
    not read.

    Raises ValueError with the path if the file is missing or damaged, would run code, or has compressed data. The file
    must hold only floating-point tensors, each with a name."""
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")
    size = path.stat().st_size
    packed = zipfile.is_zipfile(path)
    if packed:
        _check_archive(path, size)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecated storages and formats
            # With mmap, torch compares each tensor's size with the available bytes, and reads only what is used.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=packed)
    except Exception as error:
        raise ValueError(_why(path, error)) from error
    num_classes = None
    if isinstance(content, dict) and "ema" in content and "model" in content:
        num_classes = getattr(content.get("args"), "num_classes", None)
        content = content["ema"]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} holds no state dict of a model: only tensors, each under its name")
    state, total = {}, 0
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} holds no state dict of a model: {type(name).__name__} is no parameter's name")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype not in FLOATS:
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}".replace("torch.", "")
            raise ValueError(f"{path}: {name[:100]!r} is a tensor of {kind}; weights are dense floating-point numbers")
        total += tensor.numel() * tensor.element_size()
        if total > size:
            raise ValueError(f"{path}: its tensors are larger than the file, because they share memory; save copies")
    for name, tensor in content.items():
        state[name.removeprefix("module.")] = tensor.detach()
    return state, num_classes if type(num_classes) is int else None


def _check_archive(path: Path, size: int) -> None:
    """Raise ValueError if the archive's entries are compressed or overlap. torch never writes such files."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{path} is damaged: it is no readable .pt file ({error})") from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError(
            f"{path} is a compressed archive, which torch.save does not write; unpack it and save it again"
        )
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(f"{path} is damaged: its entries are larger than the file")


def _why(path: Path, error: Exception) -> str:
    """Explain an error of torch.load. torch's message would tell the user how to load the unsafe file."""
    if call := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return (
            f"{path} is refused: it would run code when loaded ({call[1]}). Weights are tensors in plain containers; "
            "get them as .safetensors, or as a .pt file with the state dict alone"
        )
    return f"{path} is no .pt file of weights, or is damaged ({type(error).__name__}); get it again, or as .safetensors"


def check_dit(names: Iterable[str], path: Path) -> None:
    """Raise ValueError unless ``names``, those of a file without a configuration, are the names of a DiT's weights."""
    found, embedder = set(names), "x_embedder.proj.weight"
    if embedder in found:
        return
    if any(".lora_" in name for name in found):
        raise ValueError(f"{path} holds a LoRA; give the folder of its base model here, and train or draw with --lora")
    raise ValueError(
        f"{path} does not hold a DiT: it has no {embedder!r}; for a public model give the folder of its pipeline, with "
        f"{PIPELINE_INDEX} and all components"
    )


def infer_config(state: Mapping[str, Tensor], name: str, path: Path, num_classes: int | None = None) -> DiTConfig:
    """Infer a class-conditional DiT's configuration from its name and weight shapes, for square inputs.

    The last layer's rows show whether the model predicts a variance. ``num_classes`` shows whether the label table's
    last row is the null class. If ``num_classes`` is None, a table of 1000 rows (ImageNet) is assumed to have no null
    class, and every other table to have one; see :func:`assumption`. Raises ValueError if ``name`` is a model for
    clips, or the weights don't fit."""
    if is_video(name):
        raise ValueError(f"{path} says nothing of the frames that --model {name} takes; give a checkpoint of OpenDiT")
    check_dit(state, path)
    dimensions = {"x_embedder.proj.weight": 4, "pos_embed": 3, LABELS: 2, "final_layer.linear.weight": 2}
    for key, number in dimensions.items():
        if key not in state:
            raise ValueError(f"{path} does not hold a DiT: it has no {key!r}")
        if state[key].dim() != number or 0 in state[key].shape:
            raise ValueError(f"{path} does not hold a DiT: {key} is of shape {list(state[key].shape)[:8]}")
    hidden, channels, patch, _ = state["x_embedder.proj.weight"].shape
    side = math.isqrt(state["pos_embed"].shape[1]) * patch
    try:
        rows, predicted = len(state[LABELS]), len(state["final_layer.linear.weight"])
        if num_classes is None:
            num_classes = rows if rows == IMAGENET_CLASSES else rows - 1
        if num_classes < 1 or rows - num_classes not in (0, 1):
            raise ValueError(f"it has a label table of {rows} rows, which is none of {num_classes} classes")
        if predicted not in (patch**2 * channels, 2 * patch**2 * channels):
            raise ValueError(
                f"it predicts {predicted} numbers a patch: neither the noise of its {patch} x {patch} x "
                f"{channels} ones alone nor with their variance"
            )
        config = model_config(
            name,
            input_size=(side, side),
            in_channels=channels,
            num_classes=num_classes,
            null_class=rows > num_classes,
            learn_sigma=predicted > patch**2 * channels,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    if (config.hidden_size, config.depth, config.patch_size) != (hidden, depth, patch):
        fits = [f"DiT-{k}/{patch}" for k, v in SIZES.items() if v[:2] == (hidden, depth)]
        raise ValueError(
            f"--model {name}: does not fit {path}, which holds {depth} blocks of width {hidden}, patch {patch}; use "
            f"{f'--model {fits[0]}' if fits else 'other weights'}"
        )
    return config


def assumption(weights: Weights, config: DiTConfig) -> list[str]:
    """Return a message, in a list, if :func:`infer_config` has guessed whether the label table's last row is the null
    class. Nothing is guessed for a known number of classes, or for 1001 rows as in Meta's checkpoints."""
    rows = 0 if config.num_classes is None else config.num_classes + config.null_class
    if weights.config is not None or weights.num_classes is not None or rows == IMAGENET_CLASSES + 1:
        return []
    unknown = f"{weights.path} does not say how many classes it has: "
    if rows == IMAGENET_CLASSES:
        return [
            f"{unknown}its {rows} rows are taken for the classes of ImageNet, without a null class for guidance; if it "
            f"was trained on {rows - 1} classes with class dropout, sample.py needs --num_classes {rows - 1}"
        ]
    return [
        f"{unknown}the last of its {rows} rows is taken for the null class of guidance; if it was trained without "
        f"class dropout, sample.py needs --num_classes {rows}"
    ]


# ------------------------------------------------------------------------------------------ DiTPipeline folders

# Layer names, OpenDiT's -> diffusers'. BLOCK has the layers in a block; OUTER and EMBEDDERS have all other layers.
OUTER = {"x_embedder.proj": "pos_embed.proj", "final_layer.adaLN_modulation.1": "proj_out_1",
         "final_layer.linear": "proj_out_2"}  # fmt: skip
EMBEDDERS = {"t_embedder.mlp.0": "timestep_embedder.linear_1", "t_embedder.mlp.2": "timestep_embedder.linear_2",
             "y_embedder.embedding_table": "class_embedder.embedding_table"}  # fmt: skip
BLOCK = {"adaLN_modulation.1": "norm1.linear", "attn.proj": "attn1.to_out.0", "mlp.fc1": "ff.net.0.proj",
         "mlp.fc2": "ff.net.2"}  # fmt: skip
QKV = ("attn1.to_q", "attn1.to_k", "attn1.to_v")


def suffixes(state: dict[str, Tensor], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in state if name.startswith(prefix + ".")]


def from_diffusers_state(theirs: dict[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """Convert the state dict of DiTTransformer2DModel to OpenDiT's, with the position table. The inverse is
    :func:`opendit.export.conversion.to_diffusers_state`."""
    made = {}
    for ours, name in OUTER.items():
        made.update({ours + end: theirs[name + end] for end in suffixes(theirs, name)})
    for ours, name in EMBEDDERS.items():
        name = f"transformer_blocks.0.norm1.emb.{name}"
        made.update({ours + end: theirs[name + end] for end in suffixes(theirs, name)})
    table = made["y_embedder.embedding_table.weight"]
    made["y_embedder.embedding_table.weight"] = torch.cat((table[: config.num_classes], table[-1:]))
    for i in range(config.depth):
        block = f"transformer_blocks.{i}."
        for end in (".weight", ".bias"):
            made[f"blocks.{i}.attn.qkv{end}"] = torch.cat([theirs[block + name + end] for name in QKV])
            made.update({f"blocks.{i}.{ours}{end}": theirs[block + name + end] for ours, name in BLOCK.items()})
    return {**made, "pos_embed": empty_model(config, parameters=False).get_buffer("pos_embed")}


def read_pipeline(folder: Path) -> Weights:
    """Read a DiTPipeline folder's transformer into CPU memory as OpenDiT weights. Raises ValueError or
    FileNotFoundError if the DiT is not supported, or files are damaged or missing."""
    from opendit.checkpoint.schema import PIPELINE, TRANSFORMER  # slow: imports pydantic
    from opendit.common.json_models import read_file

    path = folder / "transformer" / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} doesn't exist; only pipelines with a transformer are supported")
    values = read_file(path, TRANSFORMER)
    heads, head_dim, depth = (values[k] for k in ("num_attention_heads", "attention_head_dim", "num_layers"))
    size = next((k for k, v in SIZES.items() if v == (heads * head_dim, depth, heads)), None)
    if size is None:
        raise ValueError(f"{folder} holds no DiT of ours: {depth} blocks of {heads} heads of {head_dim}")
    labels = read_file(folder / PIPELINE_INDEX, PIPELINE).get("id2label") or {}
    name = f"DiT-{size}/{values['patch_size']}"
    try:
        config = model_config(
            name,
            input_size=(values["sample_size"],) * 2,
            in_channels=values["in_channels"],
            num_classes=len(labels) or values["num_embeds_ada_norm"],
        )
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    theirs = {}
    for path in sorted((folder / "transformer").glob("*.safetensors")):
        with open_safetensors(path) as file:
            theirs.update({name: file.get_tensor(name) for name in shapes_in(file, path)})
    if not theirs:
        raise ValueError(f"{folder}/transformer has no .safetensors file; pickled weights are not read")
    try:
        state = from_diffusers_state(theirs, config)
    except (KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"{folder}/transformer lacks weights of its configuration, or has others ({error})") from error
    check_shapes(config, {key: tuple(tensor.shape) for key, tensor in state.items()}, folder / "transformer")
    info = {"model": name, "config": config.to_dict(), "vae": str((folder / "vae").resolve())}
    if labels:
        info["class_names"] = [labels[key] for key in sorted(labels, key=int)]
    return Weights(state, folder, {**info, "image_size": 8 * config.input_size[0]})


TRANSFORMER, STEM = "transformer", "diffusion_pytorch_model"
EXPERTS = {TRANSFORMER: "high", f"{TRANSFORMER}_2": "low"}  # folder in a pipeline with two networks -> its noise range
SCHEDULER = "scheduler_config.json"


@dataclass(frozen=True)
class PublishedFolder:
    """A public model's folder that agrees with its family's definition."""

    family: Family
    spec: Any  # the family's specification of the network
    config: dict[str, Any]  # the content of ``transformer``/config.json
    transformer: Path  # the network's folder
    pipeline: Path | None  # the pipeline's folder; None for a single network's folder
    index: dict[str, Any] | None  # the content of model_index.json, or None
    root: Path  # the folder that must contain all files, see _root
    files: TensorSet  # the weights by their published names
    pairs: tuple[Pair, ...]  # (OpenDiT's names, published names, dimension of concatenation)
    alone: bool = False  # True if the user named one network's folder in a pipeline with two

    def shapes(self) -> Shapes:
        """Return the shapes of OpenDiT's parameters. Raises ValueError with the configuration file's name."""
        try:
            return model_shapes(public_config(self.family.name, self.config))[0]
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{self.transformer / CONFIG}: {one_line(error)}") from error

    def tensors(
        self, shapes: Mapping[str, Sequence[int]] | None = None, weights: Mapping[str, Tensor] | None = None
    ) -> MatchedTensors:
        """Return the weights by OpenDiT's names. shapes: shapes of all parameters, by default :meth:`shapes`. weights:
        weights by published names, to use instead of the files. Raises ValueError if a weight does not fit."""
        shapes = self.shapes() if shapes is None else shapes
        source = self.files if weights is None else weights
        return MatchedTensors(source, self.pairs, shapes, self.files.path, constants=self.family.constants)

    def published(self, state: Mapping[str, Tensor], path: Path) -> MatchedTensors:
        """Convert OpenDiT's weights to the published names, shapes and dtypes, the inverse of :meth:`tensors`. path:
        the weights' path, for messages. Raises ValueError if a weight is missing, unexpected, or does not fit."""
        back = [(theirs, ours, dim) for ours, theirs, dim in self.pairs]
        constants = {name: self.files[name] for name in self.family.constants}
        return MatchedTensors(state, back, self.files.shapes, path, self.files.dtypes, constants)

    def close(self) -> None:
        self.files.close()


def expert_of(folder: Path) -> str | None:
    """Return "high" or "low" if the folder is a pipeline's network for high or low noise; else None."""
    path = folder.parent / PIPELINE_INDEX
    if folder.name not in EXPERTS or not (folder / CONFIG).is_file() or not path.is_file():
        return None
    try:
        index = read_json(path, 4 * MIB)
    except (ValueError, OSError):
        return None
    return EXPERTS[folder.name] if isinstance(index, dict) and index.get("boundary_ratio") is not None else None


def network_of(folder: str | Path, config: DiTConfig | None) -> Path:
    """Return the folder of the network that ``config`` describes: ``folder``, or a folder inside."""
    expert = config.expert if isinstance(config, PublicConfig) else None
    inside = Path(folder) / next((name for name, which in EXPERTS.items() if which == expert), ".")
    return inside if expert_of(inside) == expert else Path(folder)


def is_published(folder: str | Path) -> bool:
    """Return True if the folder names the network class of a known family. Nothing else is checked."""
    folder = Path(folder)
    path = next((p for p in (folder / TRANSFORMER / CONFIG, folder / CONFIG) if p.is_file()), None)
    try:
        values = read_json(path, 4 * MIB) if path else None
    except (ValueError, OSError):
        return False
    name = values.get("_class_name") if isinstance(values, dict) else None
    return name in [family.network for family in FAMILIES.values()]


def open_published(folder: str | Path, families: Mapping[str, Family] | None = None) -> PublishedFolder:
    """Open a public model's folder: a pipeline or its transformer. Only the headers of weight files are read.

    Raises FileNotFoundError if a file is missing. Raises ValueError with one line and the path if a file is damaged,
    links out of the folder, or belongs to another model."""
    from opendit.checkpoint.schema import NETWORK  # slow: imports pydantic
    from opendit.common.json_models import read_file

    families = FAMILIES if families is None else families
    folder = Path(folder)
    inside, expert = folder / TRANSFORMER, expert_of(folder)
    pipeline, transformer = (folder, inside) if inside.is_dir() else (None, folder)
    if expert is not None:
        pipeline = folder.parent
    if not (transformer / CONFIG).is_file():
        raise FileNotFoundError(
            f"{folder}: no public model there; give a folder with {TRANSFORMER}/{CONFIG}, as diffusers writes it"
        )
    root = _root(folder if expert is None else folder.parent)
    file_size(transformer / CONFIG, root)
    config = read_file(transformer / CONFIG, NETWORK)
    family = next((family for family in families.values() if family.describes(config)), None)
    if family is None:
        raise ValueError(
            f"{transformer / CONFIG}: _class_name is {shown(config['_class_name'])}; read are "
            f"{', '.join(sorted(family.network for family in families.values()))}"
        )
    index = _read_index(pipeline, family, root) if pipeline else None
    try:
        spec = family.layout(config)
        pairs: tuple[Pair, ...] = tuple(
            (ours, theirs, match.dim) for match in family.names(spec) for ours, theirs in match.names()
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        what = f"{one_line(error)} is missing" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"{transformer / CONFIG}: {what}") from error
    files = _open_files(transformer, root)
    check_matched(
        [*family.constants, *(name for _, theirs, _ in pairs for name in theirs)],
        files.shapes,
        f"{files.path}: of the weights of a {family.network} as {CONFIG} has it",
    )
    return PublishedFolder(family, spec, config, transformer, pipeline, index, root, files, pairs, expert is not None)


def _root(folder: Path) -> Path:
    """Return the folder that must contain all files: ``folder``, or its repository in the Hugging Face cache. Files in
    the cache are links to the repository's ``blobs``."""
    snapshot = snapshot_of(folder)
    return folder.resolve() if snapshot is None else snapshot[0].parent.parent


def _read_index(pipeline: Path, family: Family, root: Path) -> dict[str, Any] | None:
    """Read model_index.json and compare it with the family's components. Return None if the file does not exist."""
    path = pipeline / PIPELINE_INDEX
    if not path.is_symlink() and not path.exists():
        return None
    file_size(path, root)
    index = check_index(pipeline, family)
    if not names_class(index.get(TRANSFORMER), "diffusers", family.network):
        raise ValueError(f"{path}: {TRANSFORMER} is {shown(index.get(TRANSFORMER))}, not {family.network} of diffusers")
    others = [
        name for name, kind in index.items() if name.startswith(f"{TRANSFORMER}_") and kind not in (None, [None, None])
    ]
    variant = family.variant(index)
    wanted = [f"{TRANSFORMER}_2"] if variant is not None and variant.experts else []
    if others != wanted:
        raise ValueError(
            f"{path}: it has a second network, {shown(others[0])}, which is not read"
            if others
            else f"{path}: {cast(Variant, variant).setting} is of two networks, and it has one"
        )
    for name in others:
        boundary = index[cast(Variant, variant).setting]
        if not names_class(index[name], "diffusers", family.network):
            raise ValueError(f"{path}: {name} is {shown(index[name])}, not {family.network} of diffusers")
        if not isinstance(boundary, float) or not 0 < boundary < 1:
            raise ValueError(
                f"{path}: {cast(Variant, variant).setting} is {shown(boundary)}, no number between 0 and 1"
            )
    return index


def _open_files(transformer: Path, root: Path) -> TensorSet:
    """Map the weight files, and compare their headers with the file sizes and the index."""
    path = transformer / (STEM + PARTS)
    for file in [*weight_files(transformer, STEM), *([path] if path.is_file() else [])]:
        file_size(file, root)
    tensors = open_set(path if path.is_file() else transformer / (STEM + WHOLE), root)
    tensors.check_floats()
    return tensors


# ------------------------------------------------------------------------------------------------ as OpenDiT weights


def read_published(folder: str | Path) -> Weights:
    """Return a public model's weights by OpenDiT's names. ``info`` also has settings such as the schedule. A weight is
    read from its file on access. Raises as :func:`open_published` and ``published_schedule``."""
    opened = open_published(folder)
    family, info = opened.family, {}
    root, variant = opened.pipeline, opened.family.variant(opened.index)
    if root is not None:
        if (root / "vae" / CONFIG).is_file():
            info["vae"] = str((root / "vae").resolve())
        if opened.index is not None:
            info["text_encoder"] = str(root.resolve())
            if family.distilled is not None and opened.index.get("is_distilled") is True:
                info["distilled"] = True
        schedule = root / "scheduler" / SCHEDULER
        if schedule.is_file():
            from opendit.common.json_models import read_file
            from opendit.encoders.schema import PRETRAINED

            try:
                objective, sampler = published_schedule(
                    read_file(schedule, PRETRAINED), family.shifted_end, family.karras
                )
            except ValueError as error:
                raise ValueError(f"{schedule}: {error}".replace(f"{schedule}: {schedule}", str(schedule))) from error
            # families with an empirical shift compute every dynamic shift by FLUX.2's formula
            if family.shift == "empirical" and objective.shift_tokens is not None:
                objective = FlowObjective(empirical_tokens=0)
            info |= {"objective": objective.to_dict(), "sampler": sampler}
    expert = expert_of(opened.transformer) if opened.alone else None
    index = (opened.index or {}) | ({} if expert is None else {"expert": expert})
    config = public_config(family.name, opened.config, index=index)
    if variant is not None:
        info["clip_fps"] = variant.fps
    place = opened.transformer if opened.alone else opened.pipeline or opened.transformer
    shapes, _ = model_shapes(config)
    info |= {"model": folder_name(place), "config": config.to_dict()}
    objective = objective_from_dict(info.get("objective", FlowObjective().to_dict()))
    if expert is not None:
        between = {"least": config.boundary} if expert == "high" else {"most": config.boundary}
        objective = replace(cast(FlowObjective, objective), **between)
    info["objective"] = objective.to_dict()
    return Weights(opened.tensors(shapes), place, info)
