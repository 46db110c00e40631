"""Read a pretrained model's untrusted folder in the format of diffusers or transformers, or download it from the hub.

No code is run, and no pickles, adapters or quantised weights are loaded. A configuration that names code or other files
(``auto_map``) is refused. A configuration must also match the weights' header before a model is built. A download has a
fixed commit and is then treated like any other folder.
"""

import math
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from opendit.common.hub import COMMIT, probe_hub
from opendit.common.tensor_files import open_safetensors, shapes_in
from opendit.common.torch_utils import on_meta
from opendit.common.utils import shown
from opendit.config.architectures import UNSUPPORTED
from opendit.kernels.base_precision import base_layers, row_bytes, store_base
from opendit.models.families.base import Family

if TYPE_CHECKING:
    from opendit.common.json_models import FileKind

KNOWN = ("none", "ema", "mse", "bytes", "clip", "t5")  # built-in names, safe even in an untrusted file
CONFIG = "config.json"
PIPELINE_INDEX = "model_index.json"  # a folder with this file is a pipeline
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")


def encoder_name(flag: str, given: str | None, stored: str | None, source: Path, also: str = "") -> str | None:
    """Return the encoder's name: ``given`` by the user, or else ``stored`` in the file ``source``. Raises
    ValueError for a stored name that is not in KNOWN. The message names the flag and ends with ``also``."""
    if given is not None or stored is None or stored in KNOWN:
        return stored if given is None else given
    quoted = shlex.quote(stored) if stored.isprintable() else shown(stored)
    raise ValueError(
        f"{source} names {quoted} as its {flag}; what only a file names is not loaded: if you trust it, add "
        f"{flag} {quoted}{also}"
    )


def refuse_adapters(folder: Path) -> None:
    """Raise ValueError if the folder has an adapter, because transformers would load it unasked."""
    found = next((name for name in ADAPTERS if os.path.lexists(folder / name)), None)
    if found:
        raise ValueError(f"{folder / found} is an adapter, which is not merged here; merge it and save the whole model")


def weight_files(folder: Path, stem: str) -> list[Path]:
    """Return STEM.safetensors, or the files in STEM.safetensors.index.json. Raises FileNotFoundError or ValueError,
    naming the file."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        if single.is_file():
            raise ValueError(f"{folder} holds both {single.name} and {index.name}: remove one of them")
        from opendit.common.json_models import read_file
        from opendit.encoders.schema import INDEX

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
    """Read the shapes of all tensors in the model's files. Raises as :func:`weight_files`."""
    shapes = {}
    for path in weight_files(folder, stem):
        with open_safetensors(path) as file:
            shapes |= shapes_in(file, path, floats=False)
    return shapes


def weight_count(folder: Path, stem: str) -> int:
    """Count the weights from the headers of the files. Raises as :func:`weight_files`."""
    return sum(map(math.prod, weight_shapes(folder, stem).values()))


def stored_bytes(folder: Path, stem: str, kind: str) -> int:
    """Return a text encoder's size in bytes. kind: storage of linear layers (see :func:`transformers_model`). Other
    weights count as half precision. Raises as :func:`weight_files`."""

    def size(name: str, shape: tuple[int, ...]) -> int:
        table = any(word in name for word in ("embed", "shared", "relative_attention_bias"))
        if kind == "bf16" or len(shape) != 2 or table:
            return 2 * math.prod(shape)
        return shape[0] * row_bytes(kind, shape[1])

    return sum(size(*each) for each in weight_shapes(folder, stem).items())


