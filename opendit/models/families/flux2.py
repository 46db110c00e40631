"""FLUX.2 (Black Forest Labs 2025), dev and klein: FLUX.1's two kinds of blocks without biases and with SwiGLU. All
blocks of a kind share one modulation."""

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

STREAMS = ("text", "media")


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    channels, axes = values["in_channels"], tuple(values.get("axes_dims_rope", (32, 32, 32, 32)))
    if values.get("patch_size", 1) != 1:
        raise ValueError("patch_size: only 1, of latents that are packed by 2 x 2, is known")
    if values.get("out_channels") not in (None, channels):
        raise ValueError("out_channels: models of other outputs than inputs are not known")
    if values.get("eps", 1e-6) != 1e-6:
        raise ValueError(f"eps: {values['eps']} is not known; it is 1e-6")
    heads, size = values["num_attention_heads"], values["attention_head_dim"]
    width = heads * size
    if sum(axes) != size or len(axes) != 4:
        raise ValueError(f"axes_dims_rope: {times(axes)} do not divide heads of {size} channels")
    double = BlockSpec(
        width,
        heads,
        int(width * values.get("mlp_ratio", 3.0)),
        (ATTENTION, MLP),
        mlp="swiglu",
        source="shared",
        options=Options(bias=False, qk_norm=True),
        streams=STREAMS,
    )
    single = replace(double, streams=(), parallel=True, shared_first=double.chunks)
    return NetworkSpec(
        channels=channels,
        patch=(1, 1),
        stacks=(Stack(values["num_layers"], double), Stack(values["num_single_layers"], single)),
        text=TextEmbedding(values["joint_attention_dim"]),
        rotary=Rotary(axes, values.get("rope_theta", 2000), "last"),
        order=STREAMS,
        frequencies=values.get("timestep_guidance_channels", 256),
        guidance=values.get("guidance_embeds", True),
        shared=double.chunks + single.chunks,
        final=("scale", "shift"),
        bias=False,
    )


SHARED = ("double_stream_modulation_txt", "double_stream_modulation_img", "single_stream_modulation")
AROUND = {
    "x_embedder.proj": "x_embedder",
    "text_embedder.mlp": "context_embedder",
    "shared_modulation.1": tuple(f"{name}.linear" for name in SHARED),
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
OF_STREAM = {
    "media": {
        "attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "attn.proj": ("attn.to_out.0",),
        "attn.q_norm": ("attn.norm_q",),
        "attn.k_norm": ("attn.norm_k",),
        "mlp.fc1": ("ff.linear_in",),
        "mlp.fc2": ("ff.linear_out",),
    },
    "text": {
        "attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "attn.proj": ("attn.to_add_out",),
        "attn.q_norm": ("attn.norm_added_q",),
        "attn.k_norm": ("attn.norm_added_k",),
        "mlp.fc1": ("ff_context.linear_in",),
        "mlp.fc2": ("ff_context.linear_out",),
    },
}
OF_SINGLE = {"attn.q_norm": "attn.norm_q", "attn.k_norm": "attn.norm_k"}


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    double, single = spec.stacks[0].count, spec.stacks[1].count
    found = layers(AROUND, WEIGHT)
    embedders = {"t_embedder": "timestep_embedder"} | (
        {"guidance_embedder": "guidance_embedder"} if spec.guidance else {}
    )
    for ours, theirs in embedders.items():
        both = {"mlp.0": "linear_1", "mlp.2": "linear_2"}
        found += layers(both, WEIGHT, ours=f"{ours}.", theirs=f"time_guidance_embed.{theirs}.")
    for stream in STREAMS:
        where: dict[str, Any] = dict(theirs="transformer_blocks.*.", blocks=range(double))
        found += layers(OF_STREAM[stream], WEIGHT, ours=f"blocks.*.{stream}.", **where)
    theirs, blocks = "single_transformer_blocks.*.", range(double, double + single)
    found += layers(OF_SINGLE, WEIGHT, ours="blocks.*.", theirs=theirs, blocks=blocks, offset=double)
    # The published weights have one input projection and one output projection for both attention and MLP.
    for dim, parts, fused in ((0, ("attn.qkv", "mlp.fc1"), "to_qkv_mlp_proj"), (1, ("attn.proj", "mlp.fc2"), "to_out")):
        weights = tuple(f"blocks.*.{part}.weight" for part in parts)
        found.append(Match(weights, (f"{theirs}attn.{fused}.weight",), dim, blocks, double))
    return tuple(found)


ORIGINAL = {  # Black Forest Labs' names
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
    **{f"{name}.lin": f"{name}.linear" for name in SHARED},
    **{
        f"{name}_in.{ours}_layer": f"time_guidance_embed.{theirs}_embedder.linear_{number}"
        for name, theirs in (("time", "timestep"), ("guidance", "guidance"))
        for number, ours in enumerate(("in", "out"), start=1)
    },
    **{
        f"double_blocks.*.{short}_{name}": tuple(f"transformer_blocks.*.{part}" for part in OF_STREAM[stream][ours])
        for stream, short in (("media", "img"), ("text", "txt"))
        for ours, name in zip(
            ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"), ("attn.qkv", "attn.proj", "mlp.0", "mlp.2"), strict=True
        )
    },
    "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
    "single_blocks.*.linear2": "single_transformer_blocks.*.attn.to_out",
}

FAMILY = Family(
    name="flux2",
    network="Flux2Transformer2DModel",
    pipelines=("Flux2Pipeline",),
    components={
        "tokenizer": ("transformers", "PixtralProcessor"),
        "text_encoder": ("transformers", "Mistral3ForConditionalGeneration"),
        "vae": ("diffusers", "AutoencoderKLFlux2"),
    },
    layout=layout,
    names=names,
    text=Text(512, "attend"),
    latents=LatentSpace("AutoencoderKLFlux2", "batch", downscale=16),
    guidance=Guidance(4.0, "embedded"),
    steps=50,
    license="FLUX.2-dev: flux-dev-non-commercial-license",
    original=ORIGINAL,
    # diffusers stores scale, shift; the original file shift, scale
    exchanged=frozenset({"final_layer.adaLN_modulation.1"}),
    loadable=("diffusers", "kohya"),
    architecture="flux-2",
    when={"guidance_embeds": True},
    shift="empirical",
)
KLEIN = replace(
    FAMILY,
    name="flux2_klein",
    pipelines=("Flux2KleinPipeline",),
    components={
        "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        "text_encoder": ("transformers", "Qwen3Model"),
        "vae": ("diffusers", "AutoencoderKLFlux2"),
    },
    guidance=Guidance(4.0),
    distilled=(4, 1.0),
    license="FLUX.2-klein-4B: apache-2.0; FLUX.2-klein-9B: flux-non-commercial-license",
    when={"guidance_embeds": False},
)
