"""Runs hub_cases.py in a separate process: in a run of the full suite its fake downloads once failed after other
tests, for an unknown reason."""

import subprocess
import sys
from pathlib import Path


def test_models_by_their_names_on_the_hub():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests/common/hub_cases.py",
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
