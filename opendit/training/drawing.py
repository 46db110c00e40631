"""The sample grids that a run draws from its EMA weights."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from opendit.diffusion.sampling import sample_in_batches
from opendit.encoders.conditioner import preview_labels
from opendit.encoders.pictures import grid_columns, save_contact_sheet, save_grid, to_uint8
from opendit.inference.engine import SamplingEngine
from opendit.models import Condition, DiT, empty_model
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import Engine
from opendit.parallel.pipeline.forward import PipelineForward
from opendit.parallel.tensor import allocate, tensor_group
from opendit.state.ema import EMA
from opendit.training import monitor as monitoring
from opendit.training.monitor import Monitor
from opendit.training.specification import RunSpecification, example_captions

PREVIEWS_AT_ONCE = 32


class SampleGrids:
    """Draws samples/NNNNNNN.png from the EMA weights; without the latents' VAE nothing."""

    def __init__(self, spec: RunSpecification, engine: Engine, ema: EMA, monitor: Monitor):
        self._spec, self._engine, self._ema, self._monitor = spec, engine, ema, monitor
        self._pipeline = None if spec.stages is None else PipelineForward(engine.mesh, spec.stages.chunks)

    def draw(self, step: int) -> None:
        """By rank 0 and those that share its samples; the others help to gather the weights.

        The training module itself takes them for the time; under a plugin that has cut it up, a second one does.
        """
        if self._spec.codec is None:
            return
        trained, model = monitoring.allocated_gib(), self._model()
        with self._ema.applied(model), self._engine.autocast():
            if model is not None:
                self._draw(model, step)
        self._monitor.forget_drawing(trained)
        self._engine.mesh.barrier()

    def _model(self) -> DiT | None:
        """What takes the averages; None on ranks that do not draw."""
        spec, engine, mesh = self._spec, self._engine, self._engine.mesh
        if mesh.dp_rank > 0:
            return None
        if engine.whole:
            return engine.module
        with mesh.device:
            model = empty_model(spec.model_config, parameters=mesh.tp_size * mesh.pp_size == 1)
        kernels, how = spec.kernels, dict(sequence=spec.sequence, tensor=tensor_group(mesh), stages=spec.stages)
        apply_parallel(model, ops=kernels.ops, attend=kernels.attend, **how)
        allocate(model, mesh.device)
        return model.place(mesh.device, engine.dtype)

    def _draw(self, model: DiT, step: int) -> None:
        spec, monitor = self._spec, self._monitor
        y, captions = self._what()
        batches = self._batches(model, y, spec.conditioner.null(), torch.arange(len(captions)))
        pictures = np.concatenate([to_uint8(spec.codec.decode(latents)) for _, latents in batches])
        if not spec.mesh.is_main:
            return
        path = spec.folder / "samples" / f"{step:07d}.png"
        with monitor.failures.survive("samples", step):
            if pictures.ndim == 5:
                save_contact_sheet(path, pictures, captions)
            else:
                save_grid(path, pictures, captions, columns=grid_columns(captions))
            monitor.say(f"step {step}: drew {path}")
            monitor.picture(path, step)

    def _batches(self, model: DiT, y: Condition, null: Condition, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(index, latents) of some samples at a time."""
        spec, seed = self._spec, self._spec.flags.global_seed
        how = dict(
            steps=spec.flags.sample_steps,
            sampler=spec.objective.preview_sampler,
            cfg_scale=spec.flags.sample_cfg_scale,
        )
        if self._pipeline is not None:  # what is made beforehand for all steps is made of all blocks
            how |= dict(objective=spec.objective, seed=seed, forward=partial(self._pipeline, model))
            return sample_in_batches(model, y, null, index, PREVIEWS_AT_ONCE, **how)
        # (An engine for this grid alone: its recordings would take memory from training.)
        record = spec.sequence is None and tensor_group(spec.mesh) is None  # ranks that train share memory, too
        engine = SamplingEngine(model, spec.objective, record=record, say=self._monitor.say, **how)
        return engine.batches(y, null, index, PREVIEWS_AT_ONCE, seed)

    def _what(self) -> tuple[Condition, list[str]]:
        """The conditions of a sample grid, and what to write above the pictures."""
        spec = self._spec
        if spec.model_config.text is not None:
            captions = example_captions(spec.dataset, count=8 if spec.flags.use_video else 16)
            return spec.conditioner.encode(captions), captions
        names = spec.dataset.class_names
        labels = preview_labels(len(names), 4 * len(names) if len(names) <= 10 else 32)
        return labels.to(spec.mesh.device), [names[label] for label in labels]
