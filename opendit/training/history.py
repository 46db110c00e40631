"""config.json: what the newest start of a run used, and under "starts" what every one of them did."""

import json
import os
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from opendit.checkpoint.schema import RUN_CONFIG
from opendit.common.json_file import read_file
from opendit.common.safe_files import rename, replacing, sync_folder, write_whole
from opendit.config.command_line import overridden, to_yaml
from opendit.config.flags import to_dict
from opendit.training.specification import RunSpecification

CONFIG, DAMAGED, YAML = "config.json", "config_damaged.json", "config.yaml"


def write_config(spec: RunSpecification) -> None:
    """Add this start to the run's config.json, and write config.yaml, which repeats it (--config). Both are whole at
    every moment. Call it on one rank. Raises OSError."""
    path, start = spec.folder / CONFIG, describe_start(spec)
    starts = _earlier_starts(path, spec.notes)
    content = {key: start[key] for key in ("opendit", "torch", "world_size", "flags", "recipe")}
    content |= {"clip_fps": spec.clip_fps} if spec.clip_fps is not None else {}
    content |= {"model_config": spec.model_config.to_dict()}
    content |= {key: start[key] for key in ("steps_per_epoch", "last_step")}
    with replacing(path) as file:
        file.write(json.dumps({**content, "starts": [*starts, start]}, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    write_whole(spec.folder / YAML, to_yaml(spec.flags).encode())
    sync_folder(spec.folder)


def describe_start(spec: RunSpecification) -> dict[str, Any]:
    """Describe a start of a run: time, machine, versions, flags, first step, and changes since the last start."""
    flags, found = spec.flags, spec.fingerprint
    return {
        "time": _iso(datetime.now(timezone.utc).timestamp()),
        "host": socket.gethostname(),
        **{key: found[key] for key in ("opendit", "commit", "torch", "colossalai", "triton", "processor")},
        "world_size": spec.mesh.world_size,
        "first_step": spec.first_step,
        "last_step": spec.last_step,
        "steps_per_epoch": spec.schedule.steps_per_epoch,
        "resumed_from": spec.resume and str(spec.resume.folder),
        "changes": [note for note in spec.notes if note.startswith("resume: ")],
        "recipe": flags.recipe and {"name": flags.recipe, "changed": list(overridden(flags))},
        "flags": to_dict(flags),
    }


def _earlier_starts(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The starts in a config.json; one that has no list of them, from before there was one, is a start itself."""
    if not os.path.lexists(path):
        return []
    try:
        content = read_file(path, RUN_CONFIG)
    except (OSError, ValueError) as error:
        rename(path, path.with_name(DAMAGED))
        notes.append(f"{error}: it is kept as {DAMAGED}, and {CONFIG} begins anew")
        return []
    if "starts" in content:
        return content["starts"]
    return [{"time": _iso(path.stat().st_mtime), **content}]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
