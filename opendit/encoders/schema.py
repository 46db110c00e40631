"""Check the JSON files in a folder of diffusers or transformers before anything is loaded from the folder.

Import this module only where a file is read, because importing pydantic is slow.
"""

from typing import Annotated, Any, Literal

from annotated_types import Interval, Len, MaxLen
from pydantic import FailFast, Field, model_validator

from opendit.common.json_file import MIB
from opendit.common.json_models import FileKind, FileName, OpenJsonObject, Word

# Keys that request code or weights from elsewhere, and are refused -> words for the error message.
REFUSED = {
    "auto_map": "names code to run",
    "custom_pipelines": "names code to run",
    "quantization_config": "asks for a package that unpacks the weights",
    "transformers_weights": "names another file of weights",
    "adapter_config": "asks for an adapter",
}
Width = Annotated[int, Interval(ge=1, le=1 << 16)]
Layers = Annotated[int, Interval(ge=1, le=256)]


class PretrainedConfig(OpenJsonObject):
    """A configuration of transformers or diffusers. Keys that could load code or other files are refused."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        refuse_requests(value)
        return value


def refuse_requests(value: Any) -> None:
    """Raise ValueError if a configuration, at any depth, has a key in REFUSED or an attention implementation from
    outside torch."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in REFUSED and item:
            raise ValueError(f"{key} {REFUSED[key]}, which is not done")
        if key in ("attn_implementation", "_attn_implementation") and item not in (None, "eager", "sdpa"):
            raise ValueError(f"{key} asks for other code than torch's attention, which is not done")
        refuse_requests(item)


class IndexOfWeights(OpenJsonObject):
    """The content of STEM.safetensors.index.json."""

    weight_map: Annotated[dict[Annotated[str, MaxLen(1024)], FileName], FailFast(), MaxLen(1 << 20)]


class ClipSizes(OpenJsonObject):
    """Sizes of CLIP's text encoder, with their bounds."""

    hidden_size: Width = 1
    intermediate_size: Width = 1
    num_hidden_layers: Layers = 1
    num_attention_heads: int = Field(1, ge=1, le=1024)
    max_position_embeddings: int = Field(2, ge=2, le=1 << 20)
    vocab_size: int = Field(1, ge=1, le=1 << 22)
    projection_dim: Width = 1


class TextEncoderConfig(PretrainedConfig, ClipSizes):
    """The config.json of a text encoder (CLIP or T5)."""

    text_config: ClipSizes | None = None
    model_type: Word = ""
    d_model: Width = 1
    d_kv: Width = 1
    d_ff: Width = 1
    num_layers: Layers = 1
    num_heads: int = Field(1, ge=1, le=1024)
    relative_attention_num_buckets: int = Field(2, ge=2, le=1 << 12)
    relative_attention_max_distance: int = Field(1, ge=1, le=1 << 20)


class PublishedTextConfig(TextEncoderConfig):
    """The config.json of a published model's text encoder: CLIP, T5 or a language model."""

    head_dim: Width | None = None
    num_key_value_heads: int | None = Field(None, ge=1, le=1024)
    projection_dim: Width | None = None


VaeWidth = Annotated[int, Interval(ge=1, le=1 << 13)]
VaeWidths = Annotated[list[VaeWidth], Len(1, 8)]
VaeLayers = Annotated[int, Interval(ge=1, le=32)]
Scale = Annotated[float, Interval(gt=0, le=1e6)]
Shift = Annotated[float, Interval(ge=-1e6, le=1e6)]


class VaeConfig(PretrainedConfig):
    """The config.json of any supported autoencoder of diffusers."""

    class_name: Word = Field("", alias="_class_name")
    latent_channels: int = Field(1, ge=1, le=1024)
    z_dim: int = Field(1, ge=1, le=1024)
    in_channels: int = Field(1, ge=1, le=64)
    out_channels: int = Field(1, ge=1, le=64)
    block_out_channels: VaeWidths = [1]
    base_dim: VaeWidth = 1
    decoder_base_dim: VaeWidth | None = None
    dim_mult: VaeWidths = [1]
    layers_per_block: VaeLayers | Annotated[list[VaeLayers], Len(1, 8)] = 1
    num_res_blocks: int = Field(1, ge=1, le=32)
    norm_num_groups: int = Field(1, ge=1, le=1024)
    patch_size: Annotated[int, Interval(ge=1, le=64)] | list[Literal[2]] | None = None
    batch_norm_eps: Annotated[float, Interval(gt=0, le=1)] = 1e-4
    spatial_compression_ratio: Annotated[int, Interval(ge=1, le=1024)] | None = None
    temporal_compression_ratio: Annotated[float, Interval(ge=1, le=64)] | None = None
    patch_size_t: Annotated[int, Interval(ge=1, le=64)] | None = None
    spatio_temporal_scaling: Annotated[list[bool], Len(1, 8)] = [True]
    temperal_downsample: Annotated[list[bool], Len(1, 8)] = [True]
    scaling_factor: Scale | None = None
    shift_factor: Shift | None = None
    latents_mean: Annotated[list[Shift], Len(1, 4096)] | None = None
    latents_std: Annotated[list[Scale], Len(1, 4096)] | None = None


INDEX, PRETRAINED = FileKind(IndexOfWeights, 64 * MIB), FileKind(PretrainedConfig, 4 * MIB)
TEXT, PUBLISHED_TEXT = FileKind(TextEncoderConfig, 4 * MIB), FileKind(PublishedTextConfig, 4 * MIB)
VAE = FileKind(VaeConfig, 4 * MIB)
