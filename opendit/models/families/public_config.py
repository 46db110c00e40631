"""The configurations of public models. A configuration stores the family and the published ``config.json``."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from opendit.config.names import BUT_ATTENTION
from opendit.models.blocks import MLPS, BlockSpec
from opendit.models.conditioning import TextConfig
from opendit.models.configuration import DiTConfig
from opendit.models.families.base import Family, NetworkSpec, Stack, Variant
from opendit.models.plan import (
    Column,
    Execution,
    FlopTerm,
    Heads,
    Kept,
    MemoryTerm,
    Plan,
    Replicated,
    Row,
    Rule,
    StageCuts,
    linear,
)


def published(values: Mapping[str, Any]) -> str:
    """Convert a ``config.json``'s values to the string that a :class:`PublicConfig` stores."""
    return json.dumps(dict(values), sort_keys=True)


@functools.cache
def _spec_of(family: str, config: str, own_blocks: tuple[int, ...] | None = None) -> NetworkSpec:
    try:
        spec = family_of(family).layout(json.loads(config))
    except KeyError as error:
        raise ValueError(f"{error.args[0]}: not in the published configuration") from None
    if own_blocks is None:
        return spec
    return replace(spec, stacks=tuple(Stack(1, spec.blocks[number]) for number in own_blocks))


def family_of(name: str) -> Family:
    from opendit.models.families import FAMILIES as found

    if name not in found:
        raise ValueError(f"a model of family {name!r}: this version knows {', '.join(found)}")
    return found[name]