def check_size(make: Callable[[], torch.nn.Module], shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Raise ValueError if ``make()`` fails on the meta device, or builds a model with more weights than ``shapes``."""
    try:
        with on_meta():
            model = make()
    except Exception as error:  # the library may raise any error for inconsistent values
        raise ValueError(f"{folder / CONFIG} describes no model that can be built ({one_line(error)})") from error
    described, held = sum(p.numel() for p in model.parameters()), sum(map(math.prod, shapes.values()))
    if described > held:
        raise ValueError(f"{folder / CONFIG} describes {described:,} weights, the folder's files hold {held:,}")


def lazy_module(name: str) -> Any:
    """Import diffusers or ``transformers``. These packages replace their module object during the import, so an
    ``import`` statement in a second thread could return the old object."""
    return import_module(name)


def transformers_model(
    folder: Path,
    name: str,
    stem: str,
    dtype: torch.dtype = torch.float32,
    kind: str = "bf16",
    device: torch.device | str = "cpu",
) -> Any:
    """Load a folder's model as the class ``name`` of ``transformers``. No code in the folder is run, no pickle is read.

    kind: storage of linear layers' weights, one of ``opendit.config.names.BASE_PRECISIONS``; bf16 means ``dtype``.
    device: device for quantising weights, one tensor at a time. Raises ValueError for missing weights, and any error of
    ``transformers``."""
    refuse_adapters(folder)
    shapes = weight_shapes(folder, stem)
    model_class = getattr(lazy_module("transformers"), name)
    made = model_class.config_class.from_pretrained(folder, local_files_only=True)
    check_size(lambda: model_class(made), shapes, folder)
    # Without a folder, transformers reads the tensors in the argument ``state_dict``.
    numbered = None if kind == "bf16" else {key: _number(i, shape) for i, (key, shape) in enumerate(shapes.items())}
    files = dict(local_files_only=True, trust_remote_code=False, use_safetensors=True)
    with _quiet_loading(warnings=numbered is None):
        model, report = model_class.from_pretrained(
            **(files if numbered is None else {"config": made, "state_dict": numbered}),
            pretrained_model_name_or_path=folder if numbered is None else None,
            attn_implementation="sdpa" if model_class._supports_sdpa else "eager",
            output_loading_info=True,
            dtype=dtype if numbered is None else torch.float32,
        )
    if report["missing_keys"]:  # transformers would initialise missing weights at random
        raise ValueError(f"its weights lack {sorted(report['missing_keys'])[0]}")
    if numbered is not None:
        _fill_stored(model, list(shapes.items()), weight_files(folder, stem), dtype, kind, torch.device(device))
    return model


def _number(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a float32 tensor of this shape, filled with ``number``, that takes one element of memory."""
    return torch.tensor(float(number)).expand(shape)


@torch.no_grad()
def _fill_stored(
    model: torch.nn.Module,
    tensors: list[tuple[str, tuple[int, ...]]],
    files: list[Path],
    dtype: torch.dtype,
    kind: str,
    device: torch.device,
) -> None:
    """Replace a model's parameters by the tensors in its files, one at a time. Linear layers are stored as ``kind``.
    Before the call, each parameter must be filled with its tensor's index in ``tensors``, because ``transformers``
    renames tensors. Raises ValueError if a parameter is not exactly one tensor."""
    model.requires_grad_(False)
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = {name: tensors[int(parameter.flatten()[0])] for name, parameter in named.items()}
    for name, (key, shape) in chosen.items():
        if tuple(named[name].shape) != shape:
            raise ValueError(f"{name} is not one tensor ({key}), so it can't be stored as {kind}; take bf16")
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in named}
    tables = {id(named[name]) for name, owner in owners.items() if not isinstance(owner, torch.nn.Linear)}
    store_base(model, kind, dtype, device, lambda name, _: id(named[name]) not in tables)
    stored, places = dict(base_layers(model)), {}
    for path in files:
        with open_safetensors(path) as file:
            places |= dict.fromkeys(file.keys(), path)
    filled: dict[int, torch.Tensor] = {}
    for name, parameter in named.items():
        if id(parameter) in filled:
            continue
        key = chosen[name][0]
        with open_safetensors(places[key]) as file:
            values = file.get_tensor(key).to(device)
        if name in stored:
            packed = torch.empty_like(stored[name].weight, device=device)
            stored[name].weight = torch.nn.Parameter(packed, requires_grad=False)
            stored[name].store(packed, values, torch.clone)
        else:
            parameter.data = filled[id(parameter)] = values.to(dtype, copy=True)


