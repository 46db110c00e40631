"""Print what a run would need (--dry_run), the settings before the first step, and the results at the end."""

import math
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

from opendit.checkpoint.run_folders import CHECKPOINTS, newest_run
from opendit.common.safe_files import WriteFailures
from opendit.config.architectures import family_in
from opendit.config.command_line import overridden
from opendit.config.components import BatchFlags, TokenRoute
from opendit.config.console import print_block, print_error
from opendit.config.names import DESCRIPTIONS
from opendit.config.train import TrainConfig
from opendit.data import DataError, MediaDataset
from opendit.data.mock import MockDataset
from opendit.diffusion.objectives.base import Objective
from opendit.encoders.folder import KNOWN
from opendit.models.configuration import DiTConfig
from opendit.models.families.public_config import PublicConfig, family_of
from opendit.parallel.engines import Engine
from opendit.parallel.hardware import find_hardware
from opendit.parallel.pipeline import stages_of
from opendit.parallel.sequence import attention_note, sequence_shape
from opendit.training.auto_parallel import Circumstances, decide, on_card
from opendit.training.data_plan import (
    fit_captions,
    last_step_of,
    make_schedule,
    open_data,
    samples_at_once,
    shape_samples,
    text_before,
)
from opendit.training.fingerprint import write_config
from opendit.training.memory import (
    GIB,
    USABLE,
    Setup,
    advice,
    card_memory,
    describe,
    estimate,
    in_eight_bits,
    largest_batch,
    lora_parameters,
    parts,
    resolve_sharding,
    save_buffers,
    stage_setups,
)
from opendit.training.model_plan import (
    check_pretrained,
    encoder_bytes,
    lora_of,
    memory_setup,
    plan_model,
    saved_by_adaln_lora,
)
from opendit.training.monitor import RunLogger, describe_duration
from opendit.training.run import Run
from opendit.training.step_cost import StepCost, Traffic, step_cost, tokens_per_second, training_flops

# Size that is sold -> GiB that torch reports, of an RTX 4090, an L40S, an H100 and an H200.
CARDS = {"24 GB": 23.6, "48 GB": 44.4, "80 GB": 79.1, "141 GB": 139.8}


def dry_run(flags: TrainConfig) -> None:
    """Print parameters, tokens, FLOPs, GPU memory and steps of a run on --dry_run's number of GPUs.

    Without a number, plan for torchrun's processes, or for more if the parallelism flags need more. Random latents
    replace a missing data set. Flags that the run would refuse end the program with one line and exit code 2.
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
        hardware, origin = on_card(flags.card, hardware, origin)
    where = Circumstances(world, flags.node_size(world), USABLE * hardware.capacity, hardware)
    if flags.decided_by_estimates:
        resolved, notes = flags.resolve(world, has_gpu=True)
        flags, lines = decide(flags, _data(resolved, notes), where, origin)
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
    if flags.token_route is not None and flags.route_until is not None:
        until = f"--route_until {flags.route_until}"
        notes.append(f"{until}: the time is of a step with the route, and the memory of a step without it")
    if config.adaln_lora is not None:
        notes.append(saved_by_adaln_lora(config))
    ranks, stages = world // flags.sharing, flags.pipeline_parallel_size
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
        "objective": _objective(plan.objective),
        "GPUs": f"{world}, plugin {flags.plugin}, {flags.mixed_precision}"
        + (f", layers divided by {tensor}" if tensor > 1 else "")
        + (f", experts on {flags.expert_parallel_size} each" if flags.expert_parallel_size > 1 else ""),
        **({"pipeline": stages_of(config, flags.pipeline_schedule, 0, stages).describe()} if stages > 1 else {}),
        "batch": f"{flags.batch_size} x {ranks} ranks x {flags.grad_accumulation} micro-batches = {samples:,}",
        "steps": steps,
    }
    setup = memory_setup(flags, world, encoder_bytes(flags, config, dataset))
    rows |= _time(flags, config, setup, where, origin, last)
    rows |= _memory(config, together, setup)
    print_block("OpenDiT dry run: nothing was built", rows)
    for note in notes:
        print(f"note: {note}", flush=True)


def _objective(objective: Objective) -> str:
    flags = DESCRIPTIONS[objective.name].settings
    fields = {name: value for name, value in objective.to_dict().items() if name != "name"}
    words = [f"{f'--{flags[name].flag}' if name in flags else name} {value}" for name, value in fields.items()]
    return ", ".join([objective.name, *words])


def work(flop: float) -> str:
    """Format FLOPs: 711.7e9 -> "711.7 GFLOP"."""
    power = max(2, min(6, int(math.log10(flop)) // 3))
    return f"{flop / 1000**power:,.1f} {' kMGTPE'[power]}FLOP"


def describe_recipe(flags: TrainConfig) -> str:
    """Return the recipe's name, and its flags that the command line changes."""
    assert flags.recipe is not None
    named = {"text_encoder", "vae"} if family_in(flags.model) else set()  # the folder of --pretrained sets these flags
    changed = [
        f"{name} {now} (recipe: {before})" for name, (before, now) in overridden(flags).items() if name not in named
    ]
    return flags.recipe + (f", changed: {', '.join(changed)}" if changed else "")


