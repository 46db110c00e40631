#!/usr/bin/env bash
# The tests' one command: sets up what is missing, lints, runs the suite. Arguments go to pytest. The tests of
# tests/thorough.txt, which repeat others over more layouts, are left to the weekly run: bash run_tests.sh -m "".
# Two tests at a time on CPUs, for most use one core; one at a time with GPUs, which they would have to share.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
SETUP=test
. scripts/env.sh
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # every process would compile every module, and rewrite the assertions of every test
ruff check .
ruff format --check .
python scripts/check_pages.py
exec python -m pytest -q --durations=10 -n "$((GPUS > 0 ? 0 : 2))" --dist worksteal -m "not thorough" "$@"
