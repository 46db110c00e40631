"""Z-Image (Tongyi-MAI 2025): blocks with one stream of pictures and captions. Before these blocks, separate refiners
process pictures and captions."""

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

MULTIPLE = 32  # Pictures and captions are padded with learned tokens to a multiple of this number.


def layout(values: Mapping[str, Any]) -> NetworkSpec:
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


AROUND = {
    "x_embedder.proj": "all_x_embedder.2-1",
    "t_embedder.mlp.0": "t_embedder.mlp.0",
    "t_embedder.mlp.2": "t_embedder.mlp.2",
    "text_embedder.mlp": "cap_embedder.1",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    "final_layer.linear": "all_final_layer.2-1.linear",
}
OF_BLOCK = {
    "attn.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "attn.proj": "attention.to_out.0",
    "mlp.fc1": ("feed_forward.w1", "feed_forward.w3"),  # SiLU is applied to the output of w1, not of w3
    "mlp.fc2": "feed_forward.w2",
    "attn_norm": "attention_norm1",
    "attn_norm_after": "attention_norm2",
    "mlp_norm": "ffn_norm1",
    "mlp_norm_after": "ffn_norm2",
}
QK_NORMS = {"attn.q_norm": "attention.norm_q", "attn.k_norm": "attention.norm_k"}
STACKS = {"blocks": "layers", "media_refiner": "noise_refiner", "text_refiner": "context_refiner"}


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    found = layers(AROUND) + layers({"text_embedder.norm": "cap_embedder.0"}, WEIGHT)
    found.append(Match(("text_embedder.filling",), ("cap_pad_token",)))
    found.append(Match(("x_embedder.filling",), ("x_pad_token",)))
    stacks = {"blocks": spec.stacks[0], "media_refiner": spec.media_refiner, "text_refiner": spec.text_refiner}
    for ours, stack in stacks.items():
        blocks = range(stack.count if stack else 0)
        where: dict[str, Any] = dict(ours=f"{ours}.*.", theirs=f"{STACKS[ours]}.*.", blocks=blocks)
        found += layers(OF_BLOCK | (QK_NORMS if spec.block.options.qk_norm else {}), WEIGHT, **where)
        if stack and stack.block.source != "none":
            found += layers({"adaLN_modulation.0": "adaLN_modulation.0"}, **where)
    return tuple(found)


ORIGINAL = {
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    "final_layer.linear": "all_final_layer.2-1.linear",
    **{f"{stack}.*.attention.out": f"{stack}.*.attention.to_out.0" for stack in STACKS.values()},
    **{
        f"{stack}.*.attention.qkv": tuple(f"{stack}.*.attention.to_{part}" for part in "qkv")
        for stack in STACKS.values()
    },
}

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
    original=ORIGINAL,
    comfyui="published",
    architecture="z-image",
)
