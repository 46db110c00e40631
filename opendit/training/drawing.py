"""Draw samples and sample grids with a run's EMA weights."""

import contextlib
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from opendit.diffusion.objectives.base import sample_in_batches
from opendit.encoders.conditioner import CaptionConditioner, PublishedConditioner, preview_labels
from opendit.encoders.pictures import grid_columns, save_contact_sheet, save_grid, to_uint8
from opendit.kernels.base_precision import base_layers, store_base
from opendit.models.conditioning import Condition, TextCondition, same_length
from opendit.models.dit import DiT
from opendit.models.zoo import empty_model
from opendit.parallel.apply import apply_parallel
from opendit.parallel.pipeline import PipelineForward
from opendit.parallel.tensor import allocate, tensor_group
from opendit.sampling.model_loading import guidance_of, usual_settings
from opendit.sampling.sampling_engine import SamplingEngine
from opendit.training.run import Run, example_captions, example_embeddings

logger = logging.getLogger(__name__)


class EMASampler:
    """Sampler with a run's EMA weights, ``at_once`` samples at a time, for use during training. Call on every rank."""

    at_once = 32

    def __init__(self, run: Run):
        self._run = run
        self._pipeline = None if run.stages is None else PipelineForward(run.mesh, run.stages.chunks)

    @contextlib.contextmanager
    def model(self, everywhere: bool = False) -> Iterator[DiT | None]:
        """Yield a model with the EMA weights. All ranks must call this.

        The model goes to rank 0 and the ranks that share its samples, or to all ranks with ``everywhere``. Other ranks
        get None. Memory for drawing does not count in the training's peak.
        """
        run, streamed = self._run, self._run.engine.streamed
        with run.monitor.memory_not_counted():
            model = self._model() if everywhere or run.mesh.dp_rank == 0 else None
            with run.ema.applied(model), run.engine.autocast(), streamed.sampling() if streamed else nullcontext():
                yield model
        run.mesh.barrier()

    def _model(self) -> DiT:
        run, engine, mesh = self._run, self._run.engine, self._run.mesh
        if engine.whole:
            return cast(DiT, engine.module)
        with mesh.device:
            model = empty_model(run.model_config, parameters=mesh.tp_size * mesh.pp_size == 1)
        frozen = None if run.lora is None else run.first_values(model)
        if run.flags.base_precision != "bf16":
            store_base(model, run.flags.base_precision, engine.dtype, mesh.device)
        stored = dict(base_layers(model))
        kernels, tensor = run.kernels, tensor_group(mesh)
        apply_parallel(
            model, ops=kernels.ops, attend=kernels.attend, sequence=run.sequence, tensor=tensor, stages=run.stages
        )
        allocate(model, mesh.device)
        model = model.place(mesh.device, engine.dtype)
        for name, parameter in model.named_parameters():
            if frozen is not None and name not in engine.shapes:  # frozen weights have no averages
                values = frozen(name, engine.tensor_layout.local(name))
                if name in stored:
                    stored[name].store(parameter.data, values, lambda largest: largest)
                else:
                    parameter.data.copy_(values)
        return model

    def batches(
        self, model: DiT, y: Condition, index: Tensor, steps: int, cfg_scale: float
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (index, latents) for batches of samples with the conditions ``y``.

        All ranks that share samples must call this. index: (N,), keys of the samples' noise. cfg_scale: in the
        convention of the model's published pipeline, see ``guidance_of``.
        """
        run, seed = self._run, self._run.flags.global_seed
        null, y = same_length(run.conditioner.null(), y)
        if isinstance(y, TextCondition) and y.guidance is not None:
            y = replace(y, guidance=torch.full_like(y.guidance, cfg_scale))
        cfg_scale = guidance_of(run.model_config, cfg_scale)
        how: dict[str, Any] = dict(steps=steps, sampler=run.objective.preview_sampler, cfg_scale=cfg_scale)
        if self._pipeline is not None:  # SamplingEngine needs all blocks on one rank
            objective = run.objective.for_tokens(run.model_config.tokens)
            how |= dict(objective=objective, seed=seed, forward=partial(self._pipeline, model))
            return sample_in_batches(model, y, null, index, self.at_once, **how)
        # Use a new engine for each drawing: recorded graphs must not keep memory that training needs. Nothing is
        # recorded if ranks share samples or blocks are in host memory.
        record = run.sequence is None and tensor_group(run.mesh) is None and self._run.engine.streamed is None
        engine = SamplingEngine(model, run.objective, record=record, **how)
        return engine.batches(y, null, index, self.at_once, seed)


class SampleGrids:
    """Draws sample grids, samples/NNNNNNN.png, with the EMA weights. Without the latents' VAE it draws nothing."""

    def __init__(self, run: Run, sampler: EMASampler):
        self._run, self._sampler = run, sampler

    def draw(self, step: int) -> None:
        """Draw the grid on rank 0 and the ranks that share its samples. All ranks must call this."""
        if self._run.codec is None:
            return
        with self._sampler.model() as model:
            if model is not None:
                self.draw_of(model, step)

    def draw_of(self, model: DiT, step: int) -> None:
        """Draw the grid with ``model``. Call on the ranks that have the model."""
        run, monitor = self._run, self._run.monitor
        y, captions = self._what()
        index, steps, cfg_scale = torch.arange(len(captions)), run.flags.sample_steps, run.flags.sample_cfg_scale
        if "sample_cfg_scale" not in run.flags.given:
            _, cfg_scale = usual_settings(run.model_config, steps, cfg_scale)
        batches = self._sampler.batches(model, y, index, steps, cfg_scale)
        assert run.codec is not None, "draw asks whether there is one"
        pictures = np.concatenate([to_uint8(run.codec.decode(latents)) for _, latents in batches])
        if not run.mesh.is_main:
            return
        path = run.folder / "samples" / f"{step:07d}.png"
        with monitor.failures.survive("samples", step):
            if pictures.ndim == 5:
                save_contact_sheet(path, pictures, captions, root=run.folder)
            else:
                save_grid(path, pictures, captions, columns=grid_columns(captions), root=run.folder)
            logger.info(f"step {step}: drew {path}")
            monitor.picture(path, step)

    def _what(self) -> tuple[Condition, list[str]]:
        run = self._run
        if run.prompts is not None:
            captions, y = run.prompts
            return y, captions
        if run.model_config.text is not None:
            count, conditioner = 8 if run.flags.use_video else 16, run.conditioner
            if isinstance(conditioner, PublishedConditioner) and conditioner.encoder is None:
                captions, embeddings = example_embeddings(run.dataset, count)
                return conditioner.of_embeddings(embeddings), captions
            captions = example_captions(run.dataset, count)
            return cast(CaptionConditioner, run.conditioner).encode(captions), captions
        names = run.dataset.describe().class_names
        labels = preview_labels(len(names), 4 * len(names) if len(names) <= 10 else 32)
        return labels.to(run.mesh.device), [names[label] for label in labels]
