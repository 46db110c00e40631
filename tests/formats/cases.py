"""The fixtures of file formats: the flags that write them, the flags that read them, and the values in them.

``make.py`` writes the fixtures with the programs of an earlier commit; ``tests/test_formats.py`` reads them with the
current programs. This module imports nothing from the project, because both use it.

Weights and moments in the fixtures are a pattern instead of trained values. The pattern is a function of the tensor's
name and the index of an element, so it compresses well, and a test knows every value without a second copy of it. Fixed
position tables keep their true values, because every version computes them from the configuration.
"""

import hashlib
import math
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded.json"
PERIOD = 1021  # a prime above every dimension of these models, so that all rows of a matrix differ
# Buffers that are computed from the configuration -> number of axes of their grid. Learned positions are not buffers.
FIXED_TABLES = {"pos_embed": 2, "temporal_embed": 1, "text_encoder.positions": 1}
STEPS = 2  # number of recorded training steps after loading a fixture

# ------------------------------------------------------------------------------------------ the pattern


def _levels() -> np.ndarray:
    digests = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(PERIOD // 32 + 1))
    return np.frombuffer(digests, np.uint8)[:PERIOD].astype(np.int64) % 49 - 24


LEVELS = _levels()  # integers from -24 to 24


def pattern(kind: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the float32 values of the tensor ``name`` of the set ``kind`` (model, ema, exp_avg, ...).

    They are between -0.1 and 0.1, and positive for exp_avg_sq.
    """
    count = math.prod(shape)
    first = int.from_bytes(hashlib.sha256(f"{kind}/{name}".encode()).digest()[:4], "big") % PERIOD
    levels = np.resize(np.roll(LEVELS, -first), count)
    values = (np.abs(levels) + 1) / 1024 if kind.startswith("exp_avg_sq") else levels / 256
    return values.astype(np.float32).reshape(shape)


def fixed_table(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the float64 sine-cosine table ``name`` (1, length or side * side, width) by its formula.

    The last axis of the grid comes first in the channels, and each axis has sines, then cosines, of wavelengths that
    grow geometrically from 2 pi to 20,000 pi.
    """
    axes, (_, count, width) = FIXED_TABLES[name], shape
    side = round(count ** (1 / axes))
    assert side**axes == count, (name, shape)
    waves = width // (2 * axes)
    parts = []
    for position in reversed(np.indices((side,) * axes).reshape(axes, -1)):
        angles = position[:, None] / 10000.0 ** (np.arange(waves) / waves)
        parts += [np.sin(angles), np.cos(angles)]
    return np.concatenate(parts, axis=1)[None]


def of_step(kind: str, step: int) -> str:
    """Return the ``kind`` of :func:`pattern` for a set of the checkpoint of ``step``; 0 means no checkpoint."""
    return f"{kind} of step {step}" if step else kind


# ------------------------------------------------------------------------------------------ runs


COMMON = (
    "--num_workers 0 --log_every 1 --sample_every 0 --mixed_precision fp32 --global_seed 7 --lr 1e-2 "
    "--vae none --outputs runs"
)
CLASSES = "--data_path mock --image_size 8 --num_classes 10 --batch_size 4"
CLIPS = "--data_path mock --image_size 8 --use_video --num_frames 4 --text_encoder bytes --batch_size 2"
TWO_EMAS = "--ema_decay 0.9 0.5 --ema_warmup"
SHARDED = "--checkpoint_format sharded"

# name: flags of train.py. All of them train two steps.
RUNS = {
    "dit": f"--model DiT-Ti/2 --data_path digits --image_size 8 --batch_size 4 {TWO_EMAS}"
    " --validate_path digits --validate_every 1 --validate_samples 10 --ckpt_best val_loss",
    "captions": "--model DiT-Ti/4 --data_path mock --image_size 8 --text_encoder bytes --cross_attention"
    " --batch_size 2 --prediction v --min_snr 5 --ddpm_shift 2 --max_text_tokens 64",
    "vdit": f"--model vDiT-Ti/122 {CLIPS} --objective flow --flow_shift 3 --given_frames first --qk_norm"
    " --adaln_lora 4 --positions rope --max_text_tokens 64",
    "stdit": f"--model ST-DiT-Ti/122 {CLIPS} --full_attention --objective edm --max_text_tokens 64",
    "moviegen": f"--model MovieGen-Ti/122 {CLIPS} --objective flow --max_text_tokens 64",
    "ecdit": f"--model EC-DiT-Ti/2 {CLASSES} --objective edm --expert_capacity 2",
    "evaluated": "--model DiT-Ti/2 --data_path digits --image_size 8 --batch_size 4 --objective flow"
    " --ckpt_best accuracy --evaluate_every 1 --evaluate_samples 20 --evaluate_features digits"
    " --evaluate_metrics accuracy --evaluate_steps 1",
    "packs": "--model DiT-Ti/2 --data_path pictures --image_size 16 --pack_tokens 64 --batch_size 96 --num_classes 2",
    "lora": f"--model DiT-Ti/2 {CLASSES} --lora 4 --lora_alpha 8 --pretrained base.safetensors",
    # Sharded checkpoints with tensors cut flat, by rows, by rows and heads, by experts and by stages.
    "zero2": f"--model DiT-Ti/2 {CLASSES} {SHARDED} {TWO_EMAS}",
    "fsdp": f"--model vDiT-Ti/122 {CLIPS} --plugin fsdp --objective flow --max_text_tokens 64",
    "tensor": f"--model DiT-Ti/2 {CLASSES} --plugin fsdp --tensor_parallel_size 2",
    "experts": f"--model EC-DiT-Ti/2 {CLASSES} --plugin fsdp --expert_parallel_size 2",
    "stages": f"--model DiT-Ti/2 {CLASSES} {SHARDED} --pipeline_parallel_size 2",
    # Checkpoints of earlier versions. The docstring of ``make.py`` describes how they are made.
    "fp16": f"--model DiT-Ti/2 {CLASSES}",
    "sorted": "--model DiT-Ti/2 --data_path digits --image_size 8 --batch_size 4",
    "moviegen_1": f"--model MovieGen-Ti/122 {CLIPS} --max_text_tokens 64",
    "adaln_lora_1": f"--model DiT-Ti/4 {CLASSES} --adaln_lora 4",
}
TWO_CHECKPOINTS = ("dit", "evaluated")  # all other runs save only the second step
RANKS = {"zero2": 2, "fsdp": 2, "tensor": 4, "experts": 2, "stages": 2}
# Flag changes to resume a run in one process, with the same global batch and without flags that divide the model.
ALONE = {
    "zero2": {"--batch_size 4": "--batch_size 8"},
    "fsdp": {"--batch_size 2": "--batch_size 4"},
    "tensor": {"--batch_size 4": "--batch_size 8", " --tensor_parallel_size 2": ""},
    "experts": {"--batch_size 4": "--batch_size 8", " --expert_parallel_size 2": ""},
    "stages": {" --pipeline_parallel_size 2": ""},
}


# --ema_warmup and --max_text_tokens are always set, so that the fixtures do not depend on their defaults.


def _flags(text: str) -> list[str]:
    return [*text.split(), *COMMON.split(), *([] if "--ema_warmup" in text else ["--no_ema_warmup"])]


def training_flags(name: str) -> list[str]:
    """Return the flags of train.py that made the run ``name``."""
    return [*_flags(RUNS[name]), "--max_steps", "2", *(["--ckpt_every", "1"] if name in TWO_CHECKPOINTS else [])]


def resuming_flags(name: str) -> list[str]:
    """Return the flags of train.py that resume the run ``name`` on one process."""
    text = RUNS[name]
    for old, new in ALONE.get(name, {}).items():
        assert old in text
        text = text.replace(old, new)
    return [*_flags(text), "--load", "latest", "--max_steps", str(2 + STEPS)]


# ------------------------------------------------------------------------------------------ data


PIXELS = "--vae none --image_size 8"
CLIP_PIXELS = f"{PIXELS} --use_video --num_frames 4 --text_encoder bytes --max_text_tokens 64"
# name: flags of train.py that train on the data in the fixture of the same name.
DATA = {
    "latents_files": "--data_path latents --image_size 16 --model DiT-Ti/4",
    "latents_files_clips": "--data_path latents --image_size 16 --use_video --num_frames 4 --model vDiT-Ti/122",
    "latents_tars": "--data_path latents --image_size 16 --model DiT-Ti/4",
    "latents_tars_small": "--data_path latents --image_size 8 --model DiT-Ti/4",
    "latents_tars_classes": "--data_path latents --image_size 16 --model DiT-Ti/4",
    "latents_tars_clips": "--data_path latents --image_size 16 --use_video --num_frames 4 --model vDiT-Ti/122",
    "foreign_latents": "--data_path latents --image_size 16 --model DiT-Ti/4",
    "tars": f"--data_path tars {PIXELS} --model DiT-Ti/4",
    "tars_clips": f"--data_path tars {CLIP_PIXELS} --model vDiT-Ti/144",
    "tars_indexed": f"--data_path tars {PIXELS} --text_encoder bytes --max_text_tokens 64 --model DiT-Ti/4",
    "energon": f"--data_path prepared {PIXELS} --model DiT-Ti/4",
    "table": f"--data_path checked.csv {CLIP_PIXELS} --model vDiT-Ti/144",
    "blend": f"--data_path blend.yaml {PIXELS} --text_encoder bytes --max_text_tokens 64 --model DiT-Ti/4",
}
IN = {"latents_tars_small": "latents_tars"}  # case -> fixture, if the names differ


def data_flags(name: str) -> list[str]:
    """Return the flags of train.py for two steps on the data of the fixture ``name``."""
    common = COMMON.replace("--vae none ", "") if "--vae none" in DATA[name] or "latents" in name else COMMON
    flags = f"{DATA[name]} {common} --no_ema_warmup --batch_size 4 --pretrained {name}.safetensors"
    return [*flags.split(), "--max_steps", str(STEPS)]


# ------------------------------------------------------------------------------------------ sampling


LABELS, PROMPTS = [1, 7], ["a seven", "moving left"]
# run: (classes or captions, arguments of opendit.load, arguments of the pipeline's call)
SAMPLES: dict[str, tuple[list, dict, dict]] = {
    "dit": (LABELS, {}, {"sampler": "ddim"}),
    "captions": (PROMPTS, {}, {"sampler": "dpmpp"}),
    "vdit": (PROMPTS, {}, {"image": "given.png"}),
    "stdit": (PROMPTS, {}, {"sampler": "heun"}),
    "moviegen": (PROMPTS, {}, {}),
    "ecdit": (LABELS, {}, {"sampler": "dpmpp"}),
    "lora": (LABELS, {"lora": "RUN"}, {}),
    "zero2": (LABELS, {"weights": "model"}, {}),
    "fsdp": (PROMPTS, {}, {"guidance": 1.0}),
    "moviegen_1": (PROMPTS, {"weights": "model"}, {}),
    "adaln_lora_1": (LABELS, {}, {}),
}
DRAWN_STEPS = 3
JOB = "--ckpt dit.safetensors --num_samples 6 --batch_size 1 --num_sampling_steps 100 --mixed_precision fp32 --seed 5"
JOB += " --cfg_scale 2 --output samples --npz samples.npz"

DRAW = "--class_labels 1 7 --num_samples 2 --num_sampling_steps 4 --mixed_precision fp32 --seed 3 --cfg_scale 1.5"
DRAW += " --sampler ddim --npz drawn.npz --no_save_png --output drawn"
# name: (--ckpt of sample.py, more flags), for files in the fixture "exported".
EXPORTED = {
    "pipeline": ("exported/pipeline",),
    "meta": ("exported/meta.pt", "--model", "DiT-Ti/2", "--image_size", "64", "--vae", "exported/pipeline/vae"),
    "one": ("exported/one.safetensors", "--vae", "exported/pipeline/vae"),
    "several": ("exported/several/model.safetensors.index.json", "--vae", "exported/pipeline/vae"),
}
DRY_RUN = (
    "--dry_run 1 --hardware hardware.json --model DiT-S/2 --data_path mock --num_classes 10 --mixed_precision fp32"
)
