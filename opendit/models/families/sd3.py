"""Stable Diffusion 3.5 large (Stability AI 2024): two streams in every block, without rotary positions. The last block
does not update the caption's tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opendit.models.blocks import ATTENTION, MLP, BlockSpec
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
from opendit.models.families.flux import NORMS, OF_STREAM, STREAMS
from opendit.models.layers import Options
from opendit.models.positions import Rotary


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    heads, size, count = values["num_attention_heads"], values["attention_head_dim"], values["num_layers"]
    channels, width = values["in_channels"], heads * size
    if values.get("dual_attention_layers"):
        raise ValueError("dual_attention_layers: blocks with a second attention, as in 3.5 medium, are not known")
    if values.get("patch_size", 2) != 2:
        raise ValueError(f"patch_size: {values['patch_size']} is not known; it is 2")
    if values.get("out_channels") not in (None, channels):
        raise ValueError("out_channels: models that are given pictures are not known")
    if values["caption_projection_dim"] != width:
        raise ValueError(f"caption_projection_dim: {values['caption_projection_dim']} is not the width of {width}")
    if values.get("qk_norm") not in (None, "rms_norm"):
        raise ValueError(f"qk_norm: {values['qk_norm']!r} is not known; it is 'rms_norm' or null")
    if width % 4:
        raise ValueError(f"attention_head_dim: {heads} heads of {size} channels have no sines of two axes")
    if count < 1:
        raise ValueError("num_layers: there is none")
    block = BlockSpec(
        width,
        heads,
        4 * width,
        (ATTENTION, MLP),
        options=Options(qk_norm=values.get("qk_norm") is not None),
        streams=STREAMS[::-1],
    )
    return NetworkSpec(
        channels=channels,
        patch=(2, 2),
        stacks=(Stack(count - 1, block), Stack(1, replace(block, read=("text",)))),
        text=TextEmbedding(values["joint_attention_dim"], pooled=values["pooled_projection_dim"]),
        rotary=Rotary(()),
        table=(values["pos_embed_max_size"], values["sample_size"] // 2),
        channels_last=(False, True),
        convolution=True,
        order=STREAMS[::-1],
        final=("scale", "shift"),
    )


AROUND = {
    "x_embedder.proj": "pos_embed.proj",
    "text_embedder.mlp": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "pooled_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "pooled_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
# The last block does not update the caption's tokens and has only these caption layers.
READ = ("attn.qkv", "adaLN_modulation.1")


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    updated, read = (stack.count for stack in spec.stacks)
    found = layers(AROUND)
    for stream in STREAMS:
        where: dict[str, Any] = dict(ours=f"blocks.*.{stream}.", theirs="transformer_blocks.*.")
        always = {name: theirs for name, theirs in OF_STREAM[stream].items() if name in READ or stream == "media"}
        rest = {name: theirs for name, theirs in OF_STREAM[stream].items() if name not in always}
        found += layers(always, blocks=range(updated + read), **where)
        found += layers(rest, blocks=range(updated), **where)
        if spec.block.options.qk_norm:
            found += layers(NORMS[stream], WEIGHT, blocks=range(updated + read), **where)
    return tuple(found)


# Stability AI's names. The caption's modulation is missing, because only the last block stores its halves in another
# order.
ORIGINAL = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
    **{
        f"joint_blocks.*.{'x' if stream == 'media' else 'context'}_block.{ours}": tuple(
            f"transformer_blocks.*.{part}" for part in ((theirs,) if isinstance(theirs, str) else theirs)
        )
        for stream in STREAMS
        for ours, theirs in OF_STREAM[stream].items()
        if (stream, ours) != ("text", "adaLN_modulation.1")
    },
}

FAMILY = Family(
    name="sd3",
    network="SD3Transformer2DModel",
    pipelines=("StableDiffusion3Pipeline",),
    components={
        "tokenizer": ("transformers", "CLIPTokenizer"),
        "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
        "tokenizer_2": ("transformers", "CLIPTokenizer"),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
        "tokenizer_3": ("transformers", "T5TokenizerFast"),
        "text_encoder_3": ("transformers", "T5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKL"),
    },
    layout=layout,
    names=names,
    constants=("pos_embed.pos_embed",),
    text=Text(77 + 256, "attend", pooled=True, beside=77),
    latents=LatentSpace("AutoencoderKL", "scalar"),
    guidance=Guidance(7.0),
    steps=28,
    shifted_end=True,
    license="stabilityai-ai-community",
    original=ORIGINAL,
    # diffusers stores scale, shift; the original file shift, scale
    exchanged=frozenset({"final_layer.adaLN_modulation.1"}),
    loadable=("diffusers",),
    architecture="stable-diffusion-v3.5-large",
)
