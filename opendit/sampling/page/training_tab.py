"""The tab Train: convert its fields to flags of train.py, plan and start runs, and show the started runs."""

import contextlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from opendit.checkpoint.schema import RUN_CONFIG
from opendit.common.json_models import read_file
from opendit.config.architectures import KINDS
from opendit.config.flags import default_of, flags_of
from opendit.config.names import DESCRIPTIONS
from opendit.config.recipes import RECIPES
from opendit.config.train import TrainConfig
from opendit.parallel.hardware import CARDS
from opendit.sampling.page import views
from opendit.sampling.page.catalog import Catalog
from opendit.sampling.page.drawing import Page, number_in, text_of
from opendit.sampling.page.runs_tab import plots, read_starts
from opendit.sampling.page.training_queue import FOLDER, TrainingQueue, tail, trains_lora
from opendit.sampling.page.views import HTML, PRIVATE

NOTHING, DIGITS = "nothing: from the start", "digits: the embedded pictures"
NO_RECIPE, ANY_CARD, AS_RECIPE = "none", "this one", "as recipe"
CARD_NAMES = (ANY_CARD, *CARDS)
VAES = (AS_RECIPE, "none", "ema", "mse")
PICTURE_MODELS = (AS_RECIPE, "DiT-Ti/2", "DiT-S/2", "DiT-B/2", "DiT-L/2", "DiT-XL/2")
TABLES = (".csv", ".jsonl", ".parquet")
SPEED_UPS = {"mixed_precision": "bf16", "enable_flashattn": True, "enable_layernorm_kernel": True}
SPEED_UPS |= {"enable_modulate_kernel": True, "enable_cuda_graph": True}
MOST_CHOICES, MOST_ENTRIES, MOST_PATH = 200, 5_000, 1_000
# Flags of the network and the latents. A run that starts from another run's weights copies them.
KEPT = ("model", "vae", "image_size", "use_video", "num_frames", "frame_interval", "text_encoder", "max_text_tokens")
KEPT += ("cross_attention", "objective", *(setting.flag for kind in KINDS.values() for setting in kind.settings))
BUILT_IN = {"vae": ("none", "ema", "mse"), "text_encoder": ("bytes", "clip", "t5")}  # other values are paths
REFRESH_S = 3
LOOKED, SHOWN = 200, 24  # rows to open, and pictures to show, for the button "Look"
LOOK_BYTES = 16 << 20  # largest contact sheet for "Look"
ERRORS = (ValueError, OSError)


@dataclass(frozen=True)
class TrainingForm:
    """The fields as a browser sends them. Numbers are text; an empty text means the recipe's value."""

    base: Any
    data: Any
    recipe: Any
    card: Any
    model: Any
    vae: Any
    image_size: Any
    frames: Any
    steps: Any
    batch_size: Any
    lr: Any
    lora: Any
    ckpt_every: Any


