"""Write an AutoencoderKL of Stable Diffusion's shape with random weights, for timing and for --vae PATH without a hub.

    python benchmarks/random_vae.py /tmp/vae

Its pictures are meaningless.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from safetensors.torch import save_file

from opendit.encoders.autoencoder_kl import AutoencoderKL

SD_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 256,
    "scaling_factor": 0.18215,
}


def random_vae(narrower: int = 1) -> AutoencoderKL:
    """Return the VAE. narrower: divisor of the widths, for a CPU."""
    torch.manual_seed(0)
    widths = [max(1, width // narrower) for width in SD_VAE["block_out_channels"]]
    return AutoencoderKL({**SD_VAE, "block_out_channels": widths, "norm_num_groups": min(32, widths[0])})


def write(folder: Path, narrower: int = 1) -> None:
    """Write the VAE in diffusers' format."""
    vae = random_vae(narrower)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", **vae.config}, indent=1) + "\n")
    save_file(vae.state_dict(), folder / "diffusion_pytorch_model.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write(Path(sys.argv[1]))
