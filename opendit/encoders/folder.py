"""A pretrained model's folder, as diffusers and transformers write it: what it may hold, and where it comes from.

A folder may be a stranger's, so nothing of it is loaded that could run code, name other files or fetch any: no
``auto_map``, no pickled weights, no adapter, no quantisation. Its configuration is compared with its weights' header
before a model is made. A repository of the hub is fetched by its commit, and is then such a folder.
"""

import math
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from opendit.common.json_file import FILE, MIB, FileKind, read_file
from opendit.common.rules import Invalid, Rule, listed, mapping, number, optional, plain, record, string, whole
from opendit.common.tensor_files import open_safetensors, shapes_in
from opendit.common.torch_utils import on_meta
from opendit.common.utils import shown

T = TypeVar("T")
KNOWN = ("none", "ema", "mse", "bytes", "clip", "t5")  # names that mean the same wherever they come from
CONFIG = "config.json"
# Keys by which a folder would have code run or other weights than its own loaded. -> what each of them asks for
REFUSED = {
    "auto_map": "names code to run",
    "custom_pipelines": "names code to run",
    "quantization_config": "asks for a package that unpacks the weights",
    "transformers_weights": "names another file of weights",
    "adapter_config": "asks for an adapter",
}
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
INDEX = FileKind(record({"weight_map": mapping(string(1024), FILE, 100_000)}, others=plain()), 16 * MIB)
WIDTH, LAYERS = whole(1, 1 << 16), whole(1, 256)


def encoder_name(flag: str, given: str | None, stored: str | None, source: Path) -> str | None:
    """The encoder to load: the user's ``given`` one, else the one ``stored`` in a file, if that is one of KNOWN.

    A path or a repository that only a file names may be anybody's, so it is not followed: ValueError, with the flag to
    add for who trusts it.
    """
    if given is not None or stored is None or stored in KNOWN:
        return stored if given is None else given
    quoted = shlex.quote(stored) if stored.isprintable() else shown(stored)
    raise ValueError(
        f"{source} names {quoted} as its {flag}; what only a file names is not loaded: if you trust it, add "
        f"{flag} {quoted}"
    )


def config_kind(**fields: Rule) -> FileKind:
    """The rule of a config.json: these fields, where they are there, and any others that ask for nothing."""
    inner = record({}, fields, others=plain(6))

    def rule(value: Any, place: str) -> None:
        inner(value, place)
        refuse_requests(value)

    return FileKind(rule, 4 * MIB)


def refuse_requests(value: Any) -> None:
    """Raises Invalid if a key of REFUSED, or another attention than torch's, is anywhere in a configuration."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in REFUSED and item:
            raise Invalid(f"{key} {REFUSED[key]}, which is not done")
        if key in ("attn_implementation", "_attn_implementation") and item not in (None, "eager", "sdpa"):
            raise Invalid(f"{key} asks for other code than torch's attention, which is not done")
        refuse_requests(item)


TOKENIZER_KIND = config_kind()
POSITIVE = number(0, 1e6, above=True)
PER_CHANNEL = optional(listed(number(-1e6, 1e6), 1, 4096))
PER_CHANNEL_POSITIVE = optional(listed(POSITIVE, 1, 4096))


def refuse_adapters(folder: Path) -> None:
    """Raises ValueError if the folder has an adapter, which transformers would merge into the weights by itself."""
    found = next((name for name in ADAPTERS if os.path.lexists(folder / name)), None)
    if found:
        raise ValueError(f"{folder / found} is an adapter, which is not merged here; merge it and save the whole model")


def weight_files(folder: Path, stem: str) -> list[Path]:
    """STEM.safetensors, or the files that STEM.safetensors.index.json lists.

    Raises FileNotFoundError or ValueError that names what is missing, pickled or damaged.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        if single.is_file():
            raise ValueError(f"{folder} holds both {single.name} and {index.name}: remove one of them")
        files = {folder / name for name in read_file(index, INDEX)["weight_map"].values()}
    else:
        files = {single}
    for path in sorted(files):
        if not path.is_file():
            pickled = next((found.name for pattern in PICKLES for found in sorted(folder.glob(pattern))), None)
            instead = f", only {pickled}, and pickled weights are not read: save it as .safetensors" if pickled else ""
            raise FileNotFoundError(f"no {path.name} in {folder}{instead}")
    return sorted(files)


