"""Evaluate a run's EMA weights every --evaluate_every training steps, on newly drawn samples."""

import logging
import math
import time
from typing import Any

import torch
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.config.evaluate import rename_for_training
from opendit.config.names import DIGITS
from opendit.data.digits import all_captions
from opendit.encoders.conditioner import CaptionConditioner
from opendit.encoders.pictures import to_uint8
from opendit.encoders.vae import Codec
from opendit.evaluation.digits import asked_of_captions, asked_of_labels
from opendit.evaluation.figures import Measuring
from opendit.evaluation.media import MediaOptions
from opendit.evaluation.results import Measurement, append_results, figure_text
from opendit.evaluation.samples import DescribedSamples
from opendit.models.conditioning import Condition
from opendit.models.dit import DiT
from opendit.training.drawing import EMASampler
from opendit.training.monitor import Monitor
from opendit.training.run import Run, example_captions

logger = logging.getLogger(__name__)

FOLDER = "evaluation"  # subfolder of a run's folder; `opendit evaluate plot RUN` reads it
PROMPTS = 64  # maximum number of captions; their embeddings stay on the device


class RunEvaluation:
    """Draws --evaluate_samples samples from a run's EMA weights, and computes metrics. All ranks must construct this
    object and call :meth:`after`.

    The values do not depend on the number of data-parallel ranks. ``of`` is a hash of all settings that affect the
    values, so values with equal hashes are comparable. The constructor raises ValueError or OSError, with the flag, if
    the evaluation is impossible."""

    def __init__(self, spec: Run):
        self._spec, flags, config = spec, spec.flags.evaluating(), spec.model_config
        if spec.codec is None:
            raise ValueError("--evaluate_every: samples are decoded by the latents' VAE, which isn't there; give --vae")
        self.count = spec.flags.evaluate_samples
        with torch.no_grad():
            latents = torch.zeros(1, config.in_channels, *config.input_size, device=spec.mesh.device)
            shape = to_uint8(spec.codec.decode(latents)).shape[1:]
        numbers = torch.arange(self.count)
        if config.text is None:
            classes = spec.dataset.describe().num_classes
            self._prompts, self._choices = None, numbers % classes
            digits = classes == 10
            captions, asked = None, asked_of_labels(self._choices.numpy()) if digits else None
        else:
            of_digits = flags.features == DIGITS
            self._prompts = all_captions(config.is_video) if of_digits else example_captions(spec.dataset, PROMPTS)
            self._choices = numbers % len(self._prompts)
            captions = [self._prompts[choice] for choice in self._choices.tolist()]
            asked = asked_of_captions(captions)
        side = shape[-2] if shape[-2] == shape[-3] else None
        options = MediaOptions(side, shape[0] if len(shape) == 4 else 1, spec.flags.frame_interval, spec.flags.fps)
        self._samples = DescribedSamples(self.count, shape, captions, self._details(), options, asked)
        folder = spec.folder / FOLDER
        try:
            self._measuring = Measuring(flags, self._samples, folder, spec.mesh)
        except (ValueError, OSError) as error:
            raise type(error)(rename_for_training(str(error))) from error
        if not self._measuring.metrics:
            raise ValueError(f"--evaluate_every: {self._measuring.why_nothing}")
        self._layout = self._measuring.extractor.layout(shape)
        drawn = {name: value for name, value in self._details().items() if name != "samples"}
        reference = self._measuring.reference
        parts = drawn, self._measuring.extractor.settings(), reference and reference.sha256, self.count
        self.of = hash_parts(*map(repr, parts))[:16]
        best = spec.flags.ckpt_best
        if best not in (None, "val_loss", *self._measuring.figure_names):
            known = ", ".join(self._measuring.figure_names)
            raise ValueError(f"--ckpt_best {best}: --evaluate_every computes {known} here; name one of them")
        if spec.mesh.is_main:
            names = ", ".join(self._measuring.metrics)
            logger.info(
                f"note: evaluation: {names} of {self.count:,} samples every {spec.flags.evaluate_every:,} steps; "
                "so few are for comparing steps of one run, not with published figures"
            )

    def _details(self) -> dict[str, Any]:
        spec, flags = self._spec, self._spec.flags
        return {
            "samples": spec.folder.name,
            "samples_sha256": "",  # the evaluated weights are in no file
            "sampler": spec.objective.preview_sampler,
            "steps": flags.evaluate_steps,
            "guidance": flags.evaluate_cfg_scale,
            "seed": flags.global_seed,
            "labels": "balanced" if spec.model_config.text is None else "prompts",
            "precision": flags.mixed_precision,
            "vae": self._codec.name,
            "rounding": "round to nearest, clamped",
        }

    @property
    def _codec(self) -> Codec:
        assert self._spec.codec is not None  # the constructor has checked this
        return self._spec.codec

    def after(self, step: int, sampler: EMASampler, monitor: Monitor) -> dict[str, Any]:
        """Evaluate the weights after ``step``. All ranks must call this. Return fields for the step's log line: the
        hash ``eval_of``, and each metric's value as ``eval_NAME``. The value is None if it can't be computed or is not
        finite."""
        began, mesh = time.perf_counter(), self._spec.mesh
        with sampler.model(everywhere=True) as model:
            assert model is not None  # everywhere=True gives every rank a model
            features = self._features(model, sampler)
        figures: dict[str, float | None] = {}
        if mesh.is_main:
            with monitor.failures.survive(FOLDER, step):
                figures = self._figures(features, step)
        figures = mesh.broadcast_object(figures)
        named = {f"eval_{name}": value for name, value in figures.items()}
        return named | {"eval_of": self.of, "eval_samples": self.count, "eval_s": time.perf_counter() - began}

    @torch.no_grad()
    def _features(self, model: DiT, sampler: EMASampler) -> dict[str, Tensor]:
        """Draw all samples. Return their features in CPU memory, on every rank."""
        spec, mesh = self._spec, self._spec.mesh
        device, flags = mesh.device, spec.flags
        found = {name: torch.zeros(self.count, *shape, device=device) for name, shape in self._layout.items()}
        batches = torch.arange(self.count).split(sampler.at_once)
        mine = torch.cat([torch.empty(0, dtype=torch.long), *batches[mesh.dp_rank :: mesh.dp_size]])
        if len(mine):
            choices = self._choices[mine].to(device)
            y: Condition = choices
            if self._prompts is not None:
                assert isinstance(spec.conditioner, CaptionConditioner)  # true for every model with captions
                y = spec.conditioner.encode(self._prompts)[choices]
            drawn = sampler.batches(model, y, mine, steps=flags.evaluate_steps, cfg_scale=flags.evaluate_cfg_scale)
            for index, latents in drawn:
                if mesh.leads_sharing:
                    pixels = torch.from_numpy(to_uint8(self._codec.decode(latents)))
                    for name, rows in self._measuring.extractor(pixels).items():
                        found[name][index.to(device)] = rows
        # The sum is exact, because only one rank has a nonzero value for each element.
        return {name: mesh.sum(rows).cpu() for name, rows in found.items()}

    def _figures(self, features: dict[str, Tensor], step: int) -> dict[str, float | None]:
        """Return all metrics' values, None if not finite. Log and store finite values. Rank 0 only."""
        problems: list[str] = []
        rows: list[Measurement] = []
        details = self._details() | {"samples": f"{self._spec.folder.name}/step_{step:07d}"}
        for of_metric in self._measuring.compute(features, details, problems):
            rows += of_metric
        for problem in problems:
            logger.warning("note: evaluation: %s", problem)
        finite = [row for row in rows if math.isfinite(row.value)]
        shown = ", ".join(f"{row.metric} {figure_text(row.value)}" for row in finite)
        logger.info(f"step {step}: {shown or 'no figure'} of {self.count:,} samples")
        folder = self._spec.folder / FOLDER
        figures = dict.fromkeys(self._measuring.figure_names) | {row.metric: row.value for row in finite}
        append_results(folder, finite, root=self._spec.folder)
        return figures
