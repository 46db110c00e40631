"""Read weights of other programs: Meta's .pt files, without running code in them, and diffusers' DiTPipeline folders.

``opendit.export`` writes such files and folders. Pickled weights in a folder are not read.
"""

import argparse
import math
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from opendit.checkpoint.tensor_set import check_shapes
from opendit.common.json_file import MIB, read_json
from opendit.common.tensor_files import open_safetensors, shapes_in
from opendit.common.utils import shown
from opendit.config.architectures import PUBLIC, SIZES, is_video
from opendit.encoders.folder import PIPELINE_INDEX
from opendit.models.dit import DiTConfig
from opendit.models.weights import Weights
from opendit.models.zoo import empty_model, model_config

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "UNICODE", "BINUNICODE8")  # pickle opcodes that push strings
# modules whose names occur in harmless pickled weights
_HARMLESS = ("collections", "torch", "torch._utils", "torch.storage", "argparse")
_SEARCHED = 16 << 20  # number of bytes of a pickle that are searched for calls
LABELS, IMAGENET_CLASSES = "y_embedder.embedding_table.weight", 1000


# ------------------------------------------------------------------------------------------ .pt files


def read_pickled(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """Read the state dict in a .pt file, and the number of classes or None if the file does not have it.

    Code in the file is never run, and the sizes in the file are checked. The tensors are on the CPU. In the current
    format (a zip archive), tensors stay in the file until they are used. For Meta's training checkpoints, which hold
    ``model``, ``ema``, ``opt`` and ``args``, the result is ``ema``.

    Raises:
        ValueError: the file would run code, is damaged, unpacks to more than its own size, or is not a dictionary of
            named floating-point tensors. The message is one line that names the file.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")
    size = path.stat().st_size
    packed = zipfile.is_zipfile(path)
    if packed:
        _check_archive(path, size)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about deprecated storages and formats
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
    """Raise ValueError for an archive whose entries are compressed or overlap, which torch never writes."""
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
    """Explain an error. Torch's message is not shown, because it tells the user how to load the unsafe file
    regardless."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if call := found[1] if found else _first_call(path):
        return (
            f"{path} is refused: it would run code when loaded ({call}). Weights are tensors in plain containers; get "
            "them as .safetensors, or as a .pt file with the state dict alone"
        )
    return f"{path} is no .pt file of weights, or is damaged ({type(error).__name__}); get it again, or as .safetensors"


def _first_call(path: Path) -> str | None:
    """Find the first global that a pickle names but weights do not need, without loading the pickle."""
    strings: list[str] = []
    try:
        for code, value, _ in pickletools.genops(_pickle_in(path)):
            if code.name == "GLOBAL":
                strings = str(value).split(" ", 1)
            elif code.name in _STRINGS:
                strings = [*strings[-1:], str(value)]
            if code.name in ("GLOBAL", "STACK_GLOBAL") and strings[0] not in _HARMLESS:
                return ascii(".".join(strings))[1:-1][:100]
    except Exception:  # no pickle at all, or a broken one
        return None
    return None


def _pickle_in(path: Path) -> bytes:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as file:
                return file.read(_SEARCHED)
    with open(path, "rb") as file:
        return file.read(_SEARCHED)


def infer_config(state: Mapping[str, Tensor], name: str, path: Path, num_classes: int | None = None) -> DiTConfig:
    """Infer the configuration of a class-conditional DiT with a known name from its weights' shapes, for square inputs.

    The number of rows of the last layer shows whether the model also predicts a variance. The last row of the label
    table may be a class or the null class of class dropout; ``num_classes`` tells which. Without ``num_classes``, a
    table of 1000 rows is assumed to have no null class (ImageNet), and the last row of any other table is assumed to be
    the null class (see :func:`assumption`).

    Raises:
        ValueError: the weights belong to another model; the message names a model that fits, if any.
    """
    if is_video(name):
        raise ValueError(f"{path} says nothing of the frames that --model {name} takes; give a checkpoint of OpenDiT")
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
    """Return a message that states what :func:`infer_config` assumed; an empty list if nothing was assumed."""
    rows = 0 if config.num_classes is None else config.num_classes + config.null_class
    if (
        weights.config is not None
        or weights.num_classes is not None
        or rows in (IMAGENET_CLASSES, IMAGENET_CLASSES + 1)
    ):
        return []
    return [
        f"{weights.path} does not say how many classes it has: the last of its {rows} rows is taken for the null class "
        f"of guidance; if it was trained without class dropout, sample.py needs --num_classes {rows}"
    ]


# ------------------------------------------------------------------------------------------ DiTPipeline folders

# Layer names, OpenDiT's -> diffusers'. OUTER and EMBEDDERS hold the layers outside of the blocks, BLOCK those of a
# block.
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
    """Convert the state dict of DiTTransformer2DModel to OpenDiT's, including the position table.

    The inverse of :func:`opendit.export.conversion.to_diffusers_state`.
    """
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
    """Read the transformer of a DiTPipeline folder into CPU memory as OpenDiT weights, whose ``path`` is the folder.

    Raises:
        ValueError, FileNotFoundError: the folder holds no supported DiT, or its files are damaged or missing.
    """
    from opendit.checkpoint.schema import PIPELINE, TRANSFORMER  # imports pydantic, so only when a folder is read
    from opendit.common.json_models import read_file

    path = folder / "transformer" / "config.json"
    found = read_json(path, MIB) if path.is_file() else {}
    name = found.get("_class_name") if isinstance(found, dict) else None
    if isinstance(name, str) and name != "DiTTransformer2DModel":
        known = sorted({public.network for public in PUBLIC.values()})
        raise ValueError(f"{path}: {shown(name)} is a network that is not known; known are {', '.join(known)}")
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
