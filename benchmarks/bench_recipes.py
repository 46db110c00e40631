"""Measure tokens/s, memory and FLOP/s of training steps in runs of train.py on random latents.

    python benchmarks/bench_recipes.py --gpus 1 2 [--only 7B MovieGen-5B] [--results FILE]
    python benchmarks/bench_recipes.py --plan --gpus 1 2 4            what would run, and with which batch; needs no GPU

A case runs train.py under torchrun with a mock_ recipe and a few flags. Its micro-batch is the largest that fits into
--fill of the card according to opendit/training/memory.py, limited to LARGEST_STEP FLOP. The results are medians of
what the run logs after WARMUP steps. A case that does not fit is left out. A case that fails prints its error, and the
others run.

FLOPs are counted in two ways. "executed" is what train.py logs: forward matrix products x 3, without recomputation.
"6 N" is NeMo's formula, 6 x parameters x tokens. It counts too much for modulation, experts and caption layers, because
not every token uses their weights, and it leaves out attention.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch

from benchmarks.results import append
from opendit.checkpoint.run_folders import run_folders
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.models.zoo import config_from_dict
from opendit.training.data_plan import open_data
from opendit.training.memory import GIB, USABLE, estimate, largest_batch, resolve_sharding
from opendit.training.model_plan import memory_setup, plan_model
from opendit.training.summary import CARDS

ROOT = Path(__file__).resolve().parents[1]
STEPS, EVERY = 10, 2  # steps per run, and per line of its log
WARMUP = 4  # steps for compiling kernels, initializing libraries and recording a CUDA graph
LARGEST_STEP = 1.5e15  # FLOP per GPU, about 3 s; longer steps gain nothing
NEMO = ("NeMo's published DiT-7B at 8k tokens, H100", 10052)  # tokens/s/GPU


@dataclass(frozen=True)
class Case:
    name: str
    recipe: str
    flags: str = ""
    published: tuple[str, float] | None = None  # (source, tokens/s/GPU) of a published figure

    def argv(self, more: list[str]) -> list[str]:
        return ["--recipe", self.recipe, *shlex.split(self.flags), *more]


GRAPH = "--enable_cuda_graph"  # helps at width 1152, but not at 3072, where kernels are long
CASES = (
    Case("7B", "mock_pretrain_7b_256p_joint", "", NEMO),
    Case("7B recompute cheap", "mock_pretrain_7b_256p_joint", "--recompute cheap", NEMO),
    Case("7B recompute mlp", "mock_pretrain_7b_256p_joint", "--recompute mlp", NEMO),
    Case("7B grad_checkpoint", "mock_pretrain_7b_256p_joint", "--grad_checkpoint", NEMO),
    Case("7B gemini", "mock_pretrain_7b_256p_joint", "--plugin gemini", NEMO),
    Case("7B fsdp", "mock_pretrain_7b_256p_joint", "--plugin fsdp", NEMO),
    Case("7B fsdp reduce bf16", "mock_pretrain_7b_256p_joint", "--plugin fsdp --reduce_dtype bf16", NEMO),
    Case("7B fsdp offload average", "mock_pretrain_7b_256p_joint", "--plugin fsdp --offload average", NEMO),
    Case("7B fsdp offload state", "mock_pretrain_7b_256p_joint", "--plugin fsdp --offload state", NEMO),
    Case("7B fsdp fp8 gathered in bf16", "mock_pretrain_7b_256p_joint", "--plugin fsdp --fp8 --no_gather_fp8", NEMO),
    Case("7B fsdp fp8", "mock_pretrain_7b_256p_joint", "--plugin fsdp --fp8", NEMO),
    Case("MovieGen-1B", "mock_moviegen_5b_256p_joint", "--model MovieGen-1B/122"),
    Case("MovieGen-3B", "mock_moviegen_5b_256p_joint", "--model MovieGen-3B/122"),
    Case("MovieGen-5B", "mock_moviegen_5b_256p_joint"),
    Case("MovieGen-5B grad_checkpoint", "mock_moviegen_5b_256p_joint", "--grad_checkpoint"),
    Case("MovieGen-5B gemini", "mock_moviegen_5b_256p_joint", "--plugin gemini"),
    Case("vDiT-XL", "mock_pretrain_xl_256p_joint", GRAPH),
    Case("ST-DiT-XL", "mock_st_dit_xl_256p_joint", GRAPH),
    Case("EC-DiT-1B", "mock_ec_dit_1b", GRAPH),
    Case("28B", "mock_pretrain_28b_256p_joint"),  # its recipe uses fsdp and --grad_checkpoint
    Case("MovieGen-30B", "mock_moviegen_30b_256p_joint"),
)


@dataclass(frozen=True)
class Figures:
    """A run's medians. Work is in TFLOP/s per GPU, memory in GiB. waited: share of the time spent waiting for data."""

    case: str  # name in results.csv
    batch: int
    tokens: float  # per second and GPU
    ms: float
    peak: float
    executed: float
    six_n: float
    waited: float


