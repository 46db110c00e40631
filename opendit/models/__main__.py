"""List the models with their parameters, FLOPs per training sample (forward and backward), and training memory on one
GPU for each plugin. Memory is estimated (opendit/training/memory.py) for fused kernels and one EMA.

opendit models --image_size 512 --batch_size 8 --world 8
"""

import sys

from opendit.config.architectures import NAMES, VIDEO_NAMES, is_video
from opendit.config.command_line import CommandLine
from opendit.config.console import name_of, prepare_console
from opendit.config.flags import BATCH, FRAMES, SIDE, Value, one_of, reject_unused, whole
from opendit.config.names import PLUGINS, PRECISIONS


def table(names: list[str], image_size: int, frames: int, batch: int, world: int, precision: str) -> list[list[str]]:
    """Return the rows of the table as text, with the header first. Latents have 4 channels and 1/8 of
    ``image_size``."""
    from opendit.models.zoo import model_config
    from opendit.training.memory import GIB, Setup, estimate  # imports torch, so flags are checked before this import

    rows = [["model", "parameters", "tokens", "GFLOP a sample", *(f"{plugin} GiB" for plugin in PLUGINS)]]
    for name in names:
        config = model_config(
            name,
            input_size=(image_size // 8, image_size // 8),
            in_channels=4,
            num_classes=1000,
            frames=frames if is_video(name) else None,
        )
        memory = []
        for plugin in PLUGINS:
            possible = precision in PLUGINS[plugin].precisions
            needs = estimate(config, Setup(plugin, precision, world), batch).total / GIB
            memory.append(f"{needs:.1f}" if possible else "-")
        work = f"{3 * config.forward_flops() / 1e9:,.1f}"
        rows.append([name, f"{config.parameters() / 1e6:,.1f} M", f"{config.tokens:,}", work, *memory])
    return rows


def build_parser() -> CommandLine:
    parser = CommandLine(name_of("python -m opendit.models"), __doc__ or "")
    parser.heading("Models: which, and for which runs")
    parser.option("names", Value(), "these only, e.g. DiT-XL/2 vDiT-B/244", nargs="*", metavar="MODEL")
    parser.option("--image_size", Value(int, **SIDE), "side of a picture; latents have an eighth of it", 256)
    parser.option("--num_frames", Value(int, **FRAMES), "latent frames of models of clips", 16)
    parser.option("--batch_size", Value(int, **BATCH), "samples per GPU", 32)
    parser.option("--world", whole(1, 2**20, "gpus"), "GPUs of the run", 1)
    parser.option("--mixed_precision", one_of(PRECISIONS), "precision of weights at work", "bf16")
    return parser


def main(argv: list[str]) -> None:
    prepare_console()
    parser = build_parser()
    options, given = parser.read(argv)
    names = options.pop("names") or [*NAMES, *VIDEO_NAMES]
    try:
        if not any(map(is_video, names)):
            reject_unused(given, {"num_frames": "does nothing without a model of clips"})
        rows = table(names, *options.values())
    except ValueError as error:
        parser.fail(error)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print(f"{first:<{widths[0]}}", *(f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
