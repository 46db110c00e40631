"""Render the page's HTML. All text from browsers, checkpoints and folders is escaped by :func:`escaped`."""

import base64
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from opendit.sampling.page.catalog import ModelCard

# PRIVATE keeps events out of Gradio's public API. HTML allows no scripts and only our styles.
PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
HTML: dict[str, Any] = {"js_on_load": None, "apply_default_css": False}
LONGEST_VALUE = 500
MOST_ROWS = 1_000  # rows in a table, at most
LOG_LINES = 40
LEFT, TOP, WIDTH, HEIGHT, TICKS = 62, 8, 500, 190, 5  # sizes of a plot in SVG units; labels on an axis

CSS = """
:root { --muted: #6b7280; } .dark { --muted: #9ca3af; }
.gradio-container .main { padding-top: 10px !important; }
.gradio-container { max-width: 1360px !important; margin: 0 auto !important; }
#title { padding: 0 2px; } #title h1 { font-size: 22px; font-weight: 650; margin: 0; }
#title p { margin: 0; overflow-wrap: anywhere; color: var(--muted); font-size: 13px; }
.card { color: var(--muted); font-size: 13px; padding: 0 4px; }
.card b { color: var(--body-text-color); }
.status { min-height: 34px; font-size: 14px; padding: 4px; overflow-wrap: anywhere; }
.status .error { color: #b42318; background: #fef3f2; border: 1px solid #fecdca; border-radius: 6px;
  padding: 8px 12px; }
.status .note { color: #93621a; margin-top: 4px; }
.status .bar { height: 6px; border-radius: 3px; background: var(--border-color-primary); margin-top: 6px; }
.status .bar div { height: 6px; border-radius: 3px; background: var(--color-accent); transition: width .2s; }
.samples { display: flex; flex-wrap: wrap; gap: 12px; padding: 4px; }
.samples figure { margin: 0; max-width: 100%; }
.samples img, .samples video { display: block; border-radius: 4px; background: var(--border-color-primary);
  max-width: 100%; }
.samples .small { image-rendering: pixelated; }
.samples figcaption { font-size: 12px; color: var(--muted); display: flex; gap: 8px;
  justify-content: space-between; padding-top: 3px; }
.samples figcaption span { overflow: hidden; overflow-wrap: anywhere; display: -webkit-box; -webkit-line-clamp: 2;
  -webkit-box-orient: vertical; }
.samples a { color: var(--link-text-color); text-decoration: none; }
.pair { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 10px; }
.pair > div { display: flex; gap: 10px; }
.pair > p { font-size: 12px; color: var(--muted); margin: 6px 0 0; }
.facts { overflow: auto; max-height: 520px; font-size: 13px; }
.facts table { border-collapse: collapse; width: 100%; }
.facts td, .facts th { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--border-color-primary);
  vertical-align: top; overflow-wrap: anywhere; font-weight: 400; }
.facts th { color: var(--muted); white-space: nowrap; }
.flags { columns: 3 260px; column-gap: 28px; font-size: 12.5px; }
.flags div { break-inside: avoid; padding: 1px 0; overflow-wrap: anywhere; }
.flags span { color: var(--muted); }
.plot h4 { margin: 2px 0; text-align: center; font-weight: 500; } .plot p { color: var(--muted); text-align: center; }
.plot { border: 1px solid var(--border-color-primary); border-radius: 6px; padding: 4px; }
.plot svg { display: block; width: 100%; max-height: 300px; } .plot polyline { fill: none; stroke-width: 1.6; }
.plot path { stroke: var(--border-color-primary); } .plot text { font-size: 13px; text-anchor: end;
  fill: var(--muted); } .plot .step { text-anchor: middle; }
#plot-train svg { max-height: 230px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; padding: 0 4px; }
.legend i { display: inline-block; width: 14px; height: 3px; margin-right: 6px; vertical-align: middle; }
.log { display: flex; flex-direction: column-reverse; max-height: 330px; overflow: auto; padding: 8px;
  border: 1px solid var(--border-color-primary); border-radius: 6px; } /* reversed: it shows its end */
.log pre { font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
#details td:first-child { white-space: nowrap; }
.sheet img { max-width: 100%; border-radius: 6px; }
.block.in-group { background: var(--block-background-fill); padding: 7px 12px !important; font-size: 13px; }
.in-group { color: var(--muted); }
.in-group input { display: block; margin-top: 4px; } .in-group b { color: var(--body-text-color); }
.begins { max-width: 160px; max-height: 120px; border-radius: 4px; margin: 4px; }
.grid img { max-width: 100%; max-height: 620px; border-radius: 6px; image-rendering: pixelated; }
"""


def escaped(value: Any) -> str:
    """Escape a text for HTML, between tags or in an attribute. Texts over LONGEST_VALUE characters are cut."""
    text = str(value)
    text = text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…"
    return html.escape(text.encode("utf-8", "replace").decode(), quote=True)


