"""Write the folder of a public model with random weights, to time loading and training without the published files.

    python benchmarks/random_folder.py wan-14b FOLDER [--layers N] [--tiny] [--empty]
    torchrun --nproc_per_node=4 train.py --pretrained FOLDER --data_path mock ...

The network has the published size. Its weights are bf16, drawn on the GPU if there is one. The folder has only the
configurations of the VAE, the encoders and the scheduler. So training must use random latents and embeddings
(``--data_path mock``), and no samples can be drawn. With --empty, all weights are zeros that take no space on disk, for
dry runs.
"""

import argparse
import json
import math
import sys
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from safetensors.torch import save_file

from benchmarks.bench_public import SUBJECTS, TINY

FILE_BYTES = 5 * 10**9
WAN_14B = dict(num_attention_heads=40, ffn_dim=13824, num_layers=40)
VALUES: dict[str, dict[str, Any]] = {name: subject.values for name, subject in SUBJECTS.items()}
VALUES["wan-14b"] = VALUES["wan-1.3b"] | WAN_14B
VALUES["cosmos2-2b"] = dict(
    in_channels=16, out_channels=16, num_attention_heads=16, attention_head_dim=128, num_layers=28, text_embed_dim=1024,
    adaln_lora_dim=256, rope_scale=(1.0, 4.0, 4.0), extra_pos_embed_type=None,
)  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {name: tiny["values"] for name, tiny in TINY.items()}
SMALL["cosmos2-2b"] = dict(
    num_attention_heads=2, attention_head_dim=16, num_layers=2, text_embed_dim=10, adaln_lora_dim=4
)
LAYERS = {"flux": "num_single_layers", "klein-4b": "num_single_layers", "z-image": "n_layers"}  # others: num_layers

_EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
_KL = {"_class_name": "AutoencoderKL", "latent_channels": 16, "in_channels": 3, "out_channels": 3}
_KL |= {"block_out_channels": [128, 256, 512, 512], "scaling_factor": 0.3611, "shift_factor": 0.1159}
FLUX: dict[str, dict[str, Any]] = {
    "vae/config.json": _KL,
    "text_encoder/config.json": {"model_type": "clip_text_model"},
    "text_encoder_2/config.json": {"model_type": "t5"},
    "scheduler/scheduler_config.json": _EULER
    | dict(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096),
    "model_index.json": {
        "_class_name": "FluxPipeline",
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    },
}
Z_IMAGE: dict[str, dict[str, Any]] = {
    "vae/config.json": _KL,
    "text_encoder/config.json": {"model_type": "qwen3"},
    "scheduler/scheduler_config.json": _EULER,
    "model_index.json": {
        "_class_name": "ZImagePipeline",
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "text_encoder": ["transformers", "Qwen3Model"],
        "vae": ["diffusers", "AutoencoderKL"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    },
}
WAN: dict[str, dict[str, Any]] = {
    "vae/config.json": {
        "_class_name": "AutoencoderKLWan",
        "base_dim": 96,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * 16,
        "latents_std": [1.0] * 16,
    },
    "text_encoder/config.json": {"model_type": "umt5"},
    "scheduler/scheduler_config.json": {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 3.0,
        "num_train_timesteps": 1000,
        "solver_order": 2,
        "solver_type": "bh2",
    },
    "model_index.json": {
        "_class_name": "WanPipeline",
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    },
}
TI2V = WAN | {
    "vae/config.json": WAN["vae/config.json"]
    | dict(base_dim=160, z_dim=48, is_residual=True, patch_size=2, latents_mean=[0.0] * 48, latents_std=[1.0] * 48),
    "model_index.json": WAN["model_index.json"] | {"expand_timesteps": True},
}
QWEN_IMAGE: dict[str, dict[str, Any]] = {
    "vae/config.json": WAN["vae/config.json"] | {"_class_name": "AutoencoderKLQwenImage"},
    "text_encoder/config.json": {"model_type": "qwen2_5_vl"},
    "scheduler/scheduler_config.json": _EULER
    | dict(use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, base_image_seq_len=256, max_image_seq_len=8192)
    | dict(shift=1.0, shift_terminal=0.02, time_shift_type="exponential"),
    "model_index.json": {
        "_class_name": "QwenImagePipeline",
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    },
}
KLEIN: dict[str, dict[str, Any]] = {
    "vae/config.json": {
        "_class_name": "AutoencoderKLFlux2",
        "latent_channels": 32,
        "block_out_channels": [128, 256, 512, 512],
        "patch_size": [2, 2],
    },
    "text_encoder/config.json": {"model_type": "qwen3"},
    "scheduler/scheduler_config.json": FLUX["scheduler/scheduler_config.json"],
    "model_index.json": {
        "_class_name": "Flux2KleinPipeline",
        "is_distilled": True,
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "text_encoder": ["transformers", "Qwen3Model"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    },
}
COSMOS2: dict[str, dict[str, Any]] = {
    "vae/config.json": WAN["vae/config.json"],
    "text_encoder/config.json": {"model_type": "t5"},
    "scheduler/scheduler_config.json": _EULER | {"shift": 1.0, "use_karras_sigmas": True},
    "model_index.json": {
        "_class_name": "Cosmos2TextToImagePipeline",
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "transformer": ["diffusers", "CosmosTransformer3DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    },
}
AROUND = {
    "flux": FLUX,
    "z-image": Z_IMAGE,
    "wan": WAN,
    "ti2v-5b": TI2V,
    "qwen-image": QWEN_IMAGE,
    "klein-4b": KLEIN,
    "cosmos2-2b": COSMOS2,
}

# Encoder's configuration -> (name of its width, name of that width in the network's configuration).
WIDTHS = {
    "flux": {
        "text_encoder": ("hidden_size", "pooled_projection_dim"),
        "text_encoder_2": ("d_model", "joint_attention_dim"),
    },
    "z-image": {"text_encoder": ("hidden_size", "cap_feat_dim")},
    "wan": {"text_encoder": ("d_model", "text_dim")},
    "ti2v-5b": {"text_encoder": ("d_model", "text_dim")},
    "qwen-image": {"text_encoder": ("hidden_size", "joint_attention_dim")},
    "klein-4b": {"text_encoder": ("hidden_size", "joint_attention_dim")},
    "cosmos2-2b": {"text_encoder": ("d_model", "text_embed_dim")},
}


def write_folder(name: str, folder: Path, layers: int | None = None, tiny: bool = False, empty: bool = False) -> int:
    """Write the model, and return the weights' number of bytes.

    Args:
        layers: number of blocks (for FLUX.1, single-stream blocks) instead of the published number.
        empty: write zeros in a sparse file.
    """
    import diffusers

    kind = "wan" if name.startswith("wan") else name
    around = AROUND[kind]
    values = dict(VALUES[name])
    if tiny:
        smaller = SMALL["wan-1.3b" if kind == "wan" else name]
        values |= {key: value for key, value in smaller.items() if not key.endswith("channels")}  # keep the channels
    if layers is not None:
        values[LAYERS.get(name, "num_layers")] = layers
    network = around["model_index.json"]["transformer"][1]
    with torch.device("meta"):
        shapes = {key: tuple(p.shape) for key, p in getattr(diffusers, network)(**values).state_dict().items()}
    for path, content in around.items():
        own, of_network = WIDTHS[kind].get(path.partition("/")[0], ("", ""))
        joined = 3 if kind == "klein-4b" else 1  # number of encoder layers that are concatenated
        _write_json(folder / path, content | ({own: values[of_network] // joined} if own else {}))
    if kind == "klein-4b":  # needs statistics from the VAE's weights to normalise latents
        statistics = {"bn.running_mean": torch.zeros(128), "bn.running_var": torch.ones(128)}
        save_file(statistics, folder / "vae" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    _write_json(folder / "transformer" / "config.json", {"_class_name": network, **values})
    return (_write_zeros if empty else _write_weights)(folder / "transformer", shapes)


def _write_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Write tensors N(0, 0.02^2), or 1 + N(0, 0.02^2) for norms, in files of at most FILE_BYTES, and their index."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}]
    where, written, total = {}, 0, 0

    def finish() -> None:
        save_file(files[-1], folder / _name(len(files)), {"format": "pt"})
        files[-1].clear()

    for key, shape in shapes.items():
        if written > FILE_BYTES:
            finish()
            files.append({})
            written = 0
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
        if len(shape) == 1 and key.endswith("weight"):
            weight += 1
        files[-1][key] = weight.cpu()
        where[key] = _name(len(files))
        written, total = written + weight.nbytes, total + weight.nbytes
    finish()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    _write_json(folder / "diffusion_pytorch_model.safetensors.index.json", index)
    return total


def _write_zeros(folder: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Write zeros as a sparse file."""
    ends = [0, *accumulate(2 * math.prod(shape) for shape in shapes.values())]
    header = {
        name: {"dtype": "BF16", "shape": list(shape), "data_offsets": place}
        for (name, shape), place in zip(shapes.items(), pairwise(ends), strict=True)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + ends[-1])
    return ends[-1]


def _name(number: int) -> str:
    return f"diffusion_pytorch_model-{number:05d}.safetensors"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", choices=VALUES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="blocks, instead of the published number")
    parser.add_argument("--tiny", action="store_true", help="a small network of the same layout")
    parser.add_argument("--empty", action="store_true", help="zeros that take no space, for dry runs")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    size = write_folder(args.model, args.folder, args.layers, args.tiny, args.empty)
    print(f"{args.folder}: {args.model}, {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
