"""A model on the stages of a pipeline, called like one that is whole: to draw samples from it."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.models import Condition, DiT
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline.executor import execute
from opendit.parallel.pipeline.links import Links
from opendit.parallel.pipeline.schedule import Action, one_by_one
from opendit.parallel.pipeline.stages import PipelineStages


class PipelineForward:
    """``model(x, t, y)`` without gradients: all ranks of a pipeline call it with the same arguments, and all get the
    result, in fp32. Its batch goes through the stages in as many parts as there are ranks.

    Collective over all ranks of the mesh, when it is built.
    """

    def __init__(self, mesh: Mesh, chunks: int):
        self._mesh, self._links, self._chunks = mesh, Links(mesh, around=chunks > 1), chunks
        self._last = next(ranks[-1] for ranks in mesh.dims.groups("pp") if mesh.rank in ranks)
        self._group = mesh.group("pp")

    @torch.no_grad()
    def __call__(self, model: DiT, x: Tensor, t: Tensor, y: Condition) -> Tensor:
        """x (B, C, ...), t (B,) and y as of ``DiT.forward``; model: of which this rank has its stages."""
        rows = -(-len(x) // self._mesh.pp_size)
        parts = [slice(start, start + rows) for start in range(0, len(x), rows)]
        predicted = x.new_empty((len(x), model.config.out_channels, *x.shape[2:]), dtype=torch.float32)
        shapes = [tuple(x[part].shape) for part in parts]
        stages: PipelineStages = cast(Any, model).stages

        def compute(action: Action, tokens: Tensor | None) -> Tensor:
            part, shape = parts[action.micro_batch], shapes[action.micro_batch]
            given = x[part] if tokens is None else tokens
            output = model(given, t[part], y[part], chunk=action.chunk, shape=shape)
            if stages.last and action.chunk == self._chunks - 1:
                predicted[part] = output
            return output

        actions = one_by_one(self._chunks, self._mesh.pp_size, len(parts), backward=False)
        execute(actions, self._links, self._chunks, compute, shapes.__getitem__)
        dist.broadcast(predicted, src=self._last, group=self._group)
        return predicted