def _data(flags: TrainConfig, notes: list[str]) -> MediaDataset:
    try:
        return open_data(flags)
    except (OSError, DataError) as error:
        notes.append(f"{error} (the figures are for data of the kind that the other flags ask for)")
        return open_data(replace(flags, data_path="mock"))


def _steps(flags: TrainConfig, dataset: MediaDataset | None, samples: int, config: DiTConfig) -> tuple[str, int | None]:
    """Return a description of the run's steps, and the last step if known."""
    if dataset is None:
        ends = f"{flags.max_steps:,} at most" if flags.max_steps else "not known"
        return f"{ends}; {flags.epochs:,} epochs of data that can't be found", flags.max_steps
    schedule = make_schedule(flags, dataset, samples, config)
    last = last_step_of(flags, schedule)
    an_epoch = schedule.mean_steps_per_epoch
    return (
        f"{an_epoch:,.2f} an epoch, {last:,} in all = {last / an_epoch:,.1f} epochs, "
        f"{last * samples:,} {'samples' if flags.tokens is None else f'groups of {flags.tokens:,} tokens'}"
    ), last


def _time(
    flags: TrainConfig, config: DiTConfig, setup: Setup, where: Circumstances, origin: str, last: int | None
) -> dict[str, str]:
    """Return the report's rows on sequence parallelism, time, communication, and hours until step ``last``."""
    size, route = flags.sequence_parallel_size, flags.token_route
    together = samples_at_once(flags, config)
    how = (flags, flags.attention, setup.precision, config, together)
    types = sequence_shape(*how, tensor_parallel=setup.tensor_parallel, lora=flags.lora is not None).types
    resolved = resolve_sharding(config, setup, together, where.capacity)
    cost, dense = (
        step_cost(
            config,
            replace(resolved, route=of_step),
            together,
            flags.grad_accumulation,
            where.hardware,
            where.node,
            sequence_type=flags.sequence_parallel_type,
            sequence_types=types,
            graph=flags.enable_cuda_graph,
        )
        for of_step in (route, None)
    )
    rate = tokens_per_second(config, setup, together, flags.grad_accumulation, cost.total)
    spent = cost.work | {"communication not hidden": cost.exposed, "waiting for the host": cost.waiting}
    work = ", ".join(f"{kind} {1e3 * seconds:,.1f}" for kind, seconds in spent.items() if seconds)
    card, _, why = origin.partition(":")
    speed = f"at {card} speed"
    rows = {} if cost.sequence is None else {"sequence": f"over {size} ranks, {cost.sequence}"}
    rows["time"] = f"{1e3 * cost.total:,.1f} ms a step, {rate:,.0f} tokens/s a GPU predicted {speed} ({why.strip()}), "
    rows["time"] += f"without reading data, saving and drawing; in ms: {work}"
    if last:
        routed = last if route is None or route.until is None else min(last, route.until)
        duration = describe_duration(cost.total * routed + dense.total * (last - routed))
        rows["duration"] = f"{duration} for {last:,} step{'s' * (last != 1)}, predicted {speed}"
    if where.world > 1:
        rows["received a step"] = budget(cost)
    return rows


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
        host = f"{needs.host_total / GIB:,.2f} GiB a GPU ({' and '.join(needs.host)})"
        rows["host memory"] = f"{host}, and {save_buffers(config, setup) / GIB:,.2f} for saves"
    for name, card in CARDS.items():
        largest = largest_batch(config, setup, USABLE * card * GIB)
        mitigation = advice(config, setup, batch_size, USABLE * card * GIB)
        no = f"does not fit {card} GiB; the cheapest mitigation is {mitigation}"
        rows[f"  on {name}"] = no if mitigation else f"fits {card} GiB"
        rows[f"  on {name}"] += f" (up to --batch_size {largest})" if largest else ""
    return rows


