"""Lumina-Image 2.0 (Alpha-VLLM 2025): blocks with one stream of captions and pictures, in which query heads share heads
of keys and values. Before these blocks, separate refiners process captions and pictures."""

from collections.abc import Mapping
from dataclasses import replace
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


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    channels, width, heads = values["in_channels"], values["hidden_size"], values["num_attention_heads"]
    shared, eps = values["num_kv_heads"] or heads, values.get("norm_eps", 1e-5)
    axes = tuple(values["axes_dim_rope"])
    if values.get("patch_size", 2) != 2:
        raise ValueError(f"patch_size: {values['patch_size']} is not known; it is 2")
    if values.get("out_channels") not in (None, channels):
        raise ValueError("out_channels: models that are given pictures are not known")
    if heads * sum(axes) != width:
        raise ValueError(f"axes_dim_rope: {heads} heads of {times(axes)} channels are not hidden_size {width}")
    if heads % shared:
        raise ValueError(f"num_kv_heads: {heads} heads can't share {shared} evenly")
    multiple, factor = values["multiple_of"], values.get("ffn_dim_multiplier") or 1
    condition = min(width, 1024)
    block = BlockSpec(
        width,
        heads,
        -(-int(factor * 4 * width) // multiple) * multiple,
        (ATTENTION, MLP),
        norm="rms",
        mlp="swiglu",
        kv_heads=None if shared == heads else shared,
        eps=eps,
        norm_after=True,
        values=("scale", "gate"),
        tanh_gates=True,
        condition=condition,
        modulation_bias=True,
        options=Options(bias=False, qk_norm=True, qk_eps=1e-5),
    )
    refiners = values["num_refiner_layers"]
    return NetworkSpec(
        channels=channels,
        patch=(2, 2),
        stacks=(Stack(values["num_layers"], block),),
        text=TextEmbedding(values["cap_feat_dim"], "norm", masked=True),
        rotary=Rotary(axes, text="count", first=0),
        channels_last=(True, True),
        order=("text", "media"),
        media_refiner=Stack(refiners, block),
        text_refiner=Stack(refiners, replace(block, source="none")),
        time_width=condition,
        reversed_time=True,
        time_unit=1000.0,
        final=("scale",),
    )


AROUND = {
    "x_embedder.proj": "x_embedder",
    "t_embedder.mlp.0": "time_caption_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_caption_embed.timestep_embedder.linear_2",
    "text_embedder.mlp": "time_caption_embed.caption_embedder.1",
    "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    "final_layer.linear": "norm_out.linear_2",
}
OF_BLOCK = {
    "attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.proj": "attn.to_out.0",
    "attn.q_norm": "attn.norm_q",
    "attn.k_norm": "attn.norm_k",
    "attn_norm_after": "norm2",
    # SiLU is applied to the output of linear_1, not of linear_3.
    "mlp.fc1": ("feed_forward.linear_1", "feed_forward.linear_3"),
    "mlp.fc2": "feed_forward.linear_2",
    "mlp_norm": "ffn_norm1",
    "mlp_norm_after": "ffn_norm2",
}
STACKS = {"blocks": "layers", "media_refiner": "noise_refiner", "text_refiner": "context_refiner"}


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    found = layers(AROUND) + layers({"text_embedder.norm": "time_caption_embed.caption_embedder.0"}, WEIGHT)
    stacks = {"blocks": spec.stacks[0], "media_refiner": spec.media_refiner, "text_refiner": spec.text_refiner}
    for ours, stack in stacks.items():
        blocks = range(stack.count if stack else 0)
        where: dict[str, Any] = dict(ours=f"{ours}.*.", theirs=f"{STACKS[ours]}.*.", blocks=blocks)
        modulated = stack is not None and stack.block.source != "none"
        norm = {"attn_norm": "norm1.norm" if modulated else "norm1"}
        found += layers(OF_BLOCK | norm, WEIGHT, **where)
        found += layers({"adaLN_modulation.1": "norm1.linear"} if modulated else {}, **where)
    return tuple(found)


ORIGINAL = {
    "cap_embedder.1": "time_caption_embed.caption_embedder.1",
    "t_embedder.mlp.0": "time_caption_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_caption_embed.timestep_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    "final_layer.linear": "norm_out.linear_2",
    **{
        f"{stack}.*.{ours}": tuple(f"{stack}.*.{part}" for part in parts)
        for stack in STACKS.values()
        for ours, parts in {
            "attention.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "attention.out": ("attn.to_out.0",),
            "feed_forward.w1": ("feed_forward.linear_1",),
            "feed_forward.w2": ("feed_forward.linear_2",),
            "feed_forward.w3": ("feed_forward.linear_3",),
            **({} if stack == "context_refiner" else {"adaLN_modulation.1": ("norm1.linear",)}),
        }.items()
    },
}

FAMILY = Family(
    name="lumina2",
    network="Lumina2Transformer2DModel",
    pipelines=("Lumina2Pipeline", "Lumina2Text2ImgPipeline"),
    components={
        "tokenizer": ("transformers", "GemmaTokenizerFast"),
        "text_encoder": ("transformers", "Gemma2Model"),
        "vae": ("diffusers", "AutoencoderKL"),
    },
    layout=layout,
    names=names,
    text=Text(256, "remove"),
    latents=LatentSpace("AutoencoderKL", "scalar"),
    guidance=Guidance(4.0, rescaled="row"),
    steps=30,
    license="apache-2.0",
    original=ORIGINAL,
    loadable=("diffusers",),
    architecture="lumina-2",
)
