"""Appends rows to benchmarks/results.csv."""

import csv
import datetime
import subprocess
from pathlib import Path

import torch

COLUMNS = "date,commit,gpu,gpus,torch,bench,case,metric,value,baseline,baseline_value,ratio".split(",")
RESULTS = Path(__file__).with_name("results.csv")


def commit() -> str:
    """Short hash of the checkout, "unknown" outside one."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def append(rows: list[dict], path: Path | str = RESULTS, *, gpus: int = 1) -> None:
    """Appends rows with keys bench, case, metric, value and, where one run measured both, baseline and
    baseline_value (the ratio is made here); date, commit, card and torch are filled in. A baseline that somebody else
    published comes with an empty ratio."""
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
