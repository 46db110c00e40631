"""Convert the fields of the tab Train into flags of train.py, and check them before any program is started."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendit.config.architectures import KINDS
from opendit.config.flags import default_of, flags_of
from opendit.config.names import DESCRIPTIONS
from opendit.config.recipes import RECIPES
from opendit.config.train import TrainConfig
from opendit.parallel.hardware import CARDS
from opendit.sampling.page.catalog import Catalog, starts
from opendit.sampling.page.forms import number_in, text_of
from opendit.sampling.page.training_queue import trains_lora

NOTHING, DIGITS = "nothing: from the start", "digits: the embedded pictures"
NO_RECIPE, ANY_CARD = "none", "this one"
CARD_NAMES = (ANY_CARD, *CARDS)
AS_RECIPE = "as recipe"
VAES = (AS_RECIPE, "none", "ema", "mse")
PICTURE_MODELS = (AS_RECIPE, "DiT-Ti/2", "DiT-S/2", "DiT-B/2", "DiT-L/2", "DiT-XL/2")
TABLES = (".csv", ".jsonl", ".parquet")
SPEED_UPS = {"mixed_precision": "bf16", "enable_flashattn": True, "enable_layernorm_kernel": True}
SPEED_UPS |= {"enable_modulate_kernel": True}
MOST_CHOICES, MOST_ENTRIES, MOST_PATH = 200, 5_000, 1_000
# Flags that define the network and the latents. A new run copies them from the run whose weights it starts from.
KEPT = ("model", "vae", "image_size", "use_video", "num_frames", "frame_interval", "text_encoder", "max_text_tokens")
KEPT += ("cross_attention", "objective", *(setting.flag for kind in KINDS.values() for setting in kind.settings))
BUILT_IN = {"vae": ("none", "ema", "mse"), "text_encoder": ("bytes", "clip", "t5")}  # every other value is a path


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
    """Return a title, the flags for ``train.py --config``, and extra flags for a plan.

    has_gpu: if True and no recipe is chosen, turn on the speed-ups that the repository's shell scripts use.

    Raises:
        ValueError: a field is invalid, or a path is not below ``root``; one line for the user.
    """
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
            flags[name] = number_in(name.replace("_", " "), _number(value), low, high, whole)
    if "batch_size" in flags and "--global_batch_size" in words:
        flags["global_batch_size"] = flags["batch_size"]
    if "max_steps" in flags:
        flags["epochs"] = 10**6  # no limit, because max_steps ends the run
        flags["log_every"] = max(1, min(50, flags["max_steps"] // 50))  # log a short run often enough to have a curve
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
    """Return the flags that a new run must copy from the run whose weights it starts from.

    Raises ValueError if the run is damaged.
    """
    found = starts(catalog, run)
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


# ------------------------------------------------------------------------------------------ paths


def below(root: Path, written: str, what: str) -> Path:
    """Return a path below ``root`` with all links resolved.

    written: path relative to ``root``, or absolute. what: name of the field, for messages.

    Raises:
        ValueError: the path doesn't exist, leads out of ``root``, or contains a character that has a special meaning in
            --data_path.
    """
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
    return [
        DIGITS,
        *_listed(root, skipped, lambda path: path.is_dir() or path.suffix in (".csv", ".jsonl", ".parquet")),
    ]


def base_choices(root: Path, skipped: tuple[str, ...], catalog: Catalog) -> list[str]:
    """Return the choices for a base: runs with checkpoints, and folders of models below ``root``."""
    runs = [name for name in catalog.runs() if catalog.has_checkpoint(name)]
    return [NOTHING, *runs, *_listed(root, skipped, lambda path: (path / "model_index.json").is_file())]


def _listed(root: Path, skipped: tuple[str, ...], wanted: Any) -> list[str]:
    found: list[str] = []
    for number, path in enumerate(_walk(root, skipped, 2)):
        if number >= MOST_ENTRIES or len(found) >= MOST_CHOICES:
            break
        name = str(path.relative_to(root))
        try:
            if name.isprintable() and wanted(path) and path.resolve().is_relative_to(root.resolve()):
                found.append(name)
        except (OSError, RuntimeError):
            continue
    return found


def _walk(folder: Path, skipped: tuple[str, ...], depth: int) -> Iterator[Path]:
    """Yield the entries of a folder and of its subfolders, down to ``depth`` levels."""
    try:
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    except OSError:
        return
    for path in inside:
        if path.name in skipped:
            continue
        yield path
        if depth > 1 and path.is_dir() and not path.is_symlink():
            yield from _walk(path, skipped, depth - 1)


def _number(text: str) -> float | None:
    """Parse a number. Return None if ``text`` is not a number."""
    try:
        return float(text[:40])
    except ValueError:
        return None


def _one_of(what: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{what}: choose one of the list")
    return value
