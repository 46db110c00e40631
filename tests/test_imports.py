"""No package needs another one to have been imported before it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["data", "diffusion", "encoders", "fused", "kernels.attention", "models", "training.from_flags", "state.export"],
)
def test_imported_first(module):
    subprocess.run([sys.executable, "-c", f"import opendit.{module}"], check=True)
