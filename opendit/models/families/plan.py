"""The plan of a public model: parameter rules, costs and stage cuts, all computed from the model's specification."""

import functools
import math

from opendit.models.blocks import MLPS, BlockSpec
from opendit.models.families.network_spec import NetworkSpec
from opendit.models.families.public_config import PublicConfig
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

# -------------------------------------------------------------------------------------------------- rules of parameters


def rules(config: PublicConfig) -> dict[str, Rule]:
    """Return the rules of all parameters. The text refiner is replicated, because every rank runs it on all tokens of
    a caption."""
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
    """Return the rules of the modulation module ``name``, whose first linear layer is its submodule ``number``.
    low_rank: True if the modulation is a product of two matrices."""
    first = {f"{name}.{number}.weight": Replicated()} if low_rank else {}
    return first | linear(f"{name}.{number + low_rank}", Column(gathered=True))


def _block_rules(name: str, spec: BlockSpec) -> dict[str, Rule]:
    heads, shared, found = spec.heads, spec.kv_heads or spec.heads, {}
    for branch in ("attn", "cross_attn"):
        of_heads: Rule = Heads((heads,)) if spec.options.qk_across else Replicated(partial_gradient=True)
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
    """Return the operations that use each linear layer of the blocks and the refiners; see ``Plan.projections``."""
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
        # If query heads share keys and values, torch computes the qkv projection, and no operation uses it.
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
    """Return the points at which a pipeline may divide the network. If captions are in the sequence, only the first
    stage embeds them."""
    captions = ("text_embedder", "text_refiner", "picture_embedder")
    first = ("x_embedder", "media_refiner")
    every = ("t_embedder", "guidance_embedder", "pooled_embedder", "shared_modulation")
    if spec.order:
        return StageCuts("blocks", first + captions, ("final_layer",), every)
    return StageCuts("blocks", first, ("final_layer",), every + captions)


# ---------------------------------------------------------------------------------------------------- memory and work

PICTURE_TOKENS = 257  # number of tokens of CLIP's vision encoder, ViT-H/14 at 224 pixels


def _lengths(config: PublicConfig) -> tuple[int, int]:
    """Return the numbers of tokens of a sample's media and of its caption, including learned padding."""
    spec, text = config.spec, config.text
    assert text is not None
    media = -(-config.tokens // spec.media_multiple) * spec.media_multiple
    return media, -(-text.max_tokens // spec.text.multiple) * spec.text.multiple


def _attended(config: PublicConfig) -> int:
    """Return the number of tokens that cross-attention attends to: the caption's, and the picture's if there is one."""
    return _lengths(config)[1] + PICTURE_TOKENS * bool(config.spec.text.picture)


def _streams(config: PublicConfig, block: BlockSpec) -> int:
    """Return the number of a sample's tokens in a block of the main stack."""
    media, text = _lengths(config)
    return media + text * bool(config.spec.order)


def _weights(block: BlockSpec) -> tuple[int, int, int]:
    """Return the numbers of weights by which a token is multiplied in self-attention, in the MLP, and in
    cross-attention. The last number excludes the projection to keys and values."""
    d, shared = block.width, (block.kv_heads or block.heads) * block.width // block.heads
    across = any(branch.sees == "caption" for branch in block.branches)
    return 2 * d * (d + shared), (1 + MLPS[block.mlp].branches) * d * block.mlp_hidden, 2 * d * d * across


def _block_flops(block: BlockSpec, tokens: int, captions: int) -> tuple[int, int]:
    """Return the FLOPs of one sample in a block: those of the linear layers, and those of attention."""
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
    """Return the FLOPs of all blocks of the main stack: those of the linear layers, and those of attention."""
    text = _attended(config)
    found = [_block_flops(block, _streams(config, block), text) for block in config.spec.blocks]
    linears, attentions = zip(*found, strict=True)
    return sum(linears), sum(attentions)


def _first(config: PublicConfig) -> int:
    """Return the FLOPs of the first stage: patch embedding, refiners, and the embedding of captions that are in the
    sequence."""
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
    """Return the FLOPs of the condition (time, guidance, pooled vector) and of the modulation that blocks share."""
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
    """Return the memory that a block keeps for the backward pass, averaged over the stack.

    A block keeps x, each branch's modulated norm, q, k and v before and after norm and rotation, attention's output,
    fc1's output and activation, and the branches' outputs. Without fusion, it also keeps normalised outputs and the
    tensors between norm and modulation and between norm and rotation. With two streams, it also keeps the joined q, k
    and v. In FP8, inputs of linear layers take half the memory, and weights are kept in FP8. Attention's output is then
    kept in FP8 in addition to the tensors that the attention kernel keeps. Only gradients of gates, and of norms after
    a branch, need the outputs of the two modulated branches."""
    spec, total = config.spec, Kept()
    media, _ = _lengths(config)
    between = 0 if execution.fused else 3 if execution.autocast else 1
    for block in spec.blocks:
        across = any(branch.sees == "caption" for branch in block.branches)
        norms = 1 if block.parallel else 2
        turned = (3 if block.streams else 2) if execution.fused else 4
        outputs = 1 if block.parallel else 3  # in a parallel block, attention and MLP share one output tensor
        units = 1 + norms * (1 + between) + 4 + turned * block.options.qk_norm + outputs
        wide = block.mlp_hidden / block.width
        units += (1 + MLPS[block.mlp].branches) * wide + 1
        units -= 2 * (execution.frozen_gates and not block.norm_after)
        if block.norm_after and (execution.fp8 or not execution.fused):  # torch computes these norms.
            units += 2
        units -= execution.fp8 * (norms + wide - 1) / 2
        if block.kv_heads is not None:  # Shared k and v are copied for every query head.
            units += 2 * block.kv_heads / block.heads
        if across:
            units += 5 + 2 * _attended(config) / media
        share = _streams(config, block) / config.tokens / config.depth
        weights = max(1, len(block.streams) - len(block.read)) * sum(_weights(block))
        weights = execution.fp8 * (weights + len(block.read) * 3 * block.width**2)
        statistics, numbers = (4 + block.heads) * share, block.chunks * block.width
        total += Kept(units * share, statistics, numbers / config.depth, weights / config.depth)
    return total


def backward(config: PublicConfig, execution: Execution) -> float:
    own = 5 + 5 / 4 * (config.mlp_ratio - 4) + execution.frozen_gates  # fc2's output was freed if gates are trained
    return own * _streams(config, config.spec.block) / config.tokens


@functools.cache
def plan_of_spec(spec: NetworkSpec) -> Plan:
    """Return the plan of all models with this specification."""
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
