"""Recipes: named sets of flags (``--recipe NAME``; docs/recipes.md). The command line overrides them.

Each training stage is one recipe. A later stage starts from the previous stage's weights, with ``--pretrained``. Every
recipe NAME has a variant ``mock_NAME`` on random latents, to time a step without data.
"""

import re
from dataclasses import dataclass

from opendit.config.flags import nearest


@dataclass(frozen=True)
class Preset:
    """A recipe. about: line for --recipe list. follows: the recipe that trains the initial weights."""

    about: str
    flags: str
    follows: str | None = None


FAST = "--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel"
DEMO = (
    "--vae none --max_steps {steps} --lr 3e-3 --warmup_steps 100 --lr_schedule cosine --mixed_precision fp32 "
    "--ema_decay 0.998 --num_workers 0 --log_every 50 --ckpt_every 1000"
)
NOT_OF_MOCK = (
    r" --(data_path|max_steps|log_every|global_batch_size|frame_interval|random_flip|ckpt_\w+|sample_\w+|warmup_steps)"
    r"( [^-]\S*)?(?= )"
)
MOCK = "--data_path mock --max_steps 50 --log_every 5 --sample_every 0 --no_save"

# Stages of text-to-clip training. With patch 1x2x2, 32 latent frames are 8,192 tokens at 256 px, and 73,728 at 768 px.
# Most settings of the large models come from NeMo's DiT-7B and MovieGen recipes, but not the numbers of steps.
PRETRAIN = (
    f"--use_video --data_path ./data.csv --text_encoder t5 --cross_attention --weight_decay 0.1 --adam_beta2 0.95 "
    f"--ckpt_keep 3 {FAST}"
)
PICTURES = "--image_size 256 --num_frames 1 --lr 1e-4 --warmup_steps 100 --max_steps 400000"
JOINT = (
    "--image_size 256 --num_frames 32 --lr 6e-5 --warmup_steps 100 --max_steps 200000 --global_batch_size 256 "
    "--batch_size 1"
)
LARGE = (
    "--image_size 768 --num_frames 32 --lr 6e-5 --warmup_steps 100 --max_steps 50000 --global_batch_size 256 "
    "--batch_size 1 --parallel auto"
)
# the scaled latents of Stable Diffusion have a standard deviation of about 1
EDM = "--objective edm --edm_sigma_data 1"
FLOW = "--objective flow --flow_times logit_normal"
# Settings on which papers about faster training agree (docs/better_training.md).
SPEEDRUN = (
    f"--norm rms --mlp swiglu --positions rope --qk_norm {FLOW} --optimizer muon --random_flip --label_drop 0.1 "
    f"--enable_cuda_graph {FAST}"
)


def _stages(
    name: str, model: str, objective: str, *, batch: int, world: int, more: str = "", joint: str = ""
) -> dict[str, Preset]:
    """Return a model's recipes, one per training stage. batch, world: stage 1's micro-batch size and global batch size.
    more: all stages' flags. joint: stage 2's flags."""
    common = f"--model {model} {PRETRAIN} {objective} {more}"
    shifts = ("--flow_shift 3", "--flow_shift 6") if objective == FLOW else ("", "")
    return {
        name: Preset(
            "256 px pictures with captions", f"{common} {PICTURES} --global_batch_size {world} --batch_size {batch}"
        ),
        f"{name}_256p_joint": Preset(
            "256 px pictures and clips of 32 latent frames, 8k tokens",
            f"{common} {JOINT} {shifts[0]} {joint}",
            follows=name,
        ),
        f"{name}_768p": Preset(
            "768 px clips of 32 latent frames, 74k tokens",
            f"{common} {LARGE} {shifts[1]}",
            follows=f"{name}_256p_joint",
        ),
    }


