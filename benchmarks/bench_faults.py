"""Cause the faults that users may meet, and check what each one does to a run.

    python benchmarks/bench_faults.py [--list] [--only NAME ...] [--csv FILE] [--record]

Every fault is caused in real processes (train.py, sample.py, preprocess.py, the export) with a tiny model on a CPU. The
program then checks:

- whether all processes end, within 15 s of the fault unless they should continue;
- the exit code and the last line;
- whether a process is left running, or its memory grows without bound;
- whether the newest checkpoint is intact, and a run resumed from it ends bit-identical to an undisturbed run.

Small disks are mounted in a private namespace. A fault that can't be caused on this machine is reported and left out.
The exit code is 1 if anything was lost, hung, or did not end as it should.
"""

import argparse
import csv
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from benchmarks.faults import GROUPS
from benchmarks.faults.lab import FAULTS, Fault, Outcome, Shared, judge, register_all
from benchmarks.faults.processes import Starter
from benchmarks.results import append, commit

INSIDE = "BENCH_FAULTS_MOUNTS"  # environment variable; set if this process may mount private disks


def enter_own_mounts() -> None:
    """Restart this program in a private mount namespace. If that is not allowed, continue in the current one."""
    if INSIDE in os.environ:
        return
    unshare = ["unshare", "-rm"]
    try:
        can = subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    except OSError:
        can = False
    os.environ[INSIDE] = "yes" if can else "no"
    if can:
        os.execvp("unshare", [*unshare, sys.executable, *sys.argv])


def run(faults: list[Fault], folder: Path, *, at_once: int, patience: float) -> dict[str, Outcome]:
    """Cause the faults, ``at_once`` at a time, and judge them. Print each outcome when it is known."""
    starter, results = Starter(), {}
    shared = Shared(starter, folder, patience)
    with ThreadPoolExecutor(at_once) as pool:
        asked = {pool.submit(judge, fault, shared): fault for fault in faults}
        for number, future in enumerate(as_completed(asked), start=1):
            fault, outcome = asked[future], future.result()
            results[fault.name] = outcome
            print(f"{number:3d}/{len(faults)} {fault.group}/{fault.name}: {outcome.verdict}", flush=True)
            if outcome.problems:
                print(f"        exit codes {outcome.codes}, last line: {outcome.message}", flush=True)
    starter.close()
    return results


def table(results: dict[str, Outcome]) -> str:
    """Return a Markdown table with a line per fault, grouped by class."""
    lines = ["| fault | ends after | lost | exit code | last line |", "|---|---|---|---|---|"]
    for group, title in GROUPS.items():
        rows = [(FAULTS[name], outcome) for name, outcome in results.items() if FAULTS[name].group == group]
        lines += [f"| **{title}** | | | | |"] * bool(rows)
        for fault, outcome in rows:
            seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
            ends = f"goes on ({seconds})" if outcome.goes_on else seconds
            codes = ", ".join(dict.fromkeys(map(str, outcome.codes)))
            wrong = "" if outcome.as_it_should else f" (**{outcome.verdict}**)"
            lines.append(f"| {fault.what}{wrong} | {ends} | {outcome.lost} | {codes} | {cell(outcome.message)} |")
    return "\n".join(lines) + "\n"


COLUMNS = ("date", "commit", "class", "fault", "end", "seconds", "lost", "exit_codes", "verdict", "last_line")


def write_csv(results: dict[str, Outcome], path: Path) -> None:
    """Write a row per fault, as in benchmarks/faults.csv.

    Its end is how the run should end. Its seconds, from the fault to the last process's end, are empty if the fault was
    left out. Its verdict is empty if the fault ended as it should."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, outcome in results.items():
            fault = FAULTS[name]
            seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
            codes = " ".join(dict.fromkeys(map(str, outcome.codes)))
            wrong = "" if outcome.as_it_should else outcome.verdict
            end = "goes on" if outcome.goes_on else "ends"
            row = (datetime.date.today(), commit(), fault.group, fault.what, end, seconds, outcome.lost, codes, wrong)
            writer.writerow([*row, plain(outcome.message)])


def plain(message: str, most: int = 170) -> str:
    """Return a message without the folders of this run, truncated to ``most`` characters."""
    text = re.sub(r"/[^\s()]*/faults-[^/\s]+/[^/\s]+/", "", message)
    return text if len(text) <= most else text[:most].rstrip() + " ..."


def cell(message: str) -> str:
    """Return a message escaped for a cell of the table."""
    return re.sub(r"([|`<>*_\\])", r"\\\1", plain(message))


def summary(results: dict[str, Outcome], seconds: float) -> str:
    made = [outcome for outcome in results.values() if not outcome.left_out]
    lost = sum(outcome.lost != "nothing" for outcome in made)
    wrong = sum(not outcome.as_it_should for outcome in made)
    left_out = f"; {len(results) - len(made)} left out" if len(made) < len(results) else ""
    times = f"{len(made)} faults in {seconds / 60:.1f} minutes"
    return f"{times}: {lost} lost something, {wrong} did not end as they should{left_out}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults, or these classes of them")
    parser.add_argument("--list", action="store_true", help="show the faults' names and what they are")
    parser.add_argument("--at_once", type=int, default=2, help="faults at the same time (default: 2)")
    parser.add_argument("--patience", type=float, default=1.0, help="stretches all time limits, on a busy machine")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write a row a fault there (benchmarks/faults.csv)")
    parser.add_argument("--record", action="store_true", help="append the counts to benchmarks/results.csv")
    args = parser.parse_args()
    register_all()
    if args.list:
        for fault in FAULTS.values():
            print(f"{fault.group:12} {fault.name:32} {fault.what}")
        return
    only = args.only or list(GROUPS)
    if unknown := [name for name in only if name not in FAULTS and name not in GROUPS]:
        parser.error(f"--only {unknown[0]}: no such fault or class; --list shows them")
    enter_own_mounts()
    faults = [fault for fault in FAULTS.values() if fault.name in only or fault.group in only]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        found = run(faults, Path(folder).resolve(), at_once=args.at_once, patience=args.patience)
    results = {fault.name: found[fault.name] for fault in faults}
    said = summary(results, time.monotonic() - began)
    print(f"\n{table(results)}\n{said}")
    if args.csv:
        write_csv(results, args.csv)
    if args.record:
        made = [outcome for outcome in results.values() if not outcome.left_out]
        figures = {
            "faults": len(made),
            "faults that lost something": sum(outcome.lost != "nothing" for outcome in made),
            "faults that did not end as they should": sum(not outcome.as_it_should for outcome in made),
        }
        case = "DiT-Ti/2 fp32, CPU"
        append([dict(bench="faults", case=case, metric=m, value=str(v)) for m, v in figures.items()])
    sys.exit(any(not outcome.as_it_should for outcome in results.values() if not outcome.left_out))


if __name__ == "__main__":
    main()
