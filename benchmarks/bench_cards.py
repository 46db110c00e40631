"""Time LoRA steps of FLUX.1 and Wan-1.3B with train.py on one GPU, with its memory capped to the size of smaller cards.

Also time steps that train all of FLUX.1's weights on two GPUs, with blocks or optimizer state offloaded to the host.

    python benchmarks/bench_cards.py [--folders FOLDER] [--only 14.5 wan] [--seconds 450] [--results FILE] [--record]
    python benchmarks/bench_cards.py --only whole    all weights, on two GPUs
    python benchmarks/bench_cards.py --tiny          small models on a CPU, to try this file

The models have the published sizes. Weights, latents and embeddings are random (--data_path mock). Every case is a
separate process that calls ``torch.cuda.set_per_process_memory_fraction`` with its cap. Like torch's memory statistics,
the cap excludes the CUDA context. A case runs STEPS steps and reports the median step time after WARMUP steps, the
peaks of the memory that torch allocated and reserved, and the memory that train.py estimated.

A case that does not fit prints one line, and the others run. After --seconds no new case begins. Cases with more ranks
than GPUs are left out. A case without updates runs the same passes and drops the gradients.

If the same step without --offload was measured in the same run, a case with blocks in host memory also reports the
ratio to a perfectly overlapped step: the larger of the step without --offload and the time on the link alone. At most
1 / 0.85 is wanted. The link carries the blocks twice a step, at the rate that `python -m opendit.cli.links` measured on
this machine, or else at the rate that the cost model assumes for the card."""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch

from benchmarks.random_folder import write_folder
from benchmarks.results import add_flags, record
from opendit.parallel.hardware import find_hardware

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARMUP = 14, 6
GIB = 2**30
FLUX = "--lora 16 --image_size 1024 --batch_size 1 --fp8"
WHOLE = "--image_size 512 --batch_size 32 --plugin fsdp --grad_checkpoint"  # 64 pictures a step on two GPUs
WAN_WEIGHTS = "--use_video --num_frames 81 --image_size 640 --batch_size 1"  # about as many pixels as 480p
WAN = f"--lora 16 {WAN_WEIGHTS}"
COMMON = (
    f"--data_path mock --mixed_precision bf16 --enable_modulate_kernel --enable_layernorm_kernel --enable_flashattn "
    f"--no_save --sample_every 0 --num_workers 2 --log_every 1 --warmup_steps 0 --max_steps {STEPS}"
)
BLOCKS, OVERLAPPED = "blocks in host memory GiB", "step / max(compute, link)"
GRAPH, RECOMPUTED = "--enable_cuda_graph", "--recompute but_attention"


@dataclass(frozen=True)
class Case:
    """A run under a memory cap.

    Attributes:
        cap: in GiB, or None.
        limit: largest acceptable ratio to the step time of the first case with the same :attr:`compared`, if any.
        ranks: number of processes.
        updates: False to leave the update out of every step.
    """

    name: str
    model: str
    cap: float | None
    flags: str
    limit: float | None = None
    ranks: int = 1
    updates: bool = True

    @property
    def compared(self) -> tuple[str, int]:
        """Cases with the same key are compared with the first of them."""
        return self.model, self.ranks


