"""Writes an AutoencoderKL of Stable Diffusion's shape with random weights: for trying --vae PATH where no hub
can be reached, and for timing. Its pictures mean nothing.

    python benchmarks/random_vae.py /tmp/vae
"""

import sys

import torch
from diffusers import AutoencoderKL


def main(folder: str) -> None:
    torch.manual_seed(0)
    AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        latent_channels=4,
        sample_size=256,
        scaling_factor=0.18215,
    ).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
