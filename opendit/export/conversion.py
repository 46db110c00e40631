"""Convert OpenDiT checkpoints to and from diffusers' folders, LoRA files and Meta's .pt files.

diffusers' DiTTransformer2DModel hard-codes ``downscale_freq_shift=1`` for the timestep's sinusoids, but Meta's model
uses 0. A stock pipeline therefore has a small error. :func:`load_pipeline` removes the error. An exported public model
is a copy of the published folder with new weights. The keys of a LoRA file have these forms:

diffusers  transformer.LAYER.lora_A.weight             diffusers' layers; no alphas, since B includes alpha / rank
comfyui    diffusion_model.LAYER.lora_down.weight      the authors' or diffusers' layers, depending on the family
kohya      lora_unet_LAYER_WITH_UNDERSCORES.lora_down.weight      the authors' layers
"""

import fnmatch
import io
import json
import os
import tempfile
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from opendit.checkpoint import foreign, pretrained
from opendit.checkpoint.lora import (
    ARCHITECTURE,
    CAPTION_LENGTH,
    Merged,
    Products,
    as_one,
    moved,
    of_run,
    original_layers,
    with_halves_exchanged,
)
from opendit.checkpoint.run_folders import low_noise_of
from opendit.checkpoint.tensor_set import MOST_BYTES, file_size, is_set, write_weights
from opendit.common import safe_files
from opendit.common.hub import snapshot_of
from opendit.common.tensor_files import write_file
from opendit.config.names import WHOLE
from opendit.diffusion.objectives import DDPMObjective, objective_from_dict
from opendit.encoders.folder import CONFIG, PICKLES, PIPELINE_INDEX, encoder_name
from opendit.encoders.vae import HUB, IMAGE_CLASSES, load_vae
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.base import Family
from opendit.models.families.public_config import PublicConfig
from opendit.models.finetuning import Lora, check_lora
from opendit.models.layers import PLAIN
from opendit.models.zoo import Weights, empty_model

NULL_CLASS = 1000  # DiTPipeline's label for "no class"
SCHEDULER: dict[str, Any] = dict(
    beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False, num_train_timesteps=1000
)


def refuse_unless_plain(config: DiTConfig, info: dict[str, Any], target: str) -> None:
    """Raise ValueError if ``target``'s DiT can't represent the model. target: "diffusers" or "Meta's code"."""
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
    """Convert OpenDiT's state dict to DiTTransformer2DModel's names. The tensors share no memory, as safetensors
    requires. The label table gets 1001 rows: row 1000 is the null class, and rows without a class are zero."""
    table = state["y_embedder.embedding_table.weight"]
    full = table.new_zeros(NULL_CLASS + 1, table.shape[1])
    full[: config.num_classes], full[NULL_CLASS] = table[:-1], table[-1]
    state, made = {**state, "y_embedder.embedding_table.weight": full}, {}
    for ours, theirs in foreign.OUTER.items():
        for end in foreign.suffixes(state, ours):
            made[theirs + end] = state[ours + end].clone()
    for i in range(config.depth):
        block = f"transformer_blocks.{i}."
        for ours, theirs in foreign.EMBEDDERS.items():
            for end in foreign.suffixes(state, ours):
                made[f"{block}norm1.emb.{theirs}{end}"] = state[ours + end].clone()
        for ours, theirs in foreign.BLOCK.items():
            for end in (".weight", ".bias"):
                made[block + theirs + end] = state[f"blocks.{i}.{ours}{end}"].clone()
        for end in (".weight", ".bias"):
            for theirs, part in zip(foreign.QKV, state[f"blocks.{i}.attn.qkv{end}"].chunk(3), strict=True):
                made[block + theirs + end] = part.clone()
    return made


def correct_timesteps(transformer: Any) -> None:
    """Give a DiTTransformer2DModel the timestep sinusoids of Meta's DiT."""
    for block in transformer.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0


def load_pipeline(folder: str | Path, **options: Any) -> Any:
    """Load a DiTPipeline folder. The pipeline agrees with the trained model to 1e-5 in fp32."""
    from diffusers.pipelines.dit.pipeline_dit import DiTPipeline

    pipeline = DiTPipeline.from_pretrained(folder, **options)
    correct_timesteps(pipeline.transformer)
    return pipeline


