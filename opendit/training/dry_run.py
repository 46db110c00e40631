"""Print the memory, time and steps of a run (--dry_run [GPUS]) without a GPU, a process group or weights."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

from opendit.config.command_line import overridden
from opendit.config.console import print_block, print_error
from opendit.config.train import TrainConfig
from opendit.data import DataError, MediaDataset
from opendit.data.mock import MockDataset
from opendit.models.dit import DiTConfig
from opendit.parallel.hardware import find_hardware
from opendit.parallel.pipeline import stages_of
from opendit.parallel.sequence import sequence_shape
from opendit.training.auto_parallel import Circumstances, choose, report
from opendit.training.card import fit, on_card
from opendit.training.from_flags import (
    check_pretrained,
    fit_captions,
    last_step_of,
    lora_of,
    memory_setup,
    open_data,
    plan_model,
    saved_by_adaln_lora,
    text_before,
)
from opendit.training.memory import (
    GIB,
    USABLE,
    Setup,
    advice,
    estimate,
    in_eight_bits,
    largest_batch,
    parts,
    resolve_sharding,
    save_buffers,
    stage_setups,
)
from opendit.training.specification import make_schedule, samples_at_once, shape_samples
from opendit.training.step_cost import StepCost, Traffic, step_cost, tokens_per_second, training_flops

# GPU memory as torch reports it for an RTX 4090, an L40S, an H100 and an H200.
CARDS = {"24 GB": 23.6 * GIB, "48 GB": 44.4 * GIB, "80 GB": 79.1 * GIB, "141 GB": 139.8 * GIB}


def dry_run(flags: TrainConfig) -> None:
    """Print parameters, tokens, FLOPs, GPU memory and steps of a run on the number of GPUs that --dry_run gives.

    Without a number, plan for torchrun's number of processes, or for the number of ranks that share a sequence. A
    missing data set is reported and replaced by random latents of the same kind. Flags that the run would refuse end
    the program with one line and exit code 2, as in the run.
    """
    try:
        _dry_run(flags)
    except (ValueError, OSError, DataError) as error:
        print_error(error)
        sys.exit(2)


def _dry_run(flags: TrainConfig) -> None:
    world = flags.world_size()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    hardware, origin = find_hardware(flags.hardware, card)
    if flags.card is not None:
        hardware = on_card(flags.card, hardware)
    where = Circumstances(world, flags.node_size(world), USABLE * hardware.capacity, hardware)
    if flags.parallel == "auto":
        settled, notes = flags.resolve(world, has_gpu=True)
        chosen, config = choose(flags, _data(settled, notes), where)
        print("\n".join(report(chosen, config, where, origin)), flush=True)
        flags = chosen[0].candidate.on(flags)
    elif flags.card is not None:
        settled, notes = flags.resolve(world, has_gpu=True)
        flags, lines = fit(flags, _data(settled, notes), where)
        print("\n".join(lines), flush=True)
    flags, notes = flags.resolve(world, has_gpu=True)
    dataset = _data(flags, notes)
    flags, of_captions = fit_captions(flags, dataset, text_before(flags))
    notes = notes + of_captions
    plan = plan_model(flags, dataset)
    config, notes = plan.config, notes + plan.notes
    if isinstance(dataset, MockDataset) and flags.tokens is not None:
        notes.append("the samples' sizes are not known: steps are of samples of the configured one")
    notes += dataset.describe().notes
    dataset = shape_samples(flags, dataset, config)
    if flags.pretrained and Path(flags.pretrained).exists():
        *_, config = check_pretrained(flags.pretrained, flags.model, config, notes)
    elif flags.pretrained:
        notes.append(f"--pretrained {flags.pretrained} isn't there: its blocks are not compared with the model's")
    if flags.token_route is not None:
        notes.append(f"--route {flags.route}: time and memory are those of blocks that see all tokens, which is more")
    if config.adaln_lora is not None:
        notes.append(saved_by_adaln_lora(config))
    ranks = world // flags.sharing
    samples = flags.batch_size * ranks * flags.grad_accumulation
    together = samples_at_once(flags, config)
    flop, tensor = training_flops(config, lora_of(flags), flags.token_route), flags.tensor_parallel_size
    missing = isinstance(dataset, MockDataset) and flags.data_path != "mock"
    steps, last = _steps(flags, None if missing else dataset, samples, config)
    rows = {} if flags.recipe is None else {"recipe": describe_recipe(flags)}
    rows |= {
        "model": f"{flags.model}: {config.parameters() / 1e6:,.1f} M parameters",
        "data": f"not found: {flags.data_path}" if missing else dataset.describe().text,
        "latents": f"{' x '.join(map(str, (config.in_channels, *config.input_size)))} (--vae {plan.vae})",
        "tokens": f"{config.tokens:,} a sample, {(flags.tokens or config.tokens) * samples:,} a step",
        "work": f"{work(flop)} a training sample, {work(flop * together * flags.grad_accumulation * ranks / world)} a "
        "step and GPU",
        "objective": ", ".join(f"{name} {value}" for name, value in plan.objective.to_dict().items()),
        "GPUs": f"{world}, plugin {flags.plugin}, {flags.mixed_precision}"
        + (f", layers divided by {tensor}" if tensor > 1 else "")
        + (f", experts on {flags.expert_parallel_size} each" if flags.expert_parallel_size > 1 else ""),
        **_pipeline(config, flags),
        "batch": f"{flags.batch_size} x {ranks} ranks x {flags.grad_accumulation} micro-batches = {samples:,}",
        "steps": steps,
    }
    setup = memory_setup(flags, config, world, dataset)
    rows |= _time(flags, config, setup, where, origin, last)
    rows |= _memory(config, together, setup)
    print_block("OpenDiT dry run: nothing was built", rows)
    for note in notes:
        print(f"note: {note}", flush=True)


def work(flop: float) -> str:
    """Format a number of FLOPs: 711.7e9 -> "711.7 GFLOP"."""
    power = max(2, min(6, int(math.log10(flop)) // 3))
    return f"{flop / 1000**power:,.1f} {' kMGTPE'[power]}FLOP"


def describe_recipe(flags: TrainConfig) -> str:
    """Return the recipe's name, and the recipe's flags that the command line changes."""
    assert flags.recipe is not None
    changed = [f"{name} {now} (recipe: {before})" for name, (before, now) in overridden(flags).items()]
    return flags.recipe + (f", changed: {', '.join(changed)}" if changed else "")


def _data(flags: TrainConfig, notes: list[str]) -> MediaDataset:
    try:
        return open_data(flags)
    except (OSError, DataError) as error:
        notes.append(f"{error} (the figures are for data of the kind that the other flags ask for)")
        return open_data(replace(flags, data_path="mock"))


def _steps(flags: TrainConfig, dataset: MediaDataset | None, samples: int, config: DiTConfig) -> tuple[str, int | None]:
    """Return a description of the run's steps, and the number of the last step if it is known."""
    if dataset is None:
        ends = f"{flags.max_steps:,} at most" if flags.max_steps else "not known"
        return f"{ends}; {flags.epochs:,} epochs of data that can't be found", flags.max_steps
    schedule = make_schedule(flags, dataset, samples, config)
    last = last_step_of(flags, schedule)
    an_epoch = schedule.mean_steps_per_epoch
    return (
        f"{an_epoch:,.2f} an epoch, {last:,} in all = {last / an_epoch:,.1f} epochs, "
        f"{last * samples:,} {'samples' if flags.tokens is None else f'lots of {flags.tokens:,} tokens'}"
    ), last


