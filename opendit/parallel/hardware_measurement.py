"""Measure the fields of :class:`opendit.parallel.hardware.HardwareModel` for a card and its links.

The measurements communicate with NCCL on GPUs and with gloo on CPUs. Every measured time is the maximum over the ranks.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from opendit.config.parallel_sizes import ParallelDims
from opendit.parallel.hardware import H200, HardwareModel, of_card
from opendit.parallel.mesh import Mesh

TRIALS = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the operations that are timed."""

    product: int = 8192  # side of multiplied matrices
    copied: int = 1 << 30  # bytes that are copied
    shard: int = 256 << 20  # bytes that each rank contributes to an all-gather
    tokens: int = 8192  # size of attention
    heads: int = 24


ON_GPUS, ON_CPUS = Sizes(), Sizes(product=512, copied=16 << 20, shard=1 << 20, tokens=256, heads=2)


class _Timer:
    """Measures the median time of repeated calls, in seconds, on the slowest rank."""

    def __init__(self, mesh: Mesh, trials: int):
        self.mesh, self.trials = mesh, trials

    def __call__(self, call: Callable[[], object]) -> float:
        call()  # the first call sets up libraries and communicators
        times = []
        for _ in range(self.trials):
            self._wait()
            self.mesh.barrier()
            start = time.perf_counter()
            call()
            self._wait()
            times.append(-self.mesh.least(-(time.perf_counter() - start)))
        return statistics.median(times)

    def _wait(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)


def measure_hardware(mesh: Mesh, node: int, sizes: Sizes | None = None, trials: int = TRIALS) -> HardwareModel:
    """Measure the hardware of the ranks of ``mesh``, with ``node`` ranks on each machine. Call on all ranks. Raises
    ValueError if the number of ranks is not a multiple of ``node``.

    Fields for launches, symmetric memory, overlap and links of more ranks are not measured. Their values come from
    :func:`of_card`, or from the H200.
    """
    world, cuda = mesh.world_size, mesh.device.type == "cuda"
    if world % node:
        raise ValueError(f"{world} processes are no whole number of machines of {node}")
    sizes = sizes or (ON_GPUS if cuda else ON_CPUS)
    name = torch.cuda.get_device_name(mesh.device) if cuda else "CPU"
    base, timer = of_card(name) or H200, _Timer(mesh, trials)
    found = _card(mesh, sizes, timer)
    found["matmul_fp8"] = base.matmul_fp8 / base.matmul * found["matmul"]
    found |= _links(mesh, node, sizes, timer)
    if world > node:
        found |= _across(mesh, node, sizes, timer)
    if cuda:
        found["capacity"] = mesh.least(torch.cuda.get_device_properties(mesh.device).total_memory)
    measured = ", ".join(sorted(found))
    return replace(base, name=name, origin=f"measured here by {world} ranks, {node} a machine: {measured}", **found)


def _card(mesh: Mesh, sizes: Sizes, timer: _Timer) -> dict[str, float]:
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(mesh.device, dtype)

    a, b = random(sizes.product, sizes.product), random(sizes.product, sizes.product)
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=mesh.device).fill_(1)
    target = torch.empty_like(source)
    q, k, v, grad = (random(1, sizes.heads, sizes.tokens, 128) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    forward = timer(lambda: F.scaled_dot_product_attention(q, k, v))
    both = timer(lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), leaves, grad))
    flops = 4 * sizes.heads * sizes.tokens**2  # FLOPs for each element of a head
    # factors to convert rates at this length to rates at large lengths
    there, back = ((sizes.tokens + half) / sizes.tokens for half in (H200.attention_half, H200.attention_half_backward))
    return {
        "matmul": 2 * sizes.product**3 / timer(lambda: a @ b),
        "memory": 2 * sizes.copied / timer(lambda: target.copy_(source)),
        "attention": there * flops / forward,
        "attention_backward": back * 2.5 * flops / max(both - forward, 0.1 * both),
    }


def _links(mesh: Mesh, node: int, sizes: Sizes, timer: _Timer) -> dict[str, Any]:
    """Measure a machine's links: all-gathers in groups of neighbouring ranks, and in the largest group also all-to-alls
    and transfers to the next rank."""
    world, gathers = mesh.world_size, []
    groups = [size for size in (2, 4, 8, 16) if node % size == 0]
    if node > 1 and node not in groups:
        groups.append(node)
    group = None
    for size in groups:
        group = mesh.divided(ParallelDims(dp_shard=world // size, sp=size)).group("sp")
        gathers.append((size, _gathered(mesh, group, size, sizes.shard, timer)))
    if not gathers:
        return {}
    size = gathers[-1][0]
    sent = torch.empty(sizes.shard // size * size, dtype=torch.uint8, device=mesh.device)
    received = torch.empty_like(sent)
    exchange = timer(lambda: dist.all_to_all_single(received, sent, group=group))
    after, before = ((dist.get_rank(group) + step) % size for step in (1, -1))
    hop = timer(lambda: _pass_on(sent, received, after, before, group))
    small = torch.empty(size, dtype=torch.uint8, device=mesh.device)
    latency = timer(lambda: dist.all_gather_into_tensor(small, small[:1].clone(), group=group))
    link = sizes.shard * (size - 1) / size / exchange
    return {"gather": tuple(sorted(gathers)), "link": link, "copies": sizes.shard / hop, "latency": latency}


def _across(mesh: Mesh, node: int, sizes: Sizes, timer: _Timer) -> dict[str, float]:
    """Measure the links between machines while all ranks use them at once."""
    nodes = mesh.world_size // node
    group = mesh.divided(ParallelDims(dp_replicate=nodes, dp_shard=node)).group("dp_replicate")
    small = torch.empty(nodes, dtype=torch.uint8, device=mesh.device)
    latency = timer(lambda: dist.all_gather_into_tensor(small, small[:1].clone(), group=group))
    rate = _gathered(mesh, group, nodes, sizes.shard, timer)
    return {"node_link": rate, "node_latency": latency / (nodes - 1)}


def _gathered(mesh: Mesh, group: dist.ProcessGroup | None, size: int, shard: int, timer: _Timer) -> float:
    mine = torch.empty(shard, dtype=torch.uint8, device=mesh.device)
    whole = torch.empty(size * shard, dtype=torch.uint8, device=mesh.device)
    return (size - 1) * shard / timer(lambda: dist.all_gather_into_tensor(whole, mine, group=group))


def _pass_on(sent: Tensor, received: Tensor, after: int, before: int, group: dist.ProcessGroup | None) -> None:
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=group, group_peer=before),
        ]
    )
    for work in works:
        work.wait()
