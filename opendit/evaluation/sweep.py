"""Figures over guidance and sampling steps: an evaluation for each pair, and a table of all."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from opendit.common.safe_files import write_whole
from opendit.evaluation.results import Measurement, figure_text

FILE = "sweep.csv"
COLUMNS = ("metric", "steps", "guidance", "value", "low", "high", "count", "sampler", "seed", "samples")


def sweep_table(rows: Sequence[Measurement]) -> str:
    """Format a table for each metric, with a line for each guidance scale and a column for each number of steps, in the
    order of the rows. Of two figures for one pair it shows the last."""
    parts = []
    for metric in dict.fromkeys(row.metric for row in rows):
        of_metric = [row for row in rows if row.metric == metric]
        values = {(row.guidance, row.steps): figure_text(row.value) for row in of_metric}
        steps = list(dict.fromkeys(row.steps for row in of_metric))
        lines = [[metric, *(f"{count} steps" for count in steps)]]
        for scale in dict.fromkeys(row.guidance for row in of_metric):
            lines.append([f"guidance {scale:g}", *(values.get((scale, count), "-") for count in steps)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        parts += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        parts.append("")
    return "\n".join(parts)


def write_sweep(folder: Path, rows: Sequence[Measurement]) -> Path:
    """The same as ``sweep.csv`` in a folder: a line a figure. Raises OSError."""
    path = folder / FILE
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for row in rows:
        low, high = row.interval or (None, None)
        told = (row.metric, row.steps, row.guidance, row.value, low, high)
        writer.writerow([*told, row.count, row.sampler, row.seed, row.samples])
    write_whole(path, text.getvalue().encode())
    return path
