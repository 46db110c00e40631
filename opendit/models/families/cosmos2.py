"""Cosmos-Predict2, text to image (NVIDIA 2025): blocks with self-attention, attention to the caption, and MLP. Each
branch adds a low-rank term to a shared modulation. Rotary positions rotate channels i and i + d / 2 of a head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opendit.models.blocks import ATTENTION, CAPTION, MLP, BlockSpec
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


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    heads, size, channels = values["num_attention_heads"], values["attention_head_dim"], values["in_channels"]
    only = {
        "out_channels": channels,  # unlike the input, the output has no channel for conditioning frames
        "patch_size": [1, 2, 2],
        "extra_pos_embed_type": None,
        "use_crossattn_projection": False,
        "controlnet_block_every_n": None,
        "img_context_dim_in": None,
    }
    for key, value in only.items():
        found = values.get(key, "learnable" if key == "extra_pos_embed_type" else value)
        if (list(found) if isinstance(found, tuple) else found) != value:
            raise ValueError(f"{key}: {found!r} is not known; it is {value!r}")
    scales = tuple(values.get("rope_scale", (2.0, 1.0, 1.0)))
    if len(scales) != 3 or min(scales) <= 0:
        raise ValueError(f"rope_scale: {times(scales)} is not three numbers above 0")
    if size % 2 or size < 12:
        raise ValueError(f"attention_head_dim: {size} is not an even number from 12 on")
    width, side, rank = heads * size, size // 6 * 2, values.get("adaln_lora_dim", 256)
    axes = (size - 2 * side, side, side)
    block = BlockSpec(
        width,
        heads,
        int(values.get("mlp_ratio", 4.0) * width),
        (ATTENTION, replace(CAPTION, modulated=True), MLP),
        mlp="gelu_exact",
        caption_norm=False,
        source="branches",
        context=values["text_embed_dim"],
        options=Options(
            bias=False,
            qk_norm=True,
            qk_eps=1e-5,
            adaln_lora=rank,
            shared_modulation=True,
            attends_padding=True,
            operations_across=True,
            halves=True,
        ),
    )
    return NetworkSpec(
        channels=channels,
        patch=(2, 2),
        stacks=(Stack(values["num_layers"], block),),
        text=TextEmbedding(values["text_embed_dim"], "none"),
        rotary=Rotary(
            axes, bases=tuple(1e4 * scale ** (axis / (axis - 2)) for scale, axis in zip(scales, axes, strict=True))
        ),
        channels_last=(False, True),
        time_hidden=width,
        frequencies=width,
        time_unit=1000.0,
        time_normed=True,
        shared=len(block.values),
        final_rank=rank,
        # number of padding mask channels (zero for complete pictures)
        zeros=int(values.get("concat_padding_mask", True)),
        bias=False,
    )


AROUND = {
    "x_embedder.proj": "patch_embed.proj",
    "t_embedder.mlp.0": "time_embed.t_embedder.linear_1",
    "t_embedder.mlp.2": "time_embed.t_embedder.linear_2",
    "t_embedder.norm": "time_embed.norm",
    "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    "final_layer.adaLN_modulation.2": "norm_out.linear_2",
    "final_layer.linear": "proj_out",
}
OF_BLOCK = {
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.proj": "attn1.to_out.0",
    "attn.q_norm": "attn1.norm_q",
    "attn.k_norm": "attn1.norm_k",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.kv": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.proj": "attn2.to_out.0",
    "cross_attn.q_norm": "attn2.norm_q",
    "cross_attn.k_norm": "attn2.norm_k",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    **{f"adaLN_modulation.{i}.{n}": f"norm{i + 1}.linear_{n}" for i in range(3) for n in (1, 2)},
}


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    blocks = range(spec.stacks[0].count)
    where: dict[str, Any] = dict(ours="blocks.*.", theirs="transformer_blocks.*.", blocks=blocks)
    return (*layers(AROUND, WEIGHT), *layers(OF_BLOCK, WEIGHT, **where))


ORIGINAL = {
    "x_embedder.proj.1": "patch_embed.proj",
    "t_embedder.1.linear_1": "time_embed.t_embedder.linear_1",
    "t_embedder.1.linear_2": "time_embed.t_embedder.linear_2",
    "final_layer.adaln_modulation.1": "norm_out.linear_1",
    "final_layer.adaln_modulation.2": "norm_out.linear_2",
    "final_layer.linear": "proj_out",
    **{
        f"blocks.*.{name}_attn.{ours}": f"transformer_blocks.*.attn{number}.{theirs}"
        for number, name in ((1, "self"), (2, "cross"))
        for ours, theirs in (("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("output_proj", "to_out.0"))
    },
    **{
        f"blocks.*.adaln_modulation_{name}.{layer}": f"transformer_blocks.*.norm{number}.linear_{layer}"
        for number, name in ((1, "self_attn"), (2, "cross_attn"), (3, "mlp"))
        for layer in (1, 2)
    },
    "blocks.*.mlp.layer1": "transformer_blocks.*.ff.net.0.proj",
    "blocks.*.mlp.layer2": "transformer_blocks.*.ff.net.2",
}

FAMILY = Family(
    name="cosmos2",
    network="CosmosTransformer3DModel",
    pipelines=("Cosmos2TextToImagePipeline",),
    components={
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "text_encoder": ("transformers", "T5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    },
    layout=layout,
    names=names,
    text=Text(512, "zero"),
    latents=LatentSpace("AutoencoderKLWan", "channel"),
    guidance=Guidance(7.0, "cond"),
    steps=34,
    karras=True,
    image_size=(768, 1360),
    license="nvidia-open-model-license",
    original=ORIGINAL,
    loadable=(),
    architecture="cosmos-predict2",
)
