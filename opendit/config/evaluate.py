# pyright: standard
"""The flags of ``opendit evaluate``, and the checks across them."""

import dataclasses
import itertools
import re
from dataclasses import dataclass, replace
from typing import ClassVar

from opendit.config.checks import check_exists, check_no_folder, check_output_file, check_rate, check_writable
from opendit.config.command_line import suggests_flags
from opendit.config.components import ParallelFlags, SpeedFlags
from opendit.config.flags import (
    BATCH,
    FPS,
    FRAMES,
    GUIDANCE,
    SAMPLING_STEPS,
    SIDE,
    Flags,
    between,
    check_values,
    flag,
    reject_unused,
)
from opendit.config.names import DIGITS, FEATURE_PRECISIONS, LABELS, METRICS, RESIZES
from opendit.config.sample import (
    ApproximationFlags,
    CheckpointFlags,
    DrawFlags,
    GuidanceFlags,
    SampleConfig,
    SampleSpeedFlags,
)

GUIDING = {"cfg_interval", "cfg_channels", "guidance_every", "guidance_by", "negative_prompt"}
NEEDS_REFERENCE = tuple(name for name, needs in METRICS.items() if needs.reference)


@dataclass(frozen=True)
class WhatFlags(Flags):
    """Flags that choose the samples to evaluate and the reference."""

    group: ClassVar[str] = "Evaluation: what is evaluated, and against what"

    samples: str | None = flag(
        None,
        "a folder, .npz, .npy or CSV of pictures or clips; without it they are drawn from --ckpt",
        common="pictures or clips; else drawn from --ckpt",
        unit="path",
    )
    reference: str | None = flag(
        None,
        "what they are compared with: such samples, ADM's statistics (.npz), a file of --save_features, "
        "digits (held-out ones; the default of --features digits)",
        common="samples or their statistics",
        unit="path",
    )
    metrics: list[str] = flag([], "all that can be computed when left out", choices=tuple(METRICS), common=True)
    num_frames: int | None = flag(None, "frames of a clip; 16 of files, and the checkpoint's", **FRAMES)
    frame_interval: int = flag(1, "from frame to frame, in files of clips", **FRAMES)
    fps: float | None = flag(None, "frames a second, by the times in files of clips, instead", **FPS)
    intervals: bool = flag(True, "an interval for every Fréchet distance, from leaving out a tenth at a time")


@dataclass(frozen=True)
class FeatureFlags(Flags):
    """Flags that choose the networks that compute features."""

    group: ClassVar[str] = "Features: the networks that metrics need"

    features: str | None = flag(
        None,
        "network of pictures: FID's Inception (.pth or TorchScript), any TorchScript, a folder with CLIP or DINOv2; "
        "digits: of the built-in digits and moving digits, trained in seconds",
        common="network of pictures (Inception, CLIP, digits)",
        unit="path",
    )
    video_features: str | None = flag(
        None, "network of clips: I3D or any TorchScript, a folder with VideoMAE", unit="path"
    )
    clip_model: str | None = flag(None, "folder with CLIP, for clip_score", unit="folder")
    resize: str = flag(
        "tf", "Inception's filter: tf (FID's), torch (pytorch-fid's), clean (clean-fid's)", choices=RESIZES
    )
    feature_precision: str = flag("fp32", "of these networks", choices=FEATURE_PRECISIONS)
    feature_batch_size: int = flag(64, "pictures or frames at a time in these networks", **BATCH)


@dataclass(frozen=True)
class EvaluatedDrawFlags(DrawFlags):
    """Flags that choose which samples are drawn for the evaluation."""

    num_samples: int | None = flag(
        None,
        "samples (default: 50,000, of clips 2,048; all of --samples)",
        common="default: 50,000, of clips 2,048",
        **between(1, 10_000_000, "samples"),
    )
    image_size: int | None = flag(
        None, "files are cropped and resized to this many pixels (default: as they are, or the checkpoint's)", **SIDE
    )
    num_sampling_steps: int = flag(
        250, "denoising steps; several: a sweep", several=True, common=True, **SAMPLING_STEPS
    )
    cfg_scale: float = flag(
        1.5, "classifier-free guidance; 1: off; several: a sweep", several=True, common=True, **GUIDANCE
    )
    label_sampling: str = flag("balanced", "classes: each as often, or drawn at random by --seed", choices=LABELS)


@dataclass(frozen=True)
class ResultFlags(Flags):
    """Flags that choose where results go."""

    group: ClassVar[str] = "Output: where results go"

    outputs: str = flag("./outputs", "where --ckpt latest looks for runs", unit="folder")
    output: str = flag(
        "./evaluation",
        "folder for results.jsonl and the features of samples, which are found again",
        common=True,
        unit="folder",
    )
    dry_run: int | None = flag(
        None,
        "draw and measure a few batches, print how long all would take on this many GPUs, and stop",
        alone=0,
        common="try a few batches; print how long all take",
        **between(0, 2**20, "gpus"),
    )
    save_features: str | None = flag(
        None, "also write the samples' features to this .npz, a reference for later", unit="file"
    )


