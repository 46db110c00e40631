"""Z-Image (Tongyi-MAI 2025): one stream of pictures and captions, each refined alone before."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opendit.models.blocks import ATTENTION, MLP, BlockSpec
from opendit.models.configuration import times
from opendit.models.families.base import Family, Guidance, LatentSpace, Match, Text
from opendit.models.families.network_spec import NetworkSpec, Rotary, Stack, TextEmbedding
from opendit.models.layers import Options

MULTIPLE = 32  # pictures and captions are filled with learned tokens up to a multiple of this


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    """Return the specification of a ZImageTransformer2DModel."""
    if (values.get("all_patch_size"), values.get("all_f_patch_size")) not in (((2,), (1,)), ([2], [1]), (None, None)):
        raise ValueError("all_patch_size, all_f_patch_size: only one patch of 2 x 2 in one frame is known")
    if values.get("siglip_feat_dim") is not None:
        raise ValueError("siglip_feat_dim: models that are given pictures are not known")
    if values.get("t_scale", 1000) != 1000:
        raise ValueError(f"t_scale: {values['t_scale']} is not known; it is 1000")
    width, heads, eps = values["dim"], values["n_heads"], values.get("norm_eps", 1e-5)
    axes = tuple(values["axes_dims"])
    if heads * sum(axes) != width:
        raise ValueError(f"axes_dims, n_heads, dim: {heads} heads of {times(axes)} channels are not {width}")
    condition = min(width, 256)
    block = BlockSpec(
        width,
        heads,
        int(width / 3 * 8),
        (ATTENTION, MLP),
        norm="rms",
        mlp="swiglu",
        eps=eps,
        norm_after=True,
        values=("scale", "gate"),
        tanh_gates=True,
        condition=condition,
        silu=False,
        modulation_bias=True,
        options=Options(bias=False, qk_norm=values.get("qk_norm", True), qk_eps=1e-5),
    )
    refiners = values["n_refiner_layers"]
    return NetworkSpec(
        channels=values["in_channels"],
        patch=(2, 2),
        stacks=(Stack(values["n_layers"], block),),
        text=TextEmbedding(values["cap_feat_dim"], "norm", MULTIPLE),
        rotary=Rotary(axes, values.get("rope_theta", 256.0), "count"),
        channels_last=(True, True),
        order=("media", "text"),
        media_refiner=Stack(refiners, block),
        text_refiner=Stack(refiners, replace(block, source="none")),
        time_width=condition,
        time_hidden=1024,
        reversed_time=True,
        final=("scale",),
        media_multiple=MULTIPLE,
    )


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    """Return the names of all weights."""
    found = []

    def add(ours: str, theirs: str, kinds: tuple[str, ...] = ("weight", "bias"), blocks: range | None = None) -> None:
        found.extend(Match((f"{ours}.{kind}",), (f"{theirs}.{kind}",), blocks=blocks) for kind in kinds)

    for ours, theirs in (
        ("x_embedder.proj", "all_x_embedder.2-1"),
        ("t_embedder.mlp.0", "t_embedder.mlp.0"),
        ("t_embedder.mlp.2", "t_embedder.mlp.2"),
        ("text_embedder.mlp", "cap_embedder.1"),
        ("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1"),
        ("final_layer.linear", "all_final_layer.2-1.linear"),
    ):
        add(ours, theirs)
    add("text_embedder.norm", "cap_embedder.0", ("weight",))
    found.append(Match(("text_embedder.filling",), ("cap_pad_token",)))
    found.append(Match(("x_embedder.filling",), ("x_pad_token",)))
    refiners = spec.text_refiner.count if spec.text_refiner else 0
    for ours, theirs, count in (
        ("blocks", "layers", spec.stacks[0].count),
        ("media_refiner", "noise_refiner", refiners),
        ("text_refiner", "context_refiner", refiners),
    ):
        ours, theirs, blocks = f"{ours}.*", f"{theirs}.*", range(count)
        qkv = tuple(f"{theirs}.attention.to_{name}.weight" for name in "qkv")
        found.append(Match((f"{ours}.attn.qkv.weight",), qkv, blocks=blocks))
        gates = (f"{theirs}.feed_forward.w1.weight", f"{theirs}.feed_forward.w3.weight")
        found.append(Match((f"{ours}.mlp.fc1.weight",), gates, blocks=blocks))
        for name, published in (
            ("attn.proj", "attention.to_out.0"),
            ("mlp.fc2", "feed_forward.w2"),
            ("attn_norm", "attention_norm1"),
            ("attn_norm_after", "attention_norm2"),
            ("mlp_norm", "ffn_norm1"),
            ("mlp_norm_after", "ffn_norm2"),
            *((f"attn.{part}_norm", f"attention.norm_{part}") for part in "qk" if spec.block.options.qk_norm),
        ):
            add(f"{ours}.{name}", f"{theirs}.{published}", ("weight",), blocks)
        if theirs != "context_refiner.*":
            add(f"{ours}.adaLN_modulation.0", f"{theirs}.adaLN_modulation.0", blocks=blocks)
    return tuple(found)


FAMILY = Family(
    name="z_image",
    network="ZImageTransformer2DModel",
    pipelines=("ZImagePipeline",),
    components={
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "text_encoder": ("transformers", "Qwen3Model"),
        "vae": ("diffusers", "AutoencoderKL"),
    },
    layout=layout,
    names=names,
    text=Text(512, "remove"),
    latents=LatentSpace("AutoencoderKL", "scalar"),
    guidance=Guidance(5.0, "cond"),
    steps=50,
    license="apache-2.0",
)
