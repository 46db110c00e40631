"""Weights in a foreign .pt file: read without running what is in it, and without believing what it says of its size."""

import argparse
import pickletools
import re
import warnings
import zipfile
from pathlib import Path

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "UNICODE", "BINUNICODE8")  # what pickle writes strings with
_HARMLESS = ("collections", "torch", "torch._utils", "torch.storage", "argparse")  # modules that weights name
_SEARCHED = 16 << 20  # bytes of a pickle


def read_pickled(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """The state dict in a .pt file and the number of classes if the file says it. The tensors are on the CPU, and of
    today's format (an archive) still in the file: what is not used is not read. Meta's training checkpoints hold
    ``model``, ``ema``, ``opt`` and ``args``; ``ema`` is taken.

    Raises ValueError with one line that names the file: it would run code, is damaged, unpacks to more than its own
    size, or holds anything but tensors of real numbers under their names.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")
    size = path.stat().st_size
    packed = zipfile.is_zipfile(path)
    if packed:
        _check_archive(path, size)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of storages and formats of old, in torch's words
            # Mapped, for then torch compares each tensor with the bytes there are, and reads nothing that isn't used.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=packed)
    except Exception as error:
        raise ValueError(_why(path, error)) from error
    num_classes = None
    if isinstance(content, dict) and "ema" in content and "model" in content:
        num_classes = getattr(content.get("args"), "num_classes", None)
        content = content["ema"]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} holds no state dict of a model: only tensors, each under its name")
    state, total = {}, 0
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} holds no state dict of a model: {type(name).__name__} is no parameter's name")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype not in FLOATS:
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}".replace("torch.", "")
            raise ValueError(f"{path}: {name[:100]!r} is a tensor of {kind}; weights are dense floating-point numbers")
        total += tensor.numel() * tensor.element_size()
        if total > size:
            raise ValueError(f"{path}: its tensors are larger than the file, because they share memory; save copies")
    for name, tensor in content.items():
        state[name.removeprefix("module.")] = tensor.detach()
    return state, num_classes if type(num_classes) is int else None


def _check_archive(path: Path, size: int) -> None:
    """Raises ValueError for an archive whose entries are compressed, or overlap: torch writes none of these."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{path} is damaged: it is no readable .pt file ({error})") from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError(
            f"{path} is a compressed archive, which torch.save does not write; unpack it and save it again"
        )
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(f"{path} is damaged: its entries are larger than the file")


def _why(path: Path, error: Exception) -> str:
    """Explain an error in our own words: torch's explain how to load the file in spite of it."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if call := found[1] if found else _first_call(path):
        return (
            f"{path} is refused: it would run code when loaded ({call}). Weights are tensors in plain containers; get "
            "them as .safetensors, or as a .pt file with the state dict alone"
        )
    return f"{path} is no .pt file of weights, or is damaged ({type(error).__name__}); get it again, or as .safetensors"


def _first_call(path: Path) -> str | None:
    """The first thing that a pickle names and weights have no use for; found without loading it."""
    strings: list[str] = []
    try:
        for code, value, _ in pickletools.genops(_pickle_in(path)):
            if code.name == "GLOBAL":
                strings = str(value).split(" ", 1)
            elif code.name in _STRINGS:
                strings = [*strings[-1:], str(value)]
            if code.name in ("GLOBAL", "STACK_GLOBAL") and strings[0] not in _HARMLESS:
                return ascii(".".join(strings))[1:-1][:100]
    except Exception:  # no pickle at all, or a broken one
        return None
    return None


def _pickle_in(path: Path) -> bytes:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as file:
                return file.read(_SEARCHED)
    with open(path, "rb") as file:
        return file.read(_SEARCHED)
