"""Run training steps: prepare, model, loss and backward of the micro-batches, then the optimizer's step."""

from collections.abc import Callable

from opendit.diffusion import Objective
from opendit.kernels.recording import GraphRecorder
from opendit.parallel.engines import Engine
from opendit.training.runners.base import Runner
from opendit.training.runners.cuda_graph import GRAPH_WARMUP, CUDAGraphRunner
from opendit.training.runners.eager import EagerRunner
from opendit.training.runners.micro_batch import MicroBatch, PackedMicroBatch
from opendit.training.runners.pipeline import PipelineRunner

__all__ = [
    "GRAPH_WARMUP",
    "CUDAGraphRunner",
    "EagerRunner",
    "MicroBatch",
    "PackedMicroBatch",
    "PipelineRunner",
    "Runner",
    "build_runner",
]


def build_runner(
    engine: Engine,
    objective: Objective,
    *,
    micro_batches: int = 1,
    graph: bool = False,
    packs: bool = False,
    after_forward: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = print,
) -> Runner:
    """The runner for an engine: a pipeline's for a model of which it has some stages.

    Args:
        micro_batches: of a step; the loss is their mean.
        graph: whether CUDA graphs are asked for (``--enable_cuda_graph``); ``note`` says why there are none.
        packs: whether micro-batches are packs (``--pack_tokens``).
        after_forward: called when a micro-batch's forward pass is enqueued, unless that is replayed from a graph.
        say: is told if a recording fails.
    """
    if engine.mesh.pp_size > 1:
        return PipelineRunner(engine, objective, micro_batches)
    eager = EagerRunner(engine, objective, micro_batches, after_forward)
    why_not = "--enable_cuda_graph is off"
    if graph and packs:
        why_not = "every pack has other segments (--pack_tokens), and a graph can replay but one"
    elif graph:
        why_not = (
            engine.no_graph or engine.module.no_graph if engine.mesh.device.type == "cuda" else "it needs a CUDA GPU"
        )
    if why_not:
        eager.note = f"off: {why_not}"
        return eager
    return CUDAGraphRunner(eager, GraphRecorder(), say)
