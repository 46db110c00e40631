"""Checks of flag values.

Every check raises ValueError with the flag and the fix. OnThisMachine, a subclass, is raised if the mistake may exist
on one machine only, such as a missing file.
"""

import difflib
import itertools
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

from opendit.common import hub
from opendit.common.safe_files import LinkRefused, refuse_links
from opendit.config.console import OnThisMachine
from opendit.config.names import check_address, inline_sources, is_address, named_sources

MOST_NAMES = 10_000  # folder entries to compare with a mistyped name, at most
VAES = ("ema", "mse", "none")  # names for --vae; all other values are folders


def resolve_precision(precision: str, asked_for: bool, has_gpu: bool) -> tuple[str, list[str]]:
    """Return the precision to use, and notes to print. Without a GPU, half precision becomes fp32 unless the user asked
    for it. Raises ValueError if the user asks for fp16 without a GPU."""
    if has_gpu or precision == "fp32" or (precision == "bf16" and asked_for):
        return precision, []
    if asked_for:
        raise ValueError(f"--mixed_precision {precision}: needs a GPU, and there is none; use --mixed_precision fp32")
    return "fp32", [f"precision: fp32, because there is no GPU (the default {precision} needs one)"]


def check_workers(number: int, asked_for: bool) -> None:
    """Raise OnThisMachine if the user asked for more than 4 loader processes per CPU core. 16 are always allowed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(16, 4 * cores)
    if asked_for and number > most:
        raise OnThisMachine(f"--num_workers {number}: this machine has {cores} CPU cores; use {most} at most")


LIKE_A_FILE = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4", ".npz")


def check_writable(folder: str, flag_name: str) -> None:
    """Create the folder, and check that files can be written to it. Raises ValueError for a name that looks like a
    file's, unless such a folder exists."""
    if Path(folder).suffix.lower() in LIKE_A_FILE and not os.path.isdir(folder):
        raise ValueError(f"{flag_name} {folder}: is a file's name; give a folder")
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise OnThisMachine(
            f"{flag_name} {folder}: can't write there ({_reason(error)}); name another folder"
        ) from error


def check_vae(name: str) -> None:
    """Check that the value of --vae is a known name or an existing path."""
    if name not in VAES:
        check_exists(name, "--vae", f"{', '.join(VAES)} or a folder with a VAE", VAES)


def check_no_folder(file: str, flag_name: str) -> None:
    if os.path.isdir(file) or file.endswith(os.sep):
        raise OnThisMachine(f"{flag_name} {file}: is a folder; name a file in it")


def check_output_file(file: str, flag_name: str, *, makes_folder: bool = False) -> None:
    """Check that an output file can be written, and is no folder or link. ``makes_folder``: True if the program creates
    the file's folder."""
    check_no_folder(file, flag_name)
    path = Path(file)
    try:
        refuse_links(path.parent, [path.name], flag_name)
        if path.exists() and not os.access(path, os.W_OK):
            raise OnThisMachine(f"{flag_name} {file}: it is there and can't be written; name another file")
        if not makes_folder and not path.absolute().parent.is_dir():
            raise OnThisMachine(f"{flag_name} {file}: its folder does not exist; make it, or name another file")
    except LinkRefused as error:
        raise OnThisMachine(str(error)) from error
    except OSError as error:
        raise OnThisMachine(f"{flag_name} {file}: can't write there ({_reason(error)}); name another file") from error
    check_can_be_made(path.absolute().parent, flag_name)