def planned(argv: list[str], gpus: int, capacity: float, asked_batch: int | None = None) -> tuple[int, float]:
    """Return a run's (batch per GPU, estimated GiB).

    The batch is ``asked_batch`` or, if None, the largest that fits into ``capacity`` bytes; 0 if no sample fits."""
    flags = parse(TrainConfig, [*argv, "--dry_run", str(gpus)])
    flags, _ = flags.resolve(gpus, has_gpu=True)
    config = plan_model(flags, open_data(flags)).config
    setup = memory_setup(flags, gpus)
    enough = max(1, int(LARGEST_STEP * flags.sequence_parallel_size // (3 * config.forward_flops())))
    batch = asked_batch or min(enough, largest_batch(config, setup, capacity))
    setup = resolve_sharding(config, setup, max(batch, 1), capacity)
    return batch, estimate(config, setup, max(batch, 1)).total / GIB


def train(argv: list[str], gpus: int, outputs: Path, limit: float, program: tuple[str, ...] = ("train.py",)) -> Path:
    """Run train.py, or a ``program`` with the same flags, and return its run folder. Raises RuntimeError with the
    reason if the run fails or takes longer than ``limit`` seconds."""
    steps = f"--max_steps {STEPS} --log_every {EVERY} --outputs".split()
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", *program]
    outputs.mkdir(parents=True, exist_ok=True)
    output = outputs / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [*start, *argv, *steps, str(outputs)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done in {limit:.0f} s (see {output})") from None
        finally:
            process.terminate()  # torchrun then ends its processes
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{reason(output.read_text())} (see {output})")
    return run_folders(outputs)[-1]


def reason(output: str) -> str:
    """Return the first error, from any rank, in a failed run's output."""
    found = re.search(r"^(?:\[rank\d+\]: *)?((?:[\w.]*Error|error): .+)$", output, re.MULTILINE)
    return found[1] if found else "failed without naming an error"


def figures(run: Path) -> Figures:
    """Return the figures that a run has logged. Raises RuntimeError if steps were skipped."""
    stored = json.loads((run / "config.json").read_text())
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    if lines[-1]["skipped"]:
        raise RuntimeError(f"{lines[-1]['skipped']} steps had gradients that are not finite (see {run})")
    lines = [line for line in lines if line["step"] > WARMUP]
    config, flags, world = config_from_dict(stored["model_config"]), stored["flags"], stored["world_size"]
    rate = statistics.median(line["samples_per_s"] for line in lines)
    ranks = world // flags["sequence_parallel_size"] // flags.get("tensor_parallel_size", 1)
    seconds = flags["batch_size"] * ranks * flags["grad_accumulation"] / rate
    tokens = rate * config.tokens / world
    how = [flags["plugin"], flags["mixed_precision"], f"batch {flags['batch_size']}"]
    how += ["grad_checkpoint"] * flags["grad_checkpoint"] + ["graph"] * flags["enable_cuda_graph"]
    how += [f"recompute {flags['recompute']}"] * (flags["recompute"] != "none")
    how += ["fp8"] * flags.get("fp8", False)
    if flags["plugin"] == "fsdp":
        how += ["gathered in bf16"] * (flags["fp8"] and not flags["gather_fp8"])
        how += [f"offload {flags['offload']}"] * (flags["offload"] != "none")
        how += [f"reduced in {flags['reduce_dtype']}"] * (flags["reduce_dtype"] != "fp32")
    return Figures(
        case=" ".join([flags["model"], f"{config.tokens} tokens", *how]),
        batch=flags["batch_size"],
        tokens=tokens,
        ms=1e3 * seconds,
        peak=max(line["memory_gib"] for line in lines),
        executed=statistics.median(line["tflops"] for line in lines),
        six_n=6 * config.parameters() * tokens / 1e12,
        waited=statistics.median(line["data_wait_s"] for line in lines) / (EVERY * seconds),
    )


def rows_of(found: Figures, published: tuple[str, float] | None, estimated: float | None = None) -> list[dict]:
    """Return rows for results.csv. estimated: GiB. The row with a published figure has no ratio."""
    values = {
        "tokens/s/GPU": f"{found.tokens:.0f}",
        "ms": f"{found.ms:.1f}",
        "peak GiB": f"{found.peak:.1f}",
        "TFLOP/s executed": f"{found.executed:.1f}",
        "TFLOP/s 6 N": f"{found.six_n:.1f}",
    }
    rows: list[dict[str, str | float]] = [
        {"bench": "recipes", "case": found.case, "metric": k, "value": v} for k, v in values.items()
    ]
    if published is not None:
        rows[0] |= {"baseline": published[0], "baseline_value": published[1], "ratio": ""}
    if estimated:
        rows[2] |= {"baseline": "estimated", "baseline_value": f"{estimated:.1f}"}
        rows[2]["ratio"] = f"{found.peak / estimated:.3f}"
    return rows


TITLES = f"{'case':28s} {'GPUs':>4s} {'batch':>5s} {'tok/s/GPU':>9s} {'ms':>8s} {'GiB':>6s} {'(est.)':>6s} "
TITLES += f"{'TFLOP/s':>7s} {'by 6 N':>7s}"


def line(case: Case, gpus: int, estimated: float, found: Figures) -> str:
    text = f"{case.name:28s} {gpus:4d} {found.batch:5d} {found.tokens:9,.0f} {found.ms:8.1f} {found.peak:6.1f} "
    text += f"{estimated:6.1f} {found.executed:7.1f} {found.six_n:7.1f}"
    return text + (f"  data late for {found.waited:.0%} of the time" if found.waited > 0.01 else "")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[max(1, torch.cuda.device_count())], help="one run each")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--fill", type=float, default=USABLE, help="share of the card that a run may take")
    parser.add_argument("--batch_size", type=int, help="samples per GPU, instead of as many as fit")
    parser.add_argument("--more", default="", metavar="'--FLAG VALUE'", help="flags of train.py for all cases")
    parser.add_argument("--limit", type=float, default=300, help="seconds a run may take")
    parser.add_argument("--outputs", type=Path, default=Path("outputs/bench_recipes"))
    parser.add_argument("--plan", action="store_true", help="only say what would run, on a GPU of 141 GB without one")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args(argv)
    chosen = [case for case in CASES if args.only is None or case.name in args.only]
    cuda = torch.cuda.is_available()
    capacity = args.fill * (torch.cuda.get_device_properties(0).total_memory if cuda else CARDS["141 GB"])
    lines = [TITLES]
    print(TITLES, flush=True)
    for gpus in args.gpus:
        for case in chosen:
            argv, started = case.argv(shlex.split(args.more)), time.perf_counter()
            batch, estimated = planned(argv, gpus, capacity, args.batch_size)
            name = f"{case.name:28s} {gpus:4d} {batch:5d}"
            try:
                if args.plan or not batch:
                    doing = "to run" if batch else "left out"
                    lines.append(f"{name} {doing}: {estimated:.1f} GiB a GPU by the estimate")
                else:
                    outputs = args.outputs.resolve() / f"{case.name.replace(' ', '_')}-{gpus}"
                    run = train([*argv, "--batch_size", str(batch)], gpus, outputs, args.limit)
                    found = figures(run)
                    lines.append(line(case, gpus, estimated, found))
                    if args.results:
                        append(rows_of(found, case.published, estimated), args.results, gpus=gpus)
            except RuntimeError as error:
                lines.append(f"{name} failed: {error}")
            print(f"{lines[-1]}  [{time.perf_counter() - started:.0f} s]", flush=True)
    if not args.plan:  # print the table again, without the lines in between
        print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
