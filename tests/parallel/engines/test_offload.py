"""--offload with --plugin fsdp: offloading changes no bit of a run, its checkpoints or its resumption.

On the CPU, work of the GPU's side stream is delayed until it is waited for, so a missing wait makes a test fail.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opendit.checkpoint.ema import EMA, WARMUP
from opendit.checkpoint.load import find_checkpoint, load_checkpoint
from opendit.checkpoint.save import Checkpoints
from opendit.config.names import OFFLOAD
from opendit.models.finetuning import Lora, add_lora
from opendit.parallel.engines import Engine, build_engine
from opendit.parallel.fsdp import Sharding
from opendit.parallel.host_memory import HostMemory
from opendit.parallel.mesh import Mesh
from tests.parallel.engines.test_engines import BETAS, CLIP, LR, loss_of
from tests.parallel.engines.test_fsdp import build_model
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Case:
    """A run of ``steps`` steps, the first ``read`` of which read the averages. ``sharded`` is its checkpoint format."""

    precision: str = "fp32"
    accumulation: int = 1
    lora: int | None = None
    sharded: bool = True
    read: int = 0
    steps: int = 8

    @property
    def saved(self) -> int:
        return self.steps // 2 + 1

    @property
    def skipped(self) -> tuple[int, int]:
        return self.saved - 2, self.saved + 1


# Number of blocks whose shards are in host memory, in addition to averages and moments. With LoRA, blocks are frozen.
HOSTED = {"a block": 1, "blocks": 10**6}
WAYS = (*OFFLOAD, *HOSTED)
CASES = [
    Case(steps=12),
    Case("bf16", accumulation=2, sharded=False, read=8),
    Case("fp16"),
    Case(lora=3, sharded=False),
]


def engine_of(mesh: Mesh, case: Case, offload: str) -> tuple[Engine, EMA]:
    model = build_model()
    if case.lora is not None:
        add_lora(model, Lora(case.lora, case.lora, ""), (), seed=0)
    settings = dict(lr=LR, weight_decay=0.01, betas=BETAS, grad_clip=CLIP, grad_accumulation=case.accumulation)
    if offload in HOSTED:
        settings["sharding"], offload = Sharding(keep_gathered=False, hosted=HOSTED[offload]), "state"
    engine = build_engine(model, mesh, plugin="fsdp", precision=case.precision, offload=offload, **settings)
    return engine, EMA(engine, [0.9, 0.3], WARMUP if case.steps > 8 else 0)


def train(mesh: Mesh, case: Case, engine: Engine, ema: EMA, steps: range) -> list[float]:
    """Return the losses. In the steps ``case.skipped`` the last rank has a gradient that is not finite."""
    losses = []
    for step in steps:
        total = torch.zeros(())
        for m in range(case.accumulation):
            index = (m * mesh.world_size + mesh.rank) * 2 + torch.arange(2)
            with engine.micro_batch(last=m == case.accumulation - 1):
                loss = loss_of(engine.forward, step, index) / case.accumulation
                bad = step in case.skipped and mesh.rank == mesh.world_size - 1
                engine.backward(loss * float("nan") if bad else loss)
            total += loss.detach()
        result = engine.step()
        assert result.finite or step in case.skipped or case.precision == "fp16"
        ema.update(result.finite)
        if step < case.read:
            ema.averages[0]
        losses.append(total.item())
    return losses


def state_of(engine: Engine, ema: EMA) -> dict[str, Tensor]:
    state = {name: engine.master(name) for name in engine.shapes}
    state |= {f"{key}.{n}": shard for n in engine.shapes for key, shard in engine.moments(n).items()}
    state |= {f"{which}.{n}": shard for which, shards in enumerate(ema.averages) for n, shard in shards.items()}
    state |= {"updates": ema.updates, "steps": torch.tensor(engine.optimizer_steps())}
    return {name: tensor.clone() for name, tensor in state.items()}


def runs(mesh: Mesh, folder: Path) -> list[tuple]:
    """Return losses and final state of every case and offload, and of resumptions from another offload."""
    found, ways = [], WAYS if mesh.world_size > 1 else OFFLOAD
    for number, case in enumerate(CASES[: 2 * mesh.world_size]):
        before = [folder / f"{number}-{mesh.world_size}-{offload}" for offload in (ways[-1], *ways)]
        ends = []
        for offload, here in zip(ways, before[1:], strict=True):
            engine, ema = engine_of(mesh, case, offload)
            losses = train(mesh, case, engine, ema, range(case.saved))
            more = dict(sharded=case.sharded)
            with Checkpoints(here / "checkpoints", engine, ema, {"model": "x"}, **more) as made:
                made.save({"step": case.saved, "epoch": 0, "skipped": 1, "fingerprint": {}})
                losses += train(mesh, case, engine, ema, range(case.saved, case.steps))  # during the save
            assert not made.failures
            ends.append((losses, state_of(engine, ema)))
        for offload, there in zip(ways, before, strict=False):
            engine, ema = engine_of(mesh, case, offload)
            train(mesh, case, engine, ema, range(2))  # so that there is state to overwrite
            load_checkpoint(find_checkpoint(str(there), "", "x", mesh), engine, ema)
            ends.append((train(mesh, case, engine, ema, range(case.saved, case.steps)), state_of(engine, ema)))
        found.append(ends)
    return found


@pytest.mark.parametrize("world", (1, 2))
def test_the_same_bits_wherever_state_lies(world, tmp_path):
    for rank in run_ranks(world, runs, tmp_path):
        for case, ((losses, state), *others) in zip(CASES, rank, strict=False):
            assert state["updates"] == state["steps"] == case.steps - 2 or case.precision == "fp16"
            assert any(not torch.equal(state[n], state[f"1{n[1:]}"]) for n in state if n.startswith("0.")), case
            for curve, ended in others:
                assert curve == losses[-len(curve) :], case
                assert ended.keys() == state.keys()
                for name, tensor in state.items():
                    assert torch.equal(ended[name], tensor), (case, name)


def lies(mesh: Mesh) -> dict[str, dict[str, bool]]:
    """Return for each offload whether each state is in memory allocated by HostMemory."""
    made, found = [], {}
    make = HostMemory.__init__

    def watched(self, numel, device):
        make(self, numel, device)
        made.append((self.numbers.data_ptr(), self.numbers.data_ptr() + self.numbers.nbytes))

    def inside(tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < stop for start, stop in made)

    HostMemory.__init__ = watched
    for offload in WAYS:
        engine, ema = engine_of(mesh, Case(), offload)
        name = "blocks.0.attn.qkv.weight"
        moments = engine.moments(name).values()
        states = {"masters": [engine.master(name)], "moments": moments, "averages": [a[name] for a in ema.averages]}
        found[offload] = {state: all(map(inside, tensors)) for state, tensors in states.items()}
        train(mesh, Case(), engine, ema, range(2))
        assert all(map(torch.any, moments))  # the steps write to these moments
    HostMemory.__init__ = make
    return found


def test_what_lies_in_host_memory():
    for found in run_ranks(2, lies):
        assert [place["masters"] for place in found.values()] == [False] * 4 + [True]
        assert [place["averages"] for place in found.values()] == [False] + [True] * 4
        assert [place["moments"] for place in found.values()] == [False] * 2 + [True] * 3


def before_and_after(mesh: Mesh) -> list[bool]:
    """Use the averages right after a step in five ways; return whether the results equal those without offload."""
    found = []
    for ask in ("read", "gather", "applied", "set_master", "step"):
        ends = []
        for offload in ("none", "average"):
            engine, ema = engine_of(mesh, Case(), offload)
            train(mesh, Case(), engine, ema, range(1))
            if ask == "read":
                ends.append(list(ema.averages[0].values()))
            elif ask == "gather":
                ends.append([full for _, full in ema.gather()])
            elif ask == "applied":
                with ema.applied(model := build_model()):
                    ends.append([p.detach().clone() for p in model.parameters()])
            elif ask == "set_master":
                for name in engine.shapes:
                    engine.set_master(name, torch.zeros_like(engine.master(name)))
                ends.append(list(ema.averages[0].values()))
            else:
                train(mesh, Case(), engine, ema, range(1, 2))
                ends.append(list(ema.averages[0].values()))
        found.append(all(torch.equal(a, b) for a, b in zip(*ends, strict=True)))
    return found


def test_averages_are_waited_for():
    for found in run_ranks(2, before_and_after):
        assert found == [True] * 5


def test_other_plugins_and_other_words_are_refused():
    for plugin, offload in (("zero2", "average"), ("fsdp", "weights")):
        with pytest.raises(ValueError, match=f"offload {offload} with plugin {plugin}"):
            build_engine(build_model(), None, plugin=plugin, precision="fp32", offload=offload)