@contextmanager
def _quiet_loading(warnings: bool) -> Iterator[None]:
    """Disable the progress bars of ``transformers``, because every rank would draw them. warnings: False to disable
    warnings, too."""
    from transformers.utils import logging

    shown, before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not warnings:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def loading(what: str, needs: str = "") -> Iterator[None]:
    """Convert a library's errors to ValueError: ``what`` can't be loaded, why, and ``needs``."""
    try:
        yield
    except BaseException as error:  # a panic in the tokenizer's Rust code is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} can't be loaded ({one_line(error)}){needs}") from error


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's text as one line of at most about ``most`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def reason(path: Path, error: Exception) -> str:
    """Return an error's text on one line without the path at its start."""
    return one_line(error).removeprefix(str(path)).lstrip(": ")


# ------------------------------------------------------------------------------------------ pipelines

# Class with an extra head -> class without the head. Only the second class is loaded.
SAME = {"Qwen3ForCausalLM": "Qwen3Model", "Gemma2ForCausalLM": "Gemma2Model"}


def check_index(folder: Path, family: Family) -> dict[str, Any]:
    """Read ``model_index.json`` in a folder, and check its pipeline and components against the family. Raises
    FileNotFoundError or ValueError."""
    from opendit.encoders.schema import PRETRAINED

    path = folder / PIPELINE_INDEX
    index = read_json_of(path, PRETRAINED, f"a folder of diffusers' {family.pipelines[0]} has one")
    if index.get("_class_name") not in family.pipelines:
        found = shown(index.get("_class_name"))
        if (why := UNSUPPORTED.get(str(index.get("_class_name")))) is not None:
            raise ValueError(f"{path}: {index['_class_name']} is not supported: {why}")
        raise ValueError(
            f"{path}: _class_name is {found}, not {' or '.join(family.pipelines)}; other pipelines of {family.name}, "
            "such as those that are given pictures, are not known"
        )
    for component, (library, class_name) in family.components.items():
        if not names_class(index.get(component), library, class_name):
            found = index.get(component)
            found = ", ".join(map(shown, found[:2])) if isinstance(found, list) else shown(found)
            raise ValueError(f"{path}: {component} is {found}, not {class_name} of {library}")
    return index


def names_class(entry: Any, library: str, class_name: str) -> bool:
    """Return True if an entry of ``model_index.json`` names this class. The tokenizers NAME and NAMEFast count as one
    class, because recent versions of transformers have only one of them."""
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        return False
    found = SAME.get(entry[1], entry[1])
    return entry[0] == library and found.removesuffix("Fast") == class_name.removesuffix("Fast")


def read_json_of(path: Path, kind: "FileKind", needed: str) -> Any:
    """Return the content of a JSON file. Raises FileNotFoundError that ends with ``needed``, or ValueError."""
    from opendit.common.json_models import read_file  # imports pydantic, so only when a file is read

    try:
        return read_file(path, kind)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} doesn't exist; {needed}") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read: {reason(path, error)}") from error


# ------------------------------------------------------------------------------------------ the hub


def pinned(name: str) -> tuple[str, str] | None:
    """Split a name like openai/clip-vit-large-patch14@COMMIT into (repository, commit); None for any other name."""
    found = re.fullmatch(rf"([\w.-]+/[\w.-]+)@({COMMIT.pattern})", name, re.ASCII)
    return (found[1], found[2]) if found else None


def fetch(repository: str, commit: str, files: tuple[str, ...], also: tuple[str, ...], what: str, needs: str) -> Path:
    """Return a repository's local folder at one commit, from the local cache or after a download.

    files: required files. also: optional files. Raises FileNotFoundError within seconds if the hub can't be reached.
    The message is ``what``, the reason and ``needs``."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def get(local_files_only: bool) -> Path:
        options: dict[str, Any] = dict(revision=commit, local_files_only=local_files_only)
        folder = [Path(hf_hub_download(repository, name, **options)) for name in files][0].parent
        for name in also:
            with suppress(EntryNotFoundError):
                hf_hub_download(repository, name, **options)
        return folder

    with suppress(OSError, ValueError):
        return get(local_files_only=True)
    try:
        # Check first that the hub can be reached, because a download retries six times with growing pauses.
        probe_hub(constants.ENDPOINT)
        return get(local_files_only=False)
    except Exception as error:
        raise FileNotFoundError(
            f"{what} isn't in the local cache and couldn't be fetched from the hub "
            f"({type(error).__name__}: {one_line(error)}). Fetch it on a machine that can, then copy it: {needs}"
        ) from error
