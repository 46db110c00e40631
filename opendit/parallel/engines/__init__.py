"""Training engines, one file for each plugin. opendit/config/names.py registers them and explains how to add one."""

from dataclasses import replace
from importlib import import_module

from torch import nn

from opendit.config.names import OFFLOAD, PLUGINS, check_precision
from opendit.parallel.apply import Sharding
from opendit.parallel.engines.base import MOMENTS, PRECISIONS, Engine, Settings, StepResult, Values
from opendit.parallel.mesh import Mesh
from opendit.parallel.muon import MuonSettings
from opendit.parallel.streamed_blocks import StreamedBlocks

__all__ = [
    "MOMENTS",
    "PRECISIONS",
    "Engine",
    "MuonSettings",
    "Sharding",
    "StepResult",
    "Values",
    "build_engine",
    "engine_of",
]


def engine_of(plugin: str) -> type[Engine]:
    """Import and return the engine of a plugin of ``opendit.config.names.PLUGINS``."""
    return import_module(f"{__name__}.{plugin}").ENGINE


def build_engine(
    module: nn.Module,
    mesh: Mesh,
    *,
    plugin: str = "zero2",
    precision: str = "bf16",
    lr: float = 1e-4,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    grad_clip: float = 1.0,
    grad_accumulation: int = 1,
    sharding: Sharding | None = None,
    offload: str = "none",
    streamed: StreamedBlocks | None = None,
    initial: Values | None = None,
    muon: MuonSettings | None = None,
    eight_bits: bool = False,
) -> Engine:
    """Wrap a module for training. All ranks must pass the same module.

    Args:
        module: a plain module with fp32 weights. With ``initial``, its weights need not be set yet.
        plugin: one of ``opendit.config.names.PLUGINS``.
        betas: AdamW's betas, each at least 0 and below 1.
        grad_clip: bound of the global gradient norm; 0 means none.
        grad_accumulation: number of micro-batches in a step. gemini and fsdp depend on it.
        sharding: settings by which fsdp divides the model. Its dtype is replaced by the dtype of ``precision``.
        offload: state that fsdp keeps in host memory, one of ``opendit.config.names.OFFLOAD``. ``average``: the
            averages; ``state``: averages and moments.
        streamed: blocks whose frozen weights are in host memory; not with fsdp.
        initial: returns the initial fp32 values of any shard of a parameter, trained or frozen, by the parameter's
            name. None to use the module's values, which every rank then temporarily copies to host memory.
        muon: settings of Muon for the parameters that it updates instead of AdamW (zero2, ddp, fsdp; without tensor or
            expert parallelism, and without offload of the state).
        eight_bits: True to keep AdamW's moments in 8 bits (zero2, ddp, fsdp; without offload of the state).

    Raises:
        ValueError: the plugin, precision or offload is unknown, or the plugin does not support it.
    """
    if plugin not in PLUGINS or precision not in PRECISIONS:
        raise ValueError(f"plugin {plugin} with precision {precision}: plugins are {', '.join(PLUGINS)}")
    check_precision(plugin, precision)
    if offload not in OFFLOAD or (offload != "none" and plugin != "fsdp"):
        raise ValueError(f"offload {offload} with plugin {plugin}: with fsdp it is one of {', '.join(OFFLOAD)}")
    settings = Settings(lr, weight_decay, betas, grad_clip, grad_accumulation, sharding or Sharding(), offload, muon)
    settings = replace(settings, streamed=streamed, eight_bits=eight_bits)
    return engine_of(plugin)(module, mesh, precision, settings, initial)
