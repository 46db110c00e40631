"""``python -m opendit.evaluation``, and ``opendit evaluate``: how good pictures or clips are.

opendit evaluate --ckpt outputs/000-DiT-XL-2 --reference VIRTUAL_imagenet256_labeled.npz --cfg_scale 1.5
opendit evaluate --samples samples.npz --reference pictures --metrics fid kid
torchrun --standalone --nproc_per_node=8 -m opendit evaluate --ckpt RUN --reference REFERENCE
"""

import sys
from collections.abc import Sequence

from opendit.cli.command_line import read_flags
from opendit.cli.console import prepare_console
from opendit.cli.evaluate_flags import EvaluateConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    prepare_console()
    flags = read_flags(EvaluateConfig, sys.argv[1:] if argv is None else argv)
    from opendit.evaluation.program import run  # torch and the rest, which a wrong flag need not wait for

    run(flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
