"""Test models on packs: each sample gives the same output and gradients as alone."""

import functools
from dataclasses import replace

import pytest
import torch

from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.finetuning import Lora, add_lora
from opendit.models.segments import Segments, segment_attention
from opendit.models.variants import ECDiTConfig, MovieGenConfig, STDiTConfig, VDiTConfig
from opendit.models.zoo import build_model
from tests.models.packs import assert_same, pack_patches, samples, unpack_patches, with_vectors
from tests.models.test_dit import randomised

DIT = DiTConfig((8, 8), 2, 3, 48, 2, 2, num_classes=3)
VDIT = functools.partial(VDiTConfig, (4, 8, 8), (2, 2, 2), 3, 48, 2, 2)
PICTURES = [(8, 8), (8, 8), (4, 6), (6, 4), (2, 2), (12, 4), (2, 2)]
CLIPS = [(4, 8, 8), (4, 8, 8), (1, 8, 8), (2, 8, 8), (6, 2, 12), (1, 4, 6), (1, 4, 6)]
CONFIGS = {
    "DiT": (DIT, PICTURES),
    "DiT, rope and norms": (replace(DIT, positions="rope", qk_norm=True, learn_sigma=False), PICTURES),
    "DiT, low rank": (replace(DIT, adaln_lora=4, bias=False), PICTURES),
    "vDiT": (VDIT(num_classes=3), CLIPS),
    "vDiT, rope": (VDIT(num_classes=3, positions="rope"), CLIPS),
    "vDiT, captions": (VDIT(text=TextConfig("t5", 8, 5, True)), CLIPS),
    "vDiT, bytes": (
        VDIT(text=TextConfig("bytes", 8, 5, True), positions="learned"),
        [s for s in CLIPS if s[2] <= 8][:4],
    ),
    "MovieGen": (
        MovieGenConfig((4, 8, 8), (1, 2, 2), 3, 48, 2, 4, text=TextConfig("t5", 8, 5, True), kv_heads=2),
        [(4, 8, 8), (1, 8, 8), (2, 4, 6), (1, 8, 8)],
    ),
}


@functools.cache
def made(name: str):
    config, sizes = CONFIGS[name]
    torch.manual_seed(0)
    model = with_vectors(randomised(build_model(config))).double()
    return model, samples(config, sizes)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pack_is_its_samples_one_by_one(name):
    model, given = made(name)
    wanted, found = given.one_by_one(model), given.packed(model, padding=5)
    # Positions and times are fp32 for all weight dtypes.
    assert_same(found, wanted, 1e-6)
    gradients = given.gradients(model, wanted)
    assert all(gradient.any() for gradient in gradients.values())
    assert_same(given.gradients(model, found), gradients, 1e-6)


