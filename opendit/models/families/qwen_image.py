"""Qwen-Image (Alibaba 2025), text to image: two streams in every block. Coordinates are relative to the picture's
middle."""

from collections.abc import Mapping
from typing import Any

from opendit.models.blocks import ATTENTION, MLP, BlockSpec
from opendit.models.configuration import times
from opendit.models.families.base import (
    WEIGHT,
    Family,
    Guidance,
    LatentSpace,
    Match,
    NetworkSpec,
    Stack,
    Text,
    TextEmbedding,
    layers,
)
from opendit.models.layers import Options
from opendit.models.positions import Rotary

STREAMS = ("text", "media")


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    for key, models in {
        "zero_cond_t": "models that are given pictures (Qwen-Image-Edit)",
        "use_additional_t_cond": "models of layers (Qwen-Image-Layered)",
        "use_layer3d_rope": "models of layers (Qwen-Image-Layered)",
        "guidance_embeds": "models that are told the scale of guidance",
    }.items():
        if values.get(key):
            raise ValueError(f"{key}: {models} are not known")
    channels, axes = values["in_channels"], tuple(values.get("axes_dims_rope", (16, 56, 56)))
    if values.get("patch_size", 2) != 2:
        raise ValueError("patch_size: only 2 is known")
    if channels % 4:
        raise ValueError(f"in_channels: {channels} are not those of 2 x 2 latents")
    if 4 * (values.get("out_channels", 16) or channels) != channels:
        raise ValueError(f"out_channels: {values.get('out_channels', 16)} is not a quarter of in_channels, {channels}")
    heads, size = values["num_attention_heads"], values["attention_head_dim"]
    width = heads * size
    if sum(axes) != size or len(axes) != 3:
        raise ValueError(f"axes_dims_rope: {times(axes)} do not divide heads of {size} channels")
    block = BlockSpec(width, heads, 4 * width, (ATTENTION, MLP), options=Options(qk_norm=True), streams=STREAMS)
    return NetworkSpec(
        channels=channels // 4,
        patch=(2, 2),
        stacks=(Stack(values["num_layers"], block),),
        text=TextEmbedding(values["joint_attention_dim"], "norm", masked=True),
        rotary=Rotary(axes, text="diagonal"),
        order=STREAMS,
        final=("scale", "shift"),
    )


AROUND = {
    "x_embedder.proj": "img_in",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "text_embedder.mlp": "txt_in",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
OF_STREAM = {
    "media": {
        "attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "attn.proj": "attn.to_out.0",
        "adaLN_modulation.1": "img_mod.1",
        "mlp.fc1": "img_mlp.net.0.proj",
        "mlp.fc2": "img_mlp.net.2",
    },
    "text": {
        "attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "attn.proj": "attn.to_add_out",
        "adaLN_modulation.1": "txt_mod.1",
        "mlp.fc1": "txt_mlp.net.0.proj",
        "mlp.fc2": "txt_mlp.net.2",
    },
}
NORMS = {
    "media": {"attn.q_norm": "attn.norm_q", "attn.k_norm": "attn.norm_k"},
    "text": {"attn.q_norm": "attn.norm_added_q", "attn.k_norm": "attn.norm_added_k"},
}


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    found = layers(AROUND) + layers({"text_embedder.norm": "txt_norm"}, WEIGHT)
    for stream in STREAMS:
        blocks = range(spec.stacks[0].count)
        where: dict[str, Any] = dict(ours=f"blocks.*.{stream}.", theirs="transformer_blocks.*.", blocks=blocks)
        found += layers(OF_STREAM[stream], **where) + layers(NORMS[stream], WEIGHT, **where)
    return tuple(found)


FAMILY = Family(
    name="qwen_image",
    network="QwenImageTransformer2DModel",
    pipelines=("QwenImagePipeline",),
    components={
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
        "vae": ("diffusers", "AutoencoderKLQwenImage"),
    },
    layout=layout,
    names=names,
    text=Text(512, "remove"),
    latents=LatentSpace("AutoencoderKLQwenImage", "channel"),
    guidance=Guidance(4.0, rescaled="patch"),
    steps=50,
    license="apache-2.0",
    comfyui="published",
    architecture="qwen-image",
)
