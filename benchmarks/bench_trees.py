"""Compare the training speed of two trees of this project, or of two sets of flags, in turns on the same GPUs.

    git archive COMMIT opendit train.py | tar -x -C .old
    python benchmarks/bench_trees.py --trees .old . --gpus 0 -- --model DiT-XL/2 --batch_size 256 --data_path mock ...
    python benchmarks/bench_trees.py --gpus 0 1 --second="--plugin fsdp" -- --model DiT-XL/2 ...

Each side runs its tree's train.py. While one side trains, the other one pauses and has released its cached memory, so
both must fit into a GPU together, except for their activations. The first steps of a trial are not timed. The program
prints the median ratio of neighbouring turns, the first side's time divided by the second's. Above 1, the second side
is faster.
"""

import argparse
import importlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def train_in_turns(tree: str, side: int, folder: Path, turns: int, steps: int, warmup: int, ranks: int, argv) -> None:
    """Run one side in a separate process. Each call of ``EMA.update`` ends a step."""
    os.chdir(tree)
    sys.path.insert(0, os.getcwd())
    import torch

    import train

    packages = ("opendit.checkpoint", "opendit.state", "opendit")  # of ema.py, in this tree and in older ones
    package = next(name for name in packages if Path(name.replace(".", "/"), "ema.py").is_file())
    EMA = importlib.import_module(f"{package}.ema").EMA

    rank, cuda, times = int(os.environ.get("RANK", "0")), torch.cuda.is_available(), []
    turn, step, started = 0, 0, 0.0
    begin, update = EMA.__init__, EMA.update

    def wait() -> None:
        before = turn - 1 if side == 0 else turn  # the other side's preceding turn
        while before >= 0 and not all((folder / f"done.{1 - side}.{before}.{r}").exists() for r in range(ranks)):
            if (folder / "failed").exists():
                sys.exit("the other side has failed")
            time.sleep(0.003)

    def synchronize() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def waiting_init(self, *args, **kwargs):
        wait()
        begin(self, *args, **kwargs)

    def counted_update(self, *args, **kwargs):
        nonlocal turn, step, started
        update(self, *args, **kwargs)
        step += 1
        if step == warmup:
            started = synchronize()
        if step == steps:
            ended = synchronize()
            if turn:  # the first turn compiles
                times.append((ended - started) / (steps - warmup))
            if cuda:
                torch.cuda.empty_cache()
            (folder / f"done.{side}.{turn}.{rank}").touch()
            turn, step = turn + 1, 0
            if turn <= turns:
                wait()

    EMA.__init__, EMA.update = waiting_init, counted_update
    try:
        train.main([*argv, "--max_steps", str((turns + 1) * steps), "--outputs", str(folder / f"outputs{side}")])
    except BaseException:
        (folder / "failed").touch()
        raise
    if rank == 0:
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        (folder / f"times.{side}.json").write_text(json.dumps({"seconds": times, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs=2, default=[".", "."])
    parser.add_argument("--gpus", nargs="+", default=["0"], help="a process each")
    parser.add_argument("--first", default="", help="flags of the first side alone")
    parser.add_argument("--second", default="")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="of a trial")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a trial that are not timed, at least 1")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of both, after --")
    args = parser.parse_args()
    settings = (args.turns, args.steps, args.warmup, len(args.gpus))
    if args.side is not None:
        return train_in_turns(args.trees[args.side], args.side, args.folder, *settings, args.flags)
    folder, sides = Path(tempfile.mkdtemp()), []
    for side, more in enumerate((args.first, args.second)):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={len(args.gpus)}"]
        own = ["--trees", *args.trees, "--gpus", *args.gpus, "--side", str(side), "--folder", str(folder)]
        own += ["--turns", str(args.turns), "--steps", str(args.steps), "--warmup", str(args.warmup)]
        tree = str(Path(args.trees[side]).resolve())
        paths = os.pathsep.join([tree, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(args.gpus), "PYTHONPATH": paths}
        command = [sys.executable, *(launch if len(args.gpus) > 1 else []), str(Path(__file__).resolve()), *own]
        with open(folder / f"log.{side}", "w") as log:
            command += ["--", *args.flags, *shlex.split(more)]
            sides.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        codes = [side.wait(args.limit) for side in sides]
    finally:
        for side in sides:
            side.terminate()
    if any(codes):
        sys.exit("\n".join((folder / f"log.{side}").read_text()[-2000:] for side in (0, 1)))
    ours, theirs = (json.loads((folder / f"times.{side}.json").read_text()) for side in (0, 1))
    first, second = ours["seconds"], theirs["seconds"]
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    print(
        f"ms a step: {statistics.median(first) * 1e3:.1f} and {statistics.median(second) * 1e3:.1f}; ratio "
        f"{statistics.median(ratios):.4f}, of {len(ratios)} from {min(ratios):.4f} to {max(ratios):.4f}; "
        f"peak GiB on rank 0: {ours['peak']:.2f} and {theirs['peak']:.2f}"
    )


if __name__ == "__main__":
    main()
