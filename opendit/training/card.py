"""Choose the settings of a run of --lora so that it fits on a GPU (--card).

The settings are the LoRA rank, FP8, the precision of frozen blocks, moving frozen blocks to host memory, recomputation,
sharding and the size of the micro-batch. Candidates are tried in order, from the most exact and fastest to those that
need the least memory. The first candidate that the run accepts and whose estimated memory fits is chosen. Flags on the
command line keep their values.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from opendit.config.names import BUT_ATTENTION, RECOMPUTE
from opendit.config.parallel_sizes import parse_offload
from opendit.config.train import TrainConfig
from opendit.data import DataError, MediaDataset
from opendit.kernels.capability import missing
from opendit.models.dit import DiTConfig
from opendit.models.families.public_config import PublicConfig
from opendit.parallel.hardware import CARDS, HardwareModel, of_card
from opendit.parallel.mesh import Mesh
from opendit.training.auto_parallel import ONE_BYTE, Circumstances, Search, circumstances, data_of, storages
from opendit.training.from_flags import memory_setup
from opendit.training.memory import GIB, USABLE, Estimate, Setup, estimate, parts, resolve_sharding, trained_count
from opendit.training.specification import samples_at_once

AUTO = "auto"
RANKS = (16, 4)  # LoRA ranks to try, in this order; each LoRA weight takes 16 bytes in training
BATCHES = (4, 2, 1)
FLOAT8 = ("H100", "H200")  # cards for which FP8 kernels exist


def on_card(card: str, hardware: HardwareModel) -> HardwareModel:
    """Return the hardware to plan for: a known card, or ``hardware`` with ``card`` GiB of memory.

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


def candidates(flags: TrainConfig, world: int, float8: bool, config: DiTConfig) -> Iterator[dict[str, Any]]:
    """Yield candidates, as values of flags, from the most exact and fastest to those that need the least memory."""

    def options(name: str, *others: Any) -> tuple[Any, ...]:
        return (getattr(flags, name),) if name in flags.given else others

    # fsdp needs less memory than zero2, because it also shards the frozen weights
    plugins = options("plugin", *(("zero2", "fsdp") if world > 1 else ("zero2",)))
    public, stored = isinstance(config, PublicConfig), [("bf16", flags.offload)]
    # try only levels whose memory can be estimated
    known = ("none", BUT_ATTENTION) if public else RECOMPUTE
    levels = [(level, False) for level in options("recompute", *known)] + [("none", True)]
    if public:
        asked = [name in flags.given for name in ("base_precision", "offload")]
        given = flags.base_precision, flags.offload
        plans = storages(config.depth)
        own = ([g if a else s for a, g, s in zip(asked, given, plan, strict=True)] for plan in plans)
        stored = list(dict.fromkeys((base, offload) for base, offload in own))
    for rank, (base, offload), plugin, (recompute, checkpoint), fp8, size in itertools.product(
        options("lora", *RANKS),
        stored,
        plugins,
        levels,
        options("fp8", *((False, True) if float8 else (False,))),
        options("batch_size", *BATCHES),
    ):
        _, streamed = parse_offload(offload, frozen=True)
        if streamed and plugin != "fsdp" and not (checkpoint or recompute == BUT_ATTENTION):
            continue
        base = ONE_BYTE[fp8] if base == "one" else base
        chosen = {"base_precision": base, "offload": offload} if public else {}
        if checkpoint in options("grad_checkpoint", False, True):
            yield chosen | {
                "lora": rank, "plugin": plugin, "recompute": recompute, "grad_checkpoint": checkpoint, "fp8": fp8,
                "batch_size": size,
            }  # fmt: skip