def _load(ckpt: str, model: str | None) -> tuple[DiT, Weights]:
    notes: list[str] = []
    loaded = pretrained.load_pretrained(ckpt, model, notes=notes)
    for note in notes:
        print(f"note: {note}", flush=True)
    return loaded


def export_diffusers(ckpt: str, output: Path, model: str | None, vae: str | None, most_bytes: int = MOST_BYTES) -> None:
    """Write a DiTPipeline folder with weights files of at most ``most_bytes``. Raises ValueError if DiTPipeline can't
    represent the model."""
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
        attention_head_dim=config.head_dim,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_layers=config.depth,
        sample_size=config.input_size[0],
        patch_size=config.patch_size,
        num_embeds_ada_norm=NULL_CLASS,
        norm_eps=1e-6,
    ).eval()
    transformer.load_state_dict(to_diffusers_state(network.state_dict(), config))
    # A pipeline can only save a VAE of diffusers' class.
    decoder: Any = load_vae(vae, IMAGE_CLASSES, own=False)
    names = weights.info.get("class_names") or [str(label) for label in range(config.num_classes)]
    scheduler: Any = DDIMScheduler(**SCHEDULER)  # Any: diffusers declares an enum but takes a string
    pipeline = DiTPipeline(transformer, decoder, scheduler, id2label=dict(enumerate(names)))
    pipeline.register_to_config(id2label={str(label): name for label, name in enumerate(names)})
    safe_files.make_folder(output)
    # Write to a new folder, because diffusers would follow links in an existing folder.
    with tempfile.TemporaryDirectory(prefix=".partial.", dir=output) as made:
        try:
            pipeline.save_pretrained(made, max_shard_size=most_bytes)
        except SafetensorError as error:  # also raised for a full disk
            raise OSError(f"--output {output}: can't be written ({error}); name another place") from error
        safe_files.move_into(Path(made), output)


def export_meta(ckpt: str, output: Path, model: str | None) -> None:
    """Write a state dict that Meta's DiT loads strictly. Raises ValueError if Meta's DiT can't represent the model."""
    network, weights = _load(ckpt, model)
    refuse_unless_plain(network.config, weights.info, "Meta's code")
    content = io.BytesIO()  # in memory, because torch.save's error for a full disk is uninformative
    torch.save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, content)
    with safe_files.replacing(output) as new:
        write_file(new, iter([content.getbuffer()]))


def import_weights(
    ckpt: str, output: Path, model: str | None, vae: str | None, most_bytes: int = MOST_BYTES
) -> tuple[str, Path]:
    """Convert a DiTPipeline folder, Meta's .pt file or an OpenDiT checkpoint to OpenDiT's safetensors.

    Weights above ``most_bytes`` go into several files. Return the model's name, and the written file or index. Raises
    ValueError or FileNotFoundError if ``ckpt`` is none of these, or the model is not supported."""
    weights = _read(Path(ckpt), model)
    assert weights.config is not None  # _read always returns a configuration
    if notes := pretrained.table_notes(weights.config, weights.state, weights.path):
        print("\n".join(f"note: {note}" for note in notes), flush=True)
        computed = empty_model(weights.config, parameters=False).named_buffers()
        weights.state = ChainMap(dict(computed), cast(dict[str, Tensor], weights.state))
    if vae is not None:
        weights.info["vae"] = vae if vae in HUB else str(Path(vae).resolve())
    metadata = {"format": "pt", pretrained.METADATA_KEY: json.dumps(weights.info)}
    written, *_ = write_weights(output, weights.state, metadata, most_bytes)
    pretrained.read_newest(written)  # raises an error unless the written file holds a complete model
    return weights.info["model"], written


def _read(path: Path, model: str | None) -> Weights:
    """Read the weights to convert. A run's folder means its newest intact checkpoint. LoRA is merged into the base.
    Meta's .pt files need ``model``."""
    stands = pretrained.find_weights(path)
    if model is None and not is_set(stands) and stands.name != PIPELINE_INDEX:
        raise ValueError("--model: Meta's .pt does not say which model it is; name it, e.g. --model DiT-XL/2")
    notes: list[str] = []
    weights = pretrained.read_newest(path, notes=notes)
    if "lora" in weights.info or "config" not in weights.info:
        network, found = pretrained.load_pretrained(weights.path, model, notes=notes)
        notes += foreign.assumption(found, network.config)
        config = network.config
        of_meta = {"model": model, "config": config.to_dict(), "vae": "ema", "image_size": 8 * config.input_size[0]}
        info = {key: value for key, value in found.info.items() if key != "lora"}
        weights = Weights(network.state_dict(), found.path, info or of_meta)
    pretrained.check_name(weights, model)
    for note in notes:
        print(f"note: {note}", flush=True)
    return weights


LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
NOT_TAKEN = ("*.py", "*.pyc", *PICKLES)  # files that are never copied: code, and files that run code on loading
MOST_FILES = 10_000  # maximum number of files of a component


def caption_length(weights: Weights, family: Family, notes: list[str]) -> dict[str, str]:
    """Return {CAPTION_LENGTH: tokens}, and add a note, if a run's caption length is not the default of diffusers'
    pipeline. Otherwise return {}."""
    text = None if weights.config is None else weights.config.text
    if text is None or text.max_tokens == family.text.tokens:
        return {}
    count = text.max_tokens - family.text.beside
    notes.append(f"trained with captions of {count} tokens; give diffusers' pipeline max_sequence_length={count}")
    return {CAPTION_LENGTH: str(count)}


def export_published(
    state: Mapping[str, Tensor],
    source: Path,
    base: foreign.PublishedFolder,
    output: Path,
    most_bytes: int,
    more: Mapping[str, str] | None = None,
    low: tuple[Mapping[str, Tensor], Path, foreign.PublishedFolder] | None = None,
) -> list[str]:
    """Write a folder for diffusers: ``base`` with other weights.

    Files of other components become hard links, or copies if ``output`` is on another disk. ``output`` is created or
    replaced only after all files are written.

    state: weights by OpenDiT's names. source: path of the weights, for messages. more: further metadata for the weights
    file. low: (state, source, base) for a pipeline's low-noise network.

    Return the files of ``base`` that may hold code and were therefore not copied.

    Raises:
        ValueError: the weights do not fit ``base``, a link in ``base`` leads out of the folder, or ``output`` holds
            anything but a pipeline.
        OSError: a file can't be written.
    """
    output = Path(os.path.abspath(output))
    root = output.parent
    safe_files.refuse_links(root, [output.name])
    _check_output(output, (base.pipeline or base.transformer, source))
    networks = [(state, source, base), *([] if low is None else [low])]
    written = {
        each.transformer.name if each.pipeline else foreign.TRANSFORMER: (each.published(of, path), each)
        for of, path, each in networks
    }
    new, old = (output.with_name(f".{output.name}.{os.getpid()}{end}") for end in ("", ".old"))
    safe_files.remove_tree(new)
    for inside in written:
        safe_files.make_folder(new / inside, root=root)
    try:
        left_out = []
        for path, place in _others(base):
            if place.parts[0] in written:
                continue
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in NOT_TAKEN):
                left_out.append(str(place))
                continue
            file_size(path, base.root)
            safe_files.link_or_copy(path, new / place, root=root, make=True)
        for inside, (weights, each) in written.items():
            safe_files.link_or_copy(each.transformer / CONFIG, new / inside / CONFIG, root=root)
            # Don't copy the run's metadata, because they contain captions and paths.
            origin = {"base": name_of(base), **({"license": base.family.license} if base.family.license else {})}
            metadata = {**origin, **each.files.metadata, **(more or {}), "format": "pt"}
            write_weights(new / inside / (foreign.STEM + WHOLE), weights, metadata, most_bytes)
            safe_files.sync_folder(new / inside, root=root)
        _take_place(new, output, old)
        safe_files.sync_folder(root)
    finally:
        safe_files.remove_tree(new)
    return left_out


def _check_output(output: Path, read: tuple[Path, ...]) -> None:
    """Raise ValueError if ``output`` contains a path in ``read``, or holds anything but a pipeline."""
    if not output.exists():
        return
    inside = next((path for path in read if path.resolve().is_relative_to(output.resolve())), None)
    if inside is not None:
        raise ValueError(f"{output} would be replaced, and holds {inside}; name another place")
    known = (output / PIPELINE_INDEX, output / foreign.TRANSFORMER / CONFIG)
    if not output.is_dir() or (os.listdir(output) and not any(path.is_file() for path in known)):
        raise ValueError(f"{output} holds something else than a pipeline; name another place")


