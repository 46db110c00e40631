"""Tables of the names that flags accept, such as objectives, samplers and plugins. This module does not import torch.

- To add an objective, write ``opendit/diffusion/objectives/NAME.py`` and a row in :data:`DESCRIPTIONS`. The file's
  variable ``OBJECTIVE`` names its class.
- To add a sampler, write a class in ``opendit/diffusion/samplers.py``, and add its name to :data:`ALL_SAMPLERS`.
- To add a plugin, write ``opendit/parallel/engines/NAME.py`` and a row in :data:`PLUGINS`. The file's variable
  ``ENGINE`` names its subclass of ``Engine``.
- To add a data source, write ``opendit/data/NAME.py`` with a function ``open_source``, and a row in :data:`SOURCES`.
- To add a metric, write a function in ``opendit/evaluation/figures.py``, and a row in :data:`METRICS`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from opendit.common.utils import printable
from opendit.config.flags import Bounds, Setting, between

ALL_SAMPLERS = ("ddim", "ddpm", "dpmpp", "euler", "heun", "unipc")
LOGIT: Bounds = {"at_most": 10, "unit": "number"}
SHIFT: Bounds = between(0.01, 100, "factor")


@dataclass(frozen=True)
class ObjectiveDescription:
    """Description of an objective. predicts: the network's output. sampler: the default sampler. settings: flags that
    set fields of the objective."""

    predicts: str
    sampler: str
    settings: dict[str, Setting]


DESCRIPTIONS = {
    "ddpm": ObjectiveDescription(
        "noise and variance (the DiT paper)",
        "ddpm",
        {
            "prediction": Setting(
                "prediction", "eps", "of ddpm: the noise, or v, the velocity", bounds={"choices": ("eps", "v")}
            ),
            "min_snr": Setting(
                "min_snr",
                None,
                "of ddpm: gamma of min-SNR loss weights, usually 5",
                "float",
                between(0.001, 1e6, "gamma"),
            ),
            "shift": Setting("ddpm_shift", 1.0, "of ddpm's noise at every timestep, as --flow_shift", bounds=SHIFT),
        },
    ),
    "edm": ObjectiveDescription(
        "a preconditioned denoiser",
        "heun",
        {
            "mean": Setting(
                "edm_mean",
                -1.2,
                "of the log of edm's noise levels in training (P_mean)",
                bounds=between(-10, 10, "number"),
            ),
            "std": Setting("edm_std", 1.2, "their standard deviation (P_std)", bounds=between(0.001, 5, "number")),
            "sigma_data": Setting(
                "edm_sigma_data",
                0.5,
                "of edm: the standard deviation of what the model learns",
                bounds=between(0.001, 1000, "number"),
            ),
        },
    ),
    "flow": ObjectiveDescription(
        "velocity",
        "euler",
        {
            "shift": Setting(
                "flow_shift", 1.0, "of flow's times, above 1 to more noise: large pictures, clips", bounds=SHIFT
            ),
            "times_are": Setting(
                "flow_times",
                "uniform",
                "of flow's training samples",
                bounds={"choices": ("uniform", "logit_normal", "mode")},
            ),
            "shift_tokens": Setting(
                "flow_shift_tokens",
                None,
                "samples of this many tokens have --flow_shift, others by the root of theirs",
                "int",
                between(1, 10**9, "tokens"),
            ),
            "mean": Setting(
                "flow_mean", 0.0, "of logit_normal times, above 0 to more noise", bounds=LOGIT | {"at_least": -10}
            ),
            "std": Setting("flow_std", 1.0, "their standard deviation", bounds=LOGIT | {"at_least": 0.001}),
            "prediction": Setting(
                "flow_prediction",
                "v",
                "of flow: the velocity, or x, the clean sample (JiT); the loss is the velocity's",
                bounds={"choices": ("v", "x")},
            ),
            "noise_scale": Setting(
                "flow_noise_scale", 1.0, "of flow's noise, as 2 for pixels at 512 (JiT)", bounds=SHIFT
            ),
            "min_snr": Setting(
                "flow_min_snr",
                None,
                "of flow: gamma of min-SNR loss weights, as --min_snr",
                "float",
                between(0.001, 1e6, "gamma"),
            ),
            "contrast": Setting(
                "flow_contrast",
                0.0,
                "away from the velocity of another sample by so much, as 0.05 (contrastive flow matching)",
                bounds=between(0, 0.9, "weight"),
            ),
        },
    ),
    "meanflow": ObjectiveDescription(
        "mean velocity over an interval, for 1 or 2 steps",
        "euler",
        {
            "mean": Setting(
                "meanflow_mean", -0.4, "of the logit of meanflow's times in training", bounds=between(-10, 10, "number")
            ),
            "std": Setting("meanflow_std", 1.0, "its standard deviation", bounds=between(0.001, 5, "number")),
            "share": Setting(
                "meanflow_share",
                0.25,
                "of samples that learn an interval; the others learn the velocity at its end",
                bounds=between(0.01, 1, "share"),
            ),
            "guidance": Setting(
                "meanflow_guidance",
                1.0,
                "scale of the guidance inside meanflow's target, for sampling without; 1: none",
                bounds=between(0, 100, "scale"),
            ),
            "power": Setting(
                "meanflow_power",
                1.0,
                "by which a sample's squared error, to this power, divides its gradient; 0: not",
                bounds=between(0, 4, "number"),
            ),
        },
    ),
}

PRECISIONS = ("fp16", "bf16", "fp32")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes per number
RESHARD = ("auto", "after_forward", "never")
REDUCE_DTYPES = ("fp32", "bf16")
BASE_PRECISIONS = ("bf16", "fp8", "int8", "nf4")
OFFLOAD = ("none", "average", "state")  # values of --offload with --plugin fsdp
BLOCKS = "blocks"  # value of --offload: all blocks, or N of them (blocks:N), in host memory
OPTIMIZERS = ("adamw", "adamw8bit", "muon")
PIPELINE_SCHEDULES = ("1f1b", "interleaved")
SEQUENCE_TYPES = ("auto", "fastseq", "ulysses", "ring", "usp")
OWN_ATTENTION = ("ring", "usp")  # types of sequence parallelism that don't use --attention
AXIAL = "axial"  # type of sequence parallelism for models with axial attention


@dataclass(frozen=True)
class Plugin:
    """Facts about a plugin that are needed before its engine is imported.

    Attributes:
        summary: what is sharded, for --help.
        rejects: flags that raise an error with the plugin.
        ignores: flag without effect -> reason to print.
        sharded_checkpoints: True if --checkpoint_format auto means sharded checkpoints.
    """

    summary: str
    precisions: tuple[str, ...] = PRECISIONS
    rejects: frozenset[str] = frozenset()
    ignores: Mapping[str, str] = field(default_factory=dict)
    sharded_checkpoints: bool = False


PLUGINS = {
    "zero2": Plugin("gradients and state sharded"),
    "gemini": Plugin(
        "weights too",
        precisions=("bf16", "fp16"),
        # Gemini does not shard frozen weights, so a LoRA would take as much memory as with zero2.
        rejects=frozenset({"fp8", "lora", "adamw8bit", "muon", "tensor_parallel_size", "pipeline_parallel_size"}),
        ignores={
            "compile": "Gemini fetches weights in __torch_function__ and frees them after use, which compile can't "
            "follow",
            "recompute": "--plugin gemini has freed the weights by then",
        },
    ),
    "ddp": Plugin("nothing sharded"),
    "fsdp": Plugin("weights too, by torch's FSDP2", sharded_checkpoints=True),
}


def check_precision(plugin: str, precision: str) -> None:
    works = PLUGINS[plugin].precisions
    if precision not in works:
        other = next(name for name, line in PLUGINS.items() if precision in line.precisions)
        raise ValueError(
            f"--plugin {plugin}: works in {' and '.join(works)} only; use --mixed_precision {works[0]}, or --plugin "
            f"{other} for {precision}"
        )


TORCH_ATTENTION = ("cudnn", "flash", "efficient", "math")  # kernels in torch
PACKAGE = "flash_attn"  # the FlashAttention package
ATTENTION = ("auto", *TORCH_ATTENTION, PACKAGE)
# value of --recompute: recompute each block in the backward pass, except for its attention
BUT_ATTENTION = "but_attention"
RECOMPUTE = ("none", "norms", "cheap", "half", "mlp", BUT_ATTENTION)
AUTO = "auto"  # value of --recompute, --parallel and --card: choose by estimates of memory and time

# Metrics for --ckpt_best -> True if lower is better. val_loss is the held-out loss; other metrics measure samples.
BEST = {
    "val_loss": True,
    "fid": True,
    "sfid": True,
    "kid": True,
    "fvd": True,
    "frame_fid": True,
    "frechet_distance": True,
    "precision": False,
    "recall": False,
    "is": False,
    "accuracy": False,
    "direction": False,
}
CHECKPOINT_FORMATS = ("auto", "whole", "sharded")
# Suffixes of a weights file or index: one file with all tensors, an index of ranks' shards, or an index of several
# files as in ``transformers``.
WHOLE, SHARDS, PARTS = ".safetensors", ".shards.json", ".safetensors.index.json"


class Needs(NamedTuple):
    """A metric's requirements: features, and the kind of reference ("statistics", "features" or None)."""

    features: str
    reference: str | None
    about: str