CASES = (
    Case("uncapped, all kept", "flux", None, f"{FLUX} {GRAPH}"),
    Case("uncapped, fp8 base", "flux", None, f"{FLUX} --base_precision fp8 {GRAPH}"),
    Case("22.5", "flux", 22.5, f"{FLUX} --base_precision fp8 {RECOMPUTED} {GRAPH}", 1.15),
    Case(
        "22.5, 41 of 57", "flux", 22.5, f"{FLUX} --base_precision fp8 {RECOMPUTED} --recompute_blocks 41 {GRAPH}", 1.15
    ),
    Case(
        "22.5, 38 of 57", "flux", 22.5, f"{FLUX} --base_precision fp8 {RECOMPUTED} --recompute_blocks 38 {GRAPH}", 1.15
    ),
    Case(
        "22.5, 28 of 57 in host memory",
        "flux",
        22.5,
        f"{FLUX} --base_precision fp8 {RECOMPUTED} --recompute_blocks 28 --offload blocks:28 {GRAPH}",
        1.15,
    ),
    Case("bf16, all kept", "flux", None, f"{FLUX.replace(' --fp8', '')} {GRAPH}"),
    Case("bf16, blocks recomputed", "flux", None, f"{FLUX.replace(' --fp8', '')} --grad_checkpoint {GRAPH}"),
    Case("14.5", "flux", 14.5, f"{FLUX} --base_precision fp8 {RECOMPUTED} --offload blocks:15 {GRAPH}", 1.4),
    Case("10.5", "flux", 10.5, f"{FLUX} --base_precision fp8 {RECOMPUTED} --offload blocks:36 {GRAPH}", 1.6),
    Case("10.5 kernel by kernel", "flux", 10.5, f"{FLUX} --base_precision fp8 {RECOMPUTED} --offload blocks:36"),
    Case("10.5 nf4", "flux", 10.5, f"{FLUX} --base_precision nf4 --grad_checkpoint {GRAPH}", 1.6),
    Case("uncapped", "wan-1.3b", None, f"{WAN} {RECOMPUTED}"),
    Case("10.5, blocks on the host", "wan-1.3b", 10.5, f"{WAN} {RECOMPUTED} --offload blocks"),
    Case("10.5, attention recomputed", "wan-1.3b", 10.5, f"{WAN} --grad_checkpoint"),
    Case("all weights, MLPs recomputed", "wan-1.3b", 76, f"{WAN_WEIGHTS} --recompute mlp"),
    Case("all weights, all but attention recomputed", "wan-1.3b", 76, f"{WAN_WEIGHTS} {RECOMPUTED}"),
    Case("all weights, blocks recomputed", "wan-1.3b", 76, f"{WAN_WEIGHTS} --grad_checkpoint"),
    Case("whole, no update", "flux", None, f"{WHOLE} --offload blocks", ranks=2, updates=False),
    Case("whole", "flux", None, f"{WHOLE} --offload blocks", 1 / 0.65, ranks=2),
    Case("whole, half of the blocks", "flux", None, f"{WHOLE} --offload blocks:29", 1 / 0.65, ranks=2),
    Case("whole, state only", "flux", None, f"{WHOLE} --offload state", ranks=2),
    Case(
        "two ranks, frozen blocks", "flux", None, f"{FLUX} --plugin fsdp --base_precision fp8 --offload blocks", ranks=2
    ),
)
TINY_FLAGS = {
    "--image_size 1024": "--image_size 64",
    "--image_size 512": "--image_size 64",
    "--batch_size 32": "--batch_size 1",
    "--image_size 640": "--image_size 64",
}
TINY_FLAGS |= {"--num_frames 81": "--num_frames 5"}
TINY_FLAGS |= {"--fp8": "", "--enable_cuda_graph": "", "--lora 16": "--lora 2", "bf16": "fp32"}


def without_update(self: Any) -> Any:
    """Replacement for ``FSDPEngine._step`` that drops the gradients and updates nothing."""
    from opendit.parallel.engines import StepResult

    self.model.zero_grad(set_to_none=True)
    device = self.mesh.device
    return StepResult(
        torch.zeros((), dtype=torch.float64, device=device), torch.ones((), dtype=torch.bool, device=device)
    )


def run(argv: list[str], cap: float | None, updates: bool = True) -> None:
    """Run train.py in this process with at most ``cap`` GiB, then print the memory peaks."""
    import train
    from opendit.parallel.engines.fsdp import FSDPEngine

    if not updates:
        FSDPEngine._step = without_update
    if cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap * GIB / total)
    train.main(argv)
    if torch.cuda.is_available():
        peaks = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        print("PEAKS", *peaks, flush=True)


