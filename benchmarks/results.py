"""Append rows to benchmarks/results.csv."""

import argparse
import csv
import datetime
import subprocess
from pathlib import Path

import torch

COLUMNS = "date,commit,gpu,gpus,torch,bench,case,metric,value,baseline,baseline_value,ratio".split(",")
RESULTS = Path(__file__).with_name("results.csv")


def commit() -> str:
    """Return the short hash of the git checkout; "unknown" outside a checkout."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def append(rows: list[dict], path: Path | str = RESULTS, *, gpus: int = 1) -> None:
    """Append rows to the CSV file ``path``.

    A row has the keys bench, case, metric and value. If the same run also measured a baseline, the row has baseline and
    baseline_value, and the ratio is computed here. A row with a published baseline has an empty ratio. Date, commit,
    GPU and torch version are added."""
    path = Path(path)
    fresh = not path.exists()
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name().replace("NVIDIA ", "") if torch.cuda.is_available() else "CPU",
        "gpus": gpus if torch.cuda.is_available() else 0,
        "torch": torch.__version__,
    }
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if fresh:
            writer.writeheader()
        for row in rows:
            made = {**common, **row}
            if made.get("baseline_value") and "ratio" not in row:
                made["ratio"] = f"{float(made['value']) / float(made['baseline_value']):.3f}"
            writer.writerow(made)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags --results FILE and --record, which :func:`record` reads."""
    parser.add_argument("--results", default=None, help="append the rows to this CSV file")
    parser.add_argument("--record", action="store_true", help="append them to benchmarks/results.csv")


def record(rows: list[dict], args: argparse.Namespace) -> None:
    """Append rows to the files that the flags of :func:`add_flags` name. See :func:`append`."""
    if args.results:
        append(rows, args.results)
    if args.record:
        append(rows)
