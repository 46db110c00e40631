"""Weights in and out: our checkpoints <-> diffusers' DiTPipeline folders and Meta's .pt files (``python -m
opendit.export``).

Two traps on diffusers' side. Its DiTTransformer2DModel hard-codes ``downscale_freq_shift=1`` in the sinusoids of the
timestep, where Meta's model has 0, so that a stock pipeline is a little off; :func:`load_pipeline` sets it right. And
every one of its blocks has its own copy of the timestep and label embedders.
"""

import io
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from opendit.common.replace import replacing
from opendit.common.rules import MIB, mapping, optional, plain, record, string, whole
from opendit.common.strict_files import NAME, FileKind, read_file
from opendit.common.tensor_files import open_safetensors, shapes_in, write_file
from opendit.diffusion.objectives import DDPMObjective, objective_from_dict
from opendit.encoders.folder import encoder_name
from opendit.encoders.vae import HUB, load_codec
from opendit.models.dit import DiT, DiTConfig
from opendit.models.layers import PLAIN
from opendit.models.names import SIZES
from opendit.models.weights import Weights
from opendit.models.zoo import build_model, model_config
from opendit.state.header import check_shapes
from opendit.state.pretrained import (
    METADATA_KEY,
    assumption,
    check_name,
    find_weights,
    load_pretrained,
    read_newest,
    refuse_unless_finite,
)
from opendit.state.tensor_set import is_set
from opendit.state.weight_files import write_weights

_SIZE = whole(1, 1 << 16)
TRANSFORMER = FileKind(
    record(
        {
            "_class_name": string(64),
            "num_attention_heads": _SIZE,
            "attention_head_dim": _SIZE,
            "num_layers": _SIZE,
            "patch_size": whole(1, 64),
            "sample_size": whole(1, 512),
            "in_channels": whole(1, 4096),
            "num_embeds_ada_norm": whole(1, 1_000_000),
        },
        others=plain(),
    ),
    4 * MIB,
)
LABEL_NUMBER = string(7, "[0-9]+", "the number of a class")
PIPELINE = FileKind(record({}, {"id2label": optional(mapping(LABEL_NUMBER, NAME))}, others=plain()), 16 * MIB)
MOST_BYTES = 50 * 10**9  # of a file, unless told otherwise: as opendit.export has it
NULL_CLASS = 1000  # DiTPipeline's label of "no class", written into its code
SCHEDULER = dict(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False, num_train_timesteps=1000)

# ours: diffusers', of what stands before and after the blocks and of a block
OUTER = {"x_embedder.proj": "pos_embed.proj", "final_layer.adaLN_modulation.1": "proj_out_1",
         "final_layer.linear": "proj_out_2"}  # fmt: skip
EMBEDDERS = {"t_embedder.mlp.0": "timestep_embedder.linear_1", "t_embedder.mlp.2": "timestep_embedder.linear_2",
             "y_embedder.embedding_table": "class_embedder.embedding_table"}  # fmt: skip
BLOCK = {"adaLN_modulation.1": "norm1.linear", "attn.proj": "attn1.to_out.0", "mlp.fc1": "ff.net.0.proj",
         "mlp.fc2": "ff.net.2"}  # fmt: skip
QKV = ("attn1.to_q", "attn1.to_k", "attn1.to_v")


def refuse_unless_plain(config: DiTConfig, info: dict, target: str) -> None:
    """Raises ValueError for models that Meta's DiT, and so diffusers', can't express."""
    if config.kind != DiTConfig.kind:
        what = "video DiT" if config.is_video else f"{config.kind} model"
        raise ValueError(f"{target} has no {what}: a {config.kind} can't be exported")
    if config.options != PLAIN or config.positions != "sincos":
        raise ValueError(f"{target}'s DiT has no --qk_norm, --adaln_lora, --no_bias and other --positions than sincos")
    if config.text is not None:
        raise ValueError(f"{target} has no DiT conditioned on captions: this model can't be exported")
    if config.input_size[0] != config.input_size[1]:
        raise ValueError(f"{target}'s DiT takes square latents, this model {' x '.join(map(str, config.input_size))}")
    predicts = objective_from_dict(info.get("objective")).predicts
    flags = " ".join(f"--{name} {value}" for name, value in predicts.items())
    if predicts != DDPMObjective().predicts:
        raise ValueError(f"{target}'s DiT predicts noise and variance; a model of {flags} can't be exported")
    if not config.learn_sigma:
        raise ValueError(f"{target}'s DiT predicts noise and variance; this model's output has no variance")


def _suffixes(state: dict[str, Tensor], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in state if name.startswith(prefix + ".")]


