#!/usr/bin/env python
"""Prepares media for training: tables of captioned clips and pictures, shards, and cached latents.

    python preprocess.py demo                                       # videos/demo.csv: moving digits as MP4 files
    python preprocess.py ucf101 UCF-101 --output ucf101.csv         # captions from the names of the classes
    python preprocess.py folder CLIPS --output clips.csv            # from clip.txt, clip.json or folder names
    python preprocess.py check clips.csv --output checked.csv --num_frames 16 --frame_interval 3 --image_size 256

    python preprocess.py shards --data_path FOLDER --output SHARDS  # tars of 1 GB each; index SHARDS: index your tars

    python preprocess.py look DATA                                  # a contact sheet and histograms, in look/

    python preprocess.py latents --data_path FOLDER --vae ema --image_size 256 --output LATENTS
    torchrun --nproc_per_node 8 preprocess.py latents ...           # one process a GPU

Then train with ``--data_path checked.csv``, ``SHARDS`` or ``LATENTS``; with latents no picture is decoded and no VAE
runs during training. If ``demo``, ``shards``, ``index`` or ``latents`` is interrupted, run the same command again to
continue.
"""

import sys

from opendit.config.console import answer_interrupts, prepare_console, print_error, run_program, should_print

if __name__ == "__main__":
    answer_interrupts()  # Ctrl-C prints one line, even during the imports below

import os
from pathlib import Path

from opendit.common.safe_files import removed_if_empty
from opendit.config.preprocess import build_parser, check


def run(command: str, options: dict) -> None:
    """Run a subcommand with the values of its flags."""
    if command == "demo":
        from opendit.data.digits import make_demo

        table = make_demo(options["output"], options["clips"], options["size"], split=options["split"])
        use = "train" if options["split"] == "train" else "evaluate"
        print(f"{options['clips']:,} clips of moving digits: {use} with --use_video --data_path {table}")
    elif command in ("ucf101", "folder"):
        from opendit.data import captioned_media

        captioned_media.make(command, **options)
    elif command == "check":
        from opendit.data import captioned_media

        captioned_media.check(**options)
    elif command == "look":
        from opendit.data import look

        look.run(**options)
    elif command == "shards":
        from opendit.data.shards import program

        program.make_shards(**options)
    elif command == "index":
        from opendit.data.shards import program

        program.make_indexes(**options)
    else:
        from opendit.data import make_latents

        make_latents.run(**options)


def main(arguments: list[str] | None = None) -> int:
    prepare_console()
    parser = build_parser(__doc__ or "")
    options, given = parser.read(sys.argv[1:] if arguments is None else arguments)
    command = options.pop("command")
    if command is None:
        parser.print_help()
        return 0
    with removed_if_empty(Path(options.get("output") or os.curdir)):  # a failed command may leave an empty folder
        try:
            check(command, options, given)
        except ValueError as error:
            return refuse(error) if should_print(error) else 2
        from opendit.data.base import DataError  # imports torch; --help doesn't need it

        try:
            run(command, options)
        except (ValueError, OSError, DataError) as error:
            return refuse(error)
        return 0


def refuse(error: Exception) -> int:
    print_error(error)
    return 2


if __name__ == "__main__":
    run_program(main)
