"""Test --offload on GPUs: a run and its checkpoint keep their bits, with less device memory and no host waits."""

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import find_checkpoint, load_checkpoint
from opendit.checkpoint.save import Checkpoints
from opendit.config.components import SpeedFlags
from opendit.config.names import BLOCKS, OFFLOAD
from opendit.kernels.averages import SeparateAverages
from opendit.kernels.common import interpreting, kernels_available
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import Engine, build_engine
from opendit.parallel.fsdp import Sharding
from opendit.parallel.host_memory import HostMemory
from opendit.parallel.mesh import Mesh
from opendit.training.memory import Setup, estimate
from opendit.training.prepare import make_deterministic
from opendit.training.runners import build_runner
from tests.gpu.test_fsdp_gpu import CONFIG, micro_batch
from tests.kernels.test_averages import check_staged, check_the_bits_of_one_pass
from tests.models.test_dit import randomised
from tests.objectives import SquaredError
from tests.ranks import run_ranks
from train import EagerPasses

AVAILABLE, REASON = kernels_available("cuda", torch.float32)
pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason=REASON)
STEPS, SAVED, SKIPPED = 20, 10, (4, 11)


def engine_of(mesh: Mesh, offload: str) -> tuple[Engine, EMA]:
    torch.manual_seed(0)
    model = randomised(DiT(CONFIG)).to(mesh.device)
    speed = SpeedFlags(True, True, True, attention="flash")  # flash, whose gradients have the same bits every time
    kernels = select_kernels(speed, mesh.device, torch.bfloat16, 64, CONFIG.tokens)
    apply_parallel(model, ops=kernels.ops, attend=kernels.attend)
    settings = dict(lr=1e-3, weight_decay=0.01, offload=offload)
    if offload == BLOCKS:
        settings |= {"sharding": Sharding(keep_gathered=False, hosted=99), "offload": "state"}
    engine = build_engine(model, mesh, plugin="fsdp", precision="bf16", **settings)
    return engine, EMA(engine, [0.9, 0.5])


def train(mesh: Mesh, engine: Engine, ema: EMA, steps: range, graph: bool) -> list[float]:
    """Return the losses. In the steps of SKIPPED, the last rank's loss is not finite."""
    runner, losses = build_runner(EagerPasses(engine, SquaredError()), graph=graph), []
    for step in steps:
        given = micro_batch(mesh, step)
        if step in SKIPPED and mesh.rank == mesh.world_size - 1:
            given.noise[0] = math.nan
        # After the first steps, the host must not wait for the device, so a wait raises an error.
        torch.cuda.set_sync_debug_mode("error" if step - steps.start > 4 else "default")
        result = runner.train_step([given])
        ema.update(result.finite)
        torch.cuda.set_sync_debug_mode("default")
        losses.append(result.loss.clone())
    return [None if math.isnan(loss) else loss for loss in torch.stack(losses).tolist()]


def state_of(engine: Engine, ema: EMA) -> dict[str, Tensor]:
    state = {name: engine.master(name) for name in engine.shapes}
    state |= {f"{key}.{n}": shard for n in engine.shapes for key, shard in engine.moments(n).items()}
    state |= {f"{which}.{n}": shard for which, shards in enumerate(ema.averages) for n, shard in shards.items()}
    state |= {"updates": ema.updates, "steps": torch.tensor(engine.optimizer_steps())}
    return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}


def delayed(move):
    """Delay the update of the averages, to detect code that does not wait before it changes the masters."""

    def late(self, scalars):
        busy = torch.ones(4096, 4096, device=self.device)
        for _ in range(20):
            busy = busy @ busy
        move(self, scalars)

    return late


