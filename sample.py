"""Draws pictures or clips from a checkpoint: a labelled sheet, single PNGs or MP4s, on request an .npz for FID tools.

    python sample.py --ckpt outputs/000-DiT-XL-2 --class_labels 207 360 --cfg_scale 4
    python sample.py --model DiT-XL/2 --image_size 256 --ckpt ./model.pt            (Meta's weights)
    python sample.py --ckpt outputs/000-vDiT-XL-222 --use_video --prompt "a seven moving left"
    torchrun --standalone --nproc_per_node=8 sample.py --ckpt ... --num_samples 50000 --npz fid.npz
    torchrun --standalone --nproc_per_node=8 sample.py --ckpt ... --sequence_parallel_size 4 --cfg_parallel

Several processes split the samples, or share each of them; its noise depends on --seed and its number only.
"""

import sys

from opendit.common.stages import Stages
from opendit.config.command_line import read_flags
from opendit.config.console import prepare_console
from opendit.config.sample import SampleConfig


def main(argv: list[str]) -> None:
    prepare_console()
    flags = read_flags(SampleConfig, argv)
    stages = Stages("Python, flags")
    with stages("imports"):
        from opendit.sampling.run import run  # torch and the rest, which a wrong flag need not wait for

    run(flags, stages)


if __name__ == "__main__":
    main(sys.argv[1:])
