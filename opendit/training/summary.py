"""Print the summaries of a run: before its first step and after its last step."""

import math
import shlex
from pathlib import Path

import torch

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.run_folders import newest_run
from opendit.checkpoint.save import Checkpoints
from opendit.common.records import RecordFile, WriteFailures
from opendit.config.components import BatchFlags
from opendit.config.console import print_block
from opendit.config.public_models import family_in
from opendit.data.mock import MockDataset
from opendit.encoders.folder import KNOWN
from opendit.models.families.public_config import PublicConfig
from opendit.parallel.engines import Engine
from opendit.parallel.sequence import attention_note
from opendit.training.dry_run import describe_recipe
from opendit.training.fingerprint import write_config
from opendit.training.loggers import RunLogger
from opendit.training.memory import USABLE, advice, card_memory, describe, lora_parameters
from opendit.training.monitor import Monitor
from opendit.training.specification import RunSpecification
from opendit.training.step_cost import training_flops


def announce_memory(spec: RunSpecification) -> None:
    """Print the estimated memory of a step. If the GPU has less, also print the cheapest change that makes the step
    fit. Call before building the model."""
    if not spec.mesh.is_main:
        return
    config, batch = spec.model_config, spec.samples_at_once
    card = card_memory(spec.mesh.device)
    print(f"memory: {describe(config, spec.memory, batch, card)}", flush=True)
    if card is not None and (mitigation := advice(config, spec.memory, batch, USABLE * card)):
        print(
            f"note: memory: the estimate is above what the GPU has; the cheapest mitigation is {mitigation}", flush=True
        )


def announce(spec: RunSpecification, failures: WriteFailures, engine: Engine, ema: EMA, graph_note: str) -> None:
    """Write config.json, and print a summary of the run's settings and of the implementations that it uses."""
    if not spec.mesh.is_main:
        return
    with failures.survive("config.json"):
        write_config(spec)
    flags, mesh, config = spec.flags, spec.mesh, spec.model_config
    cuda = mesh.device.type == "cuda"
    weights = sum(math.prod(shape) for shape in engine.shapes.values())  # number of trained weights
    if spec.stages is not None:  # engine.shapes has only this rank's weights, so add those of the other stages
        weights = config.parameters() if spec.lora is None else lora_parameters(config, spec.lora)
    processor = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s) each"
    rows = {"recipe": describe_recipe(flags)} if flags.recipe else {}
    rows |= {
        "model": f"{flags.model}: {config.parameters() / 1e6:.1f} M parameters, {config.tokens} tokens, "
        f"{training_flops(config, spec.lora, flags.token_route) / 1e9:.2f} GFLOP a training sample",
        "data": spec.dataset.describe().text,
        "latents": f"{' x '.join(map(str, (config.in_channels, *config.input_size)))} (--vae {spec.vae})",
        "processes": f"{mesh.world_size} ({processor}), plugin {flags.plugin}",
        "precision": flags.mixed_precision + (", blocks recomputed in backward" if flags.grad_checkpoint else ""),
        "trained": f"{weights:,} weights" + (f": {spec.lora}, and what is new" if spec.lora else ""),
        **({} if spec.low is None else {"networks": f"two by turns, the high-noise one in {spec.share:.1%} of steps"}),
        **({"blocks": blocks} if (blocks := _blocks(spec, engine)) else {}),
        "optimizer": _optimizer(engine) + ("; moments in host memory" if flags.offloaded_state == "state" else ""),
        "EMA": f"{'power functions of widths' if ema.power else 'decay'} {', '.join(map(str, ema.decays))}"
        f"{', warm-up' if ema.warmup else ''}; "
        f"{ema.bytes_per_rank() / 2**20:.1f} MiB a rank (4 bytes x parameters / ranks each)"
        + (" in host memory" if flags.offloaded_state != "none" else ""),
        "attention": attention_note(spec.kernels.attention_note, spec.sequence),
        "sequence": f"over {mesh.sp_size} ranks, {spec.sequence.plan}" if spec.sequence else "whole on every rank",
        **({"layers": f"divided among {mesh.tp_size} ranks, by collectives"} if mesh.tp_size > 1 else {}),
        **({"experts": f"of a block on {mesh.dims.ep} ranks, by all-to-alls"} if mesh.dims.ep > 1 else {}),
        **({"pipeline": spec.stages.describe()} if spec.stages else {}),
        "kernels": spec.kernels.ops_note,
        "CUDA graph": graph_note,
        "compile": spec.why_not_compiled or "blocks and final layer, when they first meet a shape",
        "batch": f"{flags.batch_size} x {mesh.dp_size} ranks x {flags.grad_accumulation} micro-batches = "
        f"{spec.schedule.global_batch}{_unit(flags)}; {spec.schedule.mean_steps_per_epoch:,.2f} steps an epoch",
        **({"an epoch": spec.schedule.passes} if spec.schedule.passes else {}),
        "steps": f"{spec.first_step} to {spec.last_step}"
        + (f", resumed from {spec.resume.folder}" if spec.resume else "")
        + f"; {spec.last_step / spec.schedule.mean_steps_per_epoch:,.2f} epochs in all",
        "run folder": str(spec.folder),
    }
    print_block("OpenDiT training", rows)
    for note in spec.notes:
        print(f"note: {note}", flush=True)