METRICS = {
    "fid": Needs("pool", "statistics", "Fréchet distance of Inception's features (of clips: of their frames)"),
    "sfid": Needs("spatial", "statistics", "the same of spatial features, as ADM's"),
    "is": Needs("logits", None, "Inception score"),
    "pr": Needs("pool", "features", "precision and recall"),
    "kid": Needs("pool", "features", "kernel distance"),
    "fvd": Needs("clip", "statistics", "Fréchet distance of I3D's features of clips"),
    "motion": Needs("motion", None, "mean difference between frames"),
    "accuracy": Needs("digit", None, "share of samples that show the digit asked for (--features digits)"),
    "direction": Needs("moved", None, "share of clips that move as asked (--features digits)"),
    "copies": Needs("nearest", None, "share of copies of training digits (--features digits)"),
    "clip_score": Needs("caption", None, "how well samples fit their captions"),
}
DIGITS = "digits"  # the built-in digits, as a reference and as a network of features
RESIZES = ("tf", "torch", "clean")
FEATURE_PRECISIONS = ("fp32", "tf32")
LABELS = ("balanced", "drawn")

FOREIGN_FORMS = ("mean_std", "mean_logvar", "sample")  # formats of latents in other programs' tar files
MOCK, PYTHON = "mock", "python"  # sources: random latents, and a data set passed to opendit.train
ADDRESSES = "latents"  # the source that reads URLs
ENERGON, BLENDS = "energon_source", "blend"
TABLES = "pictures_and_clips"  # reads tables and any other folder, so it is tried last
_WITHOUT_BUCKET = ("file", "local", "memory")  # kinds of addresses without a bucket


