#!/usr/bin/env python
"""Prepares media for training: encodes pictures into cached latents.

    python preprocess.py latents --data_path FOLDER --vae ema --image_size 256 --output LATENTS
    torchrun --nproc_per_node 8 preprocess.py latents ...      # one process a GPU

Then train with ``--data_path LATENTS``: no picture is decoded and no VAE runs during training. A job that was
stopped goes on where it was when the same command is run again.
"""

import argparse
import sys


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preprocess.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    latents = commands.add_parser("latents", help="encode every picture once with a VAE")
    latents.add_argument("--data_path", required=True, help="digits, a folder of pictures or a torchvision data set")
    latents.add_argument("--vae", default="ema", help="ema, mse or a folder with a VAE (default: ema)")
    latents.add_argument("--image_size", type=positive, default=256, help="pixels of a side (default: 256)")
    latents.add_argument("--output", required=True, help="folder for the latents")
    latents.add_argument("--batch_size", type=positive, default=64, help="pictures at once (default: 64)")
    latents.add_argument("--num_workers", type=int, default=4, help="processes that read (default: 4)")
    latents.add_argument("--no_flip", action="store_true", help="leave out the mirror images: half the size")
    latents.add_argument(
        "--mixed_precision",
        choices=("auto", "fp16", "bf16", "fp32"),
        default="auto",
        help="of the VAE (default: auto, fp16 on a GPU, else fp32)",
    )
    latents.add_argument("--shard_size", type=positive, default=4096, help="pictures a file (default: 4096)")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return value


def underscores(argument: str) -> str:
    """--data-path=x-y -> --data_path=x-y."""
    flag, equals, value = argument.partition("=")
    return flag.replace("-", "_").replace("__", "--", 1) + equals + value if flag.startswith("--") else argument


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = vars(parser.parse_args([underscores(argument) for argument in arguments]))
    command = options.pop("command")
    if command is None:
        parser.print_help()
        return 0
    from opendit.data import make_latents  # torch and the rest, which the usage doesn't need
    from opendit.data.base import DataError

    try:
        make_latents.run(**options)
    except (ValueError, FileNotFoundError, DataError) as error:
        print(f"preprocess.py {command}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