def to_diffusers_state(state: dict[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """Our state dict under DiTTransformer2DModel's names; no two tensors share memory (safetensors refuses that).

    The label table grows to DiTPipeline's 1000 classes: the null class moves to row 1000, rows between are zero.
    """
    table = state["y_embedder.embedding_table.weight"]
    full = table.new_zeros(NULL_CLASS + 1, table.shape[1])
    full[: config.num_classes], full[NULL_CLASS] = table[:-1], table[-1]
    state, made = {**state, "y_embedder.embedding_table.weight": full}, {}
    for ours, theirs in OUTER.items():
        for end in _suffixes(state, ours):
            made[theirs + end] = state[ours + end].clone()
    for i in range(config.depth):
        block = f"transformer_blocks.{i}."
        for ours, theirs in EMBEDDERS.items():
            for end in _suffixes(state, ours):
                made[f"{block}norm1.emb.{theirs}{end}"] = state[ours + end].clone()
        for ours, theirs in BLOCK.items():
            for end in (".weight", ".bias"):
                made[block + theirs + end] = state[f"blocks.{i}.{ours}{end}"].clone()
        for end in (".weight", ".bias"):
            for theirs, part in zip(QKV, state[f"blocks.{i}.attn.qkv{end}"].chunk(3), strict=True):
                made[block + theirs + end] = part.clone()
    return made


def from_diffusers_state(theirs: dict[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """The inverse of :func:`to_diffusers_state`, position table included."""
    made = {}
    for ours, name in OUTER.items():
        made.update({ours + end: theirs[name + end] for end in _suffixes(theirs, name)})
    for ours, name in EMBEDDERS.items():
        name = f"transformer_blocks.0.norm1.emb.{name}"
        made.update({ours + end: theirs[name + end] for end in _suffixes(theirs, name)})
    table = made["y_embedder.embedding_table.weight"]
    made["y_embedder.embedding_table.weight"] = torch.cat((table[: config.num_classes], table[-1:]))
    for i in range(config.depth):
        block = f"transformer_blocks.{i}."
        for end in (".weight", ".bias"):
            made[f"blocks.{i}.attn.qkv{end}"] = torch.cat([theirs[block + name + end] for name in QKV])
            made.update({f"blocks.{i}.{ours}{end}": theirs[block + name + end] for ours, name in BLOCK.items()})
    return {**made, "pos_embed": build_model(config).pos_embed}


def correct_timesteps(transformer) -> None:
    """Gives a DiTTransformer2DModel the timestep sinusoids that DiTs are trained with."""
    for block in transformer.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0


def load_pipeline(folder: str | Path, **options):
    """A DiTPipeline folder as a pipeline that computes what the trained model does: agrees to 1e-5 in fp32."""
    from diffusers import DiTPipeline

    pipeline = DiTPipeline.from_pretrained(folder, **options)
    correct_timesteps(pipeline.transformer)
    return pipeline


def _load(ckpt: str, model: str | None) -> tuple[DiT, Weights]:
    """The model of --ckpt, saying so if it is not of the newest checkpoint because that is damaged."""
    notes: list[str] = []
    loaded = load_pretrained(ckpt, model, notes=notes)
    for note in notes:
        print(f"note: {note}", flush=True)
    return loaded


def export_diffusers(
    ckpt: str, output: Path, model: str | None, vae: str | None, most_bytes: int = MOST_BYTES
) -> float:
    """Writes a DiTPipeline folder, the weights of a network in files of ``most_bytes`` at most; returns how far
    the stock pipeline's network is off: relative 2-norm of its error on random latents (:func:`load_pipeline` removes
    it).

    Raises:
        ValueError: a model that DiTPipeline can't express; the message says why.
    """
    network, weights = _load(ckpt, model)
    config = network.config
    refuse_unless_plain(config, weights.info, "diffusers")
    if not config.null_class:
        raise ValueError("DiTPipeline guides away from a null class; this model was trained without class dropout")
    if config.num_classes > NULL_CLASS:
        raise ValueError(f"DiTPipeline's null class is number {NULL_CLASS}: {config.num_classes} classes don't fit")
    vae = encoder_name("--vae", vae, weights.info.get("vae"), weights.path) or "ema"
    if vae == "none":
        raise ValueError("DiTPipeline always decodes with a VAE; this model was trained on pixels (--vae none)")
    from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

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
    codec = load_codec(vae, channels=config.in_channels, device="cpu")
    names = weights.info.get("class_names") or [str(label) for label in range(config.num_classes)]
    pipeline = DiTPipeline(transformer, codec.vae, DDIMScheduler(**SCHEDULER), id2label=dict(enumerate(names)))
    pipeline.register_to_config(id2label={str(label): name for label, name in enumerate(names)})
    try:
        pipeline.save_pretrained(output, max_shard_size=most_bytes)
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"--output {output}: can't be written ({error})") from error
    return deviation


@torch.no_grad()
def stock_deviation(network: DiT, transformer) -> float:
    """Relative 2-norm by which a stock transformer leaves our network, on a few timesteps of random latents."""
    config, generator = network.config, torch.Generator().manual_seed(0)
    x = torch.randn(4, config.in_channels, *config.input_size, generator=generator)
    t, y = torch.tensor([3, 100, 500, 990]), torch.arange(4) % config.num_classes
    ours = network.float()(x, t, y)
    return ((transformer(x, t, y).sample - ours).norm() / ours.norm()).item()


def export_meta(ckpt: str, output: Path, model: str | None) -> None:
    """Writes a state dict that Meta's DiT loads strictly. Raises ValueError for other kinds of model."""
    network, weights = _load(ckpt, model)
    refuse_unless_plain(network.config, weights.info, "Meta's code")
    content = io.BytesIO()  # torch.save to a full disk says nothing that can be told
    torch.save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, content)
    with replacing(output) as new:
        write_file(new, iter([content.getbuffer()]))


def import_weights(
    ckpt: str, output: Path, model: str | None, vae: str | None, most_bytes: int = MOST_BYTES
) -> tuple[str, Path]:
    """Writes our safetensors from a DiTPipeline folder, from Meta's .pt, or from a checkpoint of ours of any kind, in
    several files where they are more than ``most_bytes`` (opendit/state/weight_files.py). Returns the model's name and
    the file that stands for the weights.

    Raises:
        ValueError, FileNotFoundError: it is neither, or no model of ours.
    """
    folder = Path(ckpt)
    if (folder / "transformer" / "config.json").is_file():
        name, weights, info = _read_pipeline(folder)
        weights.info = _said(name, info.pop("config"), vae or info["vae"], info)
    else:
        weights = _read(folder, model)
        if vae is not None:
            weights.info["vae"] = _name_or_path(vae)
    metadata = {"format": "pt", METADATA_KEY: json.dumps(weights.info)}
    written, *_ = write_weights(output, weights.state, metadata, most_bytes)
    read_newest(written)  # strictly: what was written is a model of ours
    return weights.info["model"], written


def _said(name: str, config: DiTConfig, vae: str, info: dict) -> dict:
    """What our file says of weights that come from elsewhere."""
    said = {"model": name, "config": config.to_dict(), "vae": _name_or_path(vae)}
    return {**info, **said, "image_size": 8 * config.input_size[0]}


def _name_or_path(vae: str) -> str:
    return vae if vae in HUB else str(Path(vae).resolve())


def _read(path: Path, model: str | None) -> Weights:
    """The weights of a checkpoint of ours, which are read when they are written, and what it says of them; of a run,
    those of its newest that is intact. Meta's .pt needs the name of its ``model``; a LoRA is merged into its base."""
    if model is None and not is_set(find_weights(path)):
        raise ValueError("--model: Meta's .pt does not say which model it is, name it, e.g. --model DiT-XL/2")
    notes: list[str] = []
    weights = read_newest(path, notes=notes)
    if "lora" in weights.info or "config" not in weights.info:
        network, found = load_pretrained(weights.path, model)
        notes += assumption(found, network.config)
        info = {key: value for key, value in found.info.items() if key != "lora"}
        weights = Weights(network.state_dict(), found.path, info or _said(model, network.config, "ema", {}))
    check_name(weights, model)
    for note in notes:
        print(f"note: {note}", flush=True)
    return weights


def _read_pipeline(folder: Path) -> tuple[str, Weights, dict]:
    """(model name, weights, config and class names) of a DiTPipeline folder."""
    values = read_file(folder / "transformer" / "config.json", TRANSFORMER)
    heads, head_dim, depth = (values[k] for k in ("num_attention_heads", "attention_head_dim", "num_layers"))
    size = next((k for k, v in SIZES.items() if v == (heads * head_dim, depth, heads)), None)
    if values["_class_name"] != "DiTTransformer2DModel" or size is None:
        raise ValueError(f"{folder} holds no DiT of ours: {depth} blocks of {heads} heads of {head_dim}")
    labels = read_file(folder / "model_index.json", PIPELINE).get("id2label") or {}
    name = f"DiT-{size}/{values['patch_size']}"
    try:
        config = model_config(
            name,
            input_size=(values["sample_size"],) * 2,
            in_channels=values["in_channels"],
            num_classes=len(labels) or values["num_embeds_ada_norm"],
        )
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    theirs = {}
    for path in sorted((folder / "transformer").glob("*.safetensors")):
        with open_safetensors(path) as file:
            theirs.update({name: file.get_tensor(name) for name in shapes_in(file, path)})
    if not theirs:
        raise ValueError(f"{folder}/transformer has no .safetensors file; pickled weights are not read")
    names = [labels[key] for key in sorted(labels, key=int)]
    info = {"config": config, "class_names": names, "vae": str(folder / "vae")}
    try:
        state = from_diffusers_state(theirs, config)
    except (KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"{folder}/transformer lacks weights of its configuration, or has others ({error})") from error
    check_shapes(config, {key: tuple(tensor.shape) for key, tensor in state.items()}, folder / "transformer")
    return name, refuse_unless_finite(Weights(state, folder)), info
