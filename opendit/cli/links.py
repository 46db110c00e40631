"""Measures the speed of matrix products, attention and copies on this card, and of communication between ranks on one
machine and across machines. ``--parallel auto`` and ``--dry_run`` then use these measurements: automatically on the
same cards, and with ``--hardware FILE`` on any machine. Measure once, and start the program with torchrun, like a
training run.

torchrun --standalone --nproc_per_node=8 -m opendit.cli.links
"""

import sys
from pathlib import Path

from opendit.config.command_line import CommandLine
from opendit.config.console import name_of, prepare_console, run_program
from opendit.config.flags import Value, whole
from opendit.config.parallel_sizes import environment_node_size
from opendit.parallel.hardware import HardwareModel, default_path, save


def build_parser() -> CommandLine:
    parser = CommandLine(name_of("python -m opendit.cli.links"), __doc__ or "")
    parser.heading("Measurement: what is measured, and where it is kept")
    parser.option("--out", Value(unit="file"), "where figures are kept (default: in the user's cache)")
    parser.option(
        "--gpus_per_node", whole(1, 4096, "processes"), "processes of a machine (default: those that torchrun started)"
    )
    return parser


def main(argv: list[str]) -> None:
    prepare_console()
    parser = build_parser()
    options, _ = parser.read(argv)
    path = Path(options["out"]) if options["out"] else default_path()
    from opendit.parallel.hardware_measurement import (
        measure_hardware,  # imported here, so that flags are checked before torch is imported
    )
    from opendit.parallel.mesh import close_mesh, init_mesh

    try:
        mesh = init_mesh()
        node = options["gpus_per_node"] or environment_node_size() or mesh.world_size
        found = measure_hardware(mesh, min(node, mesh.world_size))
        if mesh.is_main:
            save(found, path)
            print("\n".join([*table(found), f"kept in {path}"]))
    except (ValueError, OSError) as error:
        parser.fail(error)
    finally:
        close_mesh()


def table(found: HardwareModel) -> list[str]:
    forward, backward = found.attention_rates(128, 8192)
    gathers = ", ".join(f"{rate / 2**30:,.1f} among {ranks}" for ranks, rate in found.gather)
    return [
        f"{found.name}: {found.origin}",
        f"TFLOP/s: products {found.matmul / 1e12:,.2f}, attention {forward / 1e12:,.2f}, backward "
        f"{backward / 1e12:,.2f} (heads of 128, 8,192 tokens)",
        f"memory: {found.memory / 1e12:,.3f} TB/s",
        f"GiB/s that a rank receives on a machine: all-gather {gathers}; all-to-all {found.link / 2**30:,.1f}; from "
        f"one other rank {found.copies / 2**30:,.1f}",
        f"GiB/s from other machines: {found.node_link / 2**30:,.2f}",
        f"us of a collective: {1e6 * found.latency:,.0f}, of a hop between machines {1e6 * found.node_latency:,.0f}",
    ]


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
