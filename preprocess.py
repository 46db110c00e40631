#!/usr/bin/env python
"""Prepares media for training: tables of captioned clips and pictures, and cached latents.

    python preprocess.py demo                                       # videos/demo.csv: moving digits as MP4 files
    python preprocess.py ucf101 UCF-101 --output ucf101.csv         # captions from the names of the classes
    python preprocess.py folder CLIPS --output clips.csv            # from clip.txt, clip.json or folder names
    python preprocess.py check clips.csv --output checked.csv --num_frames 16 --frame_interval 3 --image_size 256

    python preprocess.py latents --data_path FOLDER --vae ema --image_size 256 --output LATENTS
    torchrun --nproc_per_node 8 preprocess.py latents ...           # one process a GPU

Then train with ``--data_path checked.csv`` or ``--data_path LATENTS``; with latents no picture is decoded and no VAE
runs during training. What ``demo`` or ``latents`` were stopped in goes on when the same command is run again.
"""

import argparse
import sys


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preprocess.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser("demo", help="make clips of moving digits with captions")
    demo.add_argument("--output", default="videos", help="folder for demo.csv and the clips (default: videos)")
    demo.add_argument("--clips", type=positive, default=600, help="how many (default: 600)")
    demo.add_argument("--size", type=positive, default=64, help="pixels of a side (default: 64)")
    demo.add_argument(
        "--split", choices=("train", "test"), default="train", help="of the digits shown (default: train)"
    )
    ucf101 = commands.add_parser("ucf101", help="list a UCF101 tree in a CSV")
    ucf101.add_argument("root", metavar="ROOT", help="folder with a folder of clips for every class")
    ucf101.add_argument("--output", required=True, metavar="CSV")
    folder = commands.add_parser("folder", help="list a folder of captioned clips and pictures in a CSV")
    folder.add_argument("root", metavar="ROOT", help="searched to any depth")
    folder.add_argument("--output", required=True, metavar="CSV")
    check = commands.add_parser("check", help="drop the rows of a CSV that can't be trained on")
    check.add_argument("csv", metavar="CSV", help="path,text and any other columns")
    check.add_argument("--output", required=True, metavar="CSV2")
    check.add_argument("--num_frames", type=positive, default=16, help="frames of a training clip (default: 16)")
    check.add_argument("--frame_interval", type=positive, default=1, help="from frame to frame (default: 1)")
    check.add_argument(
        "--image_size",
        "--min_size",
        type=natural,
        default=0,
        metavar="SIZE",
        help="drop what has fewer pixels on its shorter side, that is, would be enlarged by training at this size "
        "(default: 0, keep all)",
    )
    check.add_argument("--num_workers", type=positive, default=2, help="processes that decode (default: 2)")
    latents = commands.add_parser("latents", help="encode every picture once with a VAE")
    latents.add_argument("--data_path", required=True, help="digits, a folder of pictures, a torchvision set or a CSV")
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
    latents.add_argument("--use_video", action="store_true", help="encode the clips of a CSV, and its pictures as such")
    latents.add_argument("--num_frames", type=positive, default=16, help="frames of a clip (default: 16)")
    latents.add_argument("--frame_interval", type=positive, default=1, help="from frame to frame (default: 1)")
    latents.add_argument(
        "--short_clips",
        choices=("skip", "interval"),
        default="skip",
        help="interval: read clips that are too short at a smaller interval (default: skip)",
    )
    latents.add_argument("--text_encoder", help="also encode the captions: clip, t5 or a folder (default: keep words)")
    latents.add_argument("--max_text_tokens", type=positive, help="captions are cut to this (default: the encoder's)")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return value


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def underscores(argument: str) -> str:
    """--data-path=x-y -> --data_path=x-y."""
    flag, equals, value = argument.partition("=")
    return flag.replace("-", "_").replace("__", "--", 1) + equals + value if flag.startswith("--") else argument


def run(command: str, options: dict) -> None:
    """One subcommand with its flags' values."""
    if command == "demo":
        from opendit.data.moving_digits import make_demo

        table = make_demo(options["output"], options["clips"], options["size"], split=options["split"])
        use = "train" if options["split"] == "train" else "evaluate"
        print(f"{options['clips']:,} clips of moving digits: {use} with --use_video --data_path {table}")
    elif command in ("ucf101", "folder"):
        from opendit.data import make_csv

        make_csv.run(command, **options)
    elif command == "check":
        from opendit.data import check_csv

        check_csv.run(**options)
    else:
        from opendit.data import make_latents

        make_latents.run(**options)


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = vars(parser.parse_args([underscores(argument) for argument in arguments]))
    command = options.pop("command")
    if command is None:
        parser.print_help()
        return 0
    from opendit.data.base import DataError  # torch and the rest, which the usage doesn't need

    try:
        run(command, options)
    except (ValueError, OSError, DataError) as error:
        print(f"preprocess.py {command}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
