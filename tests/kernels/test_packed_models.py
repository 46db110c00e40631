"""Test packed models with the kernels in Triton's interpreter: the output and all gradients."""

from dataclasses import replace

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels.recompute import recompute_in
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.public_config import public_config
from opendit.models.variants import MovieGenConfig, VDiTConfig
from opendit.models.zoo import build_model
from tests.models.families.oracles import FLUX, Z_IMAGE
from tests.models.packs import Samples, assert_same, samples, with_vectors
from tests.models.test_dit import randomised

LABELS = DiTConfig((4, 4), 2, 2, 72, 2, 3, num_classes=3)
CAPTIONS = VDiTConfig((2, 4, 4), (2, 2, 2), 2, 72, 1, 3, text=TextConfig("t5", 8, 5, cross_attention=True))
MIXED = DiTConfig((4, 4), 2, 2, 72, 2, 3, num_classes=3, norm="rms", mlp="swiglu", qk_norm=True, positions="rope")
MOVIEGEN = MovieGenConfig((4, 4, 4), (1, 2, 2), 2, 72, 1, 3, num_classes=3, kv_heads=1)
FLOAT8 = DiTConfig((4, 4), 2, 2, 64, 2, 2, num_classes=3)
# Models with captions among the tokens. Pooled vectors have the width of caption tokens.
OF_FLUX = FLUX | dict(
    num_layers=1, num_single_layers=1, attention_head_dim=36, axes_dims_rope=(8, 12, 16), pooled_projection_dim=14
)
OF_Z_IMAGE = Z_IMAGE | dict(dim=72, n_layers=1, n_refiner_layers=1, axes_dims=[4, 8, 12])
JOINT = [public_config(*of, (4, 4), max_tokens=5) for of in (("flux", OF_FLUX), ("z_image", OF_Z_IMAGE))]
SIZES = {2: [(4, 4), (4, 4), (2, 4), (2, 2), (2, 2), (6, 2)], 3: [(2, 4, 4), (4, 2, 4), (1, 4, 2), (1, 4, 2)]}
FLAGS = {
    "all": SpeedFlags(True, True, True),
    "modulate": SpeedFlags(True, False, False),
    "split": SpeedFlags(False, False, True),
}
CPU = torch.device("cpu")


def case(config: DiTConfig) -> tuple[DiT, Samples]:
    torch.manual_seed(0)
    sizes = SIZES[len(config.patch)][3 * config.joint_sequence :]
    return with_vectors(randomised(build_model(config))), samples(config, sizes, torch.float32)


def use(model: DiT, flags: SpeedFlags, recompute: str = "none") -> None:
    choice = select_kernels(flags, CPU, torch.float32, model.config.head_dim, 16, packs=True)
    assert choice.varlen is None and "in packs one call a run" in choice.attention_note
    model.use(ops=choice.ops, attend=choice.attend, varlen=choice.varlen)
    recompute_in(model, recompute)


@pytest.mark.parametrize(
    ("config", "flags"),
    (
        *((config, "all") for config in (LABELS, CAPTIONS, MIXED, MOVIEGEN, *JOINT)),
        (LABELS, "modulate"),
        (MIXED, "modulate"),
        (CAPTIONS, "split"),
    ),
    ids=lambda value: getattr(value, "family", getattr(value, "kind", value)),
)
def test_kernels_give_what_torch_gives_one_by_one(config, flags):
    model, given = case(config)
    wanted = given.one_by_one(model)
    gradients = given.gradients(model, wanted)
    use(model, FLAGS[flags])
    found = given.packed(model, padding=3)
    assert_same(found, wanted, 1e-5)
    assert_same(given.gradients(model, found), gradients, 2e-5)


@pytest.mark.parametrize("config", (LABELS, MIXED, JOINT[1]), ids=("labels", "mixed", "z_image"))
@pytest.mark.parametrize("level", ("norms", "mlp"))
@pytest.mark.parametrize("flags", (SpeedFlags(), FLAGS["modulate"], FLAGS["all"]), ids=("torch", "modulate", "kernels"))
def test_recomputed(config, level, flags):
    model, given = case(config)
    use(model, flags)
    wanted = given.gradients(model, given.packed(model, padding=3))
    use(model, flags, level)
    # Norms round differently (see recompute.py), and the refiners' small gradients show it.
    assert_same(given.gradients(model, given.packed(model, padding=3)), wanted, 2e-5 if config.joint_sequence else 1e-6)


def test_float8_has_the_error_that_it_has_without_packs():
    """The reference is a micro-batch of the same samples, which has the same scales."""
    model, given = case(FLOAT8)
    sizes = [(4, 4)] * 4
    given = samples(FLOAT8, sizes, torch.float32)
    exact = given.one_by_one(model)
    gradients = given.gradients(model, exact)
    use(model, replace(FLAGS["all"], fp8=True))
    batch = list(model(torch.stack(given.latents), given.t, given.y))
    without = given.gradients(model, batch)
    packed = given.packed(model)
    found = given.gradients(model, packed)
    assert_same(packed, batch, 1e-4)
    assert_same(found, without, 2e-2)  # sums over the samples in different orders
    assert_same(packed, exact, 0.1)
    assert_same(found, gradients, 0.25)


def test_float8_of_unequal_segments():
    model, given = case(FLOAT8)
    exact = given.one_by_one(model)
    gradients = given.gradients(model, exact)
    use(model, replace(FLAGS["all"], fp8=True))
    packed = given.packed(model, padding=3)
    assert_same(packed, exact, 0.1)
    assert_same(given.gradients(model, packed), gradients, 0.25)
