"""Make the plots of the docs from results.csv.

    python benchmarks/plot.py                         all of them, into docs/images
    python benchmarks/plot.py sequence_layer          some of them
    python benchmarks/plot.py --list                  their names, and what each shows

The functions in :data:`PLOTS` turn rows of results.csv into figures. They use the newest rows unless they say
otherwise."""

import argparse
import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # pyplot would keep figures in memory and need a display

from benchmarks.results import RESULTS

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
DPI = 110
COLOURS = {"blue": "#3b6fb6", "orange": "#d9822b", "green": "#4a9a5c", "grey": "#9a9a9a", "dark": "#333333"}
Row = dict[str, str]


def read_rows(path: Path | str = RESULTS) -> list[Row]:
    """Return the rows of results.csv, oldest first. Raises OSError if the file can't be read."""
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def plain(axis: Axes, title: str, across: bool = True) -> None:
    """Set the title, remove the frame and draw a faint grid. across: draw horizontal grid lines."""
    axis.set_title(title, fontsize=10.5, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y" if across else "x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9)


# ------------------------------------------------------------------------------------------- docs/sequence_parallel.md

LAYER = re.compile(r"layer (\d+)/(\d+) N (\d+) P (\d+) (.+)")
LAYER_RUN = "8e1d470"  # a run with every length and width on 2 and 4 GPUs
# Targets set before the measurement: (GPUs, width) -> values for 8k, 16k and 64k tokens.
TARGETS = {
    (2, 1152): (0.97, 0.98, 0.99),
    (2, 3072): (0.98, 0.985, 0.99),
    (4, 1152): (0.90, 0.97, 0.985),
    (4, 3072): (0.95, 0.975, 0.985),
}
TOKENS = (8192, 16384, 65536)
# Legend lines: (name, cases, colour, marker). The best case is shown.
SHOWN = (
    ("blocking exchange, best", ("blocking fastseq", "blocking ulysses"), "grey", "s"),
    ("Ulysses", ("ulysses",), "orange", "^"),
    ("FastSeq", ("fastseq",), "green", "D"),
    ("auto", ("auto",), "blue", "o"),
)


def layer_shares(rows: list[Row], commit: str = LAYER_RUN) -> dict[tuple[int, int, int, str], float]:
    """Return (GPUs, width, tokens, case) -> the layer's time without communication divided by its time. Cases that
    differ only in the number of head groups are joined; the best number is used."""
    found: dict[tuple[int, int, int, str], float] = {}
    for row in rows:
        match = LAYER.fullmatch(row["case"])
        if not match or (row["bench"], row["metric"], row["commit"]) != ("sequence", "ms", commit):
            continue
        if row["baseline"] != "compute only":
            continue
        width, _, tokens, gpus, case = match.groups()
        key = (int(gpus), int(width), int(tokens), re.sub(r" x \d+$", "", case))
        found[key] = max(found.get(key, 0.0), float(row["baseline_value"]) / float(row["value"]))
    return found


def sequence_layer(rows: list[Row]) -> Figure:
    """A layer's time without communication divided by its time, for each kind of sequence parallelism."""
    shares = layer_shares(rows)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    for axis, gpus in zip(figure.subplots(1, 2, sharey=True), (2, 4), strict=True):
        groups = [(width, tokens) for width in (1152, 3072) for tokens in TOKENS]
        for place, (name, cases, colour, marker) in enumerate(SHOWN):
            y = [max(shares[(gpus, *group, case)] for case in cases) for group in groups]
            x = [number + (place - 1.5) * 0.14 for number in range(len(groups))]
            axis.plot(x, y, marker, color=COLOURS[colour], markersize=7, label=name)
        targets = [TARGETS[gpus, width][TOKENS.index(tokens)] for width, tokens in groups]
        middle = range(len(groups))
        ends = [[place + side for place in middle] for side in (-0.3, 0.3)]
        axis.hlines(targets, *ends, color=COLOURS["dark"], linewidth=1.2, label="aimed at")
        axis.axhline(1, color=COLOURS["dark"], linewidth=0.8)
        axis.axvline(2.5, color=COLOURS["grey"], linewidth=0.8, linestyle=":")
        axis.set_xticks(list(middle), [f"{tokens // 1024}k" for _, tokens in groups])
        axis.set(xlabel="tokens: at width 1152 (16 heads), then at width 3072 (24 heads)", ylim=(0.8, 1.01))
        plain(axis, f"{gpus} GPUs")
        if gpus == 2:
            axis.set_ylabel("time without communication / time")
            axis.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


# ------------------------------------------------------------------------------------------------ docs/parallelism.md


def predicted_steps(rows: list[Row]) -> Figure:
    """Predicted divided by measured time and memory of training steps in results.csv."""
    from benchmarks.bench_auto import KNOWN, measured, predicted  # imports torch, which the other plots don't need

    names, times, memories = [], [], []
    for known in KNOWN:
        gpus = known.samples if known.bench == "sequence model" else known.gpus
        (took, peak), (ms, gib) = measured(known), predicted(known.flags, gpus)
        name = re.sub(r" mock data| \d+ interleaved trials", "", known.case)
        names.append(f"{name}, {gpus} GPU{'s' * (gpus > 1)}")
        times.append(ms / took)
        memories.append(gib / peak if peak else None)
    order = sorted(range(len(names)), key=lambda i: -abs(times[i] - 1))[::-1]
    figure = Figure(figsize=(10, 5.8), layout="constrained")
    axis = figure.subplots()
    axis.axvspan(0.88, 1.12, color=COLOURS["blue"], alpha=0.10, linewidth=0, label="time aimed at: within 12 %")
    axis.axvspan(0.95, 1.05, color=COLOURS["orange"], alpha=0.14, linewidth=0, label="memory aimed at: within 5 %")
    axis.axvline(1, color=COLOURS["dark"], linewidth=0.8)
    y = range(len(order))
    axis.plot([times[i] for i in order], y, "o", color=COLOURS["blue"], markersize=7, label="time of a step")
    known_memory = [(memories[i], place) for place, i in enumerate(order) if memories[i] is not None]
    axis.plot(*zip(*known_memory, strict=True), "D", color=COLOURS["orange"], markersize=6, label="peak of the memory")
    axis.set_yticks(list(y), [names[i] for i in order])
    axis.set(xlabel="predicted / measured", xlim=(0.65, 1.18))
    plain(axis, "Steps on H200s: what --dry_run predicts", across=False)
    axis.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


