"""Lists the models: parameters, work and training memory.

python -m opendit.models --image_size 512 --batch_size 8 --world 8
"""

import argparse
import sys

from opendit.memory import BYTES, GIB, Setup, estimate
from opendit.models import NAMES, VIDEO_NAMES, is_video, model_config

PLUGINS = ("zero2", "gemini", "ddp")


def table(names: list[str], image_size: int, frames: int, batch: int, world: int, precision: str) -> list[list[str]]:
    """A row of texts for each model, the titles first. Latents are 4 channels of an eighth of ``image_size``."""
    rows = [["model", "parameters", "tokens", "GFLOP a sample", *(f"{plugin} GiB" for plugin in PLUGINS)]]
    for name in names:
        config = model_config(
            name,
            input_size=(image_size // 8,) * 2,
            in_channels=4,
            num_classes=1000,
            frames=frames if is_video(name) else None,
        )
        memory = []
        for plugin in PLUGINS:
            possible = plugin != "gemini" or precision != "fp32"
            needs = estimate(config, Setup(plugin, precision, world), batch).total / GIB
            memory.append(f"{needs:.1f}" if possible else "-")
        work = f"{3 * config.forward_flops() / 1e9:,.1f}"
        rows.append([name, f"{config.parameters() / 1e6:,.1f} M", f"{config.tokens:,}", work, *memory])
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m opendit.models",
        description="Lists the models: parameters, work of a training sample (forward and backward), and training "
        "memory of one GPU under each plugin, with fused kernels and one EMA, by formula (opendit/memory.py).",
    )
    parser.add_argument("names", nargs="*", metavar="MODEL", help="these only, e.g. DiT-XL/2 vDiT-B/244")
    parser.add_argument("--image_size", type=int, default=256, help="pixels; latents have an eighth of it")
    parser.add_argument("--num_frames", type=int, default=16, help="latent frames of models of clips")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per GPU")
    parser.add_argument("--world", type=int, default=1, help="GPUs")
    parser.add_argument("--mixed_precision", default="bf16", choices=tuple(BYTES))
    args = parser.parse_args(argv)
    for name in ("image_size", "num_frames", "batch_size", "world"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)}: must be above 0")
    names = args.names or [*NAMES, *VIDEO_NAMES]
    sizes = args.image_size, args.num_frames, args.batch_size, args.world, args.mixed_precision
    try:
        rows = table(names, *sizes)
    except ValueError as error:
        parser.error(str(error))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print(f"{first:<{widths[0]}}", *(f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
