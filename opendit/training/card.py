"""Fit a run of --lora to a card (--card): rank, FP8, what is recomputed, shards and the micro-batch.

Candidates are tried from the fastest to the smallest. The first one is taken that the run accepts and whose estimate of
memory fits. Flags on the command line are kept.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from opendit.config.names import RECOMPUTE
from opendit.config.train import TrainConfig
from opendit.data import DataError, MediaDataset
from opendit.kernels.capability import missing
from opendit.parallel.hardware import CARDS, HardwareModel, of_card
from opendit.parallel.mesh import Mesh
from opendit.training.auto_parallel import Circumstances, Search, circumstances, data_of
from opendit.training.from_flags import memory_setup
from opendit.training.memory import GIB, USABLE, estimate, parts, resolve_sharding, trained_count
from opendit.training.specification import samples_at_once

AUTO = "auto"
RANKS = (16, 4)  # the smaller one if nothing else helps: weights of LoRA take 16 bytes each while they are trained
BATCHES = (4, 2, 1)
FLOAT8 = ("H100", "H200")  # cards whose FP8 products there are kernels for


def on_card(card: str, hardware: HardwareModel) -> HardwareModel:
    """Return the hardware to plan for: a card of the table, or ``hardware`` with as many GiB.

    Raises:
        ValueError: ``card`` is neither a number nor a known card.
    """
    if card == AUTO:
        return hardware
    try:
        memory = float(card)
    except ValueError:
        if (known := of_card(card)) is None:
            raise ValueError(f"--card {card}: not known; give its GiB, or one of {', '.join(CARDS)}") from None
        return known
    if not 1 <= memory <= 10_000:
        raise ValueError(f"--card {card}: out of range; give GiB from 1 to 10,000")
    return replace(hardware, name=f"a card of {card} GiB", capacity=memory * GIB)


def candidates(flags: TrainConfig, world: int, float8: bool) -> Iterator[dict[str, Any]]:
    """Yield values of flags, from the fastest to those that need the least memory."""

    def options(name: str, *others: Any) -> tuple[Any, ...]:
        return (getattr(flags, name),) if name in flags.given else others

    plugins = options("plugin", *(("zero2", "fsdp") if world > 1 else ("zero2",)))  # fsdp divides the frozen weights
    levels = [(level, False) for level in options("recompute", *RECOMPUTE)] + [("none", True)]
    for rank, plugin, (recompute, checkpoint), fp8, size in itertools.product(
        options("lora", *RANKS),
        plugins,
        levels,
        options("fp8", *((False, True) if float8 else (False,))),
        options("batch_size", *BATCHES),
    ):
        if checkpoint in options("grad_checkpoint", False, True):
            yield {
                "lora": rank, "plugin": plugin, "recompute": recompute, "grad_checkpoint": checkpoint, "fp8": fp8,
                "batch_size": size,
            }  # fmt: skip


def fit(flags: TrainConfig, dataset: MediaDataset, where: Circumstances) -> tuple[TrainConfig, list[str]]:
    """Return the flags with the first candidate that fits, and lines that say what was chosen and why.

    Raises:
        ValueError: none fits, or the run refuses all of them; the message says what to change.
    """
    search = Search(flags, dataset, where)
    config, setups = search.config, {flags.lora: search.setup}
    refusal: ValueError | None = None
    too_large: list[tuple[float, str]] = []
    float8 = missing("float8") is None if where.has_gpu and flags.dry_run is None else where.hardware.name in FLOAT8
    for candidate in candidates(flags, where.world, float8):
        changed = replace(search.flags, **candidate)
        try:
            settled, _ = changed.resolve(where.world, where.has_gpu)
            config.check_speed(settled.fp8, settled.recompute)
        except ValueError as error:
            refusal = refusal or error
            continue
        if any(getattr(settled, name) != candidate[name] for name in ("fp8", "recompute")):
            continue  # the run would change it, with a note
        if settled.lora not in setups:
            setups[settled.lora] = memory_setup(settled, config, where.world, dataset)
        batch = samples_at_once(settled, config)
        setup = replace(
            setups[settled.lora],
            plugin=settled.plugin,
            fp8=settled.fp8,
            recompute=settled.recompute,
            grad_checkpoint=settled.grad_checkpoint,
            micro_batches=settled.grad_accumulation,
            accumulate=settled.grad_accumulation > 1,
        )
        setup = resolve_sharding(config, setup, batch, where.capacity)
        needs = estimate(config, setup, batch)
        memory = needs.total if where.has_gpu else needs.total + needs.host_total
        words = _words(settled)
        if memory > where.capacity:
            too_large.append((memory, words))
            continue
        place = where.hardware.name if where.has_gpu else "host memory"
        layers = f"at {' '.join(flags.lora_targets) or 'all linear layers of attention and MLPs'}"
        lines = [
            f"--card {flags.card}: {words}",
            f"  {memory / GIB:,.2f} of {where.capacity / GIB:,.2f} GiB ({place}) by the estimate: {parts(needs)}",
            f"  {trained_count(config, setup) / 1e6:,.1f} M trained weights, {layers}",
        ]
        if too_large:
            more, before = min(too_large)
            lines.append(f"  faster, if it fitted: {before}, {more / GIB:,.2f} GiB")
        return changed, lines
    if too_large:
        memory, words = min(too_large)
        encoders = search.setup.encoders
        hint = f"cache latents ({encoders / GIB:,.1f} GiB are encoders; preprocess.py latents), " if encoders else ""
        raise ValueError(
            f"--card {flags.card}: {where.capacity / GIB:,.1f} GiB can be used, and {words} needs {memory / GIB:,.1f}; "
            f"{hint}take more GPUs, a smaller --image_size, or fewer of the flags that were given"
        )
    assert refusal is not None, "every candidate was refused or measured"
    raise refusal


def _words(flags: TrainConfig) -> str:
    """Return what was chosen, as on a command line."""
    found = [f"--lora {flags.lora}", f"--mixed_precision {flags.mixed_precision}", *(["--fp8"] if flags.fp8 else [])]
    found += ["--grad_checkpoint"] if flags.grad_checkpoint else [f"--recompute {flags.recompute}"]
    found += [f"--batch_size {flags.batch_size}", f"--grad_accumulation {flags.grad_accumulation}"]
    return " ".join([*found, f"--plugin {flags.plugin}"])


def fit_on_ranks(flags: TrainConfig, mesh: Mesh) -> TrainConfig:
    """Return the flags that rank 0 has chosen and printed. Collective. Raises as :func:`fit`, on every rank."""
    found = None, None
    where, _ = circumstances(flags, mesh)
    if mesh.is_main:
        try:
            hardware = on_card(flags.card or AUTO, where.hardware)
            usable = where.capacity if flags.card == AUTO else USABLE * hardware.capacity
            found = fit(flags, data_of(flags, where), replace(where, hardware=hardware, capacity=usable))
            print("\n".join(found[1]), flush=True)
        except (ValueError, OSError, DataError) as error:
            found = None, error
    changed, error = mesh.broadcast_object(found)
    if changed is None:
        raise error
    return changed
