"""Run the files listed in interpreted.py with Triton's interpreter on the CPU. To see single tests:
``TRITON_INTERPRET=1 python -m pytest tests/kernels``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opendit.kernels.common import TRITON, interpreting
from tests.kernels.interpreted import INTERPRETED


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.skipif(interpreting(), reason="already in the interpreter")
@pytest.mark.parametrize("names", INTERPRETED, ids=" ".join)
def test_in_the_interpreter(names, pytestconfig):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    files = [f"tests/kernels/{name}" for name in names]
    chosen = pytestconfig.getoption("markexpr")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, *files]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout[-2000:]