def _time(
    flags: TrainConfig, config: DiTConfig, setup: Setup, where: Circumstances, origin: str, last: int | None
) -> dict[str, str]:
    """Return the report's rows about sequence parallelism, and about the time, communication and hours that the cost
    model predicts.

    Args:
        last: number of the last step, if it is known.
    """
    size = flags.sequence_parallel_size
    together = samples_at_once(flags, config)
    how = (flags, flags.attention, setup.precision, config, together)
    cost = step_cost(
        config,
        resolve_sharding(config, setup, together, where.capacity),
        together,
        flags.grad_accumulation,
        where.hardware,
        where.node,
        sequence_type=flags.sequence_parallel_type,
        sequence_types=sequence_shape(*how, tensor_parallel=setup.tensor_parallel, lora=flags.lora is not None).types,
        graph=flags.enable_cuda_graph,
    )
    rate = tokens_per_second(config, setup, together, flags.grad_accumulation, cost.total)
    spent = cost.work | {"communication not hidden": cost.exposed, "waiting for the host": cost.waiting}
    work = ", ".join(f"{kind} {1e3 * seconds:,.1f}" for kind, seconds in spent.items() if seconds)
    rows = {} if cost.sequence is None else {"sequence": f"over {size} ranks, {cost.sequence}"}
    rows["time"] = f"{1e3 * cost.total:,.1f} ms a step, {rate:,.0f} tokens/s a GPU predicted ({origin}), without "
    rows["time"] += f"reading data, saving and drawing; in ms: {work}"
    if last:
        hours = cost.total * last / 3600
        shown = f"{hours:,.1f}" if hours >= 10 else f"{hours:.2g}"
        rows["hours"] = f"{shown} for {last:,} steps, predicted ({origin.partition(':')[0]})"
    if where.world > 1:
        rows["received a step"] = budget(cost)
    return rows