def budget(cost: StepCost) -> str:

    def words(kind: str, traffic: Traffic) -> str:
        alone, exposed = 1e3 * traffic.seconds, 1e3 * traffic.exposed
        return f"{kind} {traffic.bytes / 1e9:,.2f} GB, {alone:,.1f} ms ({exposed:,.1f} not hidden)"

    return "; ".join(words(*item) for item in cost.traffic.items()) or "nothing"


def announce_memory(run: Run) -> None:
    """Print a step's estimated memory, and the cheapest change that makes it fit. Call before building the model."""
    if not run.mesh.is_main:
        return
    config, batch = run.model_config, run.samples_at_once
    card = card_memory(run.mesh.device)
    print(f"memory: {describe(config, run.memory, batch, card)}", flush=True)
    if card is not None and (mitigation := advice(config, run.memory, batch, USABLE * card)):
        print(
            f"note: memory: the estimate is above what the GPU has; the cheapest mitigation is {mitigation}", flush=True
        )


def announce(run: Run, failures: WriteFailures) -> None:
    """Write config.json, and print the run's settings and implementations."""
    if not run.mesh.is_main:
        return
    with failures.survive("config.json"):
        write_config(run)
    flags, mesh, config, engine, ema = run.flags, run.mesh, run.model_config, run.engine, run.ema
    cuda = mesh.device.type == "cuda"
    weights = sum(math.prod(shape) for shape in engine.shapes.values())  # number of trained weights
    if run.stages is not None:  # engine.shapes has only this stage's weights
        weights = config.parameters() if run.lora is None else lora_parameters(config, run.lora)
    processor = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s) each"
    rows = {"recipe": describe_recipe(flags)} if flags.recipe else {}
    rows |= {
        "model": f"{flags.model}: {config.parameters() / 1e6:.1f} M parameters, {config.tokens} tokens, "
        f"{training_flops(config, run.lora, flags.token_route) / 1e9:.2f} GFLOP a training sample",
        **({"licence": family_of(config.family).license} if isinstance(config, PublicConfig) else {}),
        "data": run.dataset.describe().text,
        "latents": f"{' x '.join(map(str, (config.in_channels, *config.input_size)))} (--vae {run.vae})",
        "processes": f"{mesh.world_size} ({processor}), plugin {flags.plugin}",
        "precision": flags.mixed_precision + (", blocks recomputed in backward" if flags.grad_checkpoint else ""),
        "trained": f"{weights:,} weights" + (f": {run.lora}, and what is new" if run.lora else ""),
        **({} if run.low is None else {"networks": f"two by turns, the high-noise one in {run.share:.1%} of steps"}),
        **({"blocks": blocks} if (blocks := _blocks(run)) else {}),
        **({"aligned": aligned} if (aligned := _aligned(run)) else {}),
        **({"route": _route(route)} if (route := flags.token_route) else {}),
        "optimizer": _optimizer(engine) + ("; moments in host memory" if flags.offloaded_state == "state" else ""),
        "EMA": f"{'power functions of widths' if ema.power else 'decay'} {', '.join(map(str, ema.decays))}"
        f"{', warm-up' if ema.warmup else ''}; "
        f"{ema.bytes_per_rank() / 2**20:.1f} MiB a rank (4 bytes x parameters / ranks each)"
        + (" in host memory" if flags.offloaded_state != "none" else ""),
        "attention": attention_note(run.kernels.attention_note, run.sequence),
        "sequence": f"over {mesh.sp_size} ranks, {run.sequence.plan}" if run.sequence else "whole on every rank",
        **({"layers": f"divided among {mesh.tp_size} ranks, by collectives"} if mesh.tp_size > 1 else {}),
        **({"experts": f"of a block on {mesh.dims.ep} ranks, by all-to-alls"} if mesh.dims.ep > 1 else {}),
        **({"pipeline": run.stages.describe()} if run.stages else {}),
        "kernels": run.kernels.ops_note,
        "CUDA graph": run.runner.note,
        "compile": run.why_not_compiled or "blocks and final layer, when they first meet a shape",
        "batch": f"{flags.batch_size} x {mesh.dp_size} ranks x {flags.grad_accumulation} micro-batches = "
        f"{run.schedule.global_batch}{_unit(flags)}; {run.schedule.mean_steps_per_epoch:,.2f} steps an epoch",
        **({"an epoch": run.schedule.passes} if run.schedule.passes else {}),
        "steps": f"{run.first_step} to {run.last_step}"
        + (f", resumed from {run.resume.folder}" if run.resume else "")
        + f"; {run.last_step / run.schedule.mean_steps_per_epoch:,.2f} epochs in all",
        "run folder": str(run.folder),
    }
    print_block("OpenDiT training", rows)
    short = short_of_disk(run, weights * (1 if run.low is None else 2))
    for note in [*run.notes, *([short] if short else [])]:
        print(f"note: {note}", flush=True)


