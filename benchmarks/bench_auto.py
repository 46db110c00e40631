"""Compare ``--parallel auto`` with measured steps: is its choice the fastest, and how good are its predictions?

    python benchmarks/bench_auto.py --plan                  predicted / measured of the steps in results.csv; no GPU
    python benchmarks/bench_auto.py --gpus 4 [--results FILE]     trains models of 8 layers with several products

A product is a combination of data, tensor, sequence, expert and pipeline parallel sizes. It is measured by running
train.py under torchrun with a model of 8 layers and random latents. For each pair of model and length, the products
that auto ranks best are measured, including its choice. Results are stored in --outputs. If --seconds may not be enough
for the next run, the program stops, and calling it again continues.
"""

import argparse
import csv
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch

from benchmarks.bench_recipes import figures, train
from benchmarks.results import RESULTS, append
from opendit.config.architectures import KINDS, SIZES
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.parallel.hardware import GIB, H200, HardwareModel, find_hardware
from opendit.training.auto_parallel import Circumstances, Priced, choose, data_of
from opendit.training.data_plan import open_data
from opendit.training.memory import USABLE, estimate, resolve_sharding
from opendit.training.model_plan import memory_setup, plan_model
from opendit.training.step_cost import step_cost

# ------------------------------------------------------------------------------------------- steps in results.csv

FAST = "--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel --data_path mock"
JOINT = "--recipe mock_pretrain_7b_256p_joint"
PICTURES = f"--model DiT-XL/2 {FAST} --num_classes 1000"
LONG = f"--model vDiT-XL/222 --use_video {FAST} --num_classes 1000 --image_size 512 --num_frames 128 --batch_size 1"


@dataclass(frozen=True)
class Known:
    """A step in the newest matching row of results.csv, and the flags that produced it.

    metric: "ms", "train ms", or "img/s" on all GPUs."""

    bench: str
    case: str
    gpus: int
    flags: str
    metric: str = "ms"
    samples: int = 1  # per step


def _recipe(case: str, gpus: int, flags: str) -> Known:
    return Known("recipes", case, gpus, flags)


KNOWN = (
    _recipe("vDiT-7B/122 8192 tokens zero2 bf16 batch 1", 2, f"{JOINT} --batch_size 1"),
    _recipe("vDiT-7B/122 8192 tokens zero2 bf16 batch 2", 4, f"{JOINT} --batch_size 2"),
    _recipe("vDiT-7B/122 8192 tokens fsdp bf16 batch 2", 2, f"{JOINT} --plugin fsdp --batch_size 2"),
    _recipe(
        "vDiT-7B/122 8192 tokens fsdp bf16 batch 2 reduced in bf16", 2,
        f"{JOINT} --plugin fsdp --batch_size 2 --reduce_dtype bf16",
    ),
    _recipe(
        "vDiT-7B/122 8192 tokens fsdp bf16 batch 2 offload state", 2,
        f"{JOINT} --plugin fsdp --batch_size 2 --offload state",
    ),
    _recipe("vDiT-7B/122 8192 tokens fsdp bf16 batch 2 fp8", 2, f"{JOINT} --plugin fsdp --batch_size 2 --fp8"),
    _recipe(
        "vDiT-7B/122 8192 tokens fsdp bf16 batch 2 fp8 gathered in bf16", 2,
        f"{JOINT} --plugin fsdp --batch_size 2 --fp8 --no_gather_fp8",
    ),
    _recipe(
        "vDiT-XL/122 8192 tokens zero2 bf16 batch 10 graph", 1,
        "--recipe mock_pretrain_xl_256p_joint --batch_size 10 --enable_cuda_graph",
    ),
    _recipe(
        "ST-DiT-XL/122 8192 tokens zero2 bf16 batch 6 graph", 1,
        "--recipe mock_st_dit_xl_256p_joint --batch_size 6 --enable_cuda_graph",
    ),
    _recipe(
        "MovieGen-1B/122 8192 tokens zero2 bf16 batch 7", 1,
        "--recipe mock_moviegen_5b_256p_joint --model MovieGen-1B/122 --batch_size 7",
    ),
    _recipe("MovieGen-5B/122 8192 tokens zero2 bf16 batch 1", 2, "--recipe mock_moviegen_5b_256p_joint --batch_size 1"),
    _recipe(
        "MovieGen-5B/122 8192 tokens zero2 bf16 batch 5 grad_checkpoint", 1,
        "--recipe mock_moviegen_5b_256p_joint --batch_size 5 --grad_checkpoint",
    ),
    _recipe(
        "EC-DiT-1B/2 256 tokens zero2 bf16 batch 238 graph", 1,
        "--recipe mock_ec_dit_1b --batch_size 238 --enable_cuda_graph",
    ),
    Known("train", "DiT-XL/2 bf16 256px", 1, f"{PICTURES} --batch_size 256 --enable_cuda_graph", "img/s", 256),
    Known(
        "train.py", "DiT-XL/2 fp8 256px batch 256 mock data 9 interleaved trials", 1,
        f"{PICTURES} --batch_size 256 --fp8", "img/s", 256,
    ),
    Known(
        "train.py", "DiT-XL/2 bf16 256px batch 256 a GPU fsdp mock data 5 interleaved trials", 2,
        f"{PICTURES} --plugin fsdp --batch_size 256", "img/s", 512,
    ),
    *(
        Known(
            "sequence model", f"vDiT-XL/222 64k P {ranks}", 4,
            f"{LONG} --plugin ddp" + f" --sequence_parallel_size {ranks}" * (ranks > 1), "train ms", ranks,
        )
        for ranks in (1, 2, 4)
    ),
)  # fmt: skip


