"""Packs under sequence parallelism: captions, segments that span two ranks, and ranks with only padding."""

import functools

import pytest
import torch

from opendit.models.conditioning import TextConfig
from opendit.models.variants import MovieGenConfig, VDiTConfig
from opendit.models.zoo import build_model
from opendit.parallel.mesh import Mesh, init_mesh
from tests.models.packs import assert_same, samples, with_vectors
from tests.models.test_dit import randomised
from tests.parallel.test_sequence import strategy
from tests.ranks import run_ranks

TEXT = TextConfig("t5", 8, 5, True)
CONFIGS = {
    "vDiT": VDiTConfig((4, 8, 8), (2, 2, 2), 3, 48, 2, 4, text=TEXT, positions="rope", qk_norm=True),
    "MovieGen": MovieGenConfig((4, 8, 8), (2, 2, 2), 3, 48, 2, 4, text=TEXT, kv_heads=2),
}
SIZES = [(4, 8, 8), (2, 8, 8), (1, 8, 8), (1, 8, 4), (1, 2, 2)]  # 32 + 16 + 16 + 8 + 1 tokens


def case(name: str):
    torch.manual_seed(0)
    config = CONFIGS[name]
    return with_vectors(randomised(build_model(config))), samples(config, SIZES, torch.float32)


def on_ranks(mesh: Mesh, name: str, kind: str, padding: int):
    mesh = init_mesh(sequence_parallel=mesh.world_size)
    model, given = case(name)
    model.use(sequence=strategy(mesh, kind, model.config))
    outputs = given.packed(model, padding)
    gradients = given.gradients(model, outputs)
    return [x.detach() for x in outputs], {n: mesh.sum(g) / mesh.world_size for n, g in gradients.items()}


@functools.cache
def wanted(name: str):
    model, given = case(name)
    outputs = given.one_by_one(model)
    return [x.detach() for x in outputs], given.gradients(model, outputs)


@pytest.mark.parametrize(
    ("name", "kind", "padding"),
    (
        ("vDiT", "ulysses", 1),
        ("vDiT", "fastseq", 73),  # the second rank has only padding
        ("vDiT", "direct fastseq", 3),
        ("MovieGen", "ulysses", 1),
    ),
)
def test_what_ranks_share_is_what_one_has(name, kind, padding):
    for outputs, gradients in run_ranks(2, on_ranks, name, kind, padding):
        assert_same(outputs, wanted(name)[0], 1e-5)
        assert_same(gradients, wanted(name)[1], 2e-5)


def uneven(mesh: Mesh):
    on_ranks(mesh, "vDiT", "ulysses", 2)


def test_tokens_that_ranks_can_not_share_evenly_are_refused():
    with pytest.raises(Exception, match="75 tokens can't be shared evenly"):
        run_ranks(2, uneven)
