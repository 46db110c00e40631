"""Adapters for Colossal-AI: corrections, the ZeRO optimizer, and plugins. Only these modules import colossalai.

:func:`load` imports Colossal-AI. :func:`prepare` makes Colossal-AI 0.5.0 importable without its pinned dependencies,
and runnable on a CPU with gloo.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

HOW_TO_INSTALL = "run `bash install.sh`, or `pip install --no-deps colossalai==0.5.0`"


def check_installed() -> None:
    if importlib.util.find_spec("colossalai") is None:
        raise ValueError(
            f"training needs Colossal-AI, which is not installed: {HOW_TO_INSTALL} (sampling does without)"
        )


def load() -> ModuleType:
    """Import Colossal-AI, apply the corrections, and return opendit.parallel.colossal.plugins. Raises ImportError, with
    the command to install Colossal-AI, if it can't be imported."""
    prepare()  # the following imports work only after this call
    from opendit.parallel.colossal import plugins

    plugins.register()
    return plugins


_OPTIONAL = ("peft", "galore_torch", "bitsandbytes")


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook with placeholders for packages that Colossal-AI imports but we never use."""

    def __init__(self, names: list[str]):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _placeholder
        return module

    def exec_module(self, module):
        pass


def _placeholder(name: str) -> type[Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


@functools.cache
def prepare() -> None:
    """Import Colossal-AI and apply the corrections that all plugins need. Further calls do nothing."""
    _import_colossalai()
    # Gemini reads storage sizes with TypedStorage, and so causes a warning.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    from colossalai.zero.gemini import gemini_ddp

    # Gemini would cast every float input, including timesteps, to half precision. Our models cast inputs themselves.
    gemini_ddp._cast_float = lambda value, dtype: value


@contextlib.contextmanager
def _nothing_compiled():
    """Disable torch.compile in this context. Colossal-AI decorates unused functions with it, and would thereby import
    torch's compiler (1 s of CPU time)."""
    compiler = torch.compile
    torch.compile = lambda function=None, **options: function or (lambda function: function)
    try:
        yield
    finally:
        torch.compile = compiler


def _import_colossalai() -> None:
    # Hide installed packages, too. An installed peft would fail with the placeholder of bitsandbytes.
    hidden = [n for n in _OPTIONAL if n not in sys.modules]
    # Colossal-AI's pipeline code calls this function. New versions of torch lack it.
    if not hasattr(dist, "is_hccl_available"):
        incomplete: Any = dist
        incomplete.is_hccl_available = lambda: False
    finder = _StandIn(hidden)
    sys.meta_path.insert(0, finder)
    try:
        with _nothing_compiled(), warnings.catch_warnings():  # hides warnings about optional packages
            warnings.simplefilter("ignore")
            import colossalai.booster.plugin
            import colossalai.nn.optimizer  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Colossal-AI could not be imported ({error}); {HOW_TO_INSTALL}") from error
    finally:
        sys.meta_path.remove(finder)
        # Remove placeholders, because diffusers and transformers look for peft in sys.modules.
        for name in [m for m in sys.modules if m.partition(".")[0] in hidden]:
            del sys.modules[name]
