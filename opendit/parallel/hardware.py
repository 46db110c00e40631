"""Hardware of the cost models: rates of a card, and of the links between cards and between machines.

:data:`H200` holds measurements on H200s (benchmarks/results.csv, docs/sequence_parallel.md). Other cards of
:data:`CARDS` have these figures scaled by the ratio of the data sheets: expected, not measured. ``python -m
opendit.cli.links`` measures the machines at hand (:func:`measure_hardware`: on GPUs over NCCL, on CPUs over gloo; every
figure is that of the slowest rank) and keeps the figures in a file, which replaces either.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from opendit.common.safe_files import write_whole
from opendit.config.parallel_sizes import ParallelDims
from opendit.parallel.mesh import Mesh

GIB = 2**30
FORMAT = "opendit-hardware-1"  # of the file


@dataclass(frozen=True)
class HardwareModel:
    """Rates of a card, in half precision, and of its links. The defaults are those of an H200, joined by NVLink.

    FLOP rates are those of single operations; in a whole training step, at its power limit, a card reaches the share
    ``sustained`` of the rate of products. ``direct`` describes not a card but the ranks whose cost is computed.
    """

    name: str = "H200"
    origin: str = "measured on H200s, links between machines assumed"
    capacity: float = 139.8 * GIB  # bytes of memory, as torch counts them
    direct: bool = False  # ranks reach each other's memory (opendit/parallel/sequence/peer_memory.py)
    # ------------------------------------------------------------------------------------------------- computation
    matmul: float = 640e12  # FLOP/s of large products
    matmul_fp8: float = 1150e12
    launch: float = 4e-6  # s, what a product takes beyond that
    # FLOP/s of attention for each element of a head, up to 128 of them: a head takes as long with 72, and ``small`` of
    # that up to 64. The backward pass is 2.5 times the work.
    attention: float = 5.1e12
    attention_backward: float = 4.35e12
    small: float = 0.69
    attention_half: int = 115  # keys with which attention reaches half of these rates
    attention_half_backward: int = 256
    partial: float = 2.9e12  # of the kernel that attends to a part of the keys and returns their log-sum-exp
    partial_backward: float = 2.45e12
    memory: float = 3.6e12  # bytes/s read or written
    sustained: float = 0.96
    host: float = 2.2e-3  # s, that Python takes to launch a block's kernels, forward and backward, without a CUDA graph
    multiprocessors: int = 132
    tile: int = 128  # queries that one multiprocessor attends from at a time
    # ------------------------------------------------------------------------------------------- links of a machine
    link: float = 230 * GIB  # bytes/s that a rank receives in an all-to-all or a hop of a ring
    # (ranks of a machine, bytes/s that each receives in an all-gather among them)
    gather: tuple[tuple[int, float], ...] = ((2, 240 * GIB), (4, 305 * GIB), (8, 327 * GIB))
    copies: float = 270 * GIB  # bytes/s that copy engines bring beside matrix products
    latency: float = 20e-6  # s, of a collective or a hop
    barrier: float = 5e-6  # s, of an exchange through symmetric memory
    part: float = 10e-6  # s, of another rank's tokens in FastSeq, each way: a copy's start, and smaller products
    group: float = 40e-6  # s, of each further group of heads: more and smaller kernels, in both directions
    tail: float = 0.03  # of an SM wave of attention, that some wait at the end of each further group of heads
    overlap: float = 0.3  # of a collective, what computation of its length beside it hides: they share multiprocessors
    host_link: float = 100e9  # bytes/s between a card and its host, both directions together
    # -------------------------------------------------------------------------------------- links between machines
    node_link: float = 40 * GIB  # bytes/s that a rank receives from other machines: 400 Gbit/s a card, assumed
    node_latency: float = 10e-6  # s, of a hop between machines, assumed
    node_overlap: float = 0.8  # as overlap, of transfers that the network and not the cards bound, assumed

    def gather_rate(self, ranks: int) -> float:
        """Return the bytes/s that each of this number of ranks of a machine receives in an all-gather or
        reduce-scatter."""
        below = [rate for size, rate in self.gather if size <= ranks]
        return below[-1] if below else self.gather[0][1]

    def attention_rates(self, head_dim: int, keys: int) -> tuple[float, float]:
        """Return the FLOP/s of attention, forward and backward, for this size of a head, if each query attends to
        ``keys``."""
        elements = min(head_dim, 128) / (1 if head_dim > 64 else self.small) * min(1, keys / self.tile)  # whole tiles
        forward = self.attention * keys / (keys + self.attention_half)
        backward = self.attention_backward * keys / (keys + self.attention_half_backward)
        return elements * forward, elements * backward


H200 = HardwareModel()


@dataclass(frozen=True)
class Card:
    """Figures of a data sheet.

    Attributes:
        capacity: GiB, as torch counts them.
        bf16, fp8: TFLOP/s of dense products.
        memory: TB/s.
        link: GB/s to other cards, each direction.
    """

    capacity: float  # GiB, as torch counts them
    bf16: float
    fp8: float
    memory: float
    link: float


CARDS = {
    "H200": Card(139.8, 989, 1979, 4.8, 450),
    "H100": Card(79.1, 989, 1979, 3.35, 450),
    "A100": Card(79.1, 312, 312, 2.04, 300),
    "L40S": Card(44.4, 362, 733, 0.864, 32),  # no NVLink: PCIe
    "4090": Card(23.5, 165, 330, 1.008, 32),
}


def of_card(name: str) -> HardwareModel | None:
    """Return the model of a card whose name contains one of :data:`CARDS` ("NVIDIA A100-SXM4-80GB"), or None."""
    found = next((card for card in CARDS if card.lower() in name.lower()), None)
    if found is None or found == "H200":
        return H200 if found else None
    card, known = CARDS[found], CARDS["H200"]
    compute, memory, link = card.bf16 / known.bf16, card.memory / known.memory, card.link / known.link
    rates = dict.fromkeys(("matmul", "attention", "attention_backward", "partial", "partial_backward"), compute)
    rates |= {"matmul_fp8": card.fp8 / known.fp8, "memory": memory, "link": link, "copies": link}
    scaled = {field: getattr(H200, field) * ratio for field, ratio in rates.items()}
    gather = tuple((ranks, rate * link) for ranks, rate in H200.gather)
    origin = "an H200's figures scaled by the data sheets: expected, not measured"
    return replace(H200, name=found, origin=origin, capacity=card.capacity * GIB, gather=gather, **scaled)


# --------------------------------------------------------------------------------------------------------- the file


def default_path() -> Path:
    """Return the default file for the measurements of ``python -m opendit.cli.links``, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opendit" / "hardware.json"


