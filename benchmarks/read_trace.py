"""Print the time per kind of kernel in traces of bench_sequence.py, and draw the step that waits least in barriers.

    torchrun --standalone --nproc_per_node=4 benchmarks/bench_sequence.py --only auto --trace FOLDER
    python benchmarks/read_trace.py FOLDER/8192-3072-4-rank*.json [--draw step.png]                 (needs matplotlib)

"gaps" is the time in which no kernel runs. Copies, and sometimes barriers, run beside kernels, so the kinds may sum to
more than the step."""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

KINDS = {  # kind -> parts of kernel names; the first match counts
    "barrier": ("barrier",),
    "attention": ("flash", "sdpa", "fmha", "cudnn"),
    "exchange": ("exchange_heads", "send_rows", "ncclDevKernel"),
    "products": ("nvjet", "gemm", "cutlass"),
}
OTHER, COPIES, GAPS = "other kernels", "copies", "gaps"
COLOURS = {"products": "#4c72b0", "attention": "#55a868", "exchange": "#c44e52", "barrier": "#000000"}
COLOURS |= {OTHER: "#b0b0b0", COPIES: "#dd8452"}


@dataclass(frozen=True)
class Span:
    """A kernel or copy on the device. Times are microseconds from the step's start."""

    kind: str
    start: float
    end: float


def kind_of(event: dict) -> str:
    if event["cat"] == "gpu_memcpy":
        return COPIES
    name = event["name"].lower()
    return next((kind for kind, words in KINDS.items() if any(word.lower() in name for word in words)), OTHER)


def read_steps(path: Path, steps: int) -> list[list[Span]]:
    """Return the steps in a Chrome trace, each in the order of start times. Raises ValueError if the trace can't be
    split into ``steps`` equal steps."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    found = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")), key=lambda e: e["ts"])
    each, rest = divmod(len(found), steps)
    if not each or rest:
        raise ValueError(f"{path}: {len(found)} kernels and copies are not {steps} equal steps; name another --steps")
    cut = [found[i * each : (i + 1) * each] for i in range(steps)]
    return [[Span(kind_of(e), e["ts"] - s[0]["ts"], e["ts"] - s[0]["ts"] + e["dur"]) for e in s] for s in cut]


def times(step: list[Span]) -> dict[str, float]:
    """Return kind -> microseconds, with "gaps", and "step" for the complete step."""
    found, busy_until = defaultdict[str, float](float), 0.0
    for span in step:
        found[span.kind] += span.end - span.start
        if span.kind != COPIES:
            found[GAPS] += max(0.0, span.start - busy_until)
            busy_until = max(busy_until, span.end)
    found["step"] = max(span.end for span in step)
    return found


def draw(step: list[Span], title: str, path: Path, panels: int = 3) -> None:
    """Draw the step in ``panels`` panels, one below the other. Spans that run beside a kernel are in the second row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    end = max(span.end for span in step)
    figure, axes = pyplot.subplots(panels, 1, figsize=(12.3, 1.5 * panels + 0.6))
    for i, axis in enumerate(axes):
        busy_until = 0.0
        for span in step:
            beside = span.kind == COPIES or span.end < busy_until + 1
            if not beside:
                busy_until = span.end
            width = max(span.end - span.start, end / panels / 400)  # wide enough to be visible
            look = dict(color=COLOURS[span.kind], edgecolor="white", linewidth=0.5)
            axis.barh(0 if beside else 1, width, left=span.start, height=0.8, **look)
        axis.set(xlim=(i * end / panels, (i + 1) * end / panels), ylim=(-0.5, 1.5))
        axis.set_yticks([0, 1], ["beside", "kernels"])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(title, loc="left", fontsize=10.5)
    axes[-1].set_xlabel("microseconds")
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="lower center", ncol=len(patches), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("traces", type=Path, nargs="+", help="one of each rank")
    parser.add_argument("--steps", type=int, default=2, help="that each of them holds")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="a picture of the step that waits least")
    args = parser.parse_args()
    columns = ["step", "attention", "products", OTHER, "exchange", "barrier", GAPS, COPIES]
    print(f"{'microseconds':28s}" + "".join(f"{column:>14s}" for column in columns))
    found = []
    for path in args.traces:
        for number, step in enumerate(read_steps(path, args.steps), 1):
            took = times(step)
            print(f"{path.stem + f', {number}':28s}" + "".join(f"{took[column]:14.1f}" for column in columns))
            found.append((took["barrier"], f"{path.stem}, step {number}", step))
    if args.draw:
        _, title, step = min(found, key=lambda item: item[0])
        draw(step, title, args.draw)


if __name__ == "__main__":
    main()
