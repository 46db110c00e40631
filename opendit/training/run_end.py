"""Tell a run's starter how it ended: ``ended.json`` in the run's folder, and exit code 75 for "start me again"."""

import contextlib
import json
import os
from pathlib import Path

from opendit.checkpoint.run_folders import ENDED
from opendit.common.safe_files import remove, write_whole

AGAIN = 75  # EX_TEMPFAIL of sysexits.h: what queues can be told to start again
# Names a file into which a run that has begun to train writes its folder, for scripts that look at its ended.json.
RUN_FOLDER_FILE = "OPENDIT_RUN_FOLDER_FILE"


def begin_run(folder: Path) -> None:
    """Remove the ended.json of an earlier start, and tell a script that this run trains. Call on one rank. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):
        remove(folder / ENDED, root=folder)
    if path := os.environ.get(RUN_FOLDER_FILE):
        Path(path).write_text(f"{folder}\n", encoding="utf-8")


def write_end(folder: Path, step: int, **how: bool) -> None:
    """Write ended.json. Raises OSError.

    step: of the run when it ended. how: ``done`` (the last step is made), ``stopped`` (by a signal), ``hours_up``
    (by --max_hours), ``failed`` (an error ended it, or something could not be written).
    """
    write_whole(folder / ENDED, (json.dumps({"step": step, **how}) + "\n").encode(), root=folder)


def exit_code(folder: Path) -> int:
    """Return the exit code of a program of one process whose run has ended in good order: 75 if steps are left. Under
    torchrun it is 0, since torchrun takes anything else for a failure."""
    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return 0
    try:
        return 0 if json.loads((folder / ENDED).read_bytes())["done"] else AGAIN
    except OSError:  # it could not be written, which the run has reported
        return 0
