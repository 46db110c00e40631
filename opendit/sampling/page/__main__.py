"""Serves a page for a browser: draws from checkpoints, shows runs, compares, trains.

opendit page --outputs outputs
opendit page --allow_train .                 # data, models and runs below this folder
opendit page --ckpt DiT-XL-2-256x256.pt --model DiT-XL/2 --vae ema --port 8000
"""

import importlib.util
import ipaddress
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from opendit.common.safe_files import make_folder
from opendit.config.checks import check_vae, check_weights
from opendit.config.command_line import CommandLine
from opendit.config.console import name_of, prepare_console
from opendit.config.flags import BATCH, Value, one_of, whole
from opendit.config.names import BASE_PRECISIONS, PRECISIONS

SHORTEST_PASSWORD = 8


def build_parser() -> CommandLine:
    parser = CommandLine(name_of("python -m opendit.sampling.page"), __doc__ or "")
    parser.heading("Shown: runs, their figures, and what can be drawn from")
    parser.option("--outputs", Value(unit="folder"), "the folder of runs (default: ./outputs, or outputs in ROOT)")
    parser.option(
        "--evaluation",
        Value(unit="folder"),
        "the --output of opendit evaluate, whose figures are shown",
        "./evaluation",
    )
    parser.option("--ckpt", Value(unit="path"), "further checkpoints to draw from, as sample.py takes them", nargs="+")
    parser.option("--lora", Value(unit="path"), "LoRA files, or runs elsewhere, to draw with", nargs="+")
    parser.option("--model", Value(unit="name"), "of those that do not say (Meta's .pt)")
    parser.option("--vae", Value(unit="name"), "ema, mse, PATH or none; from the checkpoint when left out")
    parser.option("--text_encoder", Value(unit="name"), "clip, t5 or a folder; from the checkpoint when left out")
    parser.option("--text_precision", one_of(BASE_PRECISIONS), "of text encoders' weights, as in sample.py", "bf16")
    parser.heading("Drawing: precision, memory, and how much at a time")
    parser.switch("--vae_tiling", "decode large pictures and clips in overlapping tiles: less memory")
    parser.option("--mixed_precision", one_of(PRECISIONS), "of the model (default: bf16 on a GPU, else fp32)")
    parser.switch("--fp8", "the blocks' linear layers in FP8 (Hopper and newer)")
    parser.option("--batch_size", Value(int, **BATCH), "samples at a time", 32)
    parser.option("--most_samples", whole(1, 1024, "samples"), "of one request", 64)
    parser.heading("Training: what may be started from the page")
    parser.option(
        "--allow_train",
        Value(unit="folder"),
        "ROOT, below which are data, models and runs: adds the tab Train; on this machine alone, or with --password",
    )
    parser.heading("Server: where the page is, and who may see it")
    parser.option(
        "--host", Value(unit="address"), "address to serve at; any but this machine's own needs a password", "127.0.0.1"
    )
    parser.option("--port", whole(0, 65535, "port"), "0: a free one", 7860)
    parser.option("--password", Value(), "of the page (default: none on 127.0.0.1, else one is made and printed)")
    return parser


def main(argv: list[str]) -> None:
    prepare_console()
    parser = build_parser()
    options, _ = parser.read(argv)
    try:
        check(options)
        listening = listen(options["host"], options["port"])
    except ValueError as error:
        parser.fail(error)
    from opendit.sampling.page.server import LOCAL, serve  # imported late, because it imports torch

    try:
        serve(options, listening, (*LOCAL, options["host"]) if is_local(options["host"]) else None)
    except (ValueError, OSError) as error:
        parser.fail(error)


def check(options: dict[str, Any]) -> None:
    """Check the flags. Set a password if one is needed. Raises ValueError, naming the flag and the fix."""
    options["ckpt"], options["lora"] = options["ckpt"] or [], options["lora"] or []
    root = options["allow_train"]
    if root is not None:
        check_training(options)
    elif options["outputs"] is None:
        options["outputs"] = "./outputs"
    if not Path(options["outputs"]).expanduser().is_dir() and not options["ckpt"]:
        raise ValueError(
            f"--outputs {options['outputs']}: no such folder; name the one that train.py wrote its runs to"
        )
    for path in options["ckpt"]:
        check_weights(path, "--ckpt", pipeline=True)
    for path in options["lora"]:
        check_weights(path, "--lora")
    if options["vae"] is not None:
        check_vae(options["vae"])
    if options["password"] is None:
        if not is_local(options["host"]):
            options["password"] = secrets.token_urlsafe(12)
    elif len(options["password"]) < SHORTEST_PASSWORD:
        raise ValueError(f"--password: at least {SHORTEST_PASSWORD} characters; left out, one is made")
    if importlib.util.find_spec("gradio") is None:
        raise ValueError("the page needs gradio, which is not installed: pip install 'opendit[page]'")


def check_training(options: dict[str, Any]) -> None:
    """Check --allow_train, and make the folder of runs. Raises ValueError, naming the flag and the fix."""
    flag, root = f"--allow_train {options['allow_train']}", Path(options["allow_train"]).expanduser()
    if not root.is_dir():
        raise ValueError(f"{flag}: no such folder; name the one that holds your data")
    if not is_local(options["host"]) and options["password"] is None:
        raise ValueError(f"{flag}: with --host {options['host']} others could start programs here; give --password")
    if not hasattr(os, "pidfd_open"):
        raise ValueError(f"{flag}: stopping a run needs Linux; start train.py in a terminal instead")
    if options["outputs"] is None:
        options["outputs"] = str(root / "outputs")
    outputs = Path(options["outputs"]).expanduser()
    if not outputs.resolve().is_relative_to(root.resolve()) or outputs.resolve() == root.resolve():
        raise ValueError(f"--outputs {outputs}: is not below {flag}; leave it out, or name a folder in it")
    make_folder(outputs.resolve(), root=root.resolve())


def is_local(host: str) -> bool:
    """Return True for an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ValueError if the address can't be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise ValueError(f"--host {host} --port {port}: {error.strerror or error}; try --port 0") from error
    return listening


if __name__ == "__main__":
    main(sys.argv[1:])
