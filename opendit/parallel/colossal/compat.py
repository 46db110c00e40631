"""Makes Colossal-AI 0.5.0 importable without its pinned companions, and runnable on a CPU with gloo.

Import :mod:`opendit.parallel.colossal.plugins` instead: it imports this first.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings

import torch
import torch.distributed as dist

_OPTIONAL = ("peft", "galore_torch", "bitsandbytes")


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importable placeholders for packages that Colossal-AI imports at the top of files we never use."""

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


def _placeholder(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def _import_colossalai() -> None:
    # Those that are there stay out too: peft, imported now, would take bitsandbytes' stand-in for real.
    hidden = [n for n in _OPTIONAL if n not in sys.modules]
    if not hasattr(dist, "is_hccl_available"):  # gone from new torch, called by Colossal-AI's pipeline code
        dist.is_hccl_available = lambda: False
    finder = _StandIn(hidden)
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings():  # about optional packages that nobody asked for
            warnings.simplefilter("ignore")
            import colossalai.booster.plugin
            import colossalai.nn.optimizer  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Colossal-AI could not be imported ({error}); run `bash install.sh`, "
            "or `pip install --no-deps colossalai==0.5.0`"
        ) from error
    finally:
        sys.meta_path.remove(finder)
        # diffusers and transformers ask sys.modules whether peft is there: they must not see a placeholder.
        for name in [m for m in sys.modules if m.partition(".")[0] in hidden]:
            del sys.modules[name]


_import_colossalai()
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # Gemini asks for storage sizes that way

from colossalai.accelerator import set_accelerator  # noqa: E402
from colossalai.accelerator.cpu_accelerator import CpuAccelerator  # noqa: E402
from colossalai.zero.gemini import gemini_ddp  # noqa: E402
from colossalai.zero.gemini.chunk import chunk as gemini_chunk  # noqa: E402


class _Idle:
    """A stream or event that has nothing to wait for."""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class _CpuAsCuda(CpuAccelerator):
    """The CPU under the name "cuda", which Colossal-AI's ZeRO and Gemini insist on."""

    def __init__(self):
        super().__init__()
        self._name = "cuda"

    def synchronize(self, device=None):
        return None

    def empty_cache(self):
        return None

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def memory_allocated(self, device=None):
        return 0

    max_memory_allocated = memory_allocated

    def _idle(self, *args, **kwargs):
        return _Idle()

    Stream = Event = current_stream = default_stream = stream = _idle

    def set_stream(self, stream_):
        return None


def _keep_chunks_in_one_memory() -> None:
    """Gemini tells a "cuda" shard from a "cpu" shard and moves it between the two; on a CPU both are the
    same memory, so a shard stays what it was born as: a "cuda" shard."""
    close, paired_move = gemini_chunk.Chunk.close_chunk, gemini_chunk.Chunk._Chunk__paired_shard_move

    def close_chunk(self):
        self.shard_device = torch.device("cuda")  # a name only: nothing is allocated there
        close(self)

    def shard_move(self, device, force_copy=False, non_blocking=False):
        if not self.optim_sync_flag:
            paired_move(self, non_blocking=non_blocking)
            self.optim_sync_flag = True

    gemini_chunk.Chunk.close_chunk = close_chunk
    gemini_chunk.Chunk.shard_move = shard_move


if not torch.cuda.is_available():
    set_accelerator(_CpuAsCuda())
    _keep_chunks_in_one_memory()

# Gemini would cast every float input to half, timesteps too; our models cast what they want cast.
gemini_ddp._cast_float = lambda value, dtype: value
