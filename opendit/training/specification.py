"""The specification of a training run, before anything large is built."""

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from opendit.checkpoint.load import Checkpoint
from opendit.config.flags import to_dict
from opendit.config.train import TrainConfig
from opendit.data import BatchSchedule, MediaDataset
from opendit.data.base import BadSample
from opendit.diffusion import Objective
from opendit.encoders.conditioner import Conditioner
from opendit.encoders.folder import KNOWN
from opendit.encoders.vae import ImageCodec
from opendit.encoders.video_vae import VideoCodec
from opendit.kernels.select import KernelChoice
from opendit.models import DiTConfig
from opendit.models.lora import Lora
from opendit.models.weights import Weights
from opendit.parallel.apply import Sharding
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline import PipelineStages
from opendit.parallel.sequence import SequenceParallel
from opendit.training.latents import Latents
from opendit.training.memory import Setup


@dataclass
class RunSpecification:
    """A checked training run, of which nothing large is built yet."""

    flags: TrainConfig
    mesh: Mesh
    dataset: MediaDataset
    schedule: BatchSchedule
    model_config: DiTConfig
    codec: ImageCodec | VideoCodec | None  # None: training on cached latents whose VAE is not at hand
    vae: str
    conditioner: Conditioner
    objective: Objective
    kernels: KernelChoice
    sequence: SequenceParallel | None
    stages: PipelineStages | None  # of a pipeline
    why_not_compiled: str | None  # None: blocks and final layer are
    memory: Setup
    sharding: Sharding | None  # of --plugin fsdp
    folder: Path
    lock: AbstractContextManager[Any]  # the right to write there
    resume: Checkpoint | None
    first_step: int
    last_step: int
    initial: Weights | None
    initial_config: DiTConfig | None  # of the model that these weights are of
    lora: Lora | None
    notes: list[str]
    ema_warmup: float  # of the averages, see opendit.checkpoint.ema.EMA
    samples_at_once: int  # of the model's configured size, in a rank's micro-batch, or as many tokens
    validation: MediaDataset | None = None  # what the held-out loss is of
    clip_fps: float | None = None  # frames a second of the clips that the model draws; None: not known
    fingerprint: dict[str, Any] = field(default_factory=dict)  # see opendit.training.fingerprint

    @property
    def latents(self) -> Latents:
        """Return the function that turns items of the data set into latents."""
        return self.latents_of(self.dataset, self.flags.global_seed)

    def latents_of(self, dataset: MediaDataset, seed: int) -> Latents:
        """The same for another data set of its kind, with the VAE's noise keyed by ``seed``."""
        cached = (dataset.scaling_factor, dataset.shift_factor) if dataset.kind == "latents" else None
        return Latents(self.codec, cached, self.vae != "none", seed)

    @property
    def skipped_before(self) -> int:
        """Steps that the run skipped before it was resumed."""
        return self.resume.state["skipped"] if self.resume else 0

    def flag_values(self) -> dict[str, Any]:
        """Every flag and its value."""
        return to_dict(self.flags)

    def info(self) -> dict[str, Any]:
        """Return the metadata of this run's weights files."""
        return {
            "model": self.flags.model,
            "config": self.model_config.to_dict(),
            "objective": self.objective.to_dict(),
            "class_names": self.dataset.class_names,
            "captions": example_captions(self.dataset),
            "vae": _path_or_name(self.vae),
            "text_encoder": _path_or_name(self.flags.text_encoder),
            "image_size": self.flags.image_size,
            "frame_interval": self.flags.frame_interval,
            **({"fps": self.flags.fps} if self.flags.fps is not None else {}),
            **({"clip_fps": self.clip_fps} if self.clip_fps is not None else {}),
            **({"lora": self.lora.to_dict()} if self.lora else {}),
        }


def example_captions(dataset: MediaDataset, count: int = 16) -> list[str]:
    """Captions to draw when nobody names one: distinct ones, spread evenly over the data set. Rows that can't be read
    have none: the loader replaces and counts them."""
    if dataset.conditioning != "text":
        return []
    found: dict[str, None] = {}
    for row in range(0, len(dataset), max(1, len(dataset) // (4 * count))):
        with suppress(BadSample):
            found[cast(str, dataset.caption(row))] = None
    return list(found)[:count]


def _path_or_name(value: str | None) -> str | None:
    """Return an encoder as checkpoints record it: a folder by its absolute path, a name unchanged."""
    folder = value is not None and value not in KNOWN and Path(value).expanduser()
    return str(folder.resolve()) if folder and folder.exists() else value