def short_of_disk(run: Run, weights: int) -> str | None:
    """Return a note if the checkpoints that the run will write need more than the free disk space. weights: number of
    trained weights."""
    flags, left = run.flags, run.last_step - run.first_step
    if not flags.save or left <= 0:
        return None
    count = math.ceil(left / flags.ckpt_every) if flags.ckpt_every else 1
    if flags.ckpt_keep:  # a new checkpoint is written before the oldest is deleted
        there = len(list((run.folder / CHECKPOINTS).glob("step_*")))
        count = min(count, max(1, flags.ckpt_keep + 1 - there))
    needed = count * weights * (4 + 8 + 4 * len(run.ema.decays))  # fp32 weights, two moments and the averages
    free = shutil.disk_usage(run.folder).free
    if needed <= free:
        return None
    what = "its checkpoint takes" if count == 1 else f"{count:,} checkpoints take"
    keep = "" if count == 1 or flags.ckpt_keep else ", or keep fewer by --ckpt_keep"
    return (
        f"disk: {free / GIB:,.2f} GiB are free under {flags.outputs}, but {what} about {needed / GIB:,.2f} GiB; "
        f"make room{keep}"
    )


def _aligned(run: Run) -> str | None:
    alignment, flags = run.model_config.alignment, run.flags
    if alignment is None:
        return None
    return (
        f"after {alignment.block} of {run.model_config.depth} blocks with --repa {flags.repa}: "
        f"weight {flags.repa_weight:g}, projector {alignment.projector}"
    )


def _route(route: TokenRoute) -> str:
    until = "" if route.until is None else f", until step {route.until:,}"
    kind = "SPRINT" if route.fused else "TREAD"
    return f"{100 * route.share:g} % of tokens skip blocks {route.first} to {route.last - 1}{until} ({kind})"


def _blocks(run: Run) -> str:
    flags, engine, found = run.flags, run.engine, []
    if engine.stored or engine.streamed:
        kind = flags.base_precision if engine.stored else flags.mixed_precision
        found.append(f"frozen weights in {kind}")
    if flags.streamed_blocks:
        count = min(flags.streamed_blocks, run.model_config.depth)
        what = "frozen weights" if run.lora else "weights and gradients"
        found.append(f"{what} of {count} blocks in host memory, copied when due")
    return "; ".join(found)


def _optimizer(engine: Engine) -> str:
    if engine.muon is None:
        return engine.optimizer_name
    weights = sum(math.prod(engine.shapes[name]) for name in engine.muon.names) / 1e6
    return f"Muon for {weights:,.1f} M weights of blocks, each matrix on one rank; for the rest {engine.optimizer_name}"


