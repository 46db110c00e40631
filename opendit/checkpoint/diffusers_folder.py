"""diffusers' DiTPipeline folders, read: the transformer's weights under our names, and what the folder says of them.

``opendit.checkpoint.export`` writes such folders. Pickled weights are not read.
"""

from pathlib import Path

import torch
from torch import Tensor

from opendit.checkpoint.header import check_shapes
from opendit.common.json_file import MIB, NAME, FileKind, read_file
from opendit.common.rules import mapping, optional, plain, record, string, whole
from opendit.common.tensor_files import open_safetensors, shapes_in
from opendit.config.architectures import SIZES
from opendit.models.dit import DiTConfig
from opendit.models.weights import Weights
from opendit.models.zoo import empty_model, model_config

PIPELINE_INDEX = "model_index.json"  # the file that stands for a pipeline
_SIZE = whole(1, 1 << 16)
TRANSFORMER = FileKind(
    record(
        {
            "_class_name": string(64),
            "num_attention_heads": _SIZE,
            "attention_head_dim": _SIZE,
            "num_layers": _SIZE,
            "patch_size": whole(1, 64),
            "sample_size": whole(1, 512),
            "in_channels": whole(1, 4096),
            "num_embeds_ada_norm": whole(1, 1_000_000),
        },
        others=plain(),
    ),
    4 * MIB,
)
LABEL_NUMBER = string(7, "[0-9]+", "the number of a class")
PIPELINE = FileKind(record({}, {"id2label": optional(mapping(LABEL_NUMBER, NAME))}, others=plain()), 16 * MIB)


# ours: diffusers', of what stands before and after the blocks and of a block
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
    """Our state dict, position table included, from DiTTransformer2DModel's: the inverse of
    :func:`opendit.checkpoint.export.to_diffusers_state`."""
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
    """The transformer of a DiTPipeline folder in CPU memory, as weights of ours; their ``path`` is the folder.

    Raises:
        ValueError, FileNotFoundError: it holds no DiT of ours, or its files are damaged.
    """
    values = read_file(folder / "transformer" / "config.json", TRANSFORMER)
    heads, head_dim, depth = (values[k] for k in ("num_attention_heads", "attention_head_dim", "num_layers"))
    size = next((k for k, v in SIZES.items() if v == (heads * head_dim, depth, heads)), None)
    if values["_class_name"] != "DiTTransformer2DModel" or size is None:
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