def runs(mesh: Mesh, folder: Path, graph: bool) -> list[tuple]:
    """Return the losses, the final state and the peak memory for each offload. The same follows for runs that resume
    from the checkpoint of another offload, with delayed averages; their peak is None."""
    make_deterministic()
    train(mesh, *engine_of(mesh, "none"), range(2), graph)  # libraries allocate workspaces that they keep
    ways = (*OFFLOAD, BLOCKS) if mesh.world_size > 1 else OFFLOAD
    found, folders = [], [folder / f"{mesh.world_size}{graph}{offload}" for offload in ways]
    for offload, here in zip(ways, folders, strict=True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine, ema = engine_of(mesh, offload)
        on_host = [ema.averages[0], engine.moments("x_embedder.proj.weight")]
        pinned = [next(iter(part.values())).is_pinned() for part in on_host]
        assert pinned == [offload != "none", offload in ("state", BLOCKS)]
        assert engine.master("blocks.0.mlp.fc1.weight").is_pinned() == (offload == BLOCKS)
        losses = train(mesh, engine, ema, range(SAVED), graph)
        with Checkpoints(here / "checkpoints", engine, ema, {"model": "x"}, sharded=True) as made:
            made.save({"step": SAVED, "epoch": 0, "skipped": 1, "fingerprint": {}})
            losses += train(mesh, engine, ema, range(SAVED, STEPS), graph)
        assert not made.failures
        torch.cuda.reset_peak_memory_stats()
        found.append((losses, state_of(engine, ema), 0))
        train(mesh, engine, ema, range(STEPS, STEPS + 3), False)
        found[-1] = (*found[-1][:2], torch.cuda.max_memory_allocated() - before)
        del engine, ema, made, on_host
    move = SeparateAverages.move
    for offload, there in zip(ways, folders[::-1], strict=True):
        SeparateAverages.move = delayed(move)
        engine, ema = engine_of(mesh, offload)
        train(mesh, engine, ema, range(3), graph)
        load_checkpoint(find_checkpoint(str(there), "", "x", mesh), engine, ema)
        found.append((train(mesh, engine, ema, range(SAVED, STEPS), graph), state_of(engine, ema), None))
        SeparateAverages.move = move
    return found


@pytest.mark.parametrize(("world", "graph"), ((1, False), (1, True), (2, False)))
def test_the_same_bits_in_less_memory(world, graph, tmp_path):
    if torch.cuda.device_count() < world:
        pytest.skip("needs 2 GPUs")
    for rank in run_ranks(world, runs, tmp_path, graph):
        (losses, state, peak), *others = rank
        assert state["updates"] == state["steps"] == STEPS - len(SKIPPED)
        for number, (curve, ended, _) in enumerate(others):
            assert curve == losses[-len(curve) :], (world, graph, number)
            different = [name for name, tensor in state.items() if not torch.equal(ended[name], tensor)]
            assert not different, (world, graph, number, different[:9])
        for offload, (_, _, less) in zip(OFFLOAD[1:], others, strict=False):
            whole = estimate(CONFIG, setup := Setup("fsdp", "bf16", world, averages=2), 1).total
            saved = whole - estimate(CONFIG, replace(setup, offload=offload), 1).total
            # Recordings hold other memory, so the peak is not compared.
            assert graph or peak - less == pytest.approx(saved, rel=0.05), (world, graph, offload)
        if world > 1:  # blocks are on the device only while they compute
            assert others[len(OFFLOAD) - 1][2] < others[len(OFFLOAD) - 2][2]


def test_averages_apart_and_through_a_ring_buffer():
    for odd in (False, True):
        check_the_bits_of_one_pass("cuda", odd=odd)
    check_staged("cuda", pin=True)


def test_host_memory_is_locked_and_given_back():
    """Lock and release many times, possibly at the same addresses."""
    for size in (1000, 5_000_000, 1000, 5_000_000):
        memory = HostMemory(size, torch.device("cuda"))
        (part,), _ = memory.take([torch.empty(size)], 0)
        del memory
        assert part.is_pinned() and part.cuda().add_(1).sum().item() == size
        del part
