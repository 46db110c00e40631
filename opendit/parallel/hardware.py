"""Rates of cards and links, for the cost models. This module does not need torch.

:data:`H200` has rates measured on H200s (benchmarks/results.csv, docs/sequence_parallel.md). All other cards' rates are
estimates: the H200's rates, scaled by ratios from the data sheets. ``python -m opendit.cli.links`` measures the rates
of the current machines.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from opendit.common.safe_files import write_whole

GIB = 2**30
FORMAT = "opendit-hardware-1"  # format of the file


@dataclass(frozen=True)
class HardwareModel:
    """Rates of a card, in half precision, and of its links. The defaults are an H200's rates with NVLink. FLOP rates
    are measured with single operations. In a training step, the power limit reduces matrix products to the fraction
    ``sustained``."""

    name: str = "H200"
    origin: str = "measured on H200s, links between machines assumed"
    capacity: float = 139.8 * GIB  # bytes of memory, as torch counts them
    direct: bool = False  # True if ranks can access each other's memory (opendit/parallel/sequence/peer_memory.py)
    engines: bool = False  # True if copy engines make Ulysses' exchanges, as in sampling
    # ------------------------------------------------------------------------------------------------- computation
    matmul: float = 640e12  # FLOP/s of large products
    matmul_fp8: float = 1150e12
    launch: float = 4e-6  # fixed seconds per matrix product
    # FLOP/s of attention, divided by the size of a head (at most 128). The backward pass has 2.5 times the FLOPs. Heads
    # of up to 64 elements take the fraction ``small`` of the time.
    attention: float = 5.1e12
    attention_backward: float = 4.35e12
    small: float = 0.69
    attention_half: int = 115  # number of keys at which attention reaches half of these rates
    attention_half_backward: int = 256
    partial: float = 2.9e12  # like ``attention``, for the kernel of ring attention
    partial_backward: float = 2.45e12
    memory: float = 3.6e12  # bytes/s read or written
    sustained: float = 0.96
    # seconds to launch a block's kernels, forward and backward, without a CUDA graph
    host: float = 2.2e-3
    multiprocessors: int = 132
    tile: int = 128  # queries that one multiprocessor processes at a time
    # ------------------------------------------------------------------------------------------- links of a machine
    link: float = 230 * GIB  # bytes/s that a rank receives in an all-to-all or in one hop of a ring
    # (number of ranks on a machine, bytes/s that every rank receives in an all-gather)
    gather: tuple[tuple[int, float], ...] = ((2, 240 * GIB), (4, 305 * GIB), (8, 327 * GIB))
    copies: float = 270 * GIB  # bytes/s that copy engines transfer while matrix products run
    latency: float = 20e-6  # seconds, latency of a collective or of one hop of a ring
    barrier: float = 5e-6  # seconds, latency of an exchange through symmetric memory
    # FastSeq: seconds for copies and smaller products, for every other rank and direction
    part: float = 10e-6
    group: float = 40e-6  # seconds for each additional group of heads, forward and backward
    tail: float = 0.03  # idle fraction of an attention wave at the end of each additional group of heads
    overlap: float = 0.3  # hidden fraction of a collective that runs during computation
    host_link: float = 100e9  # bytes/s between a card and its host, sum of both directions
    # -------------------------------------------------------------------------------------- links between machines
    node_link: float = 40 * GIB  # bytes/s that a rank receives from other machines: 400 Gbit/s a card, assumed
    node_latency: float = 10e-6  # seconds, latency of a hop between machines, assumed
    node_overlap: float = 0.8  # like ``overlap``, for transfers between machines, assumed

    def gather_rate(self, ranks: int) -> float:
        below = [rate for size, rate in self.gather if size <= ranks]
        return below[-1] if below else self.gather[0][1]

    def attention_rates(self, head_dim: int, keys: int) -> tuple[float, float]:
        """Return attention's FLOP/s (forward, backward) for this head size and ``keys`` keys for each query."""
        # A tile with fewer keys takes as long as a full tile, so the rate is lower.
        elements = min(head_dim, 128) / (1 if head_dim > 64 else self.small) * min(1, keys / self.tile)
        forward = self.attention * keys / (keys + self.attention_half)
        backward = self.attention_backward * keys / (keys + self.attention_half_backward)
        return elements * forward, elements * backward


H200 = HardwareModel()


@dataclass(frozen=True)
class Card:
    """Data sheet of a card."""

    capacity: float  # GiB, as torch reports them
    bf16: float  # TFLOP/s of dense products
    fp8: float
    memory: float  # TB/s
    link: float  # GB/s to other cards in each direction


CARDS = {
    "H200": Card(139.8, 989, 1979, 4.8, 450),
    "H100": Card(79.1, 989, 1979, 3.35, 450),
    "A100": Card(79.1, 312, 312, 2.04, 300),
    "L40S": Card(44.4, 362, 733, 0.864, 32),  # PCIe, no NVLink
    "4090": Card(23.5, 165, 330, 1.008, 32),
}


def of_card(name: str) -> HardwareModel | None:
    """Return a card's hardware model; None if the name contains no key of :data:`CARDS`. name: for example "NVIDIA
    A100-SXM4-80GB"."""
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opendit" / "hardware.json"


def save(model: HardwareModel, path: Path) -> None:
    text = json.dumps({"format": FORMAT, **asdict(model)}, indent=1) + "\n"
    write_whole(path, text.encode(), make=True)


def load(path: Path) -> HardwareModel:
    """Read a file written by :func:`save`. Raises ValueError for any other file."""

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
    """Return (hardware model to use, line about its origin). Raises ValueError for an unknown card in ``asked``, and
    for an invalid file.

    Args:
        asked: value of --hardware: a key of :data:`CARDS`, a file, or None.
        card: name of this process's card, if any.
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
        return H200, f"H200: {card} is unknown; python -m opendit.cli.links measures it"
    return model, f"{model.name}: {model.origin}"