def save(model: HardwareModel, path: Path) -> None:
    """Write a file, and make its folder. Raises OSError if it can't."""
    text = json.dumps({"format": FORMAT, **asdict(model)}, indent=1) + "\n"
    write_whole(path, text.encode(), make=True)


def load(path: Path) -> HardwareModel:
    """Read a file of :func:`save`. Raises ValueError, naming the file and what is wrong, for any other."""

    def wrong(what: str) -> ValueError:
        return ValueError(f"{path} is no file of python -m opendit.cli.links ({what}); measure again")

    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise wrong(str(error)) from None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise wrong(f"its format is not {FORMAT}")
    known = {field.name: field.type for field in fields(HardwareModel)}
    if strangers := values.keys() - known.keys():
        raise wrong(f"no such figure: {sorted(strangers)[0]}")
    for name, value in values.items():
        kind = known[name]
        if kind in (str, bool):
            fits = isinstance(value, kind)
        elif name == "gather":
            pairs = isinstance(value, list) and value and all(isinstance(p, list) and len(p) == 2 for p in value)
            fits = pairs and all(_positive(*pair) for pair in value)
        else:
            fits = _positive(value)
        if not fits:
            raise wrong(f"{name} is {value!r}")
    if "gather" in values:
        values["gather"] = tuple(sorted((ranks, rate) for ranks, rate in values["gather"]))
    return HardwareModel(**values)


def _positive(*values) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) and value > 0 for value in values)


