#!/usr/bin/env bash
# Set up OpenDiT in the active venv or conda environment, or else in .venv in this folder. Safe to run again.
#   bash install.sh            only what running OpenDiT needs
#   bash install.sh test       also what the tests need
# An installed torch is kept. Other packages get the versions in constraints.txt. With OPENDIT_LATEST=1, and on Python
# 3.10, they get their newest versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
extra=${1:-}
case $extra in "" | test) ;; *) echo "error: bash install.sh [test], not '$*'" >&2; exit 2 ;; esac

if [ -n "${VIRTUAL_ENV:-}" ] || [ -n "${CONDA_PREFIX:-}" ]; then
  python=$(command -v python)
  where="the active environment ${VIRTUAL_ENV:-$CONDA_PREFIX}"
else
  if [ ! -x .venv/bin/python ]; then
    base=$(command -v python3 || command -v python) || { echo "error: no python3 found; install Python 3.10 or newer" >&2; exit 1; }
    # Keep a container's torch, which was built for its machine.
    share=$("$base" -c 'import importlib.util as u; print("--system-site-packages" if u.find_spec("torch") else "")')
    echo "making .venv ${share:+(sharing the torch of $base)}"
    "$base" -m venv $share .venv || { echo "error: python3 -m venv failed; install your system's python3-venv package, or activate an environment" >&2; exit 1; }
  fi
  python=$PWD/.venv/bin/python
  where=".venv"
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: OpenDiT needs Python 3.10 or newer, $where has $("$python" -V)" >&2; exit 1; }

ready() {
  "$python" - "$extra" <<'PY'
import importlib.util as u, pathlib, sys
needed = "torch torchvision timm diffusers transformers av einops safetensors tensorboard sklearn tqdm colossalai opendit"
if sys.argv[1] == "test":
    needed += " pytest pytest_timeout xdist hypothesis ruff peft gradio playwright webdataset shtab braceexpand s3fs moto flask flask_cors mkdocs material mkdocstrings basedpyright"
missing = [name for name in needed.split() if not u.find_spec(name)]
if not missing:  # otherwise the opendit of another checkout would be used silently
    sys.path = [p for p in sys.path if p not in ("", ".")]
    here = pathlib.Path("opendit").resolve()
    spec = u.find_spec("opendit")
    found = spec and pathlib.Path(spec.origin).resolve().parent
    missing = [] if found == here else ["opendit of this folder" + (f" ({found} is installed)" if found else "")]
print(*missing)
sys.exit(bool(missing))
PY
}

if missing=$(ready); then
  exit 0
fi
echo "setting up in $where; missing: $missing"
echo "(the first time this downloads torch with its GPU libraries, some 3 GB; a few minutes)"
echo "(pip may name conflicts with colossalai's pins, in red: training does not need those versions, see setup.py)"
constraints=$(mktemp); trap 'rm -f "$constraints"' EXIT
if [ "${OPENDIT_LATEST:-0}" != 1 ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  cp constraints.txt "$constraints"
  if "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
    grep -v '^torch' constraints.txt > "$constraints"
  fi
fi
"$python" -m pip install -q --disable-pip-version-check -c "$constraints" -e ".${extra:+[$extra]}"
# Training does not need Colossal-AI's pinned versions (torch<=2.5.1, transformers==4.51.3, ...); see setup.py.
"$python" -m pip install -q --disable-pip-version-check --no-deps colossalai==0.5.0
ready >/dev/null || { echo "error: still missing after the set-up: $(ready)" >&2; exit 1; }
echo "set-up complete: $("$python" -c 'import torch; print("torch", torch.__version__, "with", torch.cuda.device_count(), "GPU(s)")')"
