"""Test that every kernel compiles for a GPU, even on a machine without one (tests/kernels/compiled.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opendit.kernels.common import TRITON, interpreting

# Stack bytes per thread, for kernels that use more than a few addresses. The optimizer's kernel still reaches 96 % of
# the speed of a copy (docs/kernels.md).
MOST_STACK = {"_update_kernel": 256}
# Compute capability -> maximum bytes of shared memory per block of threads.
SHARED_MEMORY = {(8, 9): 99 * 1024, (9, 0): 227 * 1024}
KERNELS = Path(__file__).parents[2] / "opendit" / "kernels"


def compiled(*argv: str) -> list[dict]:
    command = [sys.executable, "-m", "tests.kernels.compiled", *argv]
    result = subprocess.run(command, cwd=KERNELS.parents[1], env=dict(os.environ), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing")
def test_what_cards_before_hopper_get_compiles_and_fits_their_shared_memory():
    """The limit is the shared memory of Ada, 99 KiB, because it has the least."""
    found = compiled("80")
    assert len({entry.get("kernel") for entry in found}) >= 20
    assert not [entry for entry in found if "error" in entry or entry["shared"] > SHARED_MEMORY[8, 9]]


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing")
def test_all_kernels_compile_and_stay_in_registers():
    found = compiled()
    assert not [entry for entry in found if "error" in entry or entry["shared"] > SHARED_MEMORY[9, 0]]
    assert not [entry for entry in found if entry["stack"] > MOST_STACK.get(entry["kernel"], 16)]
    written = {
        line.removeprefix("def ").partition("(")[0]
        for file in KERNELS.glob("*.py")
        for line in file.read_text().splitlines()
        if line.startswith("def ") and line.partition("(")[0].endswith("_kernel")
    }
    assert {entry["kernel"] for entry in found} == written