def _take_place(new: Path, output: Path, old: Path) -> None:
    """Rename the folder ``new`` to ``output``. First rename an ``output`` with files to ``old``; remove it last."""
    if not output.exists() or not os.listdir(output):
        return safe_files.rename(new, output)
    safe_files.rename(output, old)
    try:
        safe_files.rename(new, output)
    except OSError:
        safe_files.rename(old, output)
        raise
    safe_files.remove_tree(old)


def _others(base: foreign.PublishedFolder) -> Iterator[tuple[Path, Path]]:
    """Yield (file, path relative to the pipeline) for model_index.json, licences, and all components except
    ``base.transformer``. Yield nothing if ``base`` is a network alone."""
    if base.pipeline is None:
        return
    for path in sorted(base.pipeline.iterdir()):
        if path.name == PIPELINE_INDEX or any(fnmatch.fnmatch(path.name.upper(), pattern) for pattern in LICENCES):
            if path.is_file():
                yield path, Path(path.name)
    named = base.index if base.index is not None else base.family.components
    for name in sorted(named):
        if name == base.transformer.name or not isinstance(named[name], list | tuple) or not _is_plain(name):
            continue
        found = 0
        for parent, folders, names in os.walk(base.pipeline / name):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            for file in sorted(names):
                if (found := found + 1) > MOST_FILES:
                    raise ValueError(f"{base.pipeline / name} has more than {MOST_FILES:,} files")
                if not file.startswith("."):
                    yield Path(parent) / file, Path(parent, file).relative_to(base.pipeline)


def _is_plain(name: str) -> bool:
    """Return True if ``name`` can't lead out of the pipeline's folder, and does not begin with "_" or "."."""
    return bool(name) and not name.startswith(("_", ".")) and os.sep not in name and "\0" not in name


def name_of(base: foreign.PublishedFolder) -> str:
    """Return a public model's name for metadata: REPOSITORY@COMMIT in the Hugging Face cache, else the pipeline
    folder's name."""
    folder = (base.pipeline or base.transformer).resolve()
    if (snapshot := snapshot_of(folder)) is not None:
        return f"{snapshot[1]}@{snapshot[2]}"
    return folder.name if base.pipeline or folder.name != foreign.TRANSFORMER else folder.parent.name


def export_run(ckpt: str, output: Path, base: str, most_bytes: int) -> list[str]:
    """Convert a public model's checkpoint or run to a folder for diffusers; see :func:`export_published`.

    ckpt: a checkpoint, a weights file, a run with an intact checkpoint, or a public model's folder. base: the public
    model's folder. The user must name it, because a path in a checkpoint is not trusted.

    Return notes for the user. Raises ValueError or FileNotFoundError if weights are missing, damaged, or from another
    model, and OSError if a file can't be written."""
    notes: list[str] = []
    if foreign.is_published(ckpt):
        weights = Weights(foreign.open_published(ckpt).tensors(), Path(ckpt))
    else:
        weights = pretrained.read_newest(ckpt, notes=notes)
    networks: list[tuple[Mapping[str, Tensor], Path, foreign.PublishedFolder]] = []
    with ExitStack() as stack:
        for each in [
            weights,
            *([] if (low := low_noise_of(weights.path)) is None else [pretrained.read_newest(low, notes=notes)]),
        ]:
            opened = stack.enter_context(closing(foreign.open_published(foreign.network_of(base, each.config))))
            state = each.state
            if "lora" in each.info:
                check_lora(each)
                state = Merged(opened.tensors(), *of_run(each))
            networks.append((state, each.path, opened))
        (high, *low), length = networks, caption_length(weights, networks[0][2].family, notes)
        left_out = export_published(*high, output, most_bytes, length, low[0] if low else None)
    return notes + [f"{Path(base) / name} holds code, or may; it was left out" for name in left_out]


