"""Trains a Diffusion Transformer: data -> prepare -> model -> loss -> step -> EMA -> log.

One process:     python train.py --model DiT-S/2 --data_path FOLDER
Several GPUs:    torchrun --standalone --nproc_per_node=8 train.py --model DiT-XL/2 --data_path FOLDER
"""

import sys

from opendit.cli.command_line import read_flags
from opendit.cli.console import prepare_console
from opendit.cli.train_flags import TrainConfig


def main(argv: list[str]) -> None:
    prepare_console()
    flags = read_flags(TrainConfig, argv)
    from opendit.training.run import run  # torch and the rest, which a wrong flag need not wait for

    run(flags)


if __name__ == "__main__":
    main(sys.argv[1:])
