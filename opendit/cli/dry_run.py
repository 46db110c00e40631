"""``--dry_run [GPUS]``: what a run will need, from its flags alone: no weights, no GPU, no process group."""

import math
import sys
from pathlib import Path

from opendit.cli.command_line import overridden
from opendit.cli.recipes import find_recipe
from opendit.cli.train_flags import TrainConfig
from opendit.cli.values import one_line
from opendit.data import DataError, MediaDataset, build_schedule
from opendit.data.mock import MockDataset
from opendit.models import DiTConfig
from opendit.models.lora import lora_parameters
from opendit.parallel.sequence.choose import Machine, make_plan
from opendit.training.from_flags import (
    check_pretrained,
    last_step_of,
    open_data,
    plan_model,
    saved_by_adaln_lora,
    sequence_shape,
    settle_captions,
)
from opendit.training.memory import GIB, USABLE, Setup, advice, estimate, largest_batch
from opendit.training.monitor import print_block

CARDS = {"80 GB": 79.1 * GIB, "141 GB": 139.8 * GIB}  # as torch counts an H100's and an H200's memory


def dry_run(flags: TrainConfig) -> None:
    """Prints parameters, tokens, work, memory of a GPU and steps of a run, as if there were that many GPUs.

    Without a number they are those of torchrun, or as many as share a sequence. Data that isn't there is said to be
    missing, and random latents of the same kind stand in for it.

    Flags that the run itself would refuse end the program as they end that: one line, exit code 2.
    """
    try:
        _dry_run(flags)
    except (ValueError, OSError, DataError) as error:
        print(one_line(f"error: {error}"), file=sys.stderr, flush=True)
        sys.exit(2)


def _dry_run(flags: TrainConfig) -> None:
    world = flags.world_size()
    flags, notes = flags.settled(world, has_gpu=True)
    notes += recipe_notes(flags)
    dataset = _data(flags, notes)
    flags, captions = settle_captions(flags, dataset)
    notes += captions
    config, objective, vae = plan_model(flags, dataset)
    if flags.pretrained and Path(flags.pretrained).exists():
        _, config = check_pretrained(flags, config, notes)
    elif flags.pretrained:
        notes.append(f"--pretrained {flags.pretrained} isn't there: its blocks are not compared with the model's")
    if config.adaln_lora is not None:
        notes.append(saved_by_adaln_lora(config))
    ranks = world // flags.sequence_parallel_size
    samples = flags.batch_size * ranks * flags.grad_accumulation
    flop = 3 * config.forward_flops()
    missing = isinstance(dataset, MockDataset) and flags.data_path != "mock"
    rows = {} if flags.recipe is None else {"recipe": describe_recipe(flags)}
    rows |= {
        "model": f"{flags.model}: {config.parameters() / 1e6:,.1f} M parameters",
        "data": f"not found: {flags.data_path}" if missing else dataset.describe(),
        "latents": f"{' x '.join(map(str, (config.in_channels, *config.input_size)))} (--vae {vae})",
        "tokens": f"{config.tokens:,} a sample, {config.tokens * samples:,} a step",
        "work": f"{work(flop)} a training sample, {work(flop * samples / world)} a step and GPU",
        "objective": ", ".join(f"{name} {value}" for name, value in objective.to_dict().items()),
        "GPUs": f"{world}, plugin {flags.plugin}, {flags.mixed_precision}",
        "batch": f"{flags.batch_size} x {ranks} ranks x {flags.grad_accumulation} micro-batches = {samples:,}",
        **_steps(flags, None if missing else dataset, samples),
    }
    if flags.sequence_parallel_size > 1:
        shape = sequence_shape(flags, config, flags.batch_size)
        size = flags.sequence_parallel_size
        machine = Machine(direct=size <= 8)  # GPUs of one host reach each other's memory
        rows["sequence"] = f"over {size} ranks, {make_plan(flags.sequence_parallel_type, size, shape, machine=machine)}"
    rows |= _memory(config, flags, memory_setup(flags, config, world))
    print_block("OpenDiT dry run: nothing was built", rows)
    for note in notes:
        print(f"note: {note}", flush=True)


def work(flop: float) -> str:
    """work(711.7e9) -> "711.7 GFLOP"."""
    power = max(2, min(6, int(math.log10(flop)) // 3))
    return f"{flop / 1000**power:,.1f} {' kMGTPE'[power]}FLOP"


def recipe_notes(flags: TrainConfig) -> list[str]:
    """What a recipe expects and the flags leave out: the weights of the stage before it."""
    recipe = find_recipe(flags.recipe) if flags.recipe else None
    if recipe is None or recipe.follows is None or flags.pretrained or flags.data_path == "mock":
        return []
    return [
        f"--recipe {flags.recipe} follows {recipe.follows}: give that run to --pretrained; without it training starts "
        "from fresh weights"
    ]


def describe_recipe(flags: TrainConfig) -> str:
    """The recipe's name, and what the command line changed of it."""
    changed = [f"{name} {now} (recipe: {before})" for name, (before, now) in overridden(flags).items()]
    return flags.recipe + (f", changed: {', '.join(changed)}" if changed else "")


def _data(flags: TrainConfig, notes: list[str]) -> MediaDataset:
    try:
        return open_data(flags)
    except (OSError, DataError) as error:
        notes.append(f"{error} (the figures are for data of the kind that the other flags ask for)")
        return open_data(flags, "mock")


def _steps(flags: TrainConfig, dataset: MediaDataset | None, samples: int) -> dict[str, str]:
    if dataset is None:
        ends = f"{flags.max_steps:,} at most" if flags.max_steps else "not known"
        return {"steps": f"{ends}; {flags.epochs:,} epochs of data that can't be found"}
    schedule = build_schedule(dataset, samples, flags.grad_accumulation, flags.global_seed)
    last = last_step_of(flags, schedule)
    epochs = last / schedule.steps_per_epoch
    return {
        "steps": f"{schedule.steps_per_epoch:,} an epoch, {last:,} in all = {epochs:,.1f} epochs, "
        f"{last * samples:,} samples"
    }


def memory_setup(flags: TrainConfig, config: DiTConfig, world: int) -> Setup:
    """What the estimate of the memory needs to know of a run on ``world`` GPUs whose kernels are all available."""
    return Setup(
        plugin=flags.plugin,
        precision=flags.mixed_precision,
        world=world,
        sequence_parallel=flags.sequence_parallel_size,
        averages=len(flags.ema_decays),
        accumulate=flags.grad_accumulation > 1,
        fused=flags.enable_modulate_kernel and flags.enable_layernorm_kernel,
        fp8=flags.fp8,
        recompute=flags.recompute,
        grad_checkpoint=flags.grad_checkpoint,
        trained=None if flags.lora is None else lora_parameters(config, flags.lora),
    )


def _memory(config: DiTConfig, flags: TrainConfig, setup: Setup) -> dict[str, str]:
    needs = estimate(config, setup, flags.batch_size)
    states = sum(needs.states.values()) / GIB
    rows = {
        "memory": f"{needs.total / GIB:,.2f} GiB a GPU estimated: states {states:,.2f}, activations "
        f"{needs.activations / GIB:,.2f}"
    }
    for name, card in CARDS.items():
        largest = largest_batch(config, setup, USABLE * card)
        mitigation = advice(config, setup, flags.batch_size, USABLE * card)
        rows[f"  on {name}"] = f"does not fit; the cheapest mitigation is {mitigation}" if mitigation else "fits"
        rows[f"  on {name}"] += f" (up to --batch_size {largest})" if largest else ""
    return rows
