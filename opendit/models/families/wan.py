"""Wan 2.1 (Wan Team 2025) and Wan 2.2: video models with self-attention, then attention to the caption, in each block.

- Wan 2.2 TI2V may be conditioned on the first frame: the frame's latents replace the noise, and the frame's tokens have
  time 0.
- Wan 2.2 A14B has two networks: one for times from a boundary on, and one for times below.
- Image-to-video models (I2V) are always conditioned on the first frame, in additional input channels. The blocks of Wan
  2.1 I2V also attend to CLIP's tokens of the first frame.
"""

from collections.abc import Mapping
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
    Variant,
    layers,
)
from opendit.models.layers import Options
from opendit.models.positions import Rotary


def layout(values: Mapping[str, Any]) -> NetworkSpec:
    if values.get("pos_embed_seq_len") is not None:
        raise ValueError("pos_embed_seq_len: models that are given the last frame as well are not known")
    channels, patch = values.get("out_channels") or values["in_channels"], tuple(values["patch_size"])
    given = values["in_channels"] - channels
    if given not in (0, 4 + channels):
        raise ValueError(f"in_channels, out_channels: {values['in_channels']} and {channels} are not known")
    if not values.get("cross_attn_norm", True):
        raise ValueError("cross_attn_norm: models without it are not known")
    heads, size, eps = values["num_attention_heads"], values["attention_head_dim"], values.get("eps", 1e-6)
    if eps != 1e-6:
        raise ValueError(f"eps: {eps} is not known; it is 1e-6")
    if size % 2 or size < 6:
        raise ValueError(f"attention_head_dim: {size} is not an even number from 6 on")
    if len(patch) != 3:
        raise ValueError(f"patch_size: {times(patch)} is not one of frames, rows and columns")
    width, side = heads * size, 2 * (size // 6)
    picture, added = values.get("image_dim") or 0, values.get("added_kv_proj_dim")
    if added != (width if picture else None) or (picture and not given):
        raise ValueError(f"image_dim, added_kv_proj_dim: {picture or None} and {added} are not known")
    block = BlockSpec(
        width,
        heads,
        values["ffn_dim"],
        (ATTENTION, CAPTION, MLP),
        eps=eps,
        caption_norm=True,
        source="table",
        options=Options(
            qk_norm=True,
            qk_across=True,
            qk_eps=eps,
            attends_padding=True,
            operations_across=True,
            pictures=bool(picture),
        ),
    )
    return NetworkSpec(
        channels=channels,
        patch=patch,
        stacks=(Stack(values["num_layers"], block),),
        text=TextEmbedding(values["text_dim"], "mlp", picture=picture),
        rotary=Rotary((size - 2 * side, side, side)),
        channels_last=(False, True),
        convolution=True,
        frequencies=values["freq_dim"],
        shared=block.chunks,
        final_table=True,
        given=given,
    )


AROUND = {
    "x_embedder.proj": "patch_embedding",
    "t_embedder.mlp.0": "condition_embedder.time_embedder.linear_1",
    "t_embedder.mlp.2": "condition_embedder.time_embedder.linear_2",
    "text_embedder.mlp.fc1": "condition_embedder.text_embedder.linear_1",
    "text_embedder.mlp.fc2": "condition_embedder.text_embedder.linear_2",
    "shared_modulation.1": "condition_embedder.time_proj",
    "final_layer.linear": "proj_out",
}
OF_BLOCK = {
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.proj": "attn1.to_out.0",
    "cross_norm": "norm2",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.kv": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.proj": "attn2.to_out.0",
    "mlp.fc1": "ffn.net.0.proj",
    "mlp.fc2": "ffn.net.2",
}
NORMS = {
    "attn.q_norm": "attn1.norm_q",
    "attn.k_norm": "attn1.norm_k",
    "cross_attn.q_norm": "attn2.norm_q",
    "cross_attn.k_norm": "attn2.norm_k",
}


OF_PICTURES = {
    "picture_embedder.norm1": "condition_embedder.image_embedder.norm1",
    "picture_embedder.norm2": "condition_embedder.image_embedder.norm2",
    "picture_embedder.fc1": "condition_embedder.image_embedder.ff.net.0.proj",
    "picture_embedder.fc2": "condition_embedder.image_embedder.ff.net.2",
}


def names(spec: NetworkSpec) -> tuple[Match, ...]:
    blocks = range(spec.stacks[0].count)
    where: dict[str, Any] = dict(ours="blocks.*.", theirs="blocks.*.", blocks=blocks)
    pictures: list[Match] = []
    if spec.text.picture:
        added = {"cross_attn.picture_kv": ("attn2.add_k_proj", "attn2.add_v_proj")}
        pictures = layers(OF_PICTURES) + layers(added, **where)
        pictures += layers({"cross_attn.picture_norm": "attn2.norm_added_k"}, WEIGHT, **where)
    return (
        *pictures,
        *layers(AROUND),
        *layers(OF_BLOCK, **where),
        *layers(NORMS, WEIGHT, **where),
        Match(("final_layer.adaLN_modulation.table",), ("scale_shift_table",)),
        Match(("blocks.*.adaLN_modulation.table",), ("blocks.*.scale_shift_table",), blocks=blocks),
    )


ORIGINAL = {
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "blocks.*.ffn.0": "blocks.*.ffn.net.0.proj",
    "blocks.*.ffn.2": "blocks.*.ffn.net.2",
    **{
        f"blocks.*.{name}_attn.{ours}": f"blocks.*.{attention}.{theirs}"
        for name, attention in (("self", "attn1"), ("cross", "attn2"))
        for ours, theirs in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    },
    # Names that only models with attention to a picture have.
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "blocks.*.cross_attn.k_img": "blocks.*.attn2.add_k_proj",
    "blocks.*.cross_attn.v_img": "blocks.*.attn2.add_v_proj",
}

FAMILY = Family(
    name="wan",
    network="WanTransformer3DModel",
    pipelines=("WanPipeline", "WanImageToVideoPipeline"),
    components={
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    },
    layout=layout,
    names=names,
    text=Text(512, "zero"),
    latents=LatentSpace("AutoencoderKLWan", "channel", video=True),
    guidance=Guidance(5.0),
    steps=50,
    image_size=(480, 832),
    frames=81,
    license="apache-2.0",
    original=ORIGINAL,
    architecture="wan2.1",
    variants=(
        Variant(
            "expand_timesteps", (704, 1280), 121, downscale=16, fps=24.0, given_frames="first", architecture="wan2.2"
        ),
        Variant("boundary_ratio", (720, 1280), steps=40, scale=4.0, architecture="wan2.2", experts=True),
    ),
)
