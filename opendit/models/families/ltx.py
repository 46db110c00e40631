"""LTX-Video (Lightricks 2024): blocks with self-attention, then attention to the caption. The angles of rotary
positions differ between heads."""

from collections.abc import Mapping
from typing import Any

from opendit.models.blocks import ATTENTION, CAPTION, MLP, BlockSpec
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

FRAMES_A_SECOND = 25  # frame rate that the pipeline assumes


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    channels, heads, size = values["in_channels"], values["num_attention_heads"], values["attention_head_dim"]
    width = heads * size
    only = {
        "out_channels": channels,
        "patch_size": 1,
        "patch_size_t": 1,
        "cross_attention_dim": width,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "attention_bias": True,
        "attention_out_bias": True,
    }
    for key, value in only.items():
        if values.get(key, value) not in ((value, None) if key == "out_channels" else (value,)):
            raise ValueError(f"{key}: {values[key]!r} is not known; it is {value!r}")
    if size % 2 or width < 6:
        raise ValueError(f"attention_head_dim: {heads} heads of {size} channels have no pairs for three axes")
    block = BlockSpec(
        width,
        heads,
        4 * width,
        (ATTENTION, CAPTION, MLP),
        norm="rms",
        norm_weight=False,
        eps=values.get("norm_eps", 1e-6),
        caption_norm=None,
        source="table",
        options=Options(qk_norm=True, qk_across=True, qk_eps=1e-5, operations_across=True),
    )
    return NetworkSpec(
        channels=channels,
        patch=(1, 1, 1),
        stacks=(Stack(values["num_layers"], block),),
        text=TextEmbedding(values["caption_channels"], "mlp"),
        # A latent covers 8 frames of 32 x 32 pixels. Positions are relative to 20 seconds and 2048 pixels.
        rotary=Rotary((), steps=(8 / FRAMES_A_SECOND, 32, 32), sides=(20, 2048, 2048)),
        shared=block.chunks,
        final_table=True,
    )


AROUND = {
    "x_embedder.proj": "proj_in",
    "t_embedder.mlp.0": "time_embed.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_embed.emb.timestep_embedder.linear_2",
    "text_embedder.mlp.fc1": "caption_projection.linear_1",
    "text_embedder.mlp.fc2": "caption_projection.linear_2",
    "shared_modulation.1": "time_embed.linear",
    "final_layer.linear": "proj_out",
}
OF_BLOCK = {
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.proj": "attn1.to_out.0",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.kv": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.proj": "attn2.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
}
NORMS = {
    "attn.q_norm": "attn1.norm_q",
    "attn.k_norm": "attn1.norm_k",
    "cross_attn.q_norm": "attn2.norm_q",
    "cross_attn.k_norm": "attn2.norm_k",
}


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    blocks = range(spec.stacks[0].count)
    where: dict[str, Any] = dict(ours="blocks.*.", theirs="transformer_blocks.*.", blocks=blocks)
    table = ("blocks.*.adaLN_modulation.table",), ("transformer_blocks.*.scale_shift_table",)
    return (
        *layers(AROUND),
        *layers(OF_BLOCK, **where),
        *layers(NORMS, WEIGHT, **where),
        Match(("final_layer.adaLN_modulation.table",), ("scale_shift_table",)),
        Match(*table, blocks=blocks),
    )


FAMILY = Family(
    name="ltx",
    network="LTXVideoTransformer3DModel",
    pipelines=("LTXPipeline",),
    components={
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "text_encoder": ("transformers", "T5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKLLTXVideo"),
    },
    layout=layout,
    names=names,
    text=Text(128, "remove"),
    latents=LatentSpace("AutoencoderKLLTXVideo", "channel", video=True, downscale=32, frames_downscale=8),
    guidance=Guidance(3.0),
    steps=50,
    image_size=(512, 704),
    frames=161,
    license="ltx-video-open-weights-license-0.x",
    original={
        "patchify_proj": "proj_in",
        "adaln_single.emb.timestep_embedder.linear_1": "time_embed.emb.timestep_embedder.linear_1",
        "adaln_single.emb.timestep_embedder.linear_2": "time_embed.emb.timestep_embedder.linear_2",
        "adaln_single.linear": "time_embed.linear",
    },
    loadable=("diffusers",),
    architecture="ltx-video",
)