def read_training_form(
    form: TrainingForm, catalog: Catalog, root: Path, has_gpu: bool = False
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a title, the flags for ``train.py --config``, and further flags for planning only.

    Raises ValueError, with one line for the user, for an invalid field or a path that is not below ``root``. has_gpu:
    if True and no recipe is chosen, the flags SPEED_UPS are set."""
    recipe = _one_of("recipe", form.recipe, (NO_RECIPE, *recipes()))
    flags: dict[str, Any] = {"recipe": recipe} if recipe != NO_RECIPE else dict(SPEED_UPS) if has_gpu else {}
    words = RECIPES[recipe].flags if recipe != NO_RECIPE else ""
    base, data = text_of(form.base), text_of(form.data)
    model = _one_of("model", form.model, PICTURE_MODELS)
    vae = _one_of("VAE", form.vae, VAES)
    if base == NOTHING:
        if "--pretrained" in words:
            raise ValueError(f"base: the recipe {recipe} adapts trained weights; choose a folder or a run")
        if not words and model == AS_RECIPE:
            raise ValueError("choose a recipe, a base or a model: one of them says what is trained")
    elif base in catalog.runs():
        flags |= kept_flags(catalog, base) | {"pretrained": str(catalog.run(base).resolve())}
    else:
        flags["pretrained"] = str(below(root, base, "base"))
    flags["data_path"] = "digits" if data == DIGITS else str(below(root, data, "data"))
    if model != AS_RECIPE:
        flags["model"] = model
    if vae != AS_RECIPE:
        flags["vae"] = vae
    card = _one_of("card", form.card, CARD_NAMES)
    for name, value, low, high, whole in (
        ("image_size", form.image_size, 2, 16_384, True),
        ("num_frames", form.frames, 1, 16_384, True),
        ("max_steps", form.steps, 1, 10**9, True),
        ("batch_size", form.batch_size, 1, 65_536, True),
        ("lr", form.lr, 1e-12, 100, False),
        ("lora", form.lora, 1, 65_536, True),
        ("ckpt_every", form.ckpt_every, 1, 10**9, True),
    ):
        if text_of(value).strip():
            flags[name] = number_in(name.replace("_", " "), _number_of(value), low, high, whole)
    if "batch_size" in flags and "--global_batch_size" in words:
        flags["global_batch_size"] = flags["batch_size"]
    if "max_steps" in flags:
        flags["epochs"] = 10**6  # no limit: max_steps ends the run
        flags["log_every"] = max(1, min(50, flags["max_steps"] // 50))  # often enough for a curve of a short run
    if "num_frames" in flags:
        flags["use_video"] = True
    if trains_lora(flags):
        flags["card"] = "auto" if card == ANY_CARD else card
    flags["outputs"] = str(catalog.outputs.resolve())
    title = f"{recipe if recipe != NO_RECIPE else flags.get('model', 'model')} on {data.split(':')[0]}"
    return title, flags, {} if card == ANY_CARD or "card" in flags else {"hardware": card}


def recipes() -> list[str]:
    """Return the names of the recipes that train on data."""
    return [name for name in RECIPES if not name.startswith("mock_")]


def kept_flags(catalog: Catalog, run: str) -> dict[str, Any]:
    """Return the flags that a new run must copy to start from the weights of ``run``. Raises ValueError if damaged."""
    found = read_starts(catalog, run)
    flags = found[-1].get("flags") if found else None
    if not isinstance(flags, dict):
        return {}
    of_objective = DESCRIPTIONS.get(str(flags.get("objective")))
    settings = [] if of_objective is None else [setting.flag for setting in of_objective.settings.values()]
    defaults = {item.name: default_of(item) for item in flags_of(TrainConfig)}
    changed = {name: flags[name] for name in (*KEPT, *settings) if flags.get(name) not in (None, defaults.get(name))}
    return {
        name: value
        for name, value in changed.items()
        if isinstance(value, str | int | float) and (name not in BUILT_IN or value in BUILT_IN[name])
    }


def below(root: Path, written: str, what: str) -> Path:
    """Return a path below ``root`` with all links resolved. written: relative to ``root``, or absolute.

    Raises ValueError, naming the field ``what``, if the path doesn't exist, leads out of ``root``, or has a character
    with a meaning in --data_path."""
    if not written or len(written) > MOST_PATH or not written.isprintable():
        raise ValueError(f"{what}: choose a folder below {root}")
    try:
        found = (root / written).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise ValueError(f"{what}: there is no {written[:100]} below {root}") from None
    if not found.is_relative_to(root.resolve()) or found == root.resolve():
        raise ValueError(f"{what}: {written[:100]} is not below {root}, or leads out of it")
    if any(sign in str(found) for sign in ":,@"):
        raise ValueError(f"{what}: a path with one of : , @ means several sources to --data_path; rename it")
    return found


def data_choices(root: Path, skipped: tuple[str, ...]) -> list[str]:
    """Return the folders and tables below ``root`` that may be data, as paths relative to ``root``."""
    return [DIGITS, *_listed(root, skipped, lambda path: path.is_dir() or path.suffix in TABLES)]


def base_choices(root: Path, skipped: tuple[str, ...], catalog: Catalog) -> list[str]:
    """Return the choices for a base: NOTHING, runs with checkpoints, and pipelines' folders below ``root``."""
    runs = [name for name in catalog.runs() if catalog.has_checkpoint(name)]
    return [NOTHING, *runs, *_listed(root, skipped, lambda path: (path / "model_index.json").is_file())]


def _listed(root: Path, skipped: tuple[str, ...], wanted: Callable[[Path], bool]) -> list[str]:
    def entries(folder: Path) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__")))
        return []

    first = [path for path in entries(root) if path.name not in skipped]
    both = (each for path in first for each in (path, *(() if path.is_symlink() else entries(path))))
    found: list[str] = []
    for path in itertools.islice(both, MOST_ENTRIES):
        name = str(path.relative_to(root))
        with contextlib.suppress(OSError, RuntimeError):
            if name.isprintable() and wanted(path) and path.resolve().is_relative_to(root.resolve()):
                found.append(name)
    return found[:MOST_CHOICES]


def _number_of(text: str) -> float | None:
    try:
        return float(text[:40])
    except ValueError:
        return None


def _one_of(what: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{what}: choose one of the list")
    return value


def train_tab(page: Page, tab: gr.Tab) -> None:
    """Create the content of the tab Train. Once a user has selected the tab, it is refreshed regularly."""
    queue, catalog = page.training, page.catalog
    assert queue is not None, "the page was started without --allow_train"
    root, skipped = queue.root, (FOLDER, catalog.outputs.name)
    with gr.Row():
        with gr.Column(scale=3, min_width=380):
            with gr.Group():
                base = _path(base_choices(root, skipped, catalog), NOTHING, "Base: a run, or a model's folder")
                data = _path(data_choices(root, skipped), DIGITS, "Data: a folder or a table")
                with gr.Row():
                    recipe = gr.Dropdown(
                        [NO_RECIPE, *recipes()], value="digits", label="Recipe", interactive=True, min_width=140
                    )
                    card = _choice(CARD_NAMES, "Card")
                with gr.Row():
                    steps = _number("Steps")
                    batch = _number("Batch size")
                    lr = _number("Learning rate", 120)
            with gr.Accordion("More", open=False):
                with gr.Row():
                    model = _choice(PICTURE_MODELS, "Model")
                    vae = _choice(VAES, "VAE")
                with gr.Row():
                    side = _number("Picture side")
                    frames = _number("Frames of clips")
                with gr.Row():
                    lora = _number("LoRA rank")
                    every = _number("Save every")
            with gr.Row():
                look = gr.Button("Look", size="md", elem_id="look", min_width=110)
                plan = gr.Button("Plan", size="md", elem_id="plan", min_width=80)
                start = gr.Button("Start", variant="primary", size="md", elem_id="start", min_width=80)
            told = gr.HTML(views.message(f"folders are below {root}"), **HTML, elem_id="told")
            details = gr.HTML("", **HTML, elem_id="details")
        with gr.Column(scale=5, min_width=380):
            table = gr.HTML("", **HTML, elem_id="jobs")
            with gr.Row():
                job = gr.Dropdown([], label="Show", interactive=True, elem_id="job", scale=3, min_width=200)
                stop = gr.Button("Stop", size="md", elem_id="stop", scale=1, min_width=80)
                go_on = gr.Button("Go on", size="md", elem_id="go-on", scale=1, min_width=80)
            state = gr.HTML("", **HTML, elem_id="state")
            others = gr.Dropdown([], multiselect=True, label="Compare its curve with", interactive=True)
            plot = gr.HTML("", **HTML, elem_id="plot-train")
            legend = gr.HTML("", **HTML)
            grid = gr.HTML("", **HTML, elem_id="train-grid")
            output = gr.HTML("", **HTML, elem_id="output")
    timer = gr.Timer(REFRESH_S, active=False)

    fields = [base, data, recipe, card, model, vae, side, frames, steps, batch, lr, lora, every]
    shown = [table, job, others, state, plot, legend, grid, output]

    def refresh(chosen: Any, compared: Any) -> list[Any]:
        names = queue.names()
        chosen = chosen if chosen in names else names[0] if names else None
        runs = catalog.runs()
        others = [str(run) for run in compared if run in runs] if isinstance(compared, list) else []
        choices = gr.Dropdown([(f"{name} {queue.title(name)}", name) for name in names], value=chosen)
        own = None if chosen is None else queue.run_of(chosen)
        drawn = ([own] if own else []) + [run for run in others if run != own]
        try:
            grids = catalog.grids(own) if own else []
        except ERRORS:  # a run was deleted while it was being read
            grids = []
        curves, named = plots(catalog, drawn)
        return [
            jobs_table(queue, catalog, names),
            choices,
            gr.Dropdown([run for run in runs if run != own], value=compared),
            "" if chosen is None else state_of(queue, catalog, chosen),
            curves[0],
            named,
            views.grid(own, grids[-1]) if own and grids else "",
            "" if chosen is None else views.log(queue.output(chosen)),
        ]

    def look_at(written: Any, size: Any) -> Iterator[list[Any]]:
        yield [views.message("looking at the data ..."), ""]
        try:
            name = text_of(written)
            source = "digits" if name == DIGITS else str(below(root, name, "data"))
            yield looked(queue, source, size)
        except ERRORS as error:
            yield [views.error(str(error)), ""]

    def make_plan(*values: Any) -> Iterator[list[Any]]:
        yield [views.message("planning ..."), ""]
        try:
            _, flags, more = read_training_form(TrainingForm(*values), catalog, root, queue.has_gpu)
            yield planned(queue, {**flags, **more})
        except ERRORS as error:
            yield [views.error(str(error)), ""]

    def begin(chosen: Any, *values: Any) -> list[Any]:
        try:
            title, flags, _ = read_training_form(TrainingForm(*values), catalog, root, queue.has_gpu)
            chosen = queue.add(title, flags)
            text = views.message(f"{chosen} starts, or waits for what runs")
        except ERRORS as error:
            text = views.error(str(error))
        return [text, *refresh(chosen, None)]

    def change(action: Callable[[str], str]) -> Callable[[Any, Any], list[Any]]:
        def changed(chosen: Any, compared: Any) -> list[Any]:
            try:
                text = views.message(f"{chosen}: {action(chosen)}")
            except ERRORS as error:
                text = views.error(str(error))
            return [text, *refresh(chosen, compared)]

        return changed

    def again(chosen_base: Any, chosen_data: Any) -> list[Any]:
        """Start the timer, and update the lists of folders and runs."""
        return [
            gr.Timer(REFRESH_S, active=True),
            gr.Dropdown(base_choices(root, skipped, catalog), value=chosen_base),
            gr.Dropdown(data_choices(root, skipped), value=chosen_data),
        ]

    look.click(look_at, [data, side], [told, details], **PRIVATE)
    plan.click(make_plan, fields, [told, details], **PRIVATE)
    start.click(begin, [job, *fields], [told, *shown], **PRIVATE)
    stop.click(change(queue.stop), [job, others], [told, *shown], **PRIVATE)
    go_on.click(change(queue.go_on), [job, others], [told, *shown], **PRIVATE)
    tab.select(again, [base, data], [timer, base, data], **PRIVATE)
    for event in (tab.select, timer.tick, job.input, others.input):
        event(refresh, [job, others], shown, **PRIVATE)


def _path(choices: list[str], value: str, label: str) -> gr.Dropdown:
    info = "or another one below that folder: write its path"
    return gr.Dropdown(choices, value=value, label=label, info=info, interactive=True, allow_custom_value=True)


def _number(label: str, min_width: int = 100) -> gr.Textbox:
    return gr.Textbox("", label=label, placeholder=AS_RECIPE, max_length=20, min_width=min_width)


def _choice(choices: tuple[str, ...], label: str) -> gr.Dropdown:
    return gr.Dropdown(list(choices), value=choices[0], label=label, interactive=True, min_width=120)


def planned(queue: TrainingQueue, flags: dict[str, Any]) -> list[str]:
    """Run ``train.py --dry_run`` with these flags. Return HTML: a line with memory and hours, and the plan's table."""
    code, text = queue.program(["train", "--config", str(queue.plan_config(flags)), "--dry_run"])
    lines = text.splitlines()
    if code:
        return [views.error(last_line(text)), ""]
    rows = [list(found.groups()) for line in lines if (found := re.fullmatch(r" {2,4}(\S.*?) {2,}(.*)", line))]
    notes = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
    known = {row[0]: row[1] for row in rows}
    memory = next((value for name, value in known.items() if name.startswith("memory")), "?")
    main = [f"memory: {memory.partition(' estimated')[0]}", f"hours: {known.get('hours', 'not known')}"]
    return [views.message("; ".join(main), notes), views.table(rows, ["Plan", ""])]


def looked(queue: TrainingQueue, source: str, size: Any) -> list[str]:
    """Run ``preprocess.py look`` on data. Return HTML: the report and the contact sheet."""
    more = ["--image_size", size] if isinstance(size, str) and size.isascii() and size.isdecimal() else []
    with queue.scratch() as folder:
        words = ["preprocess", "look", source, "--output", str(folder), "--samples", str(LOOKED)]
        code, text = queue.program([*words, "--pictures", str(SHOWN), *more])
        if code:
            return [views.error(last_line(text)), ""]
        lines = [line for line in text.splitlines() if not line.startswith(("wrote ", "looking: "))]
        return [views.message(lines[0] if lines else "", lines[1:]), views.sheet(_jpeg(folder / "contact_sheet.png"))]


def _jpeg(path: Path) -> bytes:
    if path.stat().st_size > LOOK_BYTES:
        raise ValueError("the contact sheet is too large to be shown")
    memory = io.BytesIO()
    with Image.open(path, formats=["PNG"]) as picture:
        picture.convert("RGB").save(memory, "JPEG", quality=85)
    return memory.getvalue()


def last_line(text: str) -> str:
    """Return the last error message in a program's output, or else its last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [rest for head, _, rest in (line.partition(": ") for line in lines) if head == "error"]
    return (errors or lines or ["it printed nothing"])[-1]


def jobs_table(queue: TrainingQueue, catalog: Catalog, names: list[str]) -> str:
    """Render a table of the runs that were started from the page, newest first."""
    rows = []
    for name in names:
        run = queue.run_of(name)
        entry = newest_entry(queue, catalog, run)
        progress = [run or "-", str(entry.get("step", "-")), _figure(entry, "loss")]
        rows.append([name, queue.title(name), queue.status(name), *progress])
    if not rows:
        return views.message("nothing has been trained here yet: choose data and a recipe, and press Plan or Start")
    return views.table(rows, ["", "Run", "State", "Folder", "Step", "Loss"])


def state_of(queue: TrainingQueue, catalog: Catalog, name: str) -> str:
    """Render the state of the job ``name`` in one line."""
    status, run = queue.status(name), queue.run_of(name)
    if status == "failed":
        return views.error(f"{name} has failed: {last_line(queue.output(name))}")
    entry = newest_entry(queue, catalog, run)
    words = [f"{name}: {status}"]
    if entry:
        last = last_step(catalog, run)
        words.append(f"step {entry.get('step')}{f' of {last:,}' if last else ''}")
        words += [f"{label} {_figure(entry, key)}" for key, label in FIGURES.items() if entry.get(key) is not None]
    elif status == "running":
        words.append("it prepares its first steps")
    return views.message(", ".join(words))


FIGURES = {"loss": "loss", "samples_per_s": "samples a second", "memory_gib": "memory in GiB"}


def _figure(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    return f"{value:.4g}" if isinstance(value, float) or type(value) is int and abs(value) < 2**53 else "-"


def newest_entry(queue: TrainingQueue, catalog: Catalog, run: str | None) -> dict[str, Any]:
    """Return the last complete entry of a run's log; {} if there is none, or the run is None."""
    log = None if run is None else catalog.file(run, "log.jsonl")
    for line in reversed(tail(log, queue.root).splitlines() if log else []):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # still being written
            continue
        return entry if isinstance(entry, dict) else {}
    return {}


def last_step(catalog: Catalog, run: str | None) -> int | None:
    path = None if run is None else catalog.file(run, "config.json")
    try:
        found = None if path is None else read_file(path, RUN_CONFIG).get("last_step")
    except ERRORS:
        return None
    return found if isinstance(found, int) else None