def find_hardware(asked: str | None, card: str | None) -> tuple[HardwareModel, str]:
    """Return (the model to count with, the origin of its figures in words).

    Args:
        asked: value of --hardware: a card of :data:`CARDS`, a file, or None.
        card: name of this process's card; None if it has none.

    Raises:
        ValueError: ``asked`` is neither a known card nor a file.
    """
    if asked is not None:
        model = load(Path(asked)) if Path(asked).is_file() else of_card(asked)
        if model is None:
            raise ValueError(
                f"--hardware {asked}: neither a file nor a known card; give a file of opendit links, or "
                f"one of {', '.join(CARDS)}"
            )
        return model, f"{model.name}: {model.origin}"
    path = default_path()
    if card is not None and path.is_file():
        model = load(path)
        if model.name == card:
            return model, f"{model.name}: {model.origin} ({path})"
    model = of_card(card) if card is not None else H200
    if model is None:
        return H200, f"an H200's, because {card} is unknown; python -m opendit.cli.links measures it"
    return model, f"{model.name}: {model.origin}"


TRIALS = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the operations that are timed. shard: bytes that a rank brings to an all-gather."""

    product: int = 8192
    copied: int = 1 << 30
    shard: int = 256 << 20
    tokens: int = 8192
    heads: int = 24


ON_GPUS, ON_CPUS = Sizes(), Sizes(product=512, copied=16 << 20, shard=1 << 20, tokens=256, heads=2)


class _Timer:
    """Measures the seconds of a call on the slowest rank of a mesh."""

    def __init__(self, mesh: Mesh, trials: int):
        self.mesh, self.trials = mesh, trials

    def __call__(self, call: Callable[[], object]) -> float:
        call()  # libraries set up, communicators made
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
    """Measure the hardware of the ranks of ``mesh``, of which ``node`` are on each machine. Collective.

    Figures that need more ranks than there are, and those that are not measured (launches, exchanges through symmetric
    memory, how far computation hides communication), are the card's in :data:`CARDS`, or an H200's.

    Raises:
        ValueError: machines with unequal numbers of ranks.
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
    """Measure the rates of products, attention and copies."""
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
    flops = 4 * sizes.heads * sizes.tokens**2  # for each element of a head
    # Rates at the length that was timed; the model's are those of long sequences.
    there, back = ((sizes.tokens + half) / sizes.tokens for half in (H200.attention_half, H200.attention_half_backward))
    return {
        "matmul": 2 * sizes.product**3 / timer(lambda: a @ b),
        "memory": 2 * sizes.copied / timer(lambda: target.copy_(source)),
        "attention": there * flops / forward,
        "attention_backward": back * 2.5 * flops / max(both - forward, 0.1 * both),
    }


def _links(mesh: Mesh, node: int, sizes: Sizes, timer: _Timer) -> dict[str, Any]:
    """Time a machine's links: all-gathers among neighbours, and all-to-alls and single shards among all its ranks."""
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
    """Measure the links between machines, used by all their ranks at the same time."""
    nodes = mesh.world_size // node
    group = mesh.divided(ParallelDims(dp_replicate=nodes, dp_shard=node)).group("dp_replicate")
    small = torch.empty(nodes, dtype=torch.uint8, device=mesh.device)
    latency = timer(lambda: dist.all_gather_into_tensor(small, small[:1].clone(), group=group))
    rate = _gathered(mesh, group, nodes, sizes.shard, timer)
    return {"node_link": rate, "node_latency": latency / (nodes - 1)}


def _gathered(mesh: Mesh, group: dist.ProcessGroup | None, size: int, shard: int, timer: _Timer) -> float:
    """Measure the bytes/s that each rank receives in an all-gather."""
    mine = torch.empty(shard, dtype=torch.uint8, device=mesh.device)
    whole = torch.empty(size * shard, dtype=torch.uint8, device=mesh.device)
    return (size - 1) * shard / timer(lambda: dist.all_gather_into_tensor(whole, mine, group=group))


def _pass_on(sent: Tensor, received: Tensor, after: int, before: int, group: dist.ProcessGroup | None) -> None:
    """Send to the next rank of a group, and receive from the one before."""
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=group, group_peer=before),
        ]
    )
    for work in works:
        work.wait()
