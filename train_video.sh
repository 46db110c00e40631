#!/usr/bin/env bash
# Trains a clip model (vDiT).
#   bash train_video.sh                                  the embedded demo: moving digits (see docs/video.md)
#   bash train_video.sh --data_path CLIPS.csv --model ...   train.py --use_video with these flags, on all GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/env.sh
run=(torchrun --standalone --nproc_per_node="$NPROC" train.py --use_video)

if [ $# -gt 0 ]; then
  if [ "$GPUS" -gt 0 ]; then
    run+=(--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel
      --enable_cuda_graph)
  fi
  exec "${run[@]}" "$@"
fi

started=$SECONDS
outputs=${OUTPUTS:-./outputs} videos=${VIDEOS:-./videos}
python preprocess.py demo --output "$videos"
python preprocess.py check "$videos/demo.csv" --output "$videos/checked.csv" --num_frames 8 --frame_interval 6
"${run[@]}" --recipe digits_video --data_path "$videos/checked.csv" --outputs "$outputs"
newest=$(ls -d "$outputs"/[0-9]*-vDiT-Ti-822 | sort -V | tail -n 1)
alone python sample.py --ckpt "$newest" --use_video --output "$newest/clips" --mixed_precision fp32 \
  --num_sampling_steps 50 --cfg_scale 3 --prompt "a seven moving left" "a three moving up" "a zero moving right" \
  "a four moving down"
echo "The clips: $newest/clips  (demo took $((SECONDS - started)) s)"
# Its last line: do 100 clips show what their captions ask for, and are they no copies? (docs/evaluation.md)
alone python -m opendit evaluate --ckpt "$newest" --features digits --num_samples 100 --num_sampling_steps 50 \
  --cfg_scale 3 --mixed_precision fp32 --output "$newest/evaluation" | tail -n 1
