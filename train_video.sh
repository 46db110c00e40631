#!/usr/bin/env bash
# Train a model for clips (vDiT).
#   bash train_video.sh                                  the embedded demo: moving digits (see docs/video.md)
#   bash train_video.sh --load latest                    continue the demo if it was stopped
#   bash train_video.sh --data_path CLIPS.csv --model ...   run train.py --use_video with these flags on all GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/env.sh
run=(train.py --use_video)

if [ $# -gt 0 ] && [ "$*" != "--load latest" ]; then
  if [ "$GPUS" -gt 0 ]; then
    run+=(--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel
      --enable_cuda_graph)
  fi
  exec python scripts/launch.py "$NPROC" "${run[@]}" "$@"
fi

started=$SECONDS
outputs=${OUTPUTS:-./outputs} videos=${VIDEOS:-./videos}
python preprocess.py demo --output "$videos"
python preprocess.py check "$videos/demo.csv" --output "$videos/checked.csv" --num_frames 8 --frame_interval 6
folder=$(mktemp)
python scripts/launch.py "$NPROC" --run_folder_file "$folder" "${run[@]}" --recipe digits_video \
  --data_path "$videos/checked.csv" --outputs "$outputs" "$@"
run=$(cat "$folder"); rm "$folder"
alone python sample.py --ckpt "$run" --use_video --output "$run/clips" --mixed_precision fp32 \
  --num_sampling_steps 50 --cfg_scale 3 --prompt "a seven moving left" "a three moving up" "a zero moving right" \
  "a four moving down"
echo "The clips: $run/clips  (demo took $((SECONDS - started)) s)"
# The last line says whether 100 clips show what their captions request and are not copies (docs/evaluation.md).
alone python -m opendit evaluate --ckpt "$run" --features digits --num_samples 100 --num_sampling_steps 50 \
  --cfg_scale 3 --mixed_precision fp32 --output "$run/evaluation" | tail -n 1
