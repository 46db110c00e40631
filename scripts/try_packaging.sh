#!/usr/bin/env bash
# Build OpenDiT's sdist, and a wheel from it, and test the wheel like a user without a clone: for each Python in a fresh
# environment outside the repository, without Colossal-AI.
#   bash scripts/try_packaging.sh                       every installed Python from python3.10 to python3.14
#   bash scripts/try_packaging.sh python3.12 /opt/py/bin/python
# Every environment downloads torch. KEEP=FOLDER keeps the packages and environments in FOLDER.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pythons=("$@")
if [ ${#pythons[@]} -eq 0 ]; then
  for minor in 10 11 12 13 14; do
    if "python3.$minor" -c '' 2>/dev/null; then pythons+=("python3.$minor"); fi
  done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "error: no python3.10 to python3.14 runs here; name one" >&2; exit 2; }
if [ -n "${KEEP:-}" ]; then
  mkdir -p "$KEEP"
  place=$(cd "$KEEP" && pwd)
else
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
fi
unset PYTHONPATH VIRTUAL_ENV
pip=(-m pip --disable-pip-version-check)

echo "== sdist and wheel, by ${pythons[0]}"
"${pythons[0]}" -m venv --clear "$place/build"
"$place/build/bin/python" "${pip[@]}" install -q build
rm -rf "$place/dist" "$place/source"
mkdir "$place/source"
git ls-files -z | xargs -0 cp --parents -t "$place/source"  # tracked files only, without leftovers from builds
"$place/build/bin/python" -m build --outdir "$place/dist" "$place/source" > "$place/build.log" 2>&1 ||
  { tail -20 "$place/build.log" >&2; exit 1; }
ls "$place/dist"

failed=()
for python in "${pythons[@]}"; do
  echo "== $python ($("$python" -V))"
  environment=$place/$(basename "$python")-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  rm -rf "$environment.work" && mkdir "$environment.work"
  if "$python" -m venv --clear "$environment" &&
    "$environment/bin/python" "${pip[@]}" install -q "$place"/dist/*.whl &&
    cp scripts/use_package.py "$environment.work" &&
    (cd "$environment.work" && PATH="$environment/bin:$PATH" "$environment/bin/python" use_package.py "$PWD/..")
  then echo "$python: all works"; else echo "$python: FAILED"; failed+=("$python"); fi
done
[ ${#failed[@]} -eq 0 ] || { echo "error: failed under ${failed[*]}" >&2; exit 1; }