@dataclass(frozen=True)
class SourceDescription:
    """A data source. name: word for ``--data_path``, or None if files identify the source. takes: what it reads."""

    name: str | None
    takes: str


# Keys are modules of opendit.data, in the order in which they are tried. TABLES is tried last.
SOURCES = {
    TABLES: SourceDescription(
        None, "a CSV, .jsonl or .parquet of captioned media, a folder of pictures or of such media"
    ),
    "digits": SourceDescription("digits", "digits"),
    "energon_source": SourceDescription(None, "an Energon folder or metadataset"),
    "latents": SourceDescription(None, "a folder of cached latents"),
    MOCK: SourceDescription(MOCK, "mock: random latents"),
    "python_data": SourceDescription(PYTHON, "python: what a program hands to opendit.train"),
    "blend": SourceDescription(None, "a YAML file of several sources"),
    "shards.dataset": SourceDescription(None, "a folder of indexed tars"),
    "torchvision_sets": SourceDescription(None, "a torchvision data set's folder"),
}


def named_sources() -> dict[str, str]:
    return {source.name: module for module, source in SOURCES.items() if source.name is not None}


def is_address(data_path: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", data_path) is not None


def check_address(address: str, flag: str = "--data_path") -> None:
    """Raise ValueError if a URL is unprintable, or lacks the server, bucket or path that its scheme needs."""
    kind, _, rest = address.partition("://")
    kind, shown = kind.lower(), f"{flag} {printable(address)[:200]}"
    if not address.isprintable():
        raise ValueError(f"{shown}: an address has no line breaks and the like; write it without")
    if kind in ("http", "https"):
        try:
            parts = urlsplit(address)
            host, _ = parts.hostname, parts.port  # raise an error if the address is invalid
        except ValueError as error:
            raise ValueError(f"{shown}: is no address ({error}); give {kind}://HOST/FOLDER") from error
        if not host or not host.strip("."):
            raise ValueError(f"{shown}: names no server; give {kind}://HOST/FOLDER or {kind}://HOST/train.tar")
    elif not rest.strip("/ ") or kind not in _WITHOUT_BUCKET and not rest.partition("/")[0].strip():
        raise ValueError(f"{shown}: names no bucket; give {kind}://BUCKET/FOLDER or {kind}://BUCKET/train.tar")


def inline_sources(data_path: str, flag: str = "--data_path") -> list[tuple[str, str]] | None:
    """Return the (path, weight) pairs in ``A:0.7,B:0.3``; None for any other form, or for an existing file. Raises
    ValueError if a source has no weight above 0, appears twice, is ``mock``, or is itself a blend."""
    parts = [part.strip() for part in data_path.split(",")]
    found = [re.fullmatch(r"(.+):([^/:]*)", part) for part in parts]
    if len(parts) < 2 or os.path.exists(data_path) or not any(one and _is_number(one[2]) for one in found):
        return None
    example = "write SOURCE:WEIGHT,SOURCE:WEIGHT, as pictures:0.7,more.csv:0.3"
    sources = []
    for part, one in zip(parts, found, strict=True):
        if one is None:
            raise ValueError(f"{flag} {data_path}: {part or 'a source without a name'} has no weight; {example}")
        path, weight = one[1], one[2]
        if not _is_number(weight) or not 0 < float(weight) < 1e15:
            raise ValueError(
                f"{flag} {data_path}: the weight of {path} must be a number above 0, not {weight or 'nothing'}; leave "
                "the source out to train without it"
            )
        if path == "mock":
            raise ValueError(f"{flag} {data_path}: mock has random latents, and can't be blended; leave it out")
        if Path(path).suffix.lower() in (".yaml", ".yml"):
            raise ValueError(f"{flag} {data_path}: {path} is a blend of its own; list its sources here")
        if path in dict(sources):
            raise ValueError(f"{flag} {data_path}: names the source {path} twice; give it once, with a larger weight")
        sources.append((path, weight))
    return sources


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def data_path_help() -> str:
    *others, last = [source.takes for source in sorted(SOURCES.values(), key=lambda source: source.name is not None)]
    return f"{', '.join(others)}, or {last}"
