"""Test that recomputation in the backward pass gives the same gradients with less memory, for any operations."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels import recompute
from opendit.kernels.recompute import recompute_in, recomputing
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextCondition, TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.models.layers import TORCH_OPS, Projection
from opendit.models.plan import Execution
from opendit.models.zoo import plan_of
from tests.memory import kept_bytes
from tests.models.families.oracles import FLUX2, Z_IMAGE, captions, randomise
from tests.models.test_dit import randomised

LEVELS = ("none", "norms", "cheap", "half", "mlp")
LABELS = DiTConfig((4, 4), 2, 2, 72, 2, 3, num_classes=3)
CAPTIONS = DiTConfig((4, 4), 2, 2, 72, 1, 3, text=TextConfig("t5", 8, 5, cross_attention=True))
NO_BIAS = replace(LABELS, bias=False)
MODERN = replace(LABELS, norm="rms", mlp="swiglu", positions="rope", qk_norm=True)
SPEEDS = {"torch": SpeedFlags(), "kernels": SpeedFlags(True, True, True), "modulate": SpeedFlags(True, False, False)}


def model_of(config: DiTConfig, speed: SpeedFlags, level: str) -> DiT:
    torch.manual_seed(0)
    model = randomised(DiT(config))
    for parameter in model.parameters():  # zeros would hide a missing bias
        if parameter.dim() == 1:
            parameter.data.normal_(std=0.5)
    kernels = select_kernels(speed, torch.device("cpu"), torch.float32, 24, config.tokens)
    model.use(ops=kernels.ops, attend=kernels.attend)
    recompute_in(model, level)
    return model


def inputs(config: DiTConfig, number: int = 0, batch: int = 2):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(batch, 2, *config.input_size, generator=generator)
    t = torch.arange(batch) * 300 + number
    if config.text is None:
        return x, t, torch.arange(batch) % 4
    tokens = torch.randn(batch, 5, 8, generator=generator)
    mask = torch.arange(5) <= torch.arange(batch)[:, None]
    return x, t, TextCondition(tokens, mask, tokens.mean(1))


def gradients(model: DiT, passes: int = 1, retain: int = 1, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Return gradients summed over ``passes`` micro-batches, with ``retain`` backward passes through each."""
    model.zero_grad()
    for number in range(passes):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*inputs(model.config, number)).float().square().mean()
        for _ in range(retain):
            loss.backward(retain_graph=True)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("config", "speed", "how"),
    (
        (LABELS, "torch", {"passes": 2, "retain": 2}),
        (LABELS, "torch", {"autocast": True}),
        (CAPTIONS, "torch", {"passes": 2}),
        (LABELS, "kernels", {}),
        (NO_BIAS, "kernels", {"autocast": True}),
        (NO_BIAS, "torch", {}),
        (LABELS, "modulate", {"autocast": True}),
        (CAPTIONS, "kernels", {"retain": 2, "autocast": True}),
        (MODERN, "torch", {"passes": 2, "retain": 2}),
        (MODERN, "torch", {"autocast": True}),
        (MODERN, "kernels", {"passes": 2}),
        (replace(MODERN, norm="layer", bias=False), "modulate", {"autocast": True}),
        (replace(MODERN, mlp="gelu"), "kernels", {"autocast": True}),
    ),
)
def test_gradients_are_the_same_bits(config, speed, how):
    levels = LEVELS if speed == "torch" else ("none", "cheap", "mlp")
    want, *others = (gradients(model_of(config, SPEEDS[speed], level), **how) for level in levels)
    for got in others:
        for name, grad in want.items():
            assert grad.any() and torch.equal(got[name], grad), name