RECIPES = {
    "digits": Preset(
        "the embedded demo of pictures: 8 x 8 digits in pixels (docs/images.md)",
        f"--model DiT-Ti/2 --data_path digits --image_size 8 --global_batch_size 64 --batch_size 64 "
        f"{DEMO.format(steps=2600)} --sample_cfg_scale 1",
    ),
    "digits_video": Preset(
        "the embedded demo of clips: moving digits with captions (docs/video.md)",
        f"--model vDiT-Ti/822 --use_video --data_path ./videos/checked.csv --image_size 12 --num_frames 8 "
        f"--frame_interval 6 --text_encoder bytes --max_text_tokens 28 --cross_attention --objective flow "
        f"--flow_shift 6 --global_batch_size 32 --batch_size 32 {DEMO.format(steps=3000)} --sample_cfg_scale 3",
    ),
    "dit_xl_imagenet256": Preset(
        "the DiT paper's setting: ImageNet at 256 px, 7 M steps of 256 pictures",
        f"--model DiT-XL/2 --data_path ./imagenet/train --image_size 256 --vae ema --random_flip --label_drop 0.1 "
        f"--global_batch_size 256 --batch_size 32 --lr 1e-4 --weight_decay 0 --grad_clip 0 --ema_decay 0.9999 "
        f"--no_ema_warmup --max_steps 7000000 --ckpt_every 50000 --sample_every 10000 {FAST}",
    ),
    "speedrun_cifar10": Preset(
        "CIFAR-10 in pixels, as good as it gets in minutes on one GPU (docs/better_training.md)",
        f"--model DiT-S/2 --data_path ./cifar10/train --image_size 32 --vae none --route 2:10:0.75:sprint "
        f"--global_batch_size 512 --batch_size 512 --lr 3e-4 --warmup_steps 100 --ema_decay 0.999 "
        f"--max_steps 6500 --ckpt_every 1000 --ckpt_keep 2 --sample_every 1000 --sample_cfg_scale 1 {SPEEDRUN}",
    ),
    "speedrun_imagenet256": Preset(
        "ImageNet at 256 px by the same; planned by --dry_run, never run (docs/better_training.md)",
        f"--model DiT-B/2 --data_path ./imagenet/train --image_size 256 --vae ema --route 2:10:0.75:sprint "
        f"--route_until 360000 --global_batch_size 256 --batch_size 256 --lr 1e-4 --ema_decay 0.9999 "
        f"--max_steps 400000 --ckpt_every 20000 --ckpt_keep 2 --sample_every 20000 {SPEEDRUN}",
    ),
    **_stages("pretrain_l", "vDiT-L/122", EDM, batch=64, world=1024),
    **_stages("pretrain_xl", "vDiT-XL/122", EDM, batch=64, world=1024),
    **_stages("pretrain_7b", "vDiT-7B/122", EDM, batch=9, world=4608),
    **_stages(
        "pretrain_28b", "vDiT-28B/122", EDM, batch=9, world=4608, more="--plugin fsdp", joint="--grad_checkpoint"
    ),
    **_stages("st_dit_xl", "ST-DiT-XL/122", FLOW, batch=64, world=1024),
    **_stages("moviegen_5b", "MovieGen-5B/122", FLOW, batch=12, world=4608),
    **_stages(
        "moviegen_30b", "MovieGen-30B/122", FLOW, batch=6, world=9216, more="--plugin fsdp", joint="--grad_checkpoint"
    ),
    "ec_dit_1b": Preset(
        "256 px pictures with captions",
        f"--model EC-DiT-1B/2 {PRETRAIN.replace('--use_video ', '')} {EDM} {PICTURES.replace('--num_frames 1 ', '')} "
        "--global_batch_size 2304 --batch_size 72",
    ),
    "lora": Preset(
        "a LoRA of a public model on a folder of pictures, fitted to the card's memory (docs/finetuning.md)",
        f"--pretrained ./Z-Image --data_path ./photos --lora 16 --card auto --global_batch_size 4 --batch_size 4 "
        f"--lr 1e-4 --warmup_steps 50 --max_steps 2000 --ckpt_every 250 --ckpt_keep 3 --enable_cuda_graph {FAST}",
    ),
    "wan_14b_finetune": Preset(
        "all weights of Wan 2.1 14B on clips of 81 frames of about 480p, on 4 H200s or 8 H100s (docs/public_models.md)",
        f"--pretrained ./Wan2.1-T2V-14B-Diffusers --use_video --data_path ./data.csv --num_frames 81 --bucket_tokens "
        f"32760 --plugin fsdp --recompute but_attention --batch_size 1 --lr 1e-5 --warmup_steps 100 --max_steps 5000 "
        f"--ckpt_every 500 --ckpt_keep 3 {FAST}",
    ),
}
RECIPES |= {
    # Without --global_batch_size, a step is one micro-batch per GPU for any number of GPUs.
    f"mock_{name}": Preset(f"{recipe.about}; random latents", f"{re.sub(NOT_OF_MOCK, ' ', recipe.flags + ' ')}{MOCK}")
    for name, recipe in RECIPES.items()
}


def find_recipe(name: str) -> Preset:
    if name not in RECIPES:
        raise ValueError(
            f"--recipe {name}: no such recipe; did you mean {nearest(name, [*RECIPES, 'list'])}? "
            "(--recipe list shows all)"
        )
    return RECIPES[name]


def listing() -> str:
    rows = [("recipe", "model", "what it trains on")]
    for name, recipe in RECIPES.items():
        if name.startswith("mock_"):
            continue
        words = recipe.flags.split()
        after = f"; after {recipe.follows}" if recipe.follows else ""
        model = "--model" if "--model" in words else "--pretrained"
        rows.append((name, words[words.index(model) + 1], recipe.about + after))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{name:<{widths[0]}}  {model:<{widths[1]}}  {about}" for name, model, about in rows]
    lines += [
        "",
        "A stage that comes after another one starts from its weights: --pretrained RUN.",
        "mock_NAME, for each of them: on random latents, to time a step without data.",
        "Flags on the command line override the recipe's. --dry_run says what a run will need.",
    ]
    return "\n".join(lines) + "\n"
