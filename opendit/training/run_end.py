"""Report how a run ended, to the script that started it.

The report consists of ``ended.json`` in the run's folder, and of exit code 75 if the run should be started again.
"""

import contextlib
import json
import os
from pathlib import Path

from opendit.checkpoint.run_folders import ENDED
from opendit.common.safe_files import remove, write_whole

AGAIN = 75  # EX_TEMPFAIL in sysexits.h; job queues can be configured to restart jobs with this exit code
# Environment variable that names a file. When training begins, a run writes the path of its folder into this file. So
# the script that started the run finds ended.json.
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
    """Return the exit code of a program whose run has ended without an error: 75 if steps are left, else 0.

    With torchrun the code is always 0, because torchrun treats any other code as a failure.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return 0
    try:
        return 0 if json.loads((folder / ENDED).read_bytes())["done"] else AGAIN
    except OSError:  # the file could not be written, which the run has already reported
        return 0
