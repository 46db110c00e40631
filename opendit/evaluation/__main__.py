"""Command line of ``opendit evaluate`` (``python -m opendit.evaluation``): measure how good pictures or clips are.

opendit evaluate --ckpt outputs/000-DiT-XL-2 --reference VIRTUAL_imagenet256_labeled.npz --cfg_scale 1.5
opendit evaluate --samples samples.npz --reference pictures --metrics fid kid
opendit evaluate --ckpt RUN --reference REFERENCE --cfg_scale 1 1.25 1.5 2 --num_sampling_steps 20 50 250
opendit evaluate plot evaluation outputs/000-DiT-XL-2 outputs/001-DiT-XL-2 --output runs.png
torchrun --standalone --nproc_per_node=8 -m opendit evaluate --ckpt RUN --reference REFERENCE
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from opendit.config.checks import check_exists, check_no_folder, check_output_file
from opendit.config.command_line import CommandLine, read_flags
from opendit.config.console import name_of, prepare_console, run_program
from opendit.config.evaluate import EvaluateConfig
from opendit.config.flags import Value

PLOT = """Draws runs over each other: figures over training, steps and guidance, precision against recall, the losses of
their logs; and writes a PNG.

opendit evaluate plot evaluation outputs/000-DiT-XL-2 outputs/001-DiT-XL-2 --output runs.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    prepare_console()
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["plot"]:
        return _plot(words[1:])
    flags = read_flags(EvaluateConfig, words)
    from opendit.evaluation.program import run  # torch takes seconds to import, so wrong flags are reported first

    run(flags)
    return 0


def build_plot_parser() -> CommandLine:
    """Build the parser of ``opendit evaluate plot``."""
    parser = CommandLine(name_of("python -m opendit.evaluation") + " plot", PLOT)
    about = "runs, folders of evaluations (--output of opendit evaluate), or results.jsonl files"
    parser.heading("Plot: what is drawn")
    parser.option("runs", Value(), about, metavar="RUN", nargs="+")
    parser.option("--output", Value(unit="file"), "the PNG to write", "evaluation.png")
    parser.option("--metrics", Value(unit="name"), "of results.jsonl; all of them when left out", nargs="+")
    return parser


def _plot(words: Sequence[str]) -> int:
    parser = build_plot_parser()
    options, _ = parser.read(words)
    output = Path(options["output"])
    output = output if output.suffix == ".png" else output.with_name(output.name + ".png")
    try:
        for path in options["runs"]:
            check_exists(path, "RUN", "a run, the folder of an evaluation, or a results.jsonl")
        check_no_folder(str(output), "--output")
        check_output_file(str(output), "--output")
        from opendit.evaluation.results import plot

        for note in plot(options["runs"], output, options["metrics"] or ()):
            print(f"note: {note}")
        print(f"{output}: {len(options['runs'])} runs")
    except (ValueError, OSError) as error:
        parser.fail(error)
    return 0


if __name__ == "__main__":
    run_program(main)