@pytest.mark.parametrize("name", ("DiT, rope and norms", "vDiT, captions", "MovieGen"))
def test_routed_blocks_see_the_same_tokens_as_without_packs(name):
    model, given = made(name)
    segments, model.route = given.segments(model.config, padding=5), (1, 2)
    generator, kept = torch.Generator().manual_seed(3), []
    for length in segments.lengths:
        kept.append(torch.randperm(length, generator=generator)[: max(1, length // 3)].sort().values)
    wanted = [
        model(x[None], given.t[i : i + 1], given.y[i : i + 1], kept=kept[i][None])[0]
        for i, x in enumerate(given.latents)
    ]
    counted = replace(segments, kept=tuple(map(len, kept)))
    flat = torch.cat([own + first for own, first in zip(kept, segments.offsets, strict=False)])
    patches = pack_patches(given.latents, model.config.patch, segments.tokens)
    found = unpack_patches(model(patches, given.t, given.y, counted, kept=flat[None]), segments)
    assert_same(found, wanted, 1e-6)
    assert_same(given.gradients(model, found), given.gradients(model, wanted), 1e-6)
    model.route = None


@pytest.mark.parametrize("cut", (False, True))
def test_blocks_that_are_cut_or_recomputed(cut):
    """Blocks are recomputed, or cut by hooks as with shard units and compute their modulation."""
    model, given = made("vDiT, captions")
    wanted = given.gradients(model, given.one_by_one(model))
    hooks = [block.register_forward_pre_hook(lambda *_: None) for block in model.blocks] if cut else []
    model.grad_checkpoint, model.modulate_in_blocks = not cut, cut
    try:
        assert_same(given.gradients(model, given.packed(model, padding=3)), wanted, 1e-6)
    finally:
        model.grad_checkpoint = model.modulate_in_blocks = False
        for hook in hooks:
            hook.remove()


def test_what_lora_adds():
    torch.manual_seed(0)
    model = with_vectors(randomised(build_model(CONFIGS["vDiT, captions"][0])))
    add_lora(model, Lora(3, 6.0, "base"), (), seed=0)
    model, given = randomised(model).double(), made("vDiT, captions")[1]
    wanted, found = given.one_by_one(model), given.packed(model, padding=5)
    assert_same(found, wanted, 1e-6)
    gradients = given.gradients(model, wanted, trained=True)
    assert len(gradients) == 2 * 2 * 7  # two matrices each in two blocks: qkv, proj; q, kv, proj; fc1, fc2
    assert_same(given.gradients(model, found, trained=True), gradients, 1e-6)


def test_nothing_comes_out_of_padding():
    model, given = made("vDiT, captions")
    clean, full = (given.packed(model, padding=7, garbage=value) for value in (0.0, 50.0))
    assert all(torch.equal(a, b) for a, b in zip(clean, full, strict=True))
    wanted = given.gradients(model, clean)
    assert_same(given.gradients(model, full), wanted, 1e-12)  # padding has no gradient


def test_segments_do_not_see_each_other():
    model, given = made("DiT")
    before = given.packed(model)
    given.latents[2] = given.latents[2] + 1
    after = given.packed(model)
    given.latents[2] = given.latents[2] - 1
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [number != 2 for number in range(len(same))]


def test_attention_is_one_call_a_run():
    model, given = made("DiT")
    seen = []

    def attend(q, k, v):
        seen.append(tuple(q.shape))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    model.use(attend=attend)
    given.packed(model, padding=1)
    model.use()
    wanted = [(2, 2, 16, 24), (2, 2, 6, 24), (1, 2, 1, 24), (1, 2, 12, 24), (1, 2, 1, 24)]
    assert seen == wanted * len(model.blocks)


def test_attention_written_out():
    """Compare with attention over all tokens and a mask for segments. Padding gets zeros."""
    segments = Segments(((1, 3, 2), (1, 3, 2), (2, 1, 1), (1, 1, 1)), 18)
    packed, generator = segments.place(torch.device("cpu")), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 18, 4, dtype=torch.float64, generator=generator).unbind()
    rows = packed.sample_of_row.clone()
    rows[segments.filled :] = -torch.arange(1, 1 + 18 - segments.filled)
    scores = (q @ k.mT / 2).masked_fill(rows[:, None] != rows, -torch.inf)
    wanted = torch.softmax(scores, dim=-1) @ v
    wanted[:, :, segments.filled :] = 0
    attend = torch.nn.functional.scaled_dot_product_attention
    for varlen in (None, Varlen()):
        torch.testing.assert_close(segment_attention(q, k, v, packed, attend, varlen), wanted)


class Varlen:
    """A kernel for unequal lengths that takes runs shorter than 10 tokens."""

    def __init__(self):
        self.calls = []

    def takes(self, run):
        return run.length < 10

    def __call__(self, q, k, v, offsets, longest):
        lengths = offsets.diff().tolist()
        assert max(lengths) == longest and sum(lengths) == len(q) and offsets.dtype == torch.int32
        self.calls.append(lengths)
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attend(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts])


def test_a_varlen_kernel_takes_neighbours_that_are_short():
    model, given = made("DiT")
    wanted = given.gradients(model, given.packed(model, padding=2))
    model.use(varlen=(varlen := Varlen()))
    found = given.gradients(model, given.packed(model, padding=2))
    model.use()
    assert varlen.calls == [[6, 6, 1], [1]] * len(model.blocks)
    assert_same(found, wanted, 1e-10)


def test_models_that_can_not_say_why():
    experts = ECDiTConfig((8, 8), 2, 3, 48, 1, 2, num_classes=3, experts=2, expert_hidden=8)
    axial = STDiTConfig((2, 8, 8), (1, 2, 2), 3, 48, 1, 2, num_classes=3)
    for config, size, why in ((experts, (8, 8), "experts choose"), (axial, (2, 8, 8), "axes of one grid")):
        given = samples(config, [size])
        with pytest.raises(ValueError, match=f"--pack_tokens: not {config.kind} models: .*{why}"):
            given.packed(build_model(config).double())


def test_what_does_not_fit_is_named():
    model, given = made("DiT")
    x = torch.zeros(16, 3, 2, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="17 tokens is 17 x 3 x 2 x 2 numbers, not 16 x 3 x 2 x 2"):
        model(x, given.t[:1], given.y[:1], Segments(((1, 4, 4),), 17))
    learned = build_model(replace(DIT, positions="learned")).double()
    with pytest.raises(ValueError, match="--positions learned"):
        samples(DIT, [(10, 4)]).packed(learned)