@suggests_flags
@dataclass(frozen=True)
class EvaluateConfig(
    WhatFlags,
    FeatureFlags,
    CheckpointFlags,
    EvaluatedDrawFlags,
    ApproximationFlags,
    SampleSpeedFlags,
    SpeedFlags,
    GuidanceFlags,
    ParallelFlags,
    ResultFlags,
):
    """Measures how good pictures or clips are. Several processes (torchrun) share the work; a killed run can resume."""

    program: ClassVar[str] = "python -m opendit.evaluation"
    examples: ClassVar[tuple[str, ...]] = (
        "opendit evaluate --ckpt RUN --reference VIRTUAL_imagenet256_labeled.npz --cfg_scale 1.5",
        "opendit evaluate --samples samples.npz --reference pictures --metrics fid kid",
        "opendit evaluate --ckpt RUN --reference REFERENCE --cfg_scale 1 1.5 2    # a sweep",
        "opendit evaluate plot evaluation RUN --output runs.png",
    )

    def resolve(self, world_size: int, has_gpu: bool) -> tuple["EvaluateConfig", list[str]]:
        """Check all flags, and fill in values that depend on the hardware; see :meth:`TrainConfig.resolve`."""
        check_values(self)
        check_rate(self.fps, self.given)
        notes = []
        reference = self.check_what()
        if self.feature_precision == "tf32" and not has_gpu:
            raise ValueError("--feature_precision tf32: needs a GPU, and there is none; use fp32")
        check_writable(self.output, "--output")
        saved = self.save_features
        if saved is not None:
            check_no_folder(saved, "--save_features")
            saved += "" if saved.endswith(".npz") else ".npz"
            check_output_file(saved, "--save_features")
        if self.samples is None and len(points := self.points()) > 1:
            if saved is not None:
                raise ValueError("--save_features: keeps the features of one evaluation; leave it out of a sweep")
            notes += [point.resolve(world_size, has_gpu)[1] for point in points][0]
            return replace(self, reference=reference), notes
        if self.samples is None:
            sampling, more = self.sampling().resolve(world_size, has_gpu)
            notes += more
            if self.class_labels and "label_sampling" in self.given:
                raise ValueError("--label_sampling: does nothing with --class_labels; leave one of them out")
            return replace(
                self, reference=reference, save_features=saved, mixed_precision=sampling.mixed_precision
            ), notes
        check_exists(self.samples, "--samples", "a folder, .npz, .npy or CSV of samples")
        used = {"num_samples", "image_size"}
        drawing = {item.name for item in dataclasses.fields(SampleConfig)} | {"label_sampling"}
        used |= {item.name for part in (WhatFlags, ResultFlags) for item in dataclasses.fields(part)} - {"outputs"}
        reject_unused(self.given, dict.fromkeys(sorted(drawing - used), "does nothing with --samples"))
        return replace(self, reference=reference, save_features=saved), notes

    def check_what(self) -> str | None:
        """Check metrics, networks and reference. Return the reference, which is DIGITS by default with --features
        digits. Raises ValueError if a path does not exist, or the reference or the networks don't suit the metrics."""
        reference = self.reference
        if reference is None and self.features == DIGITS:
            reference = DIGITS
        if reference == DIGITS and self.features != DIGITS:
            raise ValueError("--reference digits: is for --features digits; give both, or another reference")
        if reference is None:
            needing = [name for name in self.metrics if name in NEEDS_REFERENCE]
            if needing:
                raise ValueError(f"--metrics {needing[0]}: compares samples with others; give --reference PATH")
        elif reference != DIGITS:
            check_exists(reference, "--reference", "a folder, .npz, .npy or CSV of samples, or statistics")
        for name in ("features", "video_features", "clip_model"):
            if (path := getattr(self, name)) is not None and (name, path) != ("features", DIGITS):
                check_exists(path, f"--{name}", "a network's file or folder")
        if "clip_score" in self.metrics and self.clip_model is None:
            raise ValueError(
                "--metrics clip_score: needs a network; give --clip_model FOLDER, a folder of transformers with CLIP"
            )
        return reference

    def points(self) -> list["EvaluateConfig"]:
        """Return a configuration for each combination of --num_sampling_steps and --cfg_scale in a sweep."""
        steps, scales = (
            list(dict.fromkeys(value if isinstance(value, list) else [value]))
            for value in (self.num_sampling_steps, self.cfg_scale)
        )
        found = []
        for count, scale in itertools.product(steps, scales):
            # In a sweep, scale 1 means no guidance. Drop flags that change guidance; they would be rejected.
            given = self.given - GUIDING if scale == 1 and len(scales) > 1 else self.given
            found.append(replace(self, num_sampling_steps=count, cfg_scale=scale, given=given))
        return found

    def sampling(self) -> SampleConfig:
        names = {item.name for item in dataclasses.fields(SampleConfig)} & {
            item.name for item in dataclasses.fields(self)
        }
        values = {name: getattr(self, name) for name in names - {"given", "frame_interval", "fps"}}
        given = self.given & names | {"save_png"}
        return SampleConfig(**values, save_png=False, given=given - {"frame_interval"})


def rename_for_training(message: str) -> str:
    return re.sub(r"--(?=(?:metrics|reference|features|video_features)\b)", "--evaluate_", message)