def _pipeline(config: DiTConfig, flags: TrainConfig) -> dict[str, str]:
    ranks = flags.pipeline_parallel_size
    if ranks == 1:
        return {}
    return {"pipeline": stages_of(config, flags.pipeline_schedule, 0, ranks).describe()}


def _memory(config: DiTConfig, batch_size: int, setup: Setup) -> dict[str, str]:
    sharded, rows = setup.plugin == "fsdp" and setup.world > 1, {}
    both = sharded and setup.reshard == "auto" and not setup.hosted
    for reshard in ("after_forward", "never") if both else (setup.reshard,):
        needs = estimate(config, replace(setup, reshard=reshard), batch_size)
        how = f", --reshard {reshard}" if sharded else ""
        rows[f"memory{how}"] = f"{needs.total / GIB:,.2f} GiB a GPU estimated: {parts(needs)}"
    less = estimate(config, setup, batch_size).total - estimate(config, in_eight_bits(setup), batch_size).total
    if less > 0.005 * GIB:
        rows["  8-bit moments"] = f"{less / GIB:,.2f} GiB less with --optimizer adamw8bit"
    for rank, stage in enumerate(stage_setups(config, setup) if setup.pipeline_parallel > 1 else ()):
        of_stage = estimate(*stage, batch_size)
        rows[f"  pipeline rank {rank}"] = f"{of_stage.total / GIB:,.2f} GiB: {parts(of_stage)}"
    if needs.host:
        said = f"{needs.host_total / GIB:,.2f} GiB a GPU ({' and '.join(needs.host)})"
        rows["host memory"] = f"{said}, and {save_buffers(config, setup) / GIB:,.2f} for saves"
    for name, card in CARDS.items():
        largest = largest_batch(config, setup, USABLE * card)
        mitigation = advice(config, setup, batch_size, USABLE * card)
        rows[f"  on {name}"] = f"does not fit; the cheapest mitigation is {mitigation}" if mitigation else "fits"
        rows[f"  on {name}"] += f" (up to --batch_size {largest})" if largest else ""
    return rows


def budget(cost: StepCost) -> str:
    """Describe the bytes that a rank receives in a step, for each kind of communication."""

    def words(kind: str, traffic: Traffic) -> str:
        alone, exposed = 1e3 * traffic.seconds, 1e3 * traffic.exposed
        return f"{kind} {traffic.bytes / 1e9:,.2f} GB, {alone:,.1f} ms ({exposed:,.1f} not hidden)"

    return "; ".join(words(*item) for item in cost.traffic.items()) or "nothing"