# -------------------------------------------------------------------------------------------------- docs/kernels.md

OPERATION = re.compile(r"(\w+) (forward|backward) 131072x1152 bf16")
PEERS = {"torch compile": "orange", "torch eager": "grey"}


def kernel_shares(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Return operation and direction -> {"OpenDiT", "torch compile", "torch eager": share of a device copy's
    bandwidth}, each from the newest row."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        case = OPERATION.fullmatch(row["case"])
        if row["bench"] == "kernels" and row["metric"] == "share of copy bandwidth" and case:
            shares = found.setdefault(f"{case[1].replace('_', ' ')}, {case[2]}", {})
            shares |= {"OpenDiT": float(row["value"]), row["baseline"]: float(row["baseline_value"])}
    return found


def kernels(rows: list[Row]) -> Figure:
    """Bandwidth of each fused operation and of torch's versions, as a share of a device copy's bandwidth."""
    shares = kernel_shares(rows)
    figure = Figure(figsize=(10, 0.3 * len(shares) + 1.2), layout="constrained")
    axis = figure.subplots()
    sides = {"OpenDiT": "blue", **PEERS}
    for place, (side, colour) in enumerate(sides.items()):
        at = [number + 0.27 * (place - 1) for number in range(len(shares))]
        axis.barh(at, [of.get(side, 0) for of in shares.values()], 0.25, color=COLOURS[colour], label=side)
    axis.set_yticks(range(len(shares)), list(shares))
    axis.set(xlabel="share of a device copy's bandwidth", xlim=(0, 1.1), ylim=(len(shares) - 0.5, -0.5))
    plain(axis, "131,072 x 1152, bf16, H200", across=False)
    axis.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.995), ncols=3)
    return figure


# ----------------------------------------------------------------------------------------------------- docs/sampling.md


def approximation_errors(rows: list[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return {model and sampler: {setting: (exact block evaluations / its own, relative error of latents)}}."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["bench"] == "approximations":
            title, _, setting = row["case"].rpartition(", ")
            found.setdefault(title, {}).setdefault(setting, {})[row["metric"]] = float(row["value"])
    return {
        title: {
            setting: (of["fewer block evaluations"], of["relative error of latents"])
            for setting, of in settings.items()
            if setting != "exact" and "fewer block evaluations" in of
        }
        for title, settings in found.items()
    }


def approximations(rows: list[Row]) -> Figure:
    """Error of latents against saved block evaluations, with a panel per model and a line per approximation."""
    tables = {title: found for title, found in approximation_errors(rows).items() if "10,000 samples" in title}
    figure = Figure(figsize=(6.4 * len(tables), 4.8), layout="constrained")
    colours: dict[str, str] = {}  # kind -> colour, the same in all panels
    for axis, (title, found) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True):
        kinds: dict[str, list[tuple[float, float, str]]] = {}
        for setting, (fewer, error) in found.items():
            name, *values = setting.split(":")
            order = f", order {values[1]}" if name == "taylor" and len(values) > 1 else ""
            kind = name.replace("steps", "fewer steps").replace("taylor", "taylor:K") + order
            kinds.setdefault(kind, []).append((fewer, error, ":".join(values)))
        for kind, members in kinds.items():
            members.sort()
            colour = colours.setdefault(kind, f"C{len(colours)}")
            axis.plot([m[0] for m in members], [m[1] for m in members], marker="o", color=colour, label=kind)
            for fewer, error, values in members:
                axis.annotate(values, (fewer, error), textcoords="offset points", xytext=(5, 4), fontsize=7)
        axis.axvline(2.5, color=COLOURS["grey"], linewidth=0.8, linestyle=":")
        axis.set(yscale="log", xlabel="fewer block evaluations (x)", ylabel="relative error of latents")
        plain(axis, title.replace(", fp32, ", ", fp32,\n"))
        axis.legend(frameon=False, fontsize=8)
    return figure


PLOTS: dict[str, Callable[[list[Row]], Figure]] = {
    "sequence_layer": sequence_layer,
    "predicted_steps": predicted_steps,
    "kernels": kernels,
    "approximations": approximations,
}


def main(argv: list[str] | None = None) -> None:
    """Draw the plots. Raises SystemExit for a name that is not in :data:`PLOTS`."""
    parser = argparse.ArgumentParser(description="Makes the plots of the docs from benchmarks/results.csv.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which plots (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--output", type=Path, default=IMAGES, metavar="FOLDER", help="where they go (docs/images)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in PLOTS]:
        parser.error(f"{unknown[0]}: no such plot; there are {', '.join(PLOTS)}")
    if args.list:
        print("\n".join(f"{name}: {(draw.__doc__ or '').strip()}" for name, draw in PLOTS.items()))
        return
    rows = read_rows()
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.names or PLOTS:
        path = args.output / f"{name}.png"
        PLOTS[name](rows).savefig(path, dpi=DPI)
        print(path)


if __name__ == "__main__":
    main()