def measure(case: Case, folder: Path, tiny: bool) -> dict[str, float]:
    """Return a case's step time, memory peaks and estimate. Raises RuntimeError with a failed run's last lines."""
    flags = f"{case.flags} {COMMON}"
    for word, other in TINY_FLAGS.items() if tiny else ():
        flags = flags.replace(word, other)
    with tempfile.TemporaryDirectory() as outputs:
        argv = [*shlex.split(flags), "--pretrained", str(folder), "--outputs", outputs]
        program = Path(outputs, "program.py")
        call = f"run({argv!r}, {None if tiny else case.cap!r}, {case.updates})"
        program.write_text(f"from benchmarks.bench_cards import run\nif __name__ == '__main__':\n    {call}\n")
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": paths}
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}"]
        command = [sys.executable, *(ranks if case.ranks > 1 else []), str(program)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise RuntimeError(next((line for line in lines if "OutOfMemory" in line), " | ".join(lines[-2:])))
        (log,) = Path(outputs).glob("*/log.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    found = {"step s": statistics.median(1 / line["samples_per_s"] for line in lines[WARMUP:])}
    for line in done.stdout.splitlines():
        if line.startswith("PEAKS"):  # with several ranks the last line counts; they differ little
            found["allocated GiB"], found["reserved GiB"] = map(float, line.split()[1:])
        if line.startswith("memory: "):
            found["estimated GiB"] = float(line.split()[1])
            if blocks := re.search(r"in host memory blocks ([\d.,]+)", line):
                found[BLOCKS] = float(blocks[1].replace(",", ""))
    return found


def overlapped(resident: float, blocks: float) -> float:
    """Return the seconds of a step that hides all copies, or is as fast as the link.

    Args:
        resident: seconds of the step without --offload.
        blocks: GiB of blocks in host memory.
    """
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    hardware, _ = find_hardware(None, card)
    return max(resident, 2 * blocks * GIB / (hardware.host_link / 2))  # host_link sums both directions


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folders", type=Path, default=None, help="where the models' folders are written, or lie")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose model or name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="small models, without caps")
    parser.add_argument("--seconds", type=float, default=450, help="after which no case is begun")
    add_flags(parser)
    args = parser.parse_args(argv)
    start, base, steps, rows = time.perf_counter(), {}, {}, []
    folders = args.folders or Path(tempfile.mkdtemp())
    for case in CASES:
        if args.only and not any(word in f"{case.model} {case.name}" for word in args.only):
            continue
        if torch.cuda.is_available() and torch.cuda.device_count() < case.ranks:
            print(f"{case.model} {case.name}: needs {case.ranks} GPUs", flush=True)
            continue
        if time.perf_counter() - start > args.seconds:
            print(f"{case.model} {case.name}: no time left", flush=True)
            continue
        folder = folders / case.model
        if not (folder / "model_index.json").is_file():
            write_folder(case.model, folder, tiny=args.tiny)
            print(f"wrote {folder} ({time.perf_counter() - start:.0f} s)", flush=True)
        try:
            found = measure(case, folder, args.tiny)
        except (RuntimeError, ValueError) as error:
            print(f"{case.model} {case.name}: FAILED: {error}", flush=True)
            continue
        first = base.setdefault(case.compared, found["step s"])
        steps[case.compared, case.flags] = found["step s"]
        resident = steps.get((case.compared, re.sub(r" --offload \S+", "", case.flags)))
        if resident is not None and (blocks := found.get(BLOCKS)):
            found[OVERLAPPED] = found["step s"] / overlapped(resident, blocks)
        ratio, limit = found["step s"] / first, "" if case.limit is None else f" (asked for: {case.limit})"
        figures = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        print(f"{case.model} {case.name}: {figures}, {ratio:.2f} x the first{limit}", flush=True)
        print(f"    {case.flags}", flush=True)
        for name, value in found.items():
            row = {"bench": "cards", "case": f"{case.model} {case.name}", "metric": name, "value": f"{value:.4f}"}
            rows.append(row | ({"baseline": "the first", "baseline_value": f"{first:.4f}"} if name == "step s" else {}))
    record(rows, args)


if __name__ == "__main__":
    main()
