"""FLUX.1 (Black Forest Labs 2024), dev and schnell: two streams, then one, with attention and MLP side by side."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opendit.models.blocks import ATTENTION, MLP, BlockSpec
from opendit.models.configuration import times
from opendit.models.families.base import Family, Guidance, LatentSpace, Match, Text
from opendit.models.families.network_spec import NetworkSpec, Rotary, Stack, TextEmbedding
from opendit.models.layers import Options

STREAMS = ("text", "media")


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    """Return the specification of a FluxTransformer2DModel."""
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


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    """Return the names of all weights."""
    double, single = spec.stacks[0].count, spec.stacks[1].count
    found = []

    def add(ours: str, theirs: str, blocks: range | None = None, offset: int = 0) -> None:
        for kind in ("weight", "bias"):
            found.append(Match((f"{ours}.{kind}",), (f"{theirs}.{kind}",), 0, blocks, offset))

    def join(ours: str, theirs: tuple[str, ...], blocks: range, offset: int = 0) -> None:
        for kind in ("weight", "bias"):
            found.append(Match((f"{ours}.{kind}",), tuple(f"{name}.{kind}" for name in theirs), 0, blocks, offset))

    for ours, theirs in (
        ("x_embedder.proj", "x_embedder"),
        ("text_embedder.mlp", "context_embedder"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ("final_layer.linear", "proj_out"),
    ):
        add(ours, theirs)
    embedders = {"t_embedder": "timestep_embedder", "pooled_embedder": "text_embedder"}
    if spec.guidance:
        embedders["guidance_embedder"] = "guidance_embedder"
    for ours, theirs in embedders.items():
        for number, place in (("0", "1"), ("2", "2")):
            add(f"{ours}.mlp.{number}", f"time_text_embed.{theirs}.linear_{place}")

    blocks, theirs = range(double), "transformer_blocks.*"
    qkv = {"media": ("to_q", "to_k", "to_v"), "text": ("add_q_proj", "add_k_proj", "add_v_proj")}
    last = {"media": "to_out.0", "text": "to_add_out"}
    for stream in STREAMS:
        ours, context = f"blocks.*.{stream}", "_context" if stream == "text" else ""
        join(f"{ours}.attn.qkv", tuple(f"{theirs}.attn.{name}" for name in qkv[stream]), blocks)
        add(f"{ours}.attn.proj", f"{theirs}.attn.{last[stream]}", blocks)
        for part in "qk":
            norm = f"norm_added_{part}" if stream == "text" else f"norm_{part}"
            found.append(Match((f"{ours}.attn.{part}_norm.weight",), (f"{theirs}.attn.{norm}.weight",), blocks=blocks))
        add(f"{ours}.adaLN_modulation.1", f"{theirs}.norm1{context}.linear", blocks)
        add(f"{ours}.mlp.fc1", f"{theirs}.ff{context}.net.0.proj", blocks)
        add(f"{ours}.mlp.fc2", f"{theirs}.ff{context}.net.2", blocks)

    blocks, theirs, ours = range(double, double + single), "single_transformer_blocks.*", "blocks.*"
    join(f"{ours}.attn.qkv", tuple(f"{theirs}.attn.to_{name}" for name in "qkv"), blocks, double)
    for part in "qk":
        found.append(
            Match((f"{ours}.attn.{part}_norm.weight",), (f"{theirs}.attn.norm_{part}.weight",), 0, blocks, double)
        )
    add(f"{ours}.adaLN_modulation.1", f"{theirs}.norm.linear", blocks, double)
    add(f"{ours}.mlp.fc1", f"{theirs}.proj_mlp", blocks, double)
    # One projection of both branches' outputs, side by side.
    both = (f"{ours}.attn.proj.weight", f"{ours}.mlp.fc2.weight")
    found.append(Match(both, (f"{theirs}.proj_out.weight",), 1, blocks, double))
    found.append(Match((f"{ours}.mlp.fc2.bias",), (f"{theirs}.proj_out.bias",), 0, blocks, double))
    return tuple(found)


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
)
