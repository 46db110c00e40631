"""FP8 under --plugin fsdp: blocks cast weights that were gathered, and whose bf16 memory is freed before the backward
pass. In Triton's interpreter, on gloo ranks."""

import pytest
import torch

from opendit.kernels.operations import FLOAT8, chosen
from opendit.models import DiTConfig
from opendit.parallel.apply import Sharding
from opendit.parallel.engines import build_engine
from opendit.parallel.mesh import Mesh
from tests.kernels import conftest  # noqa: F401  (ranks round as hardware does, too)
from tests.kernels.test_kernels_in_models import with_vectors
from tests.parallel.test_sequence import fresh
from tests.ranks import run_ranks

CONFIG = DiTConfig((6, 10), 2, 2, 64, 2, 4, num_classes=5)


def gradients(mesh: Mesh, plugin: str, sharding: Sharding | None = None, float8: bool = True) -> dict:
    model = with_vectors(fresh(CONFIG))
    if float8:
        model.use(ops=chosen({FLOAT8}))
    precision = "bf16" if float8 else "fp32"
    engine = build_engine(model, mesh, plugin=plugin, precision=precision, sharding=sharding)
    generator = torch.Generator().manual_seed(mesh.rank)
    x, target = torch.randn(2, 1, CONFIG.in_channels, 6, 10, generator=generator)
    with engine.micro_batch(last=True):
        output = engine.forward(x, torch.tensor([300 + mesh.rank]), y=torch.tensor([mesh.rank]))
        engine.backward((output[:, : CONFIG.in_channels].float() - target).square().mean())
    shards = {name: shard[: engine.layout.local(name).shape[0]] for name, shard in engine.gradient_shards().items()}
    return {name: engine.layout.gather(name, shard.float()).clone() for name, shard in shards.items()}


def of_both(mesh: Mesh) -> tuple[dict, ...]:
    ways = ("zero2", None), ("fsdp", Sharding(keep_gathered=False)), ("fsdp", Sharding(keep_gathered=True))
    return gradients(mesh, "zero2", float8=False), *(gradients(mesh, *way) for way in ways)


@pytest.mark.timeout(300)
def test_gradients_are_as_near_as_those_of_zero2():
    exact, zero2, freed, kept = run_ranks(2, of_both)[0]
    for name, gradient in exact.items():
        size, error = gradient.norm(), (zero2[name] - gradient).norm()
        assert torch.equal(freed[name], kept[name]), name
        # (Shard units cut the stack, so that what is quantised at a block's border was rounded once more.)
        assert (freed[name] - gradient).norm() < 1.25 * error + 0.01 * size, name
    matrices = [name for name in exact if name.startswith("blocks") and exact[name].dim() == 2]
    assert all((freed[n] - exact[n]).norm() > 1e-3 * exact[n].norm() for n in matrices)  # it is FP8 at work
