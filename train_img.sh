#!/usr/bin/env bash
# Train an image DiT.
#   bash train_img.sh                                    the embedded demo: learn handwritten digits and draw them
#   bash train_img.sh --load latest                      continue the demo if it was stopped
#   bash train_img.sh --data_path FOLDER --model ...     run train.py with these flags on all GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/env.sh
run=(train.py)

if [ $# -gt 0 ] && [ "$*" != "--load latest" ]; then
  if [ "$GPUS" -gt 0 ]; then
    run+=(--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel
      --enable_cuda_graph)
  fi
  exec python scripts/launch.py "$NPROC" "${run[@]}" "$@"
fi

started=$SECONDS
outputs=${OUTPUTS:-./outputs}
# The pictures are small, 16 tokens each, and are drawn in pixel space. docs/images.md has the recipe's results.
folder=$(mktemp)
python scripts/launch.py "$NPROC" --run_folder_file "$folder" "${run[@]}" --recipe digits --outputs "$outputs" "$@"
run=$(cat "$folder"); rm "$folder"
alone python sample.py --ckpt "$run" --output "$run/digits" --mixed_precision fp32 \
  --num_sampling_steps 100 --cfg_scale 1.3 --class_labels 0 1 2 3 4 5 6 7 8 9 --num_samples 500 --batch_size 100 \
  --npz "$run/digits.npz"
echo "The digits: $run/digits/grid.png  (demo took $((SECONDS - started)) s)"
# The last line says whether the pictures show digits, vary like real ones, and are not copies (docs/evaluation.md).
alone python -m opendit evaluate --samples "$run/digits.npz" --features digits --output "$run/evaluation" | tail -n 1
