"""Kill random ranks of a run at random moments, and check that the resumed run ends like an undisturbed one.

    python benchmarks/bench_kills.py [--kills 30] [--plugin zero2] [--checkpoint_format whole] [--results FILE]

Two gloo ranks train a tiny model on a CPU and save every step. Repeatedly, one rank is killed, then the other, as
torchrun does, and the run is restarted with ``--load latest``. Half of the kills are aimed at saves, and the others at
the time between the middle of a start-up and a second after it. A kill counts as inside a save if the folder of an
incomplete checkpoint existed just before the kill and still exists afterwards. The exit code is 1 if any weight,
moment, average or loss differs from the undisturbed run, or if too few kills happened during a save.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from benchmarks.faults.lab import differing, newest_step
from benchmarks.faults.processes import Program, Programs, Starter, free_port
from benchmarks.results import append
from opendit.checkpoint.run_folders import newest_checkpoint
from opendit.checkpoint.tensor_set import damage

WORLD = 2
RUN = "000-DiT-Ti-2"
ARGV = "--model DiT-Ti/2 --image_size 8 --vae none --batch_size 4 --mixed_precision fp32 --num_workers 0".split()
ARGV += "--log_every 1 --sample_every 0".split()


@dataclass
class Kill:
    """A kill: the newest checkpoint before the kill, and whether the kill happened during a save."""

    rank: int
    step: int
    after_s: float
    in_save: bool


def saving(checkpoints: Path) -> set[str]:
    """Return the names of the checkpoints that are being written."""
    return {path.name for path in checkpoints.glob(".step_*.incomplete")}


def launch(programs: Programs, argv: list[str]) -> list[Program]:
    """Start train.py on WORLD ranks."""
    common: dict[str, Any] = dict(WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return [programs.start("train.py", *argv, RANK=str(r), LOCAL_RANK=str(r), **common) for r in range(WORLD)]


def kill_once(
    programs: Programs, argv: list[str], checkpoints: Path, choose: random.Random, in_save: bool, startup: float
) -> Kill:
    """Start the run and kill one of its ranks.

    With ``in_save`` the kill happens during a save, one to three steps later. Otherwise it happens around the end of
    the start-up, which takes about ``startup`` seconds."""
    ranks, began, run = launch(programs, argv), time.monotonic(), checkpoints.parent

    def wait_for(condition: Callable[[], object]) -> None:
        programs.wait(lambda: condition() or any(rank.code() is not None for rank in ranks), 120, "a moment to kill")
        if not condition():
            raise SystemExit(f"a run that nobody killed ended: {ranks[0].last_line()}")

    if in_save:
        goal = newest_step(run) + choose.randint(1, 3)
        wait_for(lambda: newest_step(run) >= goal)
        time.sleep(choose.uniform(0, 0.05))
        wait_for(lambda: saving(checkpoints))
    else:
        end = began + choose.uniform(startup / 2, startup + 1)
        wait_for(lambda: time.monotonic() >= end)
    rank, before = choose.randrange(WORLD), saving(checkpoints)
    ranks[rank].send(signal.SIGKILL)
    programs.wait(lambda: ranks[rank].code() is not None, 10, "the end of what was killed")
    after_s, hit = time.monotonic() - began, bool(before & saving(checkpoints))
    step = newest_step(run)
    time.sleep(choose.uniform(0, 0.2))  # torchrun kills the other rank only after a short time
    programs.kill_all()
    return Kill(rank, step, after_s, hit)


def finish(programs: Programs, argv: list[str]) -> None:
    ranks = launch(programs, argv)
    programs.wait(lambda: all(rank.code() is not None for rank in ranks), 3600, "a run that nobody killed")
    if any(codes := [rank.code() for rank in ranks]):
        raise SystemExit(f"a run that nobody killed ended with exit codes {codes}: {ranks[0].last_line()}")


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, (run / "log.jsonl").read_text().splitlines())}


def differences(one: Path, other: Path) -> list[str]:
    """Name the parts of two finished runs that differ in any bit."""
    tensor = differing(one, other)
    return ([tensor] if tensor else []) + ["losses"] * (losses(one) != losses(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--plugin", default="zero2", help="of train.py (default: zero2)")
    parser.add_argument("--checkpoint_format", default="whole", choices=["whole", "sharded"], help="(default: whole)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    choose, began = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Programs(starter := Starter(), Path(folder, "cwd")) as programs:
        outputs = {name: Path(folder, name) for name in ("whole", "killed")}
        # More steps than the run completes between the kills, so that some remain after the last kill.
        argv = [*ARGV, "--plugin", args.plugin, "--checkpoint_format", args.checkpoint_format]
        argv += ["--max_steps", str(40 + 5 * args.kills), "--ckpt_every", "1", "--ckpt_keep", "2"]
        finish(programs, [*argv, "--outputs", str(outputs["whole"])])
        again = [*argv, "--outputs", str(outputs["killed"]), "--load", "latest"]
        run = outputs["killed"] / RUN
        checkpoints, kills, startup = run / "checkpoints", [], 0.0
        for number in range(1, args.kills + 1):
            # The first kill is during a save, because without a checkpoint a restart would be a new run.
            in_save = 2 * sum(one.in_save for one in kills) <= len(kills)
            made = kill_once(programs, again, checkpoints, choose, in_save, startup)
            startup = made.after_s if in_save else startup
            kills.append(made)
            newest = cast(Path, newest_checkpoint(run))
            damaged = damage(newest)
            print(
                f"kill {number:3d}: rank {made.rank} {made.after_s:5.2f} s after the start, step {made.step:4d}, "
                f"{'inside a save' if made.in_save else 'outside saves'}; latest is {newest.name}, "
                f"{damaged or 'intact'}",
                flush=True,
            )
        finish(programs, again)
        starter.close()
        different = differences(outputs["whole"] / RUN, run)
        steps = max(losses(run))
    inside = sum(made.in_save for made in kills)
    different += [f"only {inside} kills inside a save"] if 2 * inside < args.kills else []
    print("\n| kills | inside a save | of rank 0 | steps | minutes | weights, moments, EMA, losses |")
    print("|---|---|---|---|---|---|")
    result = f"DIFFERENT: {'; '.join(different)}" if different else "bit for bit"
    minutes = (time.monotonic() - began) / 60
    print(f"| {len(kills)} | {inside} | {sum(made.rank == 0 for made in kills)} | {steps} | {minutes:.1f} | {result} |")
    if args.results:
        kind = "" if args.checkpoint_format == "whole" else f", {args.checkpoint_format}, --plugin {args.plugin}"
        case = f"DiT-Ti/2 fp32, {WORLD} gloo ranks, saves every step{kind}"
        figures = {"kills": len(kills), "kills inside a save": inside, "differences": len(different)}
        append([dict(bench="kills", case=case, metric=m, value=str(v)) for m, v in figures.items()], args.results)
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
