"""--plugin fsdp --offload blocks: which shards are in host memory, their estimated size, and how early they are
gathered. test_offload.py tests that offloading does not change a run."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from opendit.models.finetuning import Lora, add_lora
from opendit.parallel.engines import build_engine
from opendit.parallel.fsdp import Sharding, hosted_parameters, managed_parameters
from opendit.parallel.host_memory import AHEAD
from opendit.parallel.mesh import Mesh
from opendit.parallel.optimizer import local_part
from opendit.training.memory import Setup, estimate, resolve_sharding
from tests.parallel.engines.test_engines import loss_of
from tests.parallel.engines.test_fsdp import CONFIG, build_model
from tests.ranks import run_ranks

WAYS = [(None, 1), (None, 99), (3, 1), (3, 99)]  # LoRA rank, number of blocks
# Attributes of FSDP2's parameters that opendit/parallel/fsdp.py sets.
SET = {"offload_to_cpu", "pin_memory", "_sharded_param_data", "sharded_param"}


def shards(mesh: Mesh) -> list[dict]:
    found = []
    for rank, count in WAYS:
        model = build_model()
        if rank is not None:
            add_lora(model, Lora(rank, rank, ""), (), seed=0)
        with mock.patch.object(FSDPModule, "set_modules_to_forward_prefetch") as prefetch:
            sharding = Sharding(keep_gathered=False, hosted=count)
            state = "none" if rank else "state"
            engine = build_engine(model, mesh, plugin="fsdp", precision="fp32", sharding=sharding, offload=state)
        every = list(managed_parameters(model))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        hosted = {names[id(each.sharded_param)]: each.sharded_param for each in every if each.offload_to_cpu}
        engine.backward(loss_of(engine.forward, 0, mesh.rank * 2 + torch.arange(2)))
        found.append(
            {
                "attributes": all(vars(each).keys() >= SET for each in every),
                "hosted": list(hosted),
                "named": hosted_parameters(model, count),
                "bytes": sum(local_part(parameter).nbytes for parameter in hosted.values()),
                "gradients": sum(local_part(p.grad).nbytes for p in hosted.values() if p.grad is not None),
                "places": len({local_part(parameter).untyped_storage().data_ptr() for parameter in hosted.values()}),
                "ahead": max(len(call.args[0]) for call in prefetch.call_args_list),
            }
        )
    return found


def test_shards_of_blocks_lie_in_host_memory():
    for found in run_ranks(2, shards):
        for (rank, count), held in zip(WAYS, found, strict=True):
            assert held["places"] == 1, "all lie in one memory, page-locked on a GPU"
            assert held["attributes"] and sorted(held["hosted"]) == sorted(held["named"]) and held["hosted"]
            blocks = {name.split(".")[1] for name in held["hosted"]}
            assert len(blocks) == min(count, CONFIG.depth) and all(
                name.startswith("blocks.") for name in held["hosted"]
            )
            assert not any("lora" in name for name in held["hosted"]) and held["ahead"] == min(AHEAD, CONFIG.depth - 1)
            lora = None if rank is None else Lora(rank, rank, "")
            setup = Setup("fsdp", "fp32", 2, lora=lora, offload=f"blocks:{count}")
            needs, resident = (estimate(CONFIG, replace(setup, offload=how), 1) for how in (setup.offload, "none"))
            assert needs.host["blocks"] == pytest.approx(held["bytes"], rel=0.01)
            moved = needs.host_total - needs.host.get("gradients", 0)
            ring = needs.states.get("ring buffer", 0)
            assert sum(resident.states.values()) - sum(needs.states.values()) == pytest.approx(moved - ring)
            assert resolve_sharding(CONFIG, setup, 1, None).reshard == "after_forward"
            if rank is None:  # gradients of trained blocks; the estimate rounds up each tensor
                assert held["gradients"] == held["bytes"] and {"moments", "averages"} < needs.host.keys()
                assert held["gradients"] <= needs.host["gradients"] <= 2 * held["gradients"]
            else:
                assert held["gradients"] == 0 and needs.host.keys() == {"blocks"}
