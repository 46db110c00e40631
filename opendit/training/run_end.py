"""Report how a run ended, to the script that started it.

The report is ``ended.json`` in the run's folder, and exit code 75 if the run should be started again.
"""

import contextlib
import json
import os
from pathlib import Path

from opendit.checkpoint.run_folders import ENDED
from opendit.common.safe_files import remove, write_whole

AGAIN = 75  # EX_TEMPFAIL of sysexits.h; job queues can be told to restart such jobs
# Environment variable that names a file. A run that begins to train writes the path of its folder into this file, so
# that the script that started it finds ended.json.
RUN_FOLDER_FILE = "OPENDIT_RUN_FOLDER_FILE"


def begin_run(folder: Path) -> None:
    """Remove the ended.json of an earlier start, and write the run's folder to the file of ``RUN_FOLDER_FILE``.

    Call on one rank. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        remove(folder / ENDED, root=folder)
    if path := os.environ.get(RUN_FOLDER_FILE):
        Path(path).write_text(f"{folder}\n", encoding="utf-8")


def write_end(folder: Path, step: int, **how: bool) -> None:
    """Write ended.json. Raises OSError.

    Args:
        step: last step done.
        how: ``done`` (the last step is done), ``stopped`` (by a signal), ``hours_up`` (by --max_hours), ``failed`` (an
            error ended the run, or a file could not be written).
    """
    write_whole(folder / ENDED, (json.dumps({"step": step, **how}) + "\n").encode(), root=folder)


def exit_code(folder: Path) -> int:
    """Return the exit code of a program whose run has ended in good order: 75 if steps are left, else 0.

    With torchrun the code is always 0, because torchrun treats any other code as a failure.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return 0
    try:
        return 0 if json.loads((folder / ENDED).read_bytes())["done"] else AGAIN
    except OSError:  # the file could not be written, and the run has reported that
        return 0
