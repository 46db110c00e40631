#!/usr/bin/env bash
# Install what is missing, lint, and run the tests. Arguments go to pytest. Tests in tests/thorough.txt, which repeat
# others over more layouts, run only weekly and with: bash run_tests.sh -m ""
# On CPUs two tests run at a time, because most use one core. With GPUs, which tests would have to share, one runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
SETUP=test
. scripts/env.sh
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # otherwise every process compiles all modules again
ruff check .
ruff format --check .
python scripts/check_pages.py
exec python -m pytest -q --durations=10 -n "$((GPUS > 0 ? 0 : 2))" --dist worksteal -m "not thorough" "$@"
