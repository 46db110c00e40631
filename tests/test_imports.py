"""No package needs another one to have been imported before it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["data", "encoders", "export", "fused", "models", "plan"])
def test_imported_first(module):
    subprocess.run([sys.executable, "-c", f"import opendit.{module}"], check=True)
