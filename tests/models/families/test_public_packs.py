"""Test packs of public models: each sample gives the same results as diffusers' network for that sample alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opendit.models.conditioning import TextCondition
from opendit.models.families.network import PublicDiT
from opendit.models.segments import Interleaved, Segments
from tests.models.families.oracles import ORACLES, by_our_names, captions, in_double_precision, ours
from tests.models.families.test_oracles import difference
from tests.models.packs import pack_patches, unpack_patches

# Sizes and captions vary, but the first two sizes are equal. Z-Image pads all samples but the third to multiples of 32.
SIZES = {
    "flux": [(6, 10), (6, 10), (8, 4), (2, 2), (2, 2)],
    "z_image": [(6, 10), (6, 10), (8, 16), (2, 2), (4, 12)],
    "qwen_image": [(6, 10), (6, 10), (8, 4), (2, 2), (2, 14)],
    "wan": [(3, 6, 10), (3, 6, 10), (1, 8, 4), (1, 8, 4), (2, 2, 2)],
    "ltx": [(3, 3, 5), (3, 3, 5), (1, 4, 2), (1, 1, 1), (1, 1, 1)],
    "sd3": [(6, 10), (6, 10), (8, 4), (2, 2), (2, 2)],
    "cosmos2": [(6, 10), (6, 10), (8, 4), (2, 2), (2, 2)],
    "lumina2": [(6, 10), (6, 10), (8, 4), (2, 2), (2, 2)],
    "flux2": [(3, 5), (3, 5), (4, 2), (1, 1), (1, 1)],
}
LENGTHS = {
    "flux": [7, 7, 3, 1, 5],
    "z_image": [40, 5, 64, 33, 32],
    "wan": [6, 2, 4, 1, 3],
    "qwen_image": [7, 2, 3, 1, 5],
    "lumina2": [7, 3, 6, 1, 7],
    "flux2": [7, 7, 3, 1, 5],
    "ltx": [6, 2, 4, 1, 3],
    "sd3": [7, 7, 3, 1, 5],
    "cosmos2": [6, 2, 4, 1, 3],
}
PADDED = {
    "flux": 7, "z_image": 66, "wan": 8, "qwen_image": 9, "lumina2": 8, "flux2": 7, "ltx": 8, "sd3": 7,
    "cosmos2": 8,
}  # fmt: skip
VARIANTS = {
    "flux": {},
    "z_image": {},
    "z_image without refiners": {"n_refiner_layers": 0},
    "wan": {},
    "qwen_image": {},
    "lumina2": {},
    "flux2": {},
    "ltx": {},
    "sd3": {},
    "cosmos2": {},
}


def gradients_of(predict, module, latents: list[Tensor], y: TextCondition) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the predictions, and gradients for weights, latents and captions of a weighted sum."""
    leaves = [*latents, y.tokens, y.pooled]
    for leaf in leaves:
        leaf.grad = None
        leaf.requires_grad_()
    module.zero_grad()
    outputs = predict(latents, y)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    torch.autograd.backward(outputs, [w.to(x.dtype) for w, x in zip(weights, outputs, strict=True)])
    named = dict(module.named_parameters()) | {f"input {number}": leaf for number, leaf in enumerate(leaves)}
    # Without single blocks, some of the last block's weights for captions do not affect the output.
    found = {name: torch.zeros_like(x) if x.grad is None else x.grad.clone() for name, x in named.items()}
    return [x.detach() for x in outputs], found


def compared(variant: str, dtype: torch.dtype, prepare: Callable[[PublicDiT], Any] = id) -> dict[str, float]:
    """Return the difference of each output and gradient between a pack and diffusers' network, sample by sample.
    prepare: function that is called with our network before it runs."""
    family = variant.split()[0]
    oracle = ORACLES[family](dtype, **VARIANTS[variant])
    model = ours(oracle, dtype)
    prepare(model)
    torch.manual_seed(1)
    channels = oracle.shape[0]
    latents = [torch.randn(channels, *size, dtype=dtype) for size in SIZES[family]]
    y = captions(family, oracle.values, LENGTHS[family], dtype, PADDED[family])
    t = torch.tensor([703.125, 296.875, 921.875, 46.875, 500.0], dtype=dtype)
    sizes = SIZES[family]
    filled = Segments.of(sizes, model.config.patch, 1 << 20).filled
    segments = Segments.of(sizes, model.config.patch, filled + 3)

    def packed(latents, y):
        patches = pack_patches(latents, model.config.patch, segments.tokens)
        patches = torch.cat([patches[:filled], torch.full_like(patches[filled:], 7.0)])  # padding is not used
        return unpack_patches(model(patches, t, y, segments), segments)

    def one_by_one(latents, y):
        parts = [slice(i, i + 1) for i in range(len(latents))]
        return [oracle.theirs(x[None], t[i], y[i])[0] for x, i in zip(latents, parts, strict=True)]

    found, gradients = gradients_of(packed, model, latents, y)
    wanted, theirs = gradients_of(one_by_one, oracle.module, latents, y)
    inputs = {name: theirs.pop(name) for name in list(theirs) if name.startswith("input")}
    theirs = by_our_names(model, theirs) | inputs
    assert gradients.keys() == theirs.keys()
    errors = {f"output {i}": difference(*pair) for i, pair in enumerate(zip(found, wanted, strict=True))}
    return errors | {name: difference(gradients[name], theirs[name]) for name in gradients}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pack_is_its_samples_one_by_one_in_diffusers(variant):
    with in_double_precision():
        found = compared(variant, torch.float64)
    assert len(found) > 20 and not {name: error for name, error in found.items() if not error <= 1e-12}


@pytest.mark.parametrize("family", ["flux", "z_image"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_in_single_precision_and_recomputed(family, recomputed):
    """Recomputed blocks compute their modulation, as with shard units."""

    def prepare(model):
        model.grad_checkpoint = model.modulate_in_blocks = recomputed

    found = compared(family, torch.float32, prepare)
    assert not {name: error for name, error in found.items() if not error <= 2e-5}


def test_streams_are_interleaved_sample_by_sample():
    order = Interleaved.of([[2, 0, 1], [1, 3, 2]], torch.device("cpu"))
    text, media = torch.tensor([[1, 2, 31]]), torch.tensor([[10, 20, 21, 22, 32, 33]])
    joined = order.join([text, media])
    assert joined.tolist() == [[1, 2, 10, 20, 21, 22, 31, 32, 33]]
    assert [part.tolist() for part in order.split(joined)] == [text.tolist(), media.tolist()]
    assert [samples.tolist() for samples in order.samples] == [[0, 0, 2], [0, 1, 1, 1, 2, 2]]
    x = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: order.split(x), x)