def check_can_be_made(folder: Path, flag_name: str) -> None:
    """Check that a folder exists or can be created, and can be written to."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OnThisMachine(
            f"{flag_name} {folder}: can't write there ({_reason(error)}); name another place"
        ) from error


def check_exists(path: str, flag_name: str, what: str, names: Collection[str] = ()) -> None:
    """Check that a path exists. what: allowed values, for the message. names: words that are accepted, too."""
    try:
        there = Path(path).expanduser().exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, or ~ of an unknown user
        raise OnThisMachine(f"{flag_name} {path}: can't be looked for ({_reason(error)}); give {what}") from error
    if not there:
        raise OnThisMachine(f"{flag_name} {path}: doesn't exist; {_suggestion(path, names)}give {what}")


def check_data(path: str | None, flag_name: str) -> None:
    for source, _ in inline_sources(path or "") or [(path, "")]:
        if source is not None and is_address(source):
            check_address(source, flag_name)
        elif source is not None and source not in named_sources():
            check_exists(source, flag_name, "digits, or a folder or CSV that does", tuple(named_sources()))


def fetched(name: str, flag_name: str, download: bool, commit: str | None = None) -> str:
    """Return the local folder of a model with a hub name; see :func:`opendit.common.hub.fetched`."""
    try:
        return hub.fetched(name, flag_name, download, commit)
    except ValueError as error:
        raise OnThisMachine(str(error)) from error


def check_weights(path: str, flag_name: str, *, pipeline: bool = False) -> None:
    """Check that ``path`` looks like a weights file, or a folder with weights or checkpoints. With ``pipeline``, a
    diffusers folder is also accepted."""
    what = "a .safetensors or .pt file, a checkpoint folder or a run folder" + (", or a pipeline" if pipeline else "")
    if pipeline and Path(path).name == "model_index.json":
        raise ValueError(f"{flag_name} {path}: is a part of a pipeline; give its folder, {Path(path).parent}")
    try:
        check_exists(path, flag_name, what)
        folder, patterns = Path(path).expanduser(), ["*.safetensors", "manifest.json", "checkpoints/*"]
        patterns += ["model_index.json", "transformer/config.json"] if pipeline else []
        found = not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in patterns)
    except OSError as error:
        raise OnThisMachine(f"{flag_name} {path}: can't be read ({_reason(error)}); give {what}") from error
    if not found or not _may_hold_weights(Path(path).expanduser()):
        raise OnThisMachine(f"{flag_name} {path}: no checkpoint there; give {what}")


def path_and_weight(text: str) -> tuple[str, float]:
    """Split PATH[:WEIGHT] into a path and a weight, by default 1. A colon in an existing path belongs to the path."""
    path, colon, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        return text, 1.0
    if not colon or Path(text).expanduser().exists():
        return text, 1.0
    check_lora_weight(path, weight)
    return path, weight


def check_lora_weight(path: object, weight: float) -> None:
    if not -100 <= weight <= 100:
        raise ValueError(f"--lora {path}: its weight {weight:g} is out of range; give one from -100 to 100")


def _may_hold_weights(path: Path) -> bool:
    if not path.is_file() or path.suffix in (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".json"):
        return True
    with open(path, "rb") as file:
        start = file.read(9)
    return start.startswith((b"PK", b"\x80")) or start.endswith(b"{")  # torch's zip, a pickle, safetensors' header


def read_prompts(prompts: list[str], flag_name: str) -> list[str]:
    """Return a flag's captions. A single value that ends with .txt names a file of captions. Raises OnThisMachine."""
    if len(prompts) != 1 or not prompts[0].endswith(".txt"):
        return prompts
    try:
        lines = Path(prompts[0]).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise OnThisMachine(
            f"{flag_name} {prompts[0]}: can't be read ({_reason(error)}); give captions, or a file of them"
        ) from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise OnThisMachine(f"{flag_name}: the file holds no caption; one a line is expected")
    return found


def _suggestion(path: str, known: Collection[str]) -> str:
    """Return "did you mean NAME? Or " with a similar known name or folder entry; "" if there is none."""
    wanted = Path(path).expanduser()
    try:
        with os.scandir(wanted.parent) as found:
            names = [entry.name for entry in itertools.islice(found, MOST_NAMES)]
    except OSError:
        return ""
    if like := difflib.get_close_matches(path, known, n=1, cutoff=0.6):
        return f"did you mean {like[0]}? Or "
    like = difflib.get_close_matches(wanted.name, names, n=1, cutoff=0.75)
    return f"did you mean {Path(path).with_name(like[0])}? Or " if like else ""


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def check_rate(fps: float | None, given: Collection[str]) -> None:
    if fps is not None and "frame_interval" in given:
        raise ValueError(f"--fps {fps:g}: --frame_interval says which frames are read already; leave one of them out")
