#!/usr/bin/env bash
# Trains an image DiT.
#   bash train_img.sh                                    the embedded demo: learns handwritten digits, draws them
#   bash train_img.sh --data_path FOLDER --model ...     train.py with these flags, on all GPUs, speed-ups on
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/env.sh
run=(torchrun --standalone --nproc_per_node="$NPROC" train.py)

if [ $# -gt 0 ]; then
  if [ "$GPUS" -gt 0 ]; then
    run+=(--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel)
  fi
  exec "${run[@]}" "$@"
fi

started=$SECONDS
outputs=${OUTPUTS:-./outputs}
# Small pictures in pixels, 16 tokens each; the recipe is measured in docs/images.md.
"${run[@]}" --recipe digits --outputs "$outputs"
newest=$(ls -d "$outputs"/[0-9]*-DiT-Ti-2 | sort -V | tail -n 1)
alone python sample.py --ckpt "$newest" --output "$newest/digits" --mixed_precision fp32 \
  --num_sampling_steps 100 --cfg_scale 1.3 --class_labels 0 1 2 3 4 5 6 7 8 9 --num_samples 500 --batch_size 100 \
  --npz "$newest/digits.npz"
echo "The digits: $newest/digits/grid.png  (demo took $((SECONDS - started)) s)"
# Its last line: are they digits, as varied as real ones, and no copies? (docs/evaluation.md)
alone python -m opendit evaluate --samples "$newest/digits.npz" --features digits --output "$newest/evaluation" | tail -n 1
