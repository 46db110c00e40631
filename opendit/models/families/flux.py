"""FLUX.1 (Black Forest Labs 2024), dev and schnell: blocks with two streams, then blocks with one stream and parallel
attention and MLP."""

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
    channels, axes = values["in_channels"], tuple(values.get("axes_dims_rope", (16, 56, 56)))
    if values.get("patch_size", 1) != 1:
        raise ValueError("patch_size: only 1, of latents that are packed by 2 x 2, is known")
    if values.get("out_channels") not in (None, channels):
        raise ValueError("out_channels: models that are given pictures are not known")
    if channels % 4:
        raise ValueError(f"in_channels: {channels} are not those of 2 x 2 latents")
    heads, size = values["num_attention_heads"], values["attention_head_dim"]
    width = heads * size
    if sum(axes) != size:
        raise ValueError(f"axes_dims_rope: {times(axes)} do not divide heads of {size} channels")
    double = BlockSpec(
        width,
        heads,
        4 * width,
        (ATTENTION, MLP),
        options=Options(qk_norm=True),
        streams=STREAMS,
    )
    return NetworkSpec(
        channels=channels // 4,
        patch=(2, 2),
        stacks=(
            Stack(values["num_layers"], double),
            Stack(values["num_single_layers"], replace(double, streams=(), parallel=True)),
        ),
        text=TextEmbedding(values["joint_attention_dim"], pooled=values["pooled_projection_dim"]),
        rotary=Rotary(axes),
        order=STREAMS,
        guidance=values.get("guidance_embeds", False),
        final=("scale", "shift"),
    )


AROUND = {
    "x_embedder.proj": "x_embedder",
    "text_embedder.mlp": "context_embedder",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
EMBEDDERS = {
    "t_embedder": "timestep_embedder",
    "pooled_embedder": "text_embedder",
    "guidance_embedder": "guidance_embedder",
}
OF_STREAM = {
    "media": {
        "attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "attn.proj": "attn.to_out.0",
        "adaLN_modulation.1": "norm1.linear",
        "mlp.fc1": "ff.net.0.proj",
        "mlp.fc2": "ff.net.2",
    },
    "text": {
        "attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "attn.proj": "attn.to_add_out",
        "adaLN_modulation.1": "norm1_context.linear",
        "mlp.fc1": "ff_context.net.0.proj",
        "mlp.fc2": "ff_context.net.2",
    },
}
NORMS = {
    "media": {"attn.q_norm": "attn.norm_q", "attn.k_norm": "attn.norm_k"},
    "text": {"attn.q_norm": "attn.norm_added_q", "attn.k_norm": "attn.norm_added_k"},
}
OF_SINGLE = {
    "attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "adaLN_modulation.1": "norm.linear",
    "mlp.fc1": "proj_mlp",
}


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    double, single = spec.stacks[0].count, spec.stacks[1].count
    found = layers(AROUND)
    for ours, theirs in EMBEDDERS.items():
        if spec.guidance or ours != "guidance_embedder":
            both = {"mlp.0": "linear_1", "mlp.2": "linear_2"}
            found += layers(both, ours=f"{ours}.", theirs=f"time_text_embed.{theirs}.")
    for stream in STREAMS:
        where: dict[str, Any] = dict(theirs="transformer_blocks.*.", blocks=range(double))
        found += layers(OF_STREAM[stream], ours=f"blocks.*.{stream}.", **where)
        found += layers(NORMS[stream], WEIGHT, ours=f"blocks.*.{stream}.", **where)
    theirs, blocks = "single_transformer_blocks.*.", range(double, double + single)
    where = dict(ours="blocks.*.", theirs=theirs, blocks=blocks, offset=double)
    found += layers(OF_SINGLE, **where) + layers(NORMS["media"], WEIGHT, **where)
    # In the published weights, one projection is applied to the concatenated outputs of both branches.
    outputs = ("blocks.*.attn.proj.weight", "blocks.*.mlp.fc2.weight")
    found.append(Match(outputs, (f"{theirs}proj_out.weight",), 1, blocks, double))
    found.append(Match(("blocks.*.mlp.fc2.bias",), (f"{theirs}proj_out.bias",), 0, blocks, double))
    return tuple(found)


ORIGINAL = {  # Black Forest Labs' names
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
    **{
        f"{name}.{ours}_layer": f"time_text_embed.{theirs}.linear_{number}"
        for name, theirs in (
            ("time_in", "timestep_embedder"),
            ("vector_in", "text_embedder"),
            ("guidance_in", "guidance_embedder"),
        )
        for number, ours in enumerate(("in", "out"), start=1)
    },
    **{
        f"double_blocks.*.{name}": tuple(f"transformer_blocks.*.{part}" for part in parts)
        for name, parts in {
            "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "img_attn.proj": ("attn.to_out.0",),
            "img_mod.lin": ("norm1.linear",),
            "img_mlp.0": ("ff.net.0.proj",),
            "img_mlp.2": ("ff.net.2",),
            "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "txt_attn.proj": ("attn.to_add_out",),
            "txt_mod.lin": ("norm1_context.linear",),
            "txt_mlp.0": ("ff_context.net.0.proj",),
            "txt_mlp.2": ("ff_context.net.2",),
        }.items()
    },
    **{
        f"single_blocks.*.{name}": tuple(f"single_transformer_blocks.*.{part}" for part in parts)
        for name, parts in {
            "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
            "linear2": ("proj_out",),
            "modulation.lin": ("norm.linear",),
        }.items()
    },
}

FAMILY = Family(
    name="flux",
    network="FluxTransformer2DModel",
    pipelines=("FluxPipeline",),
    components={
        "tokenizer": ("transformers", "CLIPTokenizer"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "tokenizer_2": ("transformers", "T5TokenizerFast"),
        "text_encoder_2": ("transformers", "T5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKL"),
    },
    layout=layout,
    names=names,
    text=Text(512, "attend", pooled=True),
    latents=LatentSpace("AutoencoderKL", "scalar"),
    guidance=Guidance(3.5, "embedded"),
    steps=28,
    license="FLUX.1-dev: flux-1-dev-non-commercial-license; FLUX.1-schnell: apache-2.0",
    original=ORIGINAL,
    # diffusers stores scale, shift; the original file shift, scale
    exchanged=frozenset({"final_layer.adaLN_modulation.1"}),
    architecture="flux-1",
)