def _blocks(spec: RunSpecification, engine: Engine) -> str:
    """Describe the precision of frozen blocks, and how many blocks are in host memory; empty if there is neither."""
    flags, found = spec.flags, []
    if engine.stored or engine.streamed:
        kind = flags.base_precision if engine.stored else flags.mixed_precision
        found.append(f"frozen weights in {kind}")
    if flags.streamed_blocks:
        count = min(flags.streamed_blocks, spec.model_config.depth)
        what = "frozen weights" if spec.lora else "weights and gradients"
        found.append(f"{what} of {count} blocks in host memory, copied when due")
    return "; ".join(found)


def _optimizer(engine: Engine) -> str:
    """Describe the optimizer, and the number of weights that Muon updates, if any."""
    if engine.muon is None:
        return engine.optimizer_name
    weights = sum(math.prod(engine.shapes[name]) for name in engine.muon.names) / 1e6
    return f"Muon for {weights:,.1f} M weights of blocks, each matrix on one rank; for the rest {engine.optimizer_name}"


def _unit(flags: BatchFlags) -> str:
    if flags.tokens is None:
        return ""
    return f" {'lots of one shape' if flags.pack_tokens is None else 'packs'} of up to {flags.tokens:,} tokens"


def summarise(spec: RunSpecification, monitor: Monitor, checkpoints: Checkpoints) -> None:
    """Print the files that the run wrote, and a command to use next."""
    folder, step, failures = spec.folder, monitor.last.get("step", spec.first_step), monitor.failures
    rows = {"checkpoint": str(checkpoints.newest or "none was saved")}
    if not spec.flags.save:
        rows["checkpoint"] = "none (--no_save)"
    if (folder / "log.jsonl").is_file() and (folder / "log.jsonl").stat().st_size:
        rows["log"] = str(folder / "log.jsonl") + lines_missing(monitor.log_file)
    if seen := spec.schedule.seen(step):
        rows["samples"] = ", ".join(
            f"{count:,} seen {times:,} x" for times, count in sorted(seen.items(), reverse=True)
        )
    elif spec.flags.max_steps is None and step == spec.last_step and spec.schedule.micro_batches is not None:
        drawn, total = spec.schedule.drawn(step), spec.flags.epochs * spec.schedule.samples_of_a_pass
        rows["samples"] = f"{drawn:,} of the {total:,} of {spec.flags.epochs:,} passes; the rest fill no step"
    if any((folder / "samples").glob("*.png")):
        rows["pictures"] = str(folder / "samples")
    if monitor.board.complete:
        rows["curves"] = f"tensorboard --logdir {quote(folder / 'tensorboard')}"
    rows |= {name: logger.where for name, logger in monitor.boards.items() if isinstance(logger, RunLogger)}
    if next_step := what_next(spec, step, checkpoints.newest):
        rows["next"] = next_step
    if checkpoints.failures:
        rows["NOT SAVED"] = "; ".join(checkpoints.failures)
    if failures.count:
        rows["NOT WRITTEN"] = f"{failures.describe()}; the exit code is 1"
    loss = f", last logged loss {monitor.last['loss']:.4f}" if monitor.last.get("loss") is not None else ""
    print()
    print_block(f"{'Stopped' if step < spec.last_step else 'Done'}: step {step}{loss}", rows)


def what_next(spec: RunSpecification, step: int, newest: Path | None) -> str | None:
    """Return a command that resumes the run or samples from its newest checkpoint; None without a checkpoint."""
    if newest is None:
        return None
    if step < spec.last_step:
        latest = newest_run(spec.flags.outputs, spec.flags.model)
        ours = latest is not None and latest.resolve() == spec.folder.resolve()
        run = "latest" if ours else quote(spec.folder)
        return f"the same command with --load {run} goes on to step {spec.last_step}"
    if isinstance(spec.dataset, MockDataset):
        return None  # no command, because the run trained on random latents
    info, text = spec.info(), spec.model_config.text
    alone = isinstance(spec.model_config, PublicConfig) and spec.model_config.expert is not None
    if spec.lora is not None and family_in(spec.flags.model):  # the base model's folder has the VAE and text encoder
        video = " --use_video" if spec.flags.use_video else ""
        base = Path(str(spec.flags.pretrained))
        base = quote(base.parent if alone else base)  # the folder that contains both networks
        return f"python sample.py{video} --ckpt {base} --lora {quote(spec.folder)} --prompt WORDS"
    command = f"python sample.py --ckpt {quote(spec.folder)}" + " --second_ckpt RUN" * (alone and spec.low is None)
    frozen = {"vae": True, "text_encoder": text is not None and not text.inside}
    for name in (name for name, used in frozen.items() if used and info[name] not in KNOWN and info[name] is not None):
        # sample.py does not load an encoder that only a checkpoint names
        command += f" --{name} {quote(info[name])}"
    return command + ("" if spec.codec is not None else "  (the latents' VAE was not at hand)")


def quote(path: str | Path) -> str:
    """Quote a path so that a shell reads it as one word."""
    return shlex.quote(str(path))


def lines_missing(log: RecordFile) -> str:
    missing = log.lost + log.waiting
    return f" ({missing} lines of it could not be written)" if missing else ""