@dataclass(frozen=True)
class PublicConfig(DiTConfig):
    """The configuration of a public model. Create it with :func:`public_config`, because fields such as hidden_size
    must match the published values."""

    kind: ClassVar[str] = "public"
    plain_projections: ClassVar[bool] = False

    family: str = ""
    published: str = ""  # values of ``config.json``, as JSON
    index: str = "{}"  # settings of ``model_index.json``, and "expert" if one of two networks is selected, as JSON
    own_blocks: tuple[int, ...] | None = None  # numbers of a pipeline rank's blocks; None for all blocks

    @property
    def variant(self) -> Variant | None:
        return family_of(self.family).variant(json.loads(self.index))

    @property
    def expert(self) -> str | None:
        """The selected network, "high" or "low"; None for both, or for a model with a single network."""
        return json.loads(self.index).get("expert")

    @property
    def boundary(self) -> float | None:
        variant = self.variant
        return json.loads(self.index)[variant.setting] if variant is not None and variant.experts else None

    @property
    def index_of_both(self) -> str:
        """``index`` without the selection of one of two networks."""
        return published({key: value for key, value in json.loads(self.index).items() if key != "expert"})

    @property
    def spec(self) -> NetworkSpec:
        return _spec_of(self.family, self.published, self.own_blocks)

    def with_blocks(self, numbers: Sequence[int]) -> "PublicConfig":
        return replace(self, depth=len(numbers), own_blocks=tuple(numbers))

    @property
    def block(self) -> BlockSpec:
        return self.spec.block

    @property
    def sequence_types(self) -> tuple[str, ...]:
        return ("ulysses",)

    @property
    def caption_tokens(self) -> int:
        multiple, text = self.spec.text.multiple, cast(TextConfig, self.text)
        return -(-text.max_tokens // multiple) * multiple if self.joint_sequence else 0

    @property
    def joint_sequence(self) -> bool:
        return bool(self.spec.order)

    @property
    def float8(self) -> bool:
        """True if FP8 supports the blocks. FP8 needs a bias before GELU, and one head of keys and values for each query
        head."""
        blocks = self.spec.blocks
        return all((block.mlp != "gelu" or block.options.bias) and block.kv_heads is None for block in blocks)

    @property
    def longest_side(self) -> int | None:
        return None if self.spec.table is None else self.spec.table[0]

    @property
    def rescaled_guidance(self) -> str:
        return family_of(self.family).guidance.rescaled

    def check_speed(self, fp8: bool, recompute: str) -> None:
        sizes = {size for block in self.spec.blocks for size in (block.width, block.mlp_hidden) if size % 16}
        if fp8 and sizes:
            raise ValueError(f"--fp8: a width of {min(sizes)} is no multiple of 16; leave it out")
        if fp8 and any(block.kv_heads is not None for block in self.spec.blocks):
            raise ValueError("--fp8: does not work with heads that share keys and values; leave it out")
        if recompute not in ("none", BUT_ATTENTION) and not self.recomputable:
            fix = f"use {BUT_ATTENTION} or --grad_checkpoint"
            raise ValueError(f"--recompute {recompute}: does not work with {self.family} models; {fix}")
        # The inherited check for FP8 requires all biases. Public models need only the biases before GELU, and
        # ``float8`` has checked these.
        super().check_speed(fp8 and not self.float8, recompute)

    @property
    def given_channels(self) -> int:
        return 0

    @property
    def given_in_place(self) -> bool:
        return self.given_frames is not None and not self.spec.given

    @property
    def given_beside(self) -> bool:
        return bool(self.spec.given)

    def check_packs(self) -> None:
        if self.given_beside:
            raise ValueError("--pack_tokens: does not work with models of image to video; leave it out")
        super().check_packs()

    @property
    def recomputable(self) -> bool:
        return all(block.mlp in ("gelu", "swiglu") and block.kv_heads is None for block in self.spec.blocks)

    @property
    def tables(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {}

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "family": self.family,
            "published": json.loads(self.published),
            "input_size": self.input_size,
            "max_tokens": cast(TextConfig, self.text).max_tokens,
            **({"index": json.loads(self.index)} if self.index != "{}" else {}),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PublicConfig":
        return public_config(
            values["family"],
            values["published"],
            tuple(values["input_size"]),
            values.get("max_tokens"),
            values.get("index"),
        )

    def check(self) -> None:
        """Do nothing, because the family's function ``layout`` has already checked the published values."""

    @property
    def modulation_width(self) -> int:
        return sum(block.chunks * block.width for block in self.spec.blocks) // self.depth

    def parameters(self) -> int:
        return _parameters(self)[0]

    def whole_block_parameters(self) -> int:
        return _parameters(self)[1] // self.depth


@functools.cache
def _parameters(config: PublicConfig) -> tuple[int, int]:
    from opendit.models.zoo import model_shapes  # imported here, because the zoo imports this module

    counts = {name: math.prod(shape) for name, shape in model_shapes(config)[0].items()}
    return sum(counts.values()), sum(count for name, count in counts.items() if name.startswith("blocks."))


def public_config(
    family: str,
    values: Mapping[str, Any],
    input_size: tuple[int, ...] | None = None,
    max_tokens: int | None = None,
    index: Mapping[str, Any] | None = None,
) -> PublicConfig:
    """Return a public model's configuration. Raises ValueError if the values do not belong to the family.

    Args:
        values: values of ``config.json``.
        input_size, max_tokens: None for the family's defaults.
        index: values of ``model_index.json``, with "expert" ("high" or "low") to select one of two networks.
    """
    about, text = family_of(family), published(values)
    spec, variant = _spec_of(family, text), about.variant(index)
    kept = () if variant is None else (variant.setting, "expert")
    known = {key: value for key, value in (index or {}).items() if key in kept}
    if input_size is None and variant is not None:
        input_size = variant.latent_size
    if input_size is None:
        side = about.image_size if isinstance(about.image_size, tuple) else (about.image_size,) * 2
        input_size = tuple(n // about.latents.downscale for n in side)
        if about.latents.video:
            input_size = ((cast(int, about.frames) - 1) // about.latents.frames_downscale + 1, *input_size)
    patch = spec.patch[0] if len(spec.patch) == 2 else spec.patch
    block = spec.block
    return PublicConfig(
        input_size=input_size,
        patch_size=cast(Any, patch),
        in_channels=spec.channels,
        hidden_size=block.width,
        depth=sum(stack.count for stack in spec.stacks),
        num_heads=block.heads,
        mlp_ratio=block.mlp_hidden / block.width,
        learn_sigma=False,
        text=TextConfig(family, spec.text.width, max_tokens or about.text.tokens, cross_attention=not spec.order),
        qk_norm=block.options.qk_norm,
        bias=block.options.bias,
        positions="rope",
        norm=block.norm,
        mlp=block.mlp,
        family=family,
        published=text,
        given_frames="first" if spec.given else None if variant is None else variant.given_frames,
        index=published(known),
    )


def embedded_guidance(config: DiTConfig, scale: float | None = None) -> float | None:
    """Return the guidance scale for a network with the scale as an input: ``scale``, or the family's default if
    ``scale`` is None. Return None for other networks."""
    if not isinstance(config, PublicConfig) or not config.spec.guidance:
        return None
    return family_of(config.family).guidance.scale if scale is None else scale


# -------------------------------------------------------------------------------------------------- rules of parameters


def rules(config: PublicConfig) -> dict[str, Rule]:
    """Return the rules of all parameters. The text refiner is replicated: every rank runs it on all caption tokens."""
    spec = config.spec
    found: dict[str, Rule] = {
        "x_embedder.proj.*": Replicated(),
        "x_embedder.filling": Replicated(),
        "text_embedder.**": Replicated(),
        "text_refiner.**": Replicated(),
        "picture_embedder.**": Replicated(),
        **({"t_embedder.norm.weight": Replicated()} if spec.time_normed else {}),
        **{f"{name}.mlp.*.*": Replicated() for name in ("t_embedder", "guidance_embedder", "pooled_embedder")},
        **linear("shared_modulation.1", Column(gathered=True)),
        "final_layer.linear.*": Replicated(),
        "final_layer.adaLN_modulation.table": Replicated(),
        **_modulation("final_layer.adaLN_modulation", 1, spec.final_rank is not None),
    }
    for name in ("blocks.*", *(f"blocks.*.{stream}" for stream in spec.order), "media_refiner.*"):
        found |= _block_rules(name, spec.block)
    return found


def _modulation(name: str, number: int, low_rank: bool) -> dict[str, Rule]:
    """Return the rules of the modulation module ``name``. number: index of the module's first linear layer. low_rank:
    True if the modulation is a product of two matrices."""
    first = {f"{name}.{number}.weight": Replicated()} if low_rank else {}
    return first | linear(f"{name}.{number + low_rank}", Column(gathered=True))


def _block_rules(name: str, spec: BlockSpec) -> dict[str, Rule]:
    heads, shared, found = spec.heads, spec.kv_heads or spec.heads, {}
    for branch in ("attn", "cross_attn"):
        of_heads: Rule = Heads((heads,)) if spec.options.qk_across else Replicated()
        found |= {f"{name}.{branch}.{part}_norm.weight": of_heads for part in "qk"}
        found |= linear(f"{name}.{branch}.proj", Row(heads))
    found |= linear(f"{name}.attn.qkv", Heads((heads, shared, shared)))
    found |= linear(f"{name}.cross_attn.q", Heads((heads,)))
    for keys in ("kv", "picture_kv"):
        found |= linear(f"{name}.cross_attn.{keys}", Heads((heads, heads), of_context=True))
    found[f"{name}.cross_attn.picture_norm.weight"] = Heads((heads,))
    found |= linear(f"{name}.mlp.fc1", Column(MLPS[spec.mlp].branches)) | linear(f"{name}.mlp.fc2", Row())
    for norm in ("attn", "cross", "mlp"):
        found |= {f"{name}.{norm}_norm.*": Replicated(), f"{name}.{norm}_norm_after.*": Replicated()}
    branches = spec.source == "branches"
    found |= _modulation(f"{name}.adaLN_modulation{'.*' * branches}", int(spec.silu), branches)
    found[f"{name}.adaLN_modulation.table"] = Replicated()
    return found


def projections(config: PublicConfig) -> dict[str, tuple[str, ...]]:
    """Map linear layers of blocks and refiners to the operations that use them; see ``Plan.projections``."""
    spec, found = config.spec, {}
    for stack in spec.stacks:
        for stream in stack.block.streams or ("",):
            found |= _block_projections(f"blocks.*.{stream}".removesuffix("."), stack.block)
    for name, refiner in (("media_refiner.*", spec.media_refiner), ("text_refiner.*", spec.text_refiner)):
        found |= {} if refiner is None else _block_projections(name, refiner.block)
    return found


def _block_projections(name: str, spec: BlockSpec) -> dict[str, tuple[str, ...]]:
    norm = "rmsnorm" if spec.norm == "rms" else "layernorm"
    last = ("linear",) if spec.source == "none" else ("linear_gate_residual", f"linear_gate_residual_{norm}_modulate")
    found = {
        # If query heads share keys and values, torch computes the qkv projection.
        **({f"{name}.attn.qkv": ("linear_heads",)} if spec.kv_heads is None else {}),
        f"{name}.attn.proj": last,
        f"{name}.mlp.fc1": ("linear_gelu" if spec.mlp == "gelu" else "linear",),
        f"{name}.mlp.fc2": last,
    }
    if spec.options.operations_across:
        found |= {f"{name}.cross_attn.{layer}": ("linear",) for layer in ("q", "proj")}
    return found


def divisible(config: PublicConfig) -> dict[str, dict[str, int]]:
    spec = config.spec.block
    sizes = {"number of heads": spec.heads, "hidden size": spec.width, "MLP width": spec.mlp_hidden}
    if spec.kv_heads is not None:
        sizes["number of heads of keys and values"] = spec.kv_heads
    return {"tp": sizes}


def stages(spec: NetworkSpec) -> StageCuts:
    """Return the network's stage cuts. If captions are in the sequence, only the first stage embeds them."""
    captions = ("text_embedder", "text_refiner", "picture_embedder")
    first = ("x_embedder", "media_refiner")
    every = ("t_embedder", "guidance_embedder", "pooled_embedder", "shared_modulation")
    if spec.order:
        return StageCuts("blocks", first + captions, ("final_layer",), every)
    return StageCuts("blocks", first, ("final_layer",), every + captions)


# ----------------------------------------------------------------------------------------------------- memory and FLOPs

PICTURE_TOKENS = 257  # number of tokens of CLIP's vision encoder, ViT-H/14 at 224 pixels


def _lengths(config: PublicConfig) -> tuple[int, int]:
    """Return a sample's numbers of media tokens and caption tokens, including learned padding."""
    spec, text = config.spec, config.text
    assert text is not None
    media = -(-config.tokens // spec.media_multiple) * spec.media_multiple
    return media, -(-text.max_tokens // spec.text.multiple) * spec.text.multiple


def _attended(config: PublicConfig) -> int:
    return _lengths(config)[1] + PICTURE_TOKENS * bool(config.spec.text.picture)


def _streams(config: PublicConfig, block: BlockSpec) -> int:
    media, text = _lengths(config)
    return media + text * bool(config.spec.order)


def _weights(block: BlockSpec) -> tuple[int, int, int]:
    """Return the numbers of weights in self-attention, MLP, and cross-attention (without the projection to keys and
    values)."""
    d, shared = block.width, (block.kv_heads or block.heads) * block.width // block.heads
    across = any(branch.sees == "caption" for branch in block.branches)
    return 2 * d * (d + shared), (1 + MLPS[block.mlp].branches) * d * block.mlp_hidden, 2 * d * d * across


def _block_flops(block: BlockSpec, tokens: int, captions: int) -> tuple[int, int]:
    own, mlp, cross = _weights(block)
    linears, attention = 2 * tokens * (own + mlp + cross), 4 * tokens * tokens * block.width
    if block.read:  # For the caption's tokens, the block only computes q, k and v.
        linears -= 2 * captions * (block.width**2 + mlp)
    if cross:
        linears += 4 * captions * block.width * (block.context or block.width)
        attention += 4 * tokens * captions * block.width
    if block.source == "branches":
        assert block.options.adaln_lora is not None
        inputs = block.chunks // len(block.values) * (block.condition or block.width)
        linears += 2 * block.options.adaln_lora * (inputs + block.chunks * block.width)
    if block.source == "own":
        linears += 2 * (block.condition or block.width) * block.chunks * block.width
    return linears, attention


def _stack_flops(config: PublicConfig) -> tuple[int, int]:
    text = _attended(config)
    found = [_block_flops(block, _streams(config, block), text) for block in config.spec.blocks]
    linears, attentions = zip(*found, strict=True)
    return sum(linears), sum(attentions)


def _first(config: PublicConfig) -> int:
    """Return the FLOPs of the first stage: patch embedding, refiners, and, if captions are in the sequence, their
    embedding."""
    spec, (media, text) = config.spec, _lengths(config)
    total = 2 * config.tokens * (spec.channels + spec.given + spec.zeros) * math.prod(spec.patch) * spec.block.width
    for refiner, tokens in ((spec.media_refiner, media), (spec.text_refiner, text)):
        if refiner is not None:
            total += refiner.count * sum(_block_flops(refiner.block, tokens, 0))
    return total + (_captions(config) if spec.order else 0)


def _captions(config: PublicConfig) -> int:
    spec, text = config.spec, config.text
    assert text is not None
    width = spec.block.width
    if spec.text.layers == "none":
        return 0
    return 2 * text.max_tokens * width * (spec.text.width + (width if spec.text.layers == "mlp" else 0))


def _every(config: PublicConfig) -> int:
    """Return the FLOPs of the condition (time, guidance, pooled vector) and of the blocks' shared modulation."""
    spec = config.spec
    width = spec.time_width or spec.block.width
    hidden = spec.time_hidden or width
    if spec.time_normed:  # The second layer of the time's embedding outputs the shared modulation.
        return 2 * hidden * (spec.frequencies + spec.shared * spec.block.width)
    time = 2 * hidden * (spec.frequencies + width) * (1 + spec.guidance)
    pooled = 2 * width * (spec.text.pooled + width) * bool(spec.text.pooled)
    shared = 2 * width * spec.shared * spec.block.width
    return time + pooled + shared + (0 if spec.order else _captions(config))


def _last(config: PublicConfig) -> int:
    spec, width = config.spec, config.spec.block.width
    modulation = 0 if spec.final_table else 2 * (spec.time_width or width) * len(spec.final) * width
    if spec.final_rank is not None:
        modulation = 2 * spec.final_rank * (spec.time_width or width) * (1 + len(spec.final))
    tokens = _lengths(config)[0]
    return 2 * tokens * width * math.prod(spec.patch) * spec.channels + modulation


def _kept_by_block(config: PublicConfig, execution: Execution) -> Kept:
    """Return the memory that the block ``execution.block`` keeps for the backward pass; None for the blocks' mean.

    A block keeps its input and the results of norms, projections, rotations, attention, activation and branches. With
    FP8, inputs of linear layers take half the memory; FP8 copies of the weights are added, and of attention's output
    unless LoRA freezes the weights. A branch's output is kept only for the gradient of a gate or of a norm after the
    branch. The levels of --recompute leave out results of norms and of the MLP (opendit/kernels/recompute.py).
    """
    spec, total = config.spec, Kept()
    recomputed_norms = execution.recompute != "none"
    share_of_fc1 = {"half": 0.5, "mlp": 1}.get(execution.recompute, 0)  # of the blocks that recompute fc1's output
    media, _ = _lengths(config)
    between = 0 if execution.fused else 3 if execution.autocast else 1
    blocks = spec.blocks if execution.block is None else (spec.blocks[execution.block],)
    for block in blocks:
        across = any(branch.sees == "caption" for branch in block.branches)
        norms = 1 if block.parallel else 2
        turned = (3 if block.streams else 2) if execution.fused else 4
        # Attention's and MLP's outputs and the sum between them. A stream's part of attention's output is copied. In a
        # parallel block, attention and MLP share one output tensor.
        outputs = 1 if block.parallel else 2 + bool(block.streams)
        units = 1 + (0 if recomputed_norms else norms * (1 + between)) + 4 + turned * block.options.qk_norm + outputs
        wide = block.mlp_hidden / block.width
        fc1, activated = MLPS[block.mlp].branches * (1 - share_of_fc1), execution.recompute in ("none", "norms")
        units += (fc1 + activated) * wide + 1
        units -= 2 * (execution.frozen_gates and not block.norm_after)
        if block.norm_after and (execution.fp8 or not execution.fused):  # torch computes these norms.
            units += 2
        units -= execution.fp8 * (norms + wide - (not execution.frozen_gates)) / 2
        if block.kv_heads is not None:  # Shared k and v are copied for every query head.
            units += 2 * block.kv_heads / block.heads
        if across:
            # On a CPU, torch's RMSNorm also keeps the normalised queries before their multiplication by the weight.
            gated = any(branch.sees == "caption" and branch.modulated for branch in block.branches)
            units += (5 if execution.fused else 6) + 2 * _attended(config) / media
            units += gated and not execution.frozen_gates  # the branch's output
        share = _streams(config, block) / config.tokens / len(blocks)
        weights = max(1, len(block.streams) - len(block.read)) * sum(_weights(block))
        weights = execution.fp8 * (weights + len(block.read) * 3 * block.width**2)
        statistics, numbers = (4 + block.heads) * share, block.chunks * block.width
        total += Kept(units * share, statistics, numbers / len(blocks), weights / len(blocks))
    return total


def backward(config: PublicConfig, execution: Execution) -> float:
    own = 5 + 5 / 4 * (config.mlp_ratio - 4) + execution.frozen_gates  # only trained gates need and free fc2's output
    if execution.recompute not in ("none", "norms"):  # the activation's output, or also fc1's output and input
        own += config.mlp_ratio
        own += (MLPS[config.mlp].branches * config.mlp_ratio + 1) * (execution.recompute != "cheap")
    return own * _streams(config, config.spec.block) / config.tokens


@functools.cache
def plan_of_spec(spec: NetworkSpec) -> Plan:
    return Plan(
        rules,
        divisible,
        (MemoryTerm("blocks", _kept_by_block),),
        backward,
        (
            FlopTerm("linear layers", lambda config: _stack_flops(config)[0] // config.depth),
            FlopTerm(
                "attention",
                lambda config: _stack_flops(config)[1] // config.depth,
                keys=lambda config: _streams(config, config.spec.block),
            ),
            FlopTerm("patches and refiners", _first, place="first"),
            FlopTerm("condition", _every, place="every"),
            FlopTerm("final layer", _last, place="last"),
        ),
        stages(spec),
        projections,
        ("blocks.*", "media_refiner.*", "text_refiner.*"),
    )
