"""Convert OpenDiT checkpoints to and from diffusers' DiTPipeline folders and Meta's .pt files.

Two properties of diffusers' DiTTransformer2DModel matter here:

- It hard-codes ``downscale_freq_shift=1`` in the sinusoids of the timestep, where Meta's model has 0. So the output of
  a stock pipeline has a small error, which :func:`load_pipeline` removes.
- Every block has its own copy of the timestep and label embedders.
"""

import io
import json
import tempfile
from collections import ChainMap
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from opendit.checkpoint.foreign import BLOCK, EMBEDDERS, OUTER, QKV, assumption, suffixes
from opendit.checkpoint.pretrained import (
    METADATA_KEY,
    check_name,
    find_weights,
    load_pretrained,
    read_newest,
    table_notes,
)
from opendit.checkpoint.tensor_set import is_set, write_weights
from opendit.common.safe_files import make_folder, move_into, replacing
from opendit.common.tensor_files import write_file
from opendit.diffusion.objectives import DDPMObjective, objective_from_dict
from opendit.encoders.folder import PIPELINE_INDEX, encoder_name
from opendit.encoders.vae import HUB, IMAGE_CLASSES, load_vae
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.public_config import PublicConfig
from opendit.models.layers import PLAIN
from opendit.models.weights import Weights
from opendit.models.zoo import empty_model

MOST_BYTES = 50 * 10**9  # default limit of a file's size, equal to that of the command opendit export
NULL_CLASS = 1000  # the label of "no class" that DiTPipeline hard-codes
SCHEDULER: dict[str, Any] = dict(
    beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False, num_train_timesteps=1000
)


def refuse_unless_plain(config: DiTConfig, info: dict[str, Any], target: str) -> None:
    """Raise ValueError for models that Meta's and diffusers' DiT can't represent."""
    if config.kind == PublicConfig.kind and target == "diffusers":
        raise ValueError(
            f"--base: left out; name the folder of the public model {info.get('model', '')} that was trained"
        )
    if config.kind == PublicConfig.kind:
        raise ValueError(
            f"{target} has no public models; export diffusers --base FOLDER writes {info.get('model', '')}"
        )
    if config.kind != DiTConfig.kind:
        what = "video DiT" if config.is_video else f"{config.kind} model"
        raise ValueError(f"{target} has no {what}; a {config.kind} can't be exported")
    extended = config.exchanged or config.patch_bottleneck or config.sprint
    if config.options != PLAIN or config.positions != "sincos" or extended:
        raise ValueError(
            f"{target}'s DiT has no --qk_norm, --adaln_lora, --no_bias, --patch_bottleneck, no --norm rms or --mlp "
            "swiglu, no fused --route and other --positions than sincos; this model can't be exported"
        )
    if config.text is not None:
        raise ValueError(f"{target} has no DiT conditioned on captions; this model can't be exported")
    if config.input_size[0] != config.input_size[1]:
        raise ValueError(f"{target}'s DiT takes square latents, this model {' x '.join(map(str, config.input_size))}")
    predicts = objective_from_dict(info.get("objective")).predicts
    flags = " ".join(f"--{name} {value}" for name, value in predicts.items())
    if predicts != DDPMObjective().predicts:
        raise ValueError(f"{target}'s DiT predicts noise and variance; a model of {flags} can't be exported")
    if not config.learn_sigma:
        raise ValueError(f"{target}'s DiT predicts noise and variance; this model's output has no variance")