def card(found: ModelCard) -> str:
    kind = "clips" if found.clips else "pictures"
    by = "captions" if found.captions else f"{len(found.classes):,} classes"
    return (
        f'<div class="card"><b>{escaped(found.model)}</b> draws {kind} of {by}, {escaped(found.size)}; '
        f"trained by {escaped(found.objective)}</div>"
    )


def message(text: str = "", notes: Iterable[str] = ()) -> str:
    lines = "".join(f'<div class="note">{escaped(note)}</div>' for note in notes)
    return f'<div class="status">{escaped(text)}{lines}</div>'


def error(text: str) -> str:
    return f'<div class="status"><div class="error" role="alert">{escaped(text)}</div></div>'


def error_line(error: BaseException) -> str:
    """Return the message of an error as one line for users."""
    if isinstance(error, ValueError | OSError):
        return str(error)
    first = str(error).strip().split("\n")[0][:300]
    return f"drawing failed ({type(error).__name__}: {first}); the page's own output has more"


def progress(text: str, share: float) -> str:
    return (
        f'<div class="status">{escaped(text)}<div class="bar"><div style="width:{100 * share:.0f}%"></div></div></div>'
    )


def plot(title: str, points: list[tuple[int, float, str]], colors: dict[str, str]) -> str:
    """Render curves as an SVG. points: (step, value, run). colors: run -> color."""
    if not points:
        return f'<div class="plot"><h4>{escaped(title)}</h4><p>no values yet</p></div>'
    left, right, across = axis_of([step for step, _, _ in points])
    low, high, up = axis_of([value for _, value, _ in points])

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + WIDTH * ((step - left) / (right - left)), TOP + HEIGHT * (1 - (value - low) / (high - low))

    shown = []
    for tick in up:
        y = place(left, tick)[1]
        shown.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}"/><text x="{LEFT - 6}" y="{y + 4:.1f}">{tick:.4g}</text>')
    for tick in across:
        x = place(tick, low)[0]
        shown.append(f'<text class="step" x="{x:.1f}" y="{TOP + HEIGHT + 18}">{tick:,.6g}</text>')
    for run, color in colors.items():
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(step, value) for step, value, of in points if of == run))
        x, y = line.rpartition(" ")[2].split(",") if line else ("", "")
        named = f"<title>{escaped(run)}</title>"
        dot = f'<circle cx="{x}" cy="{y}" r="2.5" fill="{escaped(color)}"/>' if line else ""
        shown.append(f'<polyline points="{line}" stroke="{escaped(color)}">{named}</polyline>{dot}')
    box = f"0 0 {LEFT + WIDTH + 16} {TOP + HEIGHT + 26}"
    return f'<div class="plot"><h4>{escaped(title)}</h4><svg viewBox="{box}">{"".join(shown)}</svg></div>'


def axis_of(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return the ends of an axis that contains all values, and round numbers on it."""
    low, high = min(values), max(values)
    if not high - low > max(abs(low), abs(high), 1e-290) * 1e-9:  # put a single value in the middle of the axis
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
    rough = (high / TICKS - low / TICKS) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    by = next((power * times for times in (1, 2, 5) if power * times >= rough), 10 * power)
    first = math.ceil(low / by)
    ticks = [by * (first + i) for i in range(2 * TICKS) if by * (first + i) <= high]
    return low, high, ticks


def legend(colors: dict[str, str]) -> str:
    runs = (f'<span><i style="background:{escaped(color)}"></i>{escaped(run)}</span>' for run, color in colors.items())
    return f'<div class="legend">{"".join(runs)}</div>'


def grid(run: str, name: str | None) -> str:
    if name is None:
        return '<div class="card">no sample grids yet</div>'
    source = f"/grid/{quote(run, safe='')}/{quote(name)}"
    return f'<div class="grid"><img src="{source}" alt="samples at step {int(name[:-4])}"></div>'


def log(text: str, lines: int = LOG_LINES) -> str:
    """Render the last lines of a program's output. A line shows only its text after the last carriage return."""
    shown = "\n".join(line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")[-lines:])
    text = html.escape(shown.strip("\n").encode("utf-8", "replace").decode())
    return f'<div class="log"><pre>{text}</pre></div>' if text else ""


def sheet(jpeg: bytes) -> str:
    source = f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
    return f'<div class="sheet"><img alt="pictures of the data" src="{source}"></div>'


def table(rows: list[list[str]], heads: list[str]) -> str:
    """Render the first ``MOST_ROWS`` rows as a table that scrolls."""
    head = "".join(f"<th>{escaped(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows[:MOST_ROWS])
    more = f"<p>and {len(rows) - MOST_ROWS:,} more</p>" if len(rows) > MOST_ROWS else ""
    return f'<div class="facts"><table><tr>{head}</tr>{body}</table>{more}</div>'


def flags(values: dict[str, Any]) -> str:
    lines = [
        f"<div><span>--{escaped(name)}</span> {escaped(value)}</div>"
        for name, value in values.items()
        if value is not None and value != []
    ]
    return f'<div class="flags">{"".join(lines)}</div>'