def export_lora(
    ckpt: str,
    output: Path,
    base: str | None,
    form: str = "diffusers",
) -> tuple[list[str], str]:
    """Write a run's LoRA as one file. Return (notes for the user, diffusers call that reads the file or "").

    base: the public model's folder; None means the folder that the checkpoint names. form: format of the keys,
    "diffusers", "comfyui" or "kohya". Raises OSError if the file can't be written. Raises ValueError or
    FileNotFoundError if a file is missing, or if ``ckpt`` is not a LoRA of a public model."""
    weights = pretrained.read_newest(ckpt)
    if "lora" not in weights.info:
        raise ValueError(f"{weights.path} holds a whole model, not what --lora trains; export it as diffusers")
    if not isinstance(weights.config, PublicConfig):
        raise ValueError(
            f"{weights.path} is of one of our own models, which no other program loads LoRAs into; draw with "
            "sample.py --lora RUN"
        )
    check_lora(weights)
    lora = Lora(**weights.info["lora"])
    products, full = of_run(weights)
    if full:
        raise ValueError(f"{weights.path}: {min(full)} was trained as a whole, which a LoRA can't hold")
    opened, notes = foreign.open_published(foreign.network_of(base or lora.base, weights.config)), []
    reader = f"transformer.load_lora_adapter({str(output)!r})" if form == "diffusers" else ""
    if form in opened.family.loadable:
        low = isinstance(weights.config, PublicConfig) and weights.config.expert == "low"
        reader = f"load_lora_weights({str(output)!r}{', load_into_transformer_2=True' * low})"
    try:
        state = _named(products, opened, form)
        metadata = _metadata(lora, opened, form, output.stem) | caption_length(weights, opened.family, notes)
    finally:
        opened.close()
    write_weights(output, state, metadata)
    return notes, reader


def _named(products: Products, opened: foreign.PublishedFolder, form: str) -> dict[str, Tensor]:
    family, shapes = opened.family, dict(opened.files.shapes)
    products = moved(products, opened.pairs, opened.shapes(), shapes)
    if form == "diffusers":
        return {
            f"transformer.{name.removesuffix('.weight')}.lora_{factor}.weight": tensor.contiguous()
            for name, parts in products.items()
            for factor, tensor in zip("AB", as_one(parts, shapes[name], scaled=True), strict=True)
        }
    if form == "kohya" or family.comfyui == "original":
        pairs = []
        joined: set[str] = set()
        for layer, parts in original_layers(family, shapes).items():
            theirs = tuple(f"{part}.weight" for part in parts)
            pairs.append((theirs, (f"{layer}.weight",), 0))
            shapes[f"{layer}.weight"] = (sum(shapes[name][0] for name in theirs), prod(shapes[theirs[0]][1:]))
            joined.update(theirs)
        pairs += [((name,), (name,), 0) for name in products if name not in joined]
        products = with_halves_exchanged(moved(products, pairs, shapes, shapes), family)
    state = {}
    for name, parts in products.items():
        layer = name.removesuffix(".weight")
        key = f"diffusion_model.{layer}" if form == "comfyui" else f"lora_unet_{layer.replace('.', '_')}"
        a, b = as_one(parts, shapes[name])
        state |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
        state[f"{key}.alpha"] = torch.tensor(parts[0].scale * len(a))  # a run's LoRA has only one scale
    return state


def _metadata(lora: Lora, opened: foreign.PublishedFolder, form: str, title: str) -> dict[str, str]:
    """Return a LoRA file's metadata, with the keys that ComfyUI, AUTOMATIC1111 and model managers show. No key is
    called "rank" or "alpha", because a program could then apply the value a second time."""
    family, alpha = opened.family, f"{lora.alpha:g}"
    variant = family.variant(opened.index)
    architecture = (variant and variant.architecture) or family.architecture
    found = {
        "format": "pt",
        "base": name_of(opened),
        "trained_rank": str(lora.rank),
        "trained_alpha": alpha,
        "modelspec.sai_model_spec": "1.0.0",
        ARCHITECTURE: f"{architecture}/lora",
        "modelspec.implementation": "diffusers" if form == "diffusers" else form,
        "modelspec.title": title,
        "ss_base_model_version": architecture,
    }
    if opened.alone:
        found["expert"] = str(foreign.expert_of(opened.transformer))
    if form != "diffusers":
        found |= {"ss_network_dim": str(lora.rank), "ss_network_alpha": alpha}
    return found | ({"license": family.license, "modelspec.license": family.license} if family.license else {})
