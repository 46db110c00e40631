#!/usr/bin/env bash
# Draw pictures.
#   bash sample_img.sh                         from the newest run under ./outputs
#   bash sample_img.sh --ckpt PATH ...         run sample.py with these flags on all GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/env.sh
run=(sample.py)
if [ "$GPUS" -gt 0 ]; then
  run+=(--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel)
fi
exec python scripts/launch.py "$NPROC" "${run[@]}" "$@"
