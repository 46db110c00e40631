#!/usr/bin/env bash
# Trains an image DiT.
#   bash train_img.sh                                    the embedded demo: learns handwritten digits, draws them
#   bash train_img.sh --load latest                      goes on with that demo, if it was stopped
#   bash train_img.sh --data_path FOLDER --model ...     train.py with these flags, on all GPUs, speed-ups on
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
# Small pictures in pixels, 16 tokens each; the recipe is measured in docs/images.md.
folder=$(mktemp)
python scripts/launch.py "$NPROC" --run_folder_file "$folder" "${run[@]}" --recipe digits --outputs "$outputs" "$@"
run=$(cat "$folder"); rm "$folder"
alone python sample.py --ckpt "$run" --output "$run/digits" --mixed_precision fp32 \
  --num_sampling_steps 100 --cfg_scale 1.3 --class_labels 0 1 2 3 4 5 6 7 8 9 --num_samples 500 --batch_size 100 \
  --npz "$run/digits.npz"
echo "The digits: $run/digits/grid.png  (demo took $((SECONDS - started)) s)"
# Its last line: are they digits, as varied as real ones, and no copies? (docs/evaluation.md)
alone python -m opendit evaluate --samples "$run/digits.npz" --features digits --output "$run/evaluation" | tail -n 1
