"""Training engines, one file for each plugin: a new one is a subclass of Engine and its name in ENGINES (and in
opendit/parallel/names.py, which the flags are checked by)."""

from torch import nn

from opendit.parallel.engines.base import MOMENTS, PRECISIONS, Engine, Settings, StepResult
from opendit.parallel.engines.ddp import DDPEngine
from opendit.parallel.engines.gemini import GeminiEngine
from opendit.parallel.engines.zero2 import Zero2Engine
from opendit.parallel.mesh import Mesh

__all__ = ["ENGINES", "MOMENTS", "PRECISIONS", "Engine", "StepResult", "build_engine"]

ENGINES = {engine.plugin: engine for engine in (Zero2Engine, DDPEngine, GeminiEngine)}


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
) -> Engine:
    """Wraps a module, the same on every rank, for training.

    Args:
        module: a plain module with fp32 weights.
        plugin: one of ENGINES.
        betas: of AdamW, both at least 0 and below 1.
        grad_clip: bound of the global gradient norm; 0 means none.
        grad_accumulation: micro-batches a step (gemini has to know).

    Raises:
        ValueError: unknown plugin or precision, or one that the plugin does not work in.
    """
    if plugin not in ENGINES or precision not in PRECISIONS:
        raise ValueError(f"plugin {plugin} with precision {precision}: plugins are {', '.join(ENGINES)}")
    engine = ENGINES[plugin]
    if precision not in engine.precisions:
        works = " and ".join(engine.precisions)
        raise ValueError(
            f"--plugin {plugin} works in {works} only; use --mixed_precision {engine.precisions[0]} or --plugin zero2"
        )
    settings = Settings(lr, weight_decay, betas, grad_clip, grad_accumulation)
    return engine(module, mesh, precision, settings)