def weight_shapes(folder: Path, stem: str) -> dict[str, tuple[int, ...]]:
    """The shapes in the files of :func:`weight_files`, which says what it raises."""
    shapes = {}
    for path in weight_files(folder, stem):
        with open_safetensors(path) as file:
            shapes |= shapes_in(file, path, floats=False)
    return shapes


def check_size(make: Callable[[], torch.nn.Module], shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Raises ValueError if the model that ``make`` builds, here without weights, has more of them than the folder."""
    try:
        with on_meta():
            model = make()
    except Exception as error:  # of another library, which may raise anything for values that do not go together
        raise ValueError(f"{folder / CONFIG} describes no model that can be built ({one_line(error)})") from error
    described, held = sum(p.numel() for p in model.parameters()), sum(map(math.prod, shapes.values()))
    if described > held:
        raise ValueError(f"{folder / CONFIG} describes {described:,} weights, the folder's files hold {held:,}")


def transformers_model(folder: Path, name: str, stem: str) -> Any:
    """The model of transformers' class ``name`` that a folder holds, in float32; no code of the folder's is run and no
    pickle is read. Raises ValueError for weights that are missing, and whatever transformers raises."""
    refuse_adapters(folder)
    shapes = weight_shapes(folder, stem)
    import transformers  # seconds to import, so only where a model is really used

    model_class = getattr(transformers, name)
    made = model_class.config_class.from_pretrained(folder, local_files_only=True)
    check_size(lambda: model_class(made), shapes, folder)
    with _no_progress_bars():
        model, report = model_class.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa" if model_class._supports_sdpa else "eager",
            output_loading_info=True,
            dtype=torch.float32,
        )
    if report["missing_keys"]:  # transformers would go on with random weights
        raise ValueError(f"its weights lack {sorted(report['missing_keys'])[0]}")
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without those of transformers, which every rank would draw."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def one_line(error: BaseException, most: int = 300) -> str:
    """An error of another library as part of a message of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def reason(path: Path, error: Exception) -> str:
    """Return an error's text without the file's path, for a message that names the file already."""
    return one_line(error).removeprefix(str(path)).lstrip(": ")


# ------------------------------------------------------------------------------------------ the hub

COMMIT = "[0-9a-f]{40}"


def pinned(name: str) -> tuple[str, str] | None:
    """(repository, commit) of a name like openai/clip-vit-large-patch14@COMMIT; None for another name."""
    found = re.fullmatch(rf"([\w.-]+/[\w.-]+)@({COMMIT})", name, re.ASCII)
    return (found[1], found[2]) if found else None


def fetch(repository: str, commit: str, files: tuple[str, ...], also: tuple[str, ...], what: str, needs: str) -> Path:
    """The folder of a repository's ``files``, and of those of ``also`` that it has, at one commit: in the local cache,
    fetched from the hub if need be. Raises FileNotFoundError as :func:`from_hub`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def get(local_files_only: bool) -> Path:
        options: dict[str, Any] = dict(revision=commit, local_files_only=local_files_only)
        folder = [Path(hf_hub_download(repository, name, **options)) for name in files][0].parent
        for name in also:
            try:
                hf_hub_download(repository, name, **options)
            except EntryNotFoundError:
                continue
        return folder

    return from_hub(get, what, needs)


def from_hub(fetch: Callable[[bool], T], what: str, needs: str) -> T:
    """Return ``fetch(local_files_only)``: from the local cache, else from the hub.

    Raises FileNotFoundError, within seconds, if the hub can't be reached; ``what`` was asked for, and what the user
    ``needs`` instead, are in its message."""
    from huggingface_hub import constants

    try:
        return fetch(True)
    except (OSError, ValueError):
        pass
    try:
        # Its own download tries six times with growing pauses; one short question first tells whether that can help.
        probe_hub(constants.ENDPOINT)
        return fetch(False)
    except Exception as error:
        raise FileNotFoundError(
            f"{what} isn't in the local cache and couldn't be fetched from the hub "
            f"({type(error).__name__}: {one_line(error)}). Fetch it on a machine that can, then copy it: {needs}"
        ) from error


def probe_hub(endpoint: str) -> None:
    """Raises unless the hub answers, whatever it answers, within a few seconds."""
    from huggingface_hub.utils import get_session

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConnectionError("HF_HUB_OFFLINE is set")
    get_session().head(endpoint, timeout=5)
