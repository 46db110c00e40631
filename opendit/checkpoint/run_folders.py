"""The numbered folders of runs, OUTPUTS/NNN-MODEL: 000 to 999, then 1000 and on."""

import contextlib
import fnmatch
import re
from pathlib import Path

# What a run, and what it is logged to, write in its folder beside the lock.
WRITTEN = (
    "config.json",
    "config_damaged.json",
    "config.yaml",
    "log.jsonl",
    "tensorboard",
    "samples",
    "checkpoints",
    "validation.png",
)
WRITTEN += ("evaluation", "profile", "wandb", "mlflow_run_id")
_NAME = re.compile(r"([0-9]{3,})-(.+)", re.DOTALL | re.ASCII)


def run_folders(outputs: str | Path, model: str = "*") -> list[Path]:
    """The runs under a folder whose model's part of the name matches a pattern, by number, the newest last."""
    with contextlib.suppress(OSError):
        found = [(path, _NAME.fullmatch(path.name)) for path in Path(outputs).iterdir()]
        runs = [(int(name[1]), path) for path, name in found if name and fnmatch.fnmatchcase(name[2], model)]
        return [path for _, path in sorted(runs)]
    return []


def new_run_folder(outputs: str | Path, model: str) -> Path:
    """Makes OUTPUTS/NNN-MODEL with the number after the highest there is; one that starts at the same moment, of any
    model, gets another number. Call on one rank. Raises OSError if it can't be made."""
    outputs = Path(outputs)
    outputs.mkdir(parents=True, exist_ok=True)
    number = _next_number(outputs)
    while True:
        # One process alone makes the folder of this name, and so has the number, whatever its model is called.
        claim = outputs / f".{number:03d}"
        try:
            claim.mkdir()
        except FileExistsError:
            number += 1
            continue
        free = _next_number(outputs)
        if free <= number:
            break
        claim.rmdir()  # its number was taken between the look and the claim
        number = free
    folder = outputs / f"{number:03d}-{model.replace('/', '-')}"
    try:
        claim.rename(folder)
    except OSError:
        with contextlib.suppress(OSError):
            claim.rmdir()
        raise
    return folder


def _next_number(outputs: Path) -> int:
    runs = run_folders(outputs)
    newest = _NAME.fullmatch(runs[-1].name) if runs else None
    return int(newest[1]) + 1 if newest else 0