def to_diffusers_state(state: dict[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """Convert OpenDiT's state dict to DiTTransformer2DModel's names. No two tensors share memory, because safetensors
    requires this.

    The label table grows to DiTPipeline's 1000 classes. The null class moves to row 1000, and new rows are zero.
    """
    table = state["y_embedder.embedding_table.weight"]
    full = table.new_zeros(NULL_CLASS + 1, table.shape[1])
    full[: config.num_classes], full[NULL_CLASS] = table[:-1], table[-1]
    state, made = {**state, "y_embedder.embedding_table.weight": full}, {}
    for ours, theirs in OUTER.items():
        for end in suffixes(state, ours):
            made[theirs + end] = state[ours + end].clone()
    for i in range(config.depth):
        block = f"transformer_blocks.{i}."
        for ours, theirs in EMBEDDERS.items():
            for end in suffixes(state, ours):
                made[f"{block}norm1.emb.{theirs}{end}"] = state[ours + end].clone()
        for ours, theirs in BLOCK.items():
            for end in (".weight", ".bias"):
                made[block + theirs + end] = state[f"blocks.{i}.{ours}{end}"].clone()
        for end in (".weight", ".bias"):
            for theirs, part in zip(QKV, state[f"blocks.{i}.attn.qkv{end}"].chunk(3), strict=True):
                made[block + theirs + end] = part.clone()
    return made


def correct_timesteps(transformer: Any) -> None:
    """Change the timestep sinusoids of a DiTTransformer2DModel to those that DiTs are trained with."""
    for block in transformer.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0


def load_pipeline(folder: str | Path, **options: Any) -> Any:
    """Load a DiTPipeline folder. The pipeline agrees with the trained model to 1e-5 in fp32."""
    from diffusers.pipelines.dit.pipeline_dit import DiTPipeline

    pipeline = DiTPipeline.from_pretrained(folder, **options)
    correct_timesteps(pipeline.transformer)
    return pipeline


def _load(ckpt: str, model: str | None) -> tuple[DiT, Weights]:
    """Load the model of --ckpt. Print a note if the newest checkpoint is damaged and an earlier one is read instead."""
    notes: list[str] = []
    loaded = load_pretrained(ckpt, model, notes=notes)
    for note in notes:
        print(f"note: {note}", flush=True)
    return loaded


def export_diffusers(
    ckpt: str, output: Path, model: str | None, vae: str | None, most_bytes: int = MOST_BYTES
) -> float:
    """Write a DiTPipeline folder, with each network's weights in files of at most ``most_bytes``.

    Returns:
        The error of the stock pipeline's network, as a relative 2-norm on random latents. :func:`load_pipeline` removes
        this error.

    Raises:
        ValueError: DiTPipeline can't represent the model; the message gives the reason.
    """
    network, weights = _load(ckpt, model)
    config = network.config
    refuse_unless_plain(config, weights.info, "diffusers")
    if not config.null_class:
        raise ValueError("DiTPipeline guides away from a null class; this model was trained without class dropout")
    assert config.num_classes is not None and isinstance(config.patch_size, int)  # true for a plain DiT
    if config.num_classes > NULL_CLASS:
        raise ValueError(f"DiTPipeline's null class is number {NULL_CLASS}: {config.num_classes} classes don't fit")
    vae = encoder_name("--vae", vae, weights.info.get("vae"), weights.path) or "ema"
    if vae == "none":
        raise ValueError("DiTPipeline always decodes with a VAE; this model was trained on pixels (--vae none)")
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
    from diffusers.pipelines.dit.pipeline_dit import DiTPipeline
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    transformer = DiTTransformer2DModel(
        num_attention_heads=config.num_heads,
        attention_head_dim=config.hidden_size // config.num_heads,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_layers=config.depth,
        sample_size=config.input_size[0],
        patch_size=config.patch_size,
        num_embeds_ada_norm=NULL_CLASS,
        norm_eps=1e-6,
    ).eval()
    transformer.load_state_dict(to_diffusers_state(network.state_dict(), config))
    deviation = stock_deviation(network.eval(), transformer)
    # diffusers' own class, the only kind that a pipeline can save
    decoder: Any = load_vae(vae, IMAGE_CLASSES, own=False)
    names = weights.info.get("class_names") or [str(label) for label in range(config.num_classes)]
    scheduler: Any = DDIMScheduler(**SCHEDULER)  # Any, because diffusers declares an enum where it takes a string
    pipeline = DiTPipeline(transformer, decoder, scheduler, id2label=dict(enumerate(names)))
    pipeline.register_to_config(id2label={str(label): name for label, name in enumerate(names)})
    make_folder(output)
    # Write to a new folder, because diffusers would follow links in an existing folder.
    with tempfile.TemporaryDirectory(prefix=".partial.", dir=output) as made:
        try:
            pipeline.save_pretrained(made, max_shard_size=most_bytes)
        except SafetensorError as error:  # also raised for a full disk
            raise OSError(f"--output {output}: can't be written ({error}); name another place") from error
        move_into(Path(made), output)
    return deviation


@torch.no_grad()
def stock_deviation(network: DiT, transformer: Any) -> float:
    """Return the relative 2-norm of a stock transformer's error, on a few timesteps of random latents."""
    config, generator = network.config, torch.Generator().manual_seed(0)
    assert config.num_classes is not None
    x = torch.randn(4, config.in_channels, *config.input_size, generator=generator)
    t, y = torch.tensor([3, 100, 500, 990]), torch.arange(4) % config.num_classes
    ours = network.float()(x, t, y)
    return ((transformer(x, t, y).sample - ours).norm() / ours.norm()).item()


def export_meta(ckpt: str, output: Path, model: str | None) -> None:
    """Write a state dict that Meta's DiT loads strictly. Raises ValueError if Meta's DiT can't represent the model."""
    network, weights = _load(ckpt, model)
    refuse_unless_plain(network.config, weights.info, "Meta's code")
    content = io.BytesIO()  # in memory, because torch.save's error for a full disk is uninformative
    torch.save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, content)
    with replacing(output) as new:
        write_file(new, iter([content.getbuffer()]))


def import_weights(
    ckpt: str, output: Path, model: str | None, vae: str | None, most_bytes: int = MOST_BYTES
) -> tuple[str, Path]:
    """Convert a DiTPipeline folder, Meta's .pt file, or any OpenDiT checkpoint to OpenDiT's safetensors.

    Weights of more than ``most_bytes`` are written as several files with an index (opendit/checkpoint/tensor_set.py).

    Returns:
        The model's name, and the written file or index.

    Raises:
        ValueError, FileNotFoundError: ``ckpt`` has none of these forms, or the model is not supported.
    """
    weights = _read(Path(ckpt), model)
    assert weights.config is not None  # _read always returns a configuration
    if notes := table_notes(weights.config, weights.state, weights.path):
        print("\n".join(f"note: {note}" for note in notes), flush=True)
        computed = empty_model(weights.config, parameters=False).named_buffers()
        weights.state = ChainMap(dict(computed), cast(dict[str, Tensor], weights.state))
    if vae is not None:
        weights.info["vae"] = _name_or_path(vae)
    metadata = {"format": "pt", METADATA_KEY: json.dumps(weights.info)}
    written, *_ = write_weights(output, weights.state, metadata, most_bytes)
    read_newest(written)  # fails unless the written file is a complete model
    return weights.info["model"], written


def _name_or_path(vae: str) -> str:
    return vae if vae in HUB else str(Path(vae).resolve())


def _read(path: Path, model: str | None) -> Weights:
    """Read the weights to convert and their metadata.

    Tensors of an OpenDiT checkpoint stay in their file until they are written. For a run, the newest intact checkpoint
    is read. Meta's .pt needs the name ``model``. A LoRA is merged into its base.
    """
    stands = find_weights(path)
    if model is None and not is_set(stands) and stands.name != PIPELINE_INDEX:
        raise ValueError("--model: Meta's .pt does not say which model it is; name it, e.g. --model DiT-XL/2")
    notes: list[str] = []
    weights = read_newest(path, notes=notes)
    if "lora" in weights.info or "config" not in weights.info:
        network, found = load_pretrained(weights.path, model, notes=notes)
        notes += assumption(found, network.config)
        info = {key: value for key, value in found.info.items() if key != "lora"}
        weights = Weights(network.state_dict(), found.path, info or _of_meta(model, network.config))
    check_name(weights, model)
    for note in notes:
        print(f"note: {note}", flush=True)
    return weights


def _of_meta(name: str | None, config: DiTConfig) -> dict[str, Any]:
    """Return the metadata for OpenDiT weights that were converted from Meta's .pt."""
    return {"model": name, "config": config.to_dict(), "vae": "ema", "image_size": 8 * config.input_size[0]}