def fit(flags: TrainConfig, dataset: MediaDataset, where: Circumstances) -> tuple[TrainConfig, list[str]]:
    """Return the flags with the values of the first candidate that fits, and lines that describe the choice and its
    reasons.

    Raises:
        ValueError: no candidate fits, or the run refuses all candidates. The message says what to change.
    """
    search = Search(flags, dataset, where)
    config, setups = search.config, {flags.lora: search.setup}
    refusal: ValueError | None = None
    too_large: list[tuple[float, str]] = []
    float8 = missing("float8") is None if where.has_gpu and flags.dry_run is None else where.hardware.name in FLOAT8
    for candidate in candidates(flags, where.world, float8, config):
        changed = replace(search.flags, **candidate)
        try:
            settled, _ = changed.resolve(where.world, where.has_gpu)
            config.check_speed(settled.fp8, settled.recompute)
        except ValueError as error:
            refusal = refusal or error
            continue
        if any(getattr(settled, name) != candidate[name] for name in ("fp8", "recompute")):
            continue  # the run would override this value of the candidate, and print a note
        if settled.lora not in setups:
            setups[settled.lora] = memory_setup(settled, config, where.world, dataset)
        batch = samples_at_once(settled, config)
        setup = replace(
            setups[settled.lora],
            plugin=settled.plugin,
            fp8=settled.fp8,
            recompute=settled.recompute,
            base_precision=settled.base_precision,
            offload=settled.offload,
            grad_checkpoint=settled.grad_checkpoint,
            recompute_blocks=settled.recompute_blocks,
            micro_batches=settled.grad_accumulation,
            accumulate=settled.grad_accumulation > 1,
        )
        setup = resolve_sharding(config, setup, batch, where.capacity)
        if (count := _fewest_recomputed(changed, config, setup, batch, where)) < config.depth:
            changed, settled = (replace(each, recompute_blocks=count) for each in (changed, settled))
            setup = replace(setup, recompute_blocks=count)
        needs = estimate(config, setup, batch)
        memory = _memory(needs, where)
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
        lines += [f"  gives up: {what}" for what in _given_up(settled, config, setup, needs)]
        if too_large:
            more, before = min(too_large)
            lines.append(f"  faster, if it fitted: {before}, {more / GIB:,.2f} GiB")
        return changed, lines
    if too_large:
        memory, words = min(too_large)
        encoders = search.setup.encoders
        hint = f"cache latents ({encoders / GIB:,.1f} GiB are encoders; preprocess.py latents), " if encoders else ""
        hint += "add --text_precision nf4, " if encoders and flags.text_precision != "nf4" else ""
        raise ValueError(
            f"--card {flags.card}: {where.capacity / GIB:,.1f} GiB can be used, and {words} needs {memory / GIB:,.1f}; "
            f"{hint}take more GPUs, a smaller --image_size, or fewer of the flags that were given"
        )
    assert refusal is not None, "every candidate was refused or measured"
    raise refusal


def _memory(needs: Estimate, where: Circumstances) -> float:
    return needs.total if where.has_gpu else needs.total + needs.host_total


def _fewest_recomputed(flags: TrainConfig, config: DiTConfig, setup: Setup, batch: int, where: Circumstances) -> int:
    """Return the smallest number of recomputed blocks with which a step fits in memory.

    Return the number of all blocks if no number fits, or if the flags leave no choice: for example, blocks in host
    memory are always recomputed.
    """
    depth = config.depth
    chosen = (
        {"recompute", "grad_checkpoint", "recompute_blocks"} & flags.given
        or flags.streamed_blocks
        or setup.pipeline_parallel > 1
    )
    if not setup.recomputes_blocks or chosen:
        return depth

    def fits(count: int) -> bool:
        needs = estimate(config, replace(setup, recompute_blocks=count), batch)
        return _memory(needs, where) <= where.capacity

    return 1 + bisect.bisect_left(range(1, depth), True, key=fits)


def _words(flags: TrainConfig) -> str:
    """Return the chosen settings as flags on a command line."""
    found = [f"--lora {flags.lora}", f"--mixed_precision {flags.mixed_precision}", *(["--fp8"] if flags.fp8 else [])]
    if flags.base_precision != "bf16":
        found.append(f"--base_precision {flags.base_precision}")
    if flags.streamed_blocks:
        found.append(f"--offload {flags.offload}")
    found += ["--grad_checkpoint"] if flags.grad_checkpoint else [f"--recompute {flags.recompute}"]
    found += [] if flags.recompute_blocks is None else [f"--recompute_blocks {flags.recompute_blocks}"]
    found += [f"--batch_size {flags.batch_size}", f"--grad_accumulation {flags.grad_accumulation}"]
    return " ".join([*found, f"--plugin {flags.plugin}"])


# Errors of LoRA's gradients by storage format, measured by benchmarks/bench_base_precision.py on a small model
# (docs/finetuning.md).
ERRORS = {"fp8": "about 5 %", "int8": "about 1 %", "nf4": "about 17 %"}


def _given_up(flags: TrainConfig, config: DiTConfig, setup: Setup, needs: Estimate) -> Iterator[str]:
    """Yield descriptions of the disadvantages of the settings that save memory: less exact, or slower."""
    if flags.base_precision != "bf16":
        kind = flags.base_precision
        yield f"exact frozen weights: stored in {kind}, LoRA's gradients are off by {ERRORS[kind]}"
    if setup.recomputes_blocks:
        again = config.depth - setup.kept_blocks(config.depth)
        yield f"time: {again} of {config.depth} blocks are computed again in the backward pass"
    if blocks := needs.host.get("blocks"):
        yield f"time, if the link is slow: {blocks / GIB:,.1f} GiB of blocks come from host memory, twice a step"


def fit_on_ranks(flags: TrainConfig, mesh: Mesh) -> TrainConfig:
    """Choose and print the settings on rank 0; return the flags on every rank. Collective.

    Raises the same errors as :func:`fit`, on every rank.
    """
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
