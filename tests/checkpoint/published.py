"""A small public model: its family, and functions that write its folder in diffusers' layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from opendit.models.families.base import Family, Guidance, LatentSpace, Match, Text

WIDTH = 12
COMPONENTS = {"vae": ("diffusers", "AutoencoderKL"), "text_encoder": ("transformers", "T5EncoderModel")}


def layout(config: Mapping[str, Any]) -> dict[str, int]:
    if config["patch_size"] != 2:
        raise ValueError(f"patch_size {config['patch_size']} is not known")
    return {"double": config["num_layers"], "single": config["num_single_layers"], "width": config.get("width", WIDTH)}


def names(spec: dict[str, int]) -> tuple[Match, ...]:
    double, single = range(spec["double"]), range(spec["double"], spec["double"] + spec["single"])
    return (
        Match(("x_embedder.weight",), ("patch_embedding.weight",)),  # a matrix, and a convolution
        *(
            Match((f"blocks.*.qkv.{end}",), tuple(f"transformer_blocks.*.to_{x}.{end}" for x in "qkv"), blocks=double)
            for end in ("weight", "bias")
        ),
        Match(("blocks.*.norm.weight",), ("transformer_blocks.*.norm.weight",), blocks=double),
        Match(
            ("blocks.*.proj.weight", "blocks.*.fc2.weight"), ("single_blocks.*.proj_out.weight",), 1, single,
            spec["double"],
        ),
        Match(("blocks.*.fc1.weight", "blocks.*.gate.weight"), ("single_blocks.*.up.weight",), 0, single,
              spec["double"]),
    )  # fmt: skip


FAMILY = Family(
    "small", "SmallTransformer2DModel", ("SmallPipeline",), COMPONENTS, layout, names, Text(8, "attend"),
    LatentSpace("AutoencoderKL", "scalar"), Guidance(3.0), 4, license="apache-2.0",
)  # fmt: skip
FAMILIES = {"small": FAMILY}
CONFIG = {"_class_name": FAMILY.network, "_diffusers_version": "0.42.1", "patch_size": 2, "num_layers": 2,
          "num_single_layers": 2}  # fmt: skip


class Network(nn.Module):
    """A module with OpenDiT's parameter names and shapes."""

    def __init__(self, double: int, single: int, width: int = WIDTH):
        super().__init__()
        self.x_embedder = nn.Linear(4 * 3, width, bias=False)
        blocks: list[nn.Module] = []
        for _ in range(double):
            block = nn.Module()
            block.qkv, block.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width, bias=False)
            blocks.append(block)
        for _ in range(single):
            block = nn.Module()
            block.proj = nn.Linear(width, width, bias=False)
            block.fc2, block.fc1 = nn.Linear(2 * width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
            block.gate = nn.Linear(width, width + 1, bias=False)
            blocks.append(block)
        self.blocks = nn.ModuleList(blocks)


def network(width: int = WIDTH) -> Network:
    with torch.device("meta"):
        return Network(2, 2, width)


def shapes(width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in network(width).named_parameters()}


def weights(width: int = WIDTH, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return random weights by their published names."""
    made = {"patch_embedding.weight": (width, 3, 2, 2)}
    for i in range(2):
        block = f"transformer_blocks.{i}."
        made |= {f"{block}to_{x}.weight": (width, width) for x in "qkv"}
        made |= {f"{block}to_{x}.bias": (width,) for x in "qkv"} | {f"{block}norm.weight": (width,)}
        made |= {f"single_blocks.{i}.proj_out.weight": (width, 3 * width),
                 f"single_blocks.{i}.up.weight": (3 * width + 1, width)}  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in made.items()}


def ours(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert published weights to OpenDiT's names, with hand-written rules."""
    width = theirs["transformer_blocks.0.norm.weight"].numel()
    made = {"x_embedder.weight": theirs["patch_embedding.weight"].flatten(1)}
    for i in range(2):
        block = f"transformer_blocks.{i}."
        for end in ("weight", "bias"):
            made[f"blocks.{i}.qkv.{end}"] = torch.cat([theirs[f"{block}to_{x}.{end}"] for x in "qkv"])
        made[f"blocks.{i}.norm.weight"] = theirs[f"{block}norm.weight"]
        out, up = (theirs[f"single_blocks.{i}.{name}.weight"] for name in ("proj_out", "up"))
        made[f"blocks.{2 + i}.proj.weight"], made[f"blocks.{2 + i}.fc2.weight"] = out[:, :width], out[:, width:]
        made[f"blocks.{2 + i}.fc1.weight"], made[f"blocks.{2 + i}.gate.weight"] = up[: 2 * width], up[2 * width :]
    return made


def write_transformer(folder: Path, state: Mapping[str, Tensor], files: int = 1, config: dict | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {}), indent=2) + "\n")
    stem, places = "diffusion_pytorch_model", {}
    for i in range(files):
        name = f"{stem}.safetensors" if files == 1 else f"{stem}-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {key: state[key] for key in list(state)[i::files]}
        save_file(part, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    if files > 1:
        (folder / f"{stem}.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 0}, "weight_map": places})
        )


def write_pipeline(folder: Path, state: Mapping[str, Tensor], files: int = 1, config: dict | None = None) -> Path:
    write_transformer(folder / "transformer", state, files, config)
    index = {
        "_class_name": "SmallPipeline",
        "_diffusers_version": "0.42.1",
        "transformer": ["diffusers", FAMILY.network],
    }
    index |= {name: list(kind) for name, kind in COMPONENTS.items()}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    for name in COMPONENTS:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
        (folder / name / "model.safetensors").write_bytes(name.encode() * 10)
    return folder
