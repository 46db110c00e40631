"""Write folders of tiny public models in diffusers' layout, with new tokenizers and encoders and random weights.

Nothing is downloaded. ``write_pipeline(folder, name)`` writes the whole pipeline of a family. With such a pipeline,
diffusers draws pictures of 64x64, or clips of 5 frames of 32x32, in a few seconds on a CPU. The other functions write
parts of a pipeline.
"""

import json
from pathlib import Path
from typing import Any

import torch

from opendit.encoders.vae import load_codec
from opendit.encoders.video_vae import load_video_codec

LATENT_CHANNELS = 4
CLIP_WIDTH, T5_WIDTH, QWEN_WIDTH, GEMMA_WIDTH = 24, 20, 16, 28
PROJECTED = 6 + 10  # widths of the pooled vectors of Stable Diffusion 3's two encoders
MEAN, STD = [0.3, -0.2, 0.1, 0.5], [2.0, 0.5, 1.5, 0.8]
# Component -> (library, class), as in the model_index.json of FLUX.1-dev, Z-Image-Turbo, Wan2.1-T2V-1.3B and
# Qwen-Image.
COMPONENTS: dict[str, dict[str, tuple[str, str]]] = {
    "flux": {
        "tokenizer": ("transformers", "CLIPTokenizer"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "tokenizer_2": ("transformers", "T5TokenizerFast"),
        "text_encoder_2": ("transformers", "T5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKL"),
    },
    "z_image": {
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "text_encoder": ("transformers", "Qwen3Model"),
        "vae": ("diffusers", "AutoencoderKL"),
    },
    "wan": {
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    },
    "qwen_image": {
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
        "vae": ("diffusers", "AutoencoderKLQwenImage"),
    },
    "sd3": {
        "tokenizer": ("transformers", "CLIPTokenizer"),
        "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
        "tokenizer_2": ("transformers", "CLIPTokenizer"),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
        "tokenizer_3": ("transformers", "T5TokenizerFast"),
        "text_encoder_3": ("transformers", "T5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKL"),
    },
    "ltx": {
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "text_encoder": ("transformers", "T5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKLLTXVideo"),
    },
    "cosmos2": {
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "text_encoder": ("transformers", "T5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    },
    "lumina2": {
        "tokenizer": ("transformers", "GemmaTokenizerFast"),
        "text_encoder": ("transformers", "Gemma2Model"),
        "vae": ("diffusers", "AutoencoderKL"),
    },
}
FLUX2 = {
    "tokenizer": ("transformers", "PixtralProcessor"),
    "text_encoder": ("transformers", "Mistral3ForConditionalGeneration"),
    "vae": ("diffusers", "AutoencoderKLFlux2"),
}
KLEIN = {"tokenizer": ("transformers", "Qwen2TokenizerFast"), "text_encoder": ("transformers", "Qwen3Model")}
COMPONENTS |= {"flux2": FLUX2, "flux2_klein": FLUX2 | KLEIN}
PIPELINES = {
    "flux": "FluxPipeline",
    "z_image": "ZImagePipeline",
    "wan": "WanPipeline",
    "qwen_image": "QwenImagePipeline",
    "lumina2": "Lumina2Pipeline",
    "flux2": "Flux2Pipeline",
    "flux2_klein": "Flux2KleinPipeline",
    "ltx": "LTXPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "cosmos2": "Cosmos2TextToImagePipeline",
}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {
            "in_channels": 4 * LATENT_CHANNELS,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": T5_WIDTH,
            "pooled_projection_dim": CLIP_WIDTH,
            "guidance_embeds": True,
            "axes_dims_rope": (2, 2, 4),
        },
    ),
    "z_image": (
        "ZImageTransformer2DModel",
        {
            "in_channels": LATENT_CHANNELS,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 2,
            "n_heads": 4,
            "n_kv_heads": 4,
            "cap_feat_dim": QWEN_WIDTH,
            "axes_dims": [2, 2, 4],
            "axes_lens": [1024, 64, 64],
        },
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "text_dim": T5_WIDTH,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 64,
        },
    ),
    "qwen_image": (
        "QwenImageTransformer2DModel",
        {
            "in_channels": 4 * LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": QWEN_WIDTH,
            "axes_dims_rope": (2, 2, 4),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": T5_WIDTH,
            "caption_projection_dim": 16,
            "pooled_projection_dim": PROJECTED,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            "in_channels": LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "caption_channels": T5_WIDTH,
        },
    ),
    "cosmos2": (
        "CosmosTransformer3DModel",
        {
            "in_channels": LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "text_embed_dim": T5_WIDTH,
            "adaln_lora_dim": 4,
            "rope_scale": (1.0, 4.0, 4.0),
            "extra_pos_embed_type": None,
        },
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": LATENT_CHANNELS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (600, 32, 32),
            "cap_feat_dim": GEMMA_WIDTH,
        },
    ),
}
for name, told in (("flux2", True), ("flux2_klein", False)):
    TRANSFORMERS[name] = (
        "Flux2Transformer2DModel",
        {
            "in_channels": 4 * LATENT_CHANNELS,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 3 * QWEN_WIDTH,
            "timestep_guidance_channels": 16,
            "guidance_embeds": told,
            "axes_dims_rope": (2, 2, 2, 2),
        },
    )
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "flux": EULER
    | {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    },
    "z_image": EULER | {"use_dynamic_shifting": False},
    "wan": {
        "_class_name": "UniPCMultistepScheduler",
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 3.0,
    },
    "qwen_image": EULER
    | {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    },
    "lumina2": EULER | {"shift": 6.0},
    "sd3": EULER,
    "cosmos2": EULER | {"shift": 1.0, "use_karras_sigmas": True, "sigma_data": 1.0, "final_sigmas_type": "sigma_min"},
    "ltx": EULER
    | {
        "use_dynamic_shifting": True,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "base_image_seq_len": 1024,
        "max_image_seq_len": 4096,
        "shift_terminal": 0.1,
    },
}
SCHEDULERS |= dict.fromkeys(("flux2", "flux2_klein"), SCHEDULERS["flux"])
QWEN_SIZES: dict[str, Any] = {
    "hidden_size": QWEN_WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131_072,
}
# Words with one token each, so that Qwen-Image's template has 34 tokens before the prompt, as with the published
# tokenizer.
DESCRIBED = (
    "the image by detailing color shape size texture quantity text spatial relationships of objects and background"
)
TEMPLATE_WORDS = ("system", "user", "Describe", *(f" {word}" for word in DESCRIBED.split()))
IMAGE_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
CONVERSATION = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set mark = 'SYSTEM_PROMPT]' if message.role == 'system' else 'INST]' %}"
    "{{ '[' + mark }}{% for part in message.content %}{{ part.text }}{% endfor %}{{ '[/' + mark }}{% endfor %}"
)
SECOND = {"transformer_2": ["diffusers", "WanTransformer3DModel"]}
PICTURES = {"_class_name": "WanImageToVideoPipeline"}
VISION = {
    "image_encoder": ["transformers", "CLIPVisionModel"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
}
INDEX: dict[str, dict[str, Any]] = {
    "wan_i2v": PICTURES | VISION,
    "wan_i2v_a14b": {"boundary_ratio": 0.9, "expand_timesteps": False, **SECOND, **PICTURES},
    "wan_ti2v": {"boundary_ratio": None, "expand_timesteps": True},
    "wan_a14b": {"boundary_ratio": 0.875, "expand_timesteps": False, **SECOND},
}
for _table in (COMPONENTS, PIPELINES, TRANSFORMERS, SCHEDULERS):
    _table |= dict.fromkeys(INDEX, _table["wan"])  # with another autoencoder, two networks, or an input picture
for _name, _more in {"wan_i2v": {"image_dim": CLIP_WIDTH, "added_kv_proj_dim": 24}, "wan_i2v_a14b": {}}.items():
    _class, _values = TRANSFORMERS["wan"]
    TRANSFORMERS[_name] = _class, {**_values, "in_channels": 4 + 2 * LATENT_CHANNELS, **_more}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def randomise(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Add noise to every parameter, because a value of 0 or 1 could hide an error in the parameter's use."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return module.eval()


def _byte_letters() -> list[str]:
    """Return the 256 letters that represent bytes in byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_clip(folder: Path, tokenizer: str = "tokenizer", encoder: str = "text_encoder", **projected: int) -> None:
    """Write a CLIP text model and its tokenizer of 77 tokens.

    Args:
        projected: hidden_size and projection_dim of a model that projects its pooled vector.
    """
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    letters = _byte_letters()
    merges = [("s", "e"), ("v", "e"), ("se", "ve"), ("seve", "n</w>")]
    pieces = letters + [letter + "</w>" for letter in letters] + ["".join(pair) for pair in merges]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77).save_pretrained(folder / tokenizer)
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        **{"hidden_size": CLIP_WIDTH, **projected},
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )
    torch.manual_seed(0)
    model = CLIPTextModelWithProjection if projected else CLIPTextModel
    randomise(model(config), 1).save_pretrained(folder / encoder)


def write_t5(folder: Path, tokenizer: str, encoder: str, kind: str = "T5") -> None:
    """Write a T5 or UMT5 encoder and its tokenizer of letters and one word."""
    import transformers

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁seven", -1.0)]
    pieces += [(letter, -5.0) for letter in "▁abcdefghijklmnopqrstuvwxyzü"]
    transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512).save_pretrained(folder / tokenizer)
    config_class, model_class = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}EncoderModel")
    sizes = {"d_model": T5_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    config = config_class(vocab_size=len(pieces), feed_forward_proj="gated-gelu", **sizes)
    randomise(model_class(config), 2).save_pretrained(folder / encoder)
    path = folder / encoder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))  # as published


def write_sd3_text(folder: Path) -> None:
    """Write Stable Diffusion 3's tokenizers and text encoders: T5, and two CLIP models that together are narrower."""
    write_clip(folder, hidden_size=8, projection_dim=6)
    write_clip(folder, "tokenizer_2", "text_encoder_2", hidden_size=4, projection_dim=10)
    write_t5(folder, "tokenizer_3", "text_encoder_3")


def write_flux_text(folder: Path) -> None:
    """Write FLUX.1's tokenizers and text encoders, CLIP and T5."""
    write_clip(folder)
    write_t5(folder, "tokenizer_2", "text_encoder_2")


def write_z_image_text(folder: Path) -> None:
    """Write Z-Image's tokenizer, with a chat template, and its text encoder, a Qwen3 with three layers."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(vocab_size=write_qwen_tokenizer(folder), head_dim=8, **QWEN_SIZES)
    torch.manual_seed(0)
    randomise(Qwen3Model(config), 3).save_pretrained(folder / "text_encoder")


def write_qwen_tokenizer(folder: Path, words: tuple[str, ...] = ()) -> int:
    """Write Qwen's tokenizer, with a chat template, and return the size of its vocabulary.

    Args:
        words: words that get one token each.
    """
    from transformers import Qwen2Tokenizer

    letters = _byte_letters()
    merges = [("s", "e"), ("v", "e"), ("se", "ve"), ("seve", "n")]
    pieces = [*letters, *("".join(pair) for pair in merges), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, eos_token="<|im_end|>", model_max_length=1024)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    return len(tokenizer)


def write_qwen_image_text(folder: Path) -> None:
    """Write Qwen-Image's tokenizer and text encoder, a Qwen2.5-VL with three layers and a small vision part."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    size = write_qwen_tokenizer(folder, TEMPLATE_WORDS)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    text = QWEN_SIZES | {"vocab_size": size, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": QWEN_WIDTH}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision | {"fullatt_block_indexes": [0]})
    torch.manual_seed(0)
    randomise(Qwen2_5_VLForConditionalGeneration(config), 3).save_pretrained(folder / "text_encoder")


def write_flux2_klein_text(folder: Path) -> None:
    """Write klein's tokenizer and text encoder, a Qwen3 with 28 layers, of which the pipeline reads 27."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(vocab_size=write_qwen_tokenizer(folder), head_dim=8, **QWEN_SIZES | {"num_hidden_layers": 28})
    torch.manual_seed(0)
    randomise(Qwen3Model(config), 3).save_pretrained(folder / "text_encoder")


def write_flux2_text(folder: Path) -> None:
    """Write FLUX.2's processor and its encoder, a Mistral 3 with 31 layers and a small vision part."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        PixtralImageProcessor,
        PixtralProcessor,
        PreTrainedTokenizerFast,
    )

    special = ["<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", *IMAGE_TOKENS]
    vocabulary = {piece: i for i, piece in enumerate([*special, *_byte_letters(), "se", "ve", "seve", "seven"])}
    merges = [("s", "e"), ("v", "e"), ("se", "ve"), ("seve", "n")]
    words = Tokenizer(models.BPE(vocabulary, merges))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "extra_special_tokens": special[3:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", model_max_length=4096, **names)
    PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=CONVERSATION).save_pretrained(
        folder / "tokenizer"
    )
    text = QWEN_SIZES | {"vocab_size": len(tokenizer), "num_hidden_layers": 31, "head_dim": 8, "model_type": "mistral"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"head_dim": 8, "model_type": "pixtral", "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = Mistral3Config(text_config=text, vision_config=vision)
    randomise(Mistral3ForConditionalGeneration(config), 3).save_pretrained(folder / "text_encoder")


def write_wan_text(folder: Path) -> None:
    """Write Wan's tokenizer and text encoder, UMT5."""
    write_t5(folder, "tokenizer", "text_encoder", "UMT5")


def write_vision(folder: Path) -> None:
    """Write CLIP's vision encoder, with 4 + 1 tokens, and its processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sides = dict(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPImageProcessor(**sides).save_pretrained(folder / "image_processor")
    config = CLIPVisionConfig(
        hidden_size=CLIP_WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    torch.manual_seed(0)
    randomise(CLIPVisionModel(config), 6).save_pretrained(folder / "image_encoder")


def write_lumina2_text(folder: Path) -> None:
    """Write Lumina 2's tokenizer, which pads on the left by default, and text encoder, a Gemma2 with three layers."""
    from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("s", "e"), ("v", "e"), ("se", "ve"), ("seve", "n")]
    letters = "▁abcdefghijklmnopqrstuvwxyzYP<>.-"
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *letters, *("".join(pair) for pair in merges)])}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges, model_max_length=1024, add_bos_token=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = Gemma2Config(
        vocab_size=len(vocabulary),
        hidden_size=GEMMA_WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    randomise(Gemma2Model(config), 3).save_pretrained(folder / "text_encoder")


WRITE_TEXT = {
    "flux": write_flux_text,
    "z_image": write_z_image_text,
    "wan": write_wan_text,
    "qwen_image": write_qwen_image_text,
    "flux2": write_flux2_text,
    "flux2_klein": write_flux2_klein_text,
    "lumina2": write_lumina2_text,
    "sd3": write_sd3_text,
    **dict.fromkeys(("ltx", "cosmos2"), lambda folder: write_t5(folder, "tokenizer", "text_encoder")),
}
WRITE_TEXT |= dict.fromkeys(INDEX, write_wan_text)


def write_vae(folder: Path, name: str) -> None:
    """Write the autoencoder of a family, with 4 latent channels, to ``vae/``.

    A latent value covers 8 pixels per side and, for video models, 4 frames. Exceptions are LTX-Video with 32 pixels and
    8 frames, and TI2V with 16 pixels.
    """
    import diffusers

    torch.manual_seed(0)
    if name in ("qwen_image", "cosmos2") or name.startswith("wan"):
        kind = diffusers.AutoencoderKLQwenImage if name == "qwen_image" else diffusers.AutoencoderKLWan
        more = dict(is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16)
        vae = kind(
            base_dim=4,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=MEAN,
            latents_std=STD,
            **(more if name == "wan_ti2v" else {}),
        )
    elif name == "ltx":
        vae = diffusers.AutoencoderKLLTXVideo(
            latent_channels=LATENT_CHANNELS,
            block_out_channels=(8, 8, 8),
            decoder_block_out_channels=(8, 8, 8),
            layers_per_block=(1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, True),
            decoder_spatio_temporal_scaling=(True, True, True),
            down_block_types=("LTXVideoDownBlock3D",) * 3,
            decoder_inject_noise=(False,) * 4,
            downsample_type=("conv",) * 3,
            upsample_residual=(False,) * 3,
            upsample_factor=(1, 1, 1),
            timestep_conditioning=True,
        )
        vae.latents_mean, vae.latents_std = torch.tensor(MEAN), torch.tensor(STD)
    else:
        flux2 = name.startswith("flux2")
        kind: Any = diffusers.AutoencoderKLFlux2 if flux2 else diffusers.AutoencoderKL
        vae = kind(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            norm_num_groups=2,
            latent_channels=LATENT_CHANNELS,
            use_quant_conv=flux2,
            use_post_quant_conv=flux2,
            **({} if flux2 else {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        )
        if flux2:
            generator = torch.Generator().manual_seed(5)
            for statistics in (vae.bn.running_mean, vae.bn.running_var):
                statistics.copy_(torch.rand(statistics.shape, generator=generator) + 0.1)
    randomise(vae, 4).save_pretrained(folder / "vae")


def write_transformer(folder: Path, name: str, **options: Any) -> None:
    """Write the network of a family, with few blocks, to ``transformer/``. ``options`` replace configuration values."""
    import diffusers

    class_name, values = TRANSFORMERS[name]
    torch.manual_seed(0)
    inside_of = ["transformer", *(each for each in SECOND if each in INDEX.get(name, {}))]
    for seed, inside in enumerate(inside_of):
        randomise(getattr(diffusers, class_name)(**values | options), 5 + seed).save_pretrained(folder / inside)


def write_index(folder: Path, name: str, **changes: Any) -> None:
    """Write a family's ``model_index.json``. ``changes`` replace values."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"_class_name": PIPELINES[name], "_diffusers_version": "0.42.1"}
    values |= {component: list(which) for component, which in COMPONENTS[name].items()}
    values |= {"scheduler": ["diffusers", SCHEDULERS[name]["_class_name"]]}
    values |= {"transformer": ["diffusers", TRANSFORMERS[name][0]]}
    (folder / "model_index.json").write_text(json.dumps(values | INDEX.get(name, {}) | changes, indent=2))


def write_pipeline(folder: Path | str, name: str, **options: Any) -> Path:
    """Write the whole pipeline of a family and return its folder. ``options`` go to :func:`write_transformer`."""
    folder = Path(folder)
    write_index(folder, name)
    WRITE_TEXT[name](folder)
    if "image_encoder" in INDEX.get(name, {}):
        write_vision(folder)
    write_vae(folder, name)
    write_transformer(folder, name, **options)
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULERS[name], indent=2))
    return folder


class Harmless:
    """Replacement for Cosmos' guardrail, which needs another package. It accepts everything."""

    def to(self, device: Any) -> None:
        """Do nothing, because there are no weights."""

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def open_pipeline(folder: Path, name: str, **options: Any) -> Any:
    """Load a family's pipeline with diffusers. ``options`` go to ``from_pretrained``."""
    from diffusers import DiffusionPipeline

    checker = {"safety_checker": Harmless()} if name == "cosmos2" else {}
    return DiffusionPipeline.from_pretrained(folder, **checker, **options)


def load_codec_of(folder, family, **settings):
    """Load the autoencoder of a pipeline's folder."""
    load = load_video_codec if family.latents.video else load_codec
    return load(str(folder / "vae"), channels=3, device="cpu", **settings)