@pytest.mark.parametrize(("speed", "autocast"), (("torch", False), ("torch", True), ("kernels", False)))
def test_a_block_keeps_so_many_tensors(speed, autocast):
    """Compare the saved bytes of one block and two, which gives the saved tensors of a block."""
    config = DiTConfig((16, 16), 2, 2, 72, 2, 3, num_classes=3)
    x, c = torch.randn(2, config.tokens, 72, requires_grad=True), torch.randn(2, 72, requires_grad=True)
    if autocast:
        x = x.bfloat16().detach().requires_grad_()
    unit = x.numel() * x.element_size()
    kept = {}
    for level in LEVELS:
        blocks = model_of(config, SPEEDS[speed], level).blocks

        def run(count, blocks=blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                h = x
                for block in blocks[:count]:
                    h = block(h, block.modulate(c))
                return h

        kept[level] = (kept_bytes(lambda: run(2)) - kept_bytes(lambda: run(1))) / unit
    cast = 18 * 72 * 72 * 2 / unit if autocast else 0  # autocast keeps bf16 copies of a block's weights
    for level, tensors in zip(LEVELS, (18 if speed == "kernels" else 20, 16, 12, 8, 8), strict=True):
        # The second block with "half" behaves as with "mlp". The slack is for statistics and modulation, small at usual
        # widths.
        assert tensors <= kept[level] - cast < tensors + 0.6, (level, kept)


# the published Z-Image has RMSNorms around each branch; FLUX.2's second block has attention and MLP side by side
PUBLIC = {
    "z_image": ({**Z_IMAGE, "dim": 96, "axes_dims": [16, 8, 8]}, "n_layers"),
    "flux2": ({**FLUX2, "attention_head_dim": 64, "axes_dims_rope": [16] * 4}, "num_single_layers"),
    "modern": (replace(MODERN, input_size=(16, 16)), "depth"),
}


@pytest.mark.parametrize("which", PUBLIC)
def test_the_estimate_counts_what_blocks_with_swiglu_recompute(which):
    """Compare a block's saved bytes with the estimate for its kernels."""
    values, depth = PUBLIC[which]

    def kept(level: str, blocks: int) -> tuple[int, float]:
        if isinstance(values, DiTConfig):
            model = model_of(replace(values, depth=blocks), SPEEDS["kernels"], level)
            config, arguments = model.config, inputs(model.config, batch=3)
        else:
            config = public_config(which, values | {depth: blocks}, (6, 10), max_tokens=7)
            model = PublicDiT(config)
            randomise(model)
            kernels = select_kernels(SPEEDS["kernels"], torch.device("cpu"), torch.float32, config.head_dim, 60)
            model.use(ops=kernels.ops, attend=kernels.attend)
            recompute_in(model, level)
            y = captions(which, values, [5, 7, 2], torch.float32)
            arguments = torch.randn(3, config.in_channels, 6, 10), torch.rand(3), y
        of_block = plan_of(config).kept(config, Execution(recompute=level, block=config.depth - 1))
        values_of_a_sample = config.tokens * (of_block.units * config.hidden_size + of_block.statistics)
        return kept_bytes(lambda: model(*arguments)), 3 * 4 * (values_of_a_sample + of_block.numbers)

    found = {}
    for level in ("none", "cheap", "mlp"):
        (one, _), (two, estimated) = kept(level, 1), kept(level, 2)
        found[level] = two - one, estimated
    assert all(count == pytest.approx(estimated, rel=0.03) for count, estimated in found.values()), found


def test_autocasts_copy_of_an_fp32_activation_is_not_kept():
    """Under autocast, torch's LayerNorm returns fp32 on a GPU, and for an fp32 input everywhere."""
    thrifty, layer = recomputing(TORCH_OPS, "cheap"), Projection(72, 216)
    x, shift = torch.randn(2, 256, 72, requires_grad=True), torch.randn(2, 72, requires_grad=True)

    def run(ops):
        with torch.autocast("cpu", torch.bfloat16):
            return ops.linear_heads(ops.layernorm_modulate(x, shift, shift), layer, 3)

    qkv, weight = 3 * x.numel() * 2, 216 * 72 * 2  # the result, and autocast's copy of the weight
    assert 0 <= kept_bytes(lambda: run(thrifty)) - qkv - weight < x.numel() / 4
    leaves = x, shift, layer.weight
    want, got = (torch.autograd.grad(run(ops)[2].square().sum(), leaves) for ops in (TORCH_OPS, thrifty))
    assert all(map(torch.equal, got, want))


def test_fc1s_product_is_made_once():
    made, model = [], model_of(LABELS, SpeedFlags(), "mlp")
    for block in model.blocks:
        block.mlp.fc1.register_forward_pre_hook(lambda *_: made.append(torch.is_grad_enabled()))
    gradients(model)
    assert made == [True, True, False, False]  # forward and backward of two blocks


def test_memory_is_released():
    """The backward pass frees recomputed tensors, and the end of the graph frees what could recompute them."""
    seen = []
    model = model_of(LABELS, SpeedFlags(), "mlp")
    made = recompute.Recomputed.__init__

    def watch(self, *args):
        made(self, *args)
        seen.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute.Recomputed, "__init__", watch)
        loss = model(*inputs(LABELS)).square().mean()
    loss.backward(retain_graph=True)
    alive = [made() for made in seen if made() is not None]
    assert len(alive) >= 8 and all(made.result is None for made in alive)
    del alive, loss
    gc.collect()
    assert not any(made() for made in seen)


def test_without_gradients_nothing_can_be_recomputed():
    model = model_of(LABELS, SpeedFlags(), "mlp")
    with torch.no_grad():
        y = model.blocks[0].ops.layernorm_modulate(torch.randn(1, 6, 72), *torch.randn(2, 1, 72))
        assert not hasattr(y, "recomputed")
        assert torch.equal(model(*inputs(LABELS)), model_of(LABELS, SpeedFlags(), "none")(*inputs(LABELS)))