def measured(known: Known, path: Path = RESULTS) -> tuple[float, float | None]:
    """Return (ms of the step, peak GiB or None). Raises LookupError if results.csv has no such row."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["bench"], row["case"]) == (known.bench, known.case)]
    rows = [row for row in rows if int(row["gpus"]) == known.gpus]
    found = {row["metric"]: float(row["value"]) for row in rows}  # the last row is the newest
    if known.metric not in found:
        raise LookupError(f"results.csv has no {known.metric} of {known.bench}, {known.case}, {known.gpus} GPUs")
    value = found[known.metric]
    return (1e3 * known.samples / value if known.metric == "img/s" else value), found.get("peak GiB")


def predicted(words: str, gpus: int, hardware: HardwareModel = H200) -> tuple[float, float]:
    """Return (ms per step, GiB per rank) that --dry_run predicts for train.py with these flags."""
    flags, _ = parse(TrainConfig, [*words.split(), "--dry_run", str(gpus)]).resolve(gpus, has_gpu=True)
    config = plan_model(flags, open_data(flags)).config
    setup = resolve_sharding(config, memory_setup(flags, gpus), flags.batch_size, USABLE * hardware.capacity)
    cost = step_cost(
        config,
        setup,
        flags.batch_size,
        flags.grad_accumulation,
        hardware,
        flags.node_size(gpus),
        sequence_type=flags.sequence_parallel_type,
        graph=flags.enable_cuda_graph,
    )
    return 1e3 * cost.total, estimate(config, setup, flags.batch_size).total / GIB


def plan() -> list[str]:
    """Return a line for each step in ``KNOWN``."""
    lines = [
        f"{'step':76s} {'GPUs':>4s} {'ms':>8s} {'predicted':>9s} {'ratio':>6s} {'GiB':>6s} {'est.':>6s} {'ratio':>6s}"
    ]
    for known in KNOWN:
        # In the sequence benchmark, a case uses only as many GPUs as its group has ranks.
        gpus = known.samples if known.bench == "sequence model" else known.gpus
        (took, peak), (ms, gib) = measured(known), predicted(known.flags, gpus)
        memory = f"{peak:6.1f} {gib:6.1f} {gib / peak:6.3f}" if peak else f"{'':6s} {gib:6.1f}"
        lines.append(
            f"{known.bench}: {known.case}"[:76].ljust(76)
            + f" {gpus:4d} {took:8.1f} {ms:9.1f} {ms / took:6.3f} {memory}"
        )
    return lines


# -------------------------------------------------------------------------------------------- products of 8 layers

DEPTH, PRODUCTS = 8, 8
PAIRS = {  # model of 8 layers and length -> (flags, samples per step on 4 GPUs)
    "7B, 8k tokens": (f"{JOINT} --model vDiT-7Bx8/122", 16),
    "7B, 74k tokens": ("--recipe mock_pretrain_7b_768p --model vDiT-7Bx8/122", 2),
    "28B, 8k tokens": ("--recipe mock_pretrain_28b_256p_joint --model vDiT-28Bx8/122", 8),
}
RUN = (__file__, "run")  # train.py plus the models of 8 layers
TARGET = 1.05  # largest acceptable ratio to the best product's time


def add_stacks() -> None:
    """Register models of 8 layers with the widths of the large models, in this process."""
    for size in ("7B", "28B"):
        width, _, heads = SIZES[size]
        KINDS["vDiT"].sizes[f"{size}x8"] = (width, DEPTH, heads, {})


@dataclass
class Trials:
    """Measured products, stored in a file that is replaced atomically."""

    path: Path
    found: dict[str, dict] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "Trials":
        return cls(path, json.loads(path.read_text()) if path.is_file() else {})

    def keep(self, key: str, **values) -> None:
        self.found[key] = values
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=1))
        partial.replace(self.path)


def products(pair: str, gpus: int, hardware: HardwareModel, count: int = PRODUCTS) -> tuple[str, list[Priced]]:
    """Return (a pair's flags, the products that auto ranks best, its choice first)."""
    words, samples = PAIRS[pair]
    words += f" --global_batch_size {max(1, samples * gpus // 4)}"
    flags = parse(TrainConfig, [*words.split(), "--parallel", "auto", "--dry_run", str(gpus)])
    where = Circumstances(gpus, flags.node_size(gpus), USABLE * hardware.capacity, hardware)
    return words, choose(flags, data_of(flags, where), where, shown=count)[0]


def typed(words: str, one: Priced) -> str:
    """Return ``words`` plus a product's flags, which override the recipe's."""
    recomputed = "" if one.candidate.grad_checkpoint else "--no_grad_checkpoint"
    return f"{words} {recomputed} {one.candidate}"


def verdict(pair: str, gpus: int, chosen: list[Priced], trials: Trials) -> list[str]:
    """Return lines that compare predictions with measurements, and auto's choice with the fastest measured product."""
    lines, done = [f"{pair}, {gpus} GPUs"], []
    for one in chosen:
        found = trials.found.get(key_of(pair, gpus, one), {})
        if "ms" not in found:
            lines.append(f"    {found.get('failed', 'not measured yet')}: {one.candidate}")
            continue
        ms, memory = 1e3 * one.cost.total, one.memory / GIB
        done.append(found["ms"])
        lines.append(
            f"  {found['ms']:8.1f} ms, predicted {ms:8.1f} ({ms / found['ms']:.3f}); {found['gib']:6.1f} GiB, "
            f"estimated {memory:6.1f} ({memory / found['gib']:.3f}): {one.candidate}"
        )
    first = trials.found.get(key_of(pair, gpus, chosen[0]), {})
    if "ms" in first and len(done) >= 6:
        lines.append(f"  auto / best of {len(done)}: {first['ms'] / min(done):.3f} (target {TARGET})")
    return lines


def key_of(pair: str, gpus: int, one: Priced) -> str:
    return f"{pair}, {gpus} GPUs: {one.candidate}"


def measure(args: argparse.Namespace, hardware: HardwareModel) -> None:
    outputs, end = args.outputs.resolve(), time.monotonic() + args.seconds
    outputs.mkdir(parents=True, exist_ok=True)
    trials = Trials.open(outputs / "trials.json")
    for pair in args.only or PAIRS:
        words, chosen = products(pair, args.gpus, hardware)
        for number, one in enumerate(chosen):
            key = key_of(pair, args.gpus, one)
            if key in trials.found and not (args.again and "failed" in trials.found[key]):
                continue
            if time.monotonic() + args.limit > end:
                print(f"{args.seconds:.0f} s are over; the same command goes on")
                return
            try:
                folder = outputs / f"{pair}-{args.gpus}-{number}".replace(" ", "_").replace(",", "")
                found = figures(train(typed(words, one).split(), args.gpus, folder, args.limit, RUN))
                trials.keep(
                    key, ms=found.ms, gib=found.peak, predicted=1e3 * one.cost.total, estimated=one.memory / GIB
                )
                if args.results:
                    append(rows_of(key, found.ms, found.peak, one), args.results, gpus=args.gpus)
            except RuntimeError as error:
                trials.keep(key, failed=f"failed: {error}")
            print(f"{key}: {trials.found[key]}", flush=True)
        print("\n".join(verdict(pair, args.gpus, chosen, trials)), flush=True)


def rows_of(key: str, ms: float, gib: float, one: Priced) -> list[dict]:
    """Return rows for results.csv."""
    row = {"bench": "auto", "case": key, "baseline": "predicted"}
    return [
        row | {"metric": "ms", "value": f"{ms:.1f}", "baseline_value": f"{1e3 * one.cost.total:.1f}"},
        row | {"metric": "peak GiB", "value": f"{gib:.1f}", "baseline_value": f"{one.memory / GIB:.1f}"},
    ]


def main(argv: list[str]) -> int | None:
    add_stacks()
    if argv[:1] == ["run"]:
        import train

        return train.main(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="predicted / measured of the steps in results.csv")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 4)
    parser.add_argument("--only", nargs="+", metavar="PAIR", choices=[*PAIRS], help="default: all")
    parser.add_argument("--hardware", help="as of train.py")
    parser.add_argument("--limit", type=float, default=120, help="seconds a run may take")
    parser.add_argument("--seconds", type=float, default=520, help="after which no run begins")
    parser.add_argument("--again", action="store_true", help="what failed, too")
    parser.add_argument("--outputs", type=Path, default=Path("outputs/bench_auto"))
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args(argv)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    hardware, origin = find_hardware(args.hardware, card)
    if args.plan:
        print("\n".join(plan()))
        for pair in args.only or PAIRS:
            print(f"{pair}, {args.gpus} GPUs, figures of {origin}")
            for one in products(pair, args.gpus, hardware)[1]:
                print(f"  {1e3 * one.cost.total:8.1f} ms, {one.memory / GIB:6.1f} GiB; {one.limit()}: {one.candidate}")
        return None
    return measure(args, hardware)


if __name__ == "__main__":
    main(sys.argv[1:])