def _unit(flags: BatchFlags) -> str:
    if flags.tokens is None:
        return ""
    return f" {'groups of one shape' if flags.pack_tokens is None else 'packs'} of up to {flags.tokens:,} tokens"


def summarise(run: Run) -> None:
    """Print the files that the run wrote, and a command to use next."""
    monitor, checkpoints = run.monitor, run.checkpoints
    folder, step, failures = run.folder, monitor.last.get("step", run.first_step), monitor.failures
    rows = {"checkpoint": str(checkpoints.newest or "none was saved")}
    if not run.flags.save:
        rows["checkpoint"] = "none (--no_save)"
    if (folder / "log.jsonl").is_file() and (folder / "log.jsonl").stat().st_size:
        missing = monitor.log_file.lost + monitor.log_file.waiting
        rows["log"] = f"{folder / 'log.jsonl'}" + f" ({missing} lines of it could not be written)" * (missing > 0)
    if seen := run.schedule.seen(step):
        rows["samples"] = ", ".join(
            f"{count:,} seen {times:,} x" for times, count in sorted(seen.items(), reverse=True)
        )
    elif run.flags.max_steps is None and step == run.last_step and run.schedule.micro_batches is not None:
        drawn, total = run.schedule.drawn(step), run.flags.epochs * run.schedule.samples_of_a_pass
        rows["samples"] = f"{drawn:,} of the {total:,} of {run.flags.epochs:,} passes; the rest fill no step"
    if any((folder / "samples").glob("*.png")):
        rows["pictures"] = str(folder / "samples")
    if monitor.board.complete:
        rows["curves"] = f"tensorboard --logdir {quote(folder / 'tensorboard')}"
    rows |= {name: logger.where for name, logger in monitor.boards.items() if isinstance(logger, RunLogger)}
    if next_step := what_next(run, step, checkpoints.newest):
        rows["next"] = next_step
    if checkpoints.failures:
        *earlier, last = checkpoints.failures
        rows["NOT SAVED"] = f"{len(earlier) + 1} times; the last at {last}" if earlier else last
    if failures.count:
        rows["NOT WRITTEN"] = f"{failures.describe()}; the exit code is 1"
    loss = f", last logged loss {monitor.last['loss']:.4f}" if monitor.last.get("loss") is not None else ""
    print()
    print_block(f"{'Stopped' if step < run.last_step else 'Done'}: step {step}{loss}", rows)


def what_next(run: Run, step: int, newest: Path | None) -> str | None:
    """Return a command that resumes the run or samples from its newest checkpoint, or None."""
    if newest is None:
        return None
    if step < run.last_step:
        latest = newest_run(run.flags.outputs, run.flags.model)
        ours = latest is not None and latest.resolve() == run.folder.resolve()
        name = "latest" if ours else quote(run.folder)
        return f"the same command with --load {name} goes on to step {run.last_step}"
    if isinstance(run.dataset, MockDataset):
        return None  # the model knows only random latents
    info, text = run.info(), run.model_config.text
    public = run.model_config if isinstance(run.model_config, PublicConfig) else None
    alone = public is not None and public.expert is not None
    image = " --image FILE" if public is not None and public.given_beside else ""
    if run.lora is not None and family_in(run.flags.model):  # the base model's folder has the VAE and text encoder
        video = " --use_video" if run.flags.use_video else ""
        base = Path(str(run.flags.pretrained))
        base = quote(base.parent if alone else base)  # the folder that contains both networks
        return f"python sample.py{video} --ckpt {base} --lora {quote(run.folder)} --prompt WORDS{image}"
    command = f"python sample.py --ckpt {quote(run.folder)}{image}"
    command += " --second_ckpt RUN" * (alone and run.low is None)
    frozen = {"vae": True, "text_encoder": text is not None and not text.inside}
    for name in (name for name, used in frozen.items() if used and info[name] not in KNOWN and info[name] is not None):
        # sample.py does not load an encoder that only a checkpoint names
        command += f" --{name} {quote(info[name])}"
    return command + ("" if run.codec is not None else "  (the latents' VAE was not at hand)")


def quote(path: str | Path) -> str:
    return shlex.quote(str(path))
