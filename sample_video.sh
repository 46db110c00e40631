#!/usr/bin/env bash
# Draw clips.
#   bash sample_video.sh                            from the newest run under ./outputs
#   bash sample_video.sh --ckpt PATH --prompt ...   run sample.py --use_video with these flags on all GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/env.sh
run=(sample.py --use_video)
if [ "$GPUS" -gt 0 ]; then
  run+=(--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel)
fi
exec python scripts/launch.py "$NPROC" "${run[@]}" "$@"
