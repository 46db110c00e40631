"""Run Colossal-AI's ZeRO and Gemini on a CPU by presenting the CPU as a GPU."""

from typing import Any, cast

import torch
from colossalai.accelerator import set_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.zero.gemini.chunk import chunk as gemini_chunk


def stand_in_for_a_gpu() -> None:
    """Register the CPU, under the name "cuda", as Colossal-AI's accelerator."""
    set_accelerator(_CpuAsCuda())
    _keep_chunks_in_one_memory()


class _Idle:
    """Stand-in for a CUDA stream or event on a CPU; all methods do nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class _CpuAsCuda(CpuAccelerator):
    """Accelerator that is the CPU under the name "cuda", which Colossal-AI's ZeRO and Gemini require."""

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

    Stream = Event = current_stream = default_stream = stream = cast(Any, _idle)

    def set_stream(self, stream_):
        return None


def _keep_chunks_in_one_memory() -> None:
    """Prevent Gemini from moving shards between "cuda" and "cpu", which are the same memory on a CPU. A shard stays a
    "cuda" shard."""
    chunk: Any = gemini_chunk.Chunk
    close, paired_move = chunk.close_chunk, chunk._Chunk__paired_shard_move

    def close_chunk(self):
        self.shard_device = torch.device("cuda")  # only a name; nothing is allocated on this device
        close(self)

    def shard_move(self, device, force_copy=False, non_blocking=False):
        if not self.optim_sync_flag:
            paired_move(self, non_blocking=non_blocking)
            self.optim_sync_flag = True

    gemini_chunk.Chunk.close_chunk = close_chunk
    gemini_chunk.Chunk.shard_move = shard_move
