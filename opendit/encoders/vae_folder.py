"""The folder of a VAE in diffusers' format, a user's or of the hub: its configuration, checked, and its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from opendit.common.json_file import read_file
from opendit.common.rules import listed, number, optional, string, truth, whole
from opendit.common.tensor_files import open_safetensors
from opendit.common.torch_utils import on_meta
from opendit.encoders.autoencoder_kl import AutoencoderKL, canonical_names, describes
from opendit.encoders.folder import (
    CONFIG,
    PER_CHANNEL,
    PER_CHANNEL_POSITIVE,
    POSITIVE,
    check_size,
    config_kind,
    fetch,
    one_line,
    reason,
    refuse_adapters,
    weight_files,
    weight_shapes,
)

# Short name -> repository of the hub and its commit.
HUB = {
    "ema": ("stabilityai/sd-vae-ft-ema", "f04b2c4b98319346dad8c65879f680b1997b204a"),
    "mse": ("stabilityai/sd-vae-ft-mse", "31f26fdeee1355a5c34592e401dd41e45d25a493"),
}
STEM = "diffusion_pytorch_model"
FILES = (CONFIG, f"{STEM}.safetensors")


def picture_geometry(config: dict[str, Any]) -> tuple[int, int]:
    """(latent channels, pixels a latent's side) of an ``AutoencoderKL`` of this configuration."""
    return config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1)


Geometry = Callable[
    [dict[str, Any]], tuple[int, ...]
]  # what a class of diffusers says of its sizes in its configuration
IMAGE_CLASSES: dict[str, Geometry] = {"AutoencoderKL": picture_geometry}


def load_vae(name: str, classes: dict[str, Geometry], own: bool = True) -> torch.nn.Module:
    """The autoencoder of ``--vae name`` with its weights; it must be of one of diffusers' ``classes``.

    That of Stable Diffusion is ours, unless ``own`` is false; others, and variants of it, are diffusers' own, which
    takes seconds to import.
    Raises FileNotFoundError or ValueError, naming the flag and what to do."""
    folder = vae_folder(name)
    class_name, config = read_vae_config(str(folder), classes)
    try:
        refuse_adapters(folder)
        if own and class_name == AutoencoderKL.__name__ and describes(config):
            return _own(folder, config)
        return _of_diffusers(folder, class_name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--vae {name}: {error}; {_needs()}") from error
    except Exception as error:
        raise ValueError(f"--vae {name}: {folder} can't be loaded ({one_line(error)}); {_needs()}") from error


def _own(folder: Path, config: dict[str, Any]) -> AutoencoderKL:
    check_size(lambda: AutoencoderKL(config), weight_shapes(folder, STEM), folder)
    with on_meta():
        vae = AutoencoderKL(config)
    stored: dict[str, torch.Tensor] = {}
    for path in weight_files(folder, STEM):
        with open_safetensors(path) as file:
            # Copies: the file's own memory, which others could change, is not taken.
            stored |= {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    state = canonical_names(stored)
    for name, parameter in vae.state_dict().items():
        if name not in state:
            raise ValueError(f"its weights lack {name}")
        if state[name].shape != parameter.shape:
            found, wanted = list(state[name].shape), list(parameter.shape)
            raise ValueError(f"{name} is of shape {found}, by the configuration it is {wanted}")
    vae.load_state_dict({name: state[name] for name in vae.state_dict()}, assign=True)
    return vae.float()


def _of_diffusers(folder: Path, class_name: str) -> torch.nn.Module:
    shapes = weight_shapes(folder, STEM)
    import diffusers  # seconds to import, so only where such a VAE is really used

    vae_class = getattr(diffusers, class_name)
    made = vae_class.load_config(folder, local_files_only=True)
    check_size(lambda: vae_class.from_config(made), shapes, folder)
    vae, report = vae_class.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False, output_loading_info=True
    )
    if report["missing_keys"]:  # diffusers would go on with random weights
        raise ValueError(f"its weights lack {sorted(report['missing_keys'])[0]}")
    return vae


SIDES = listed(whole(1, 1 << 13), 1, 8)
VAE_CONFIG = config_kind(
    _class_name=string(64),
    latent_channels=whole(1, 1024),
    z_dim=whole(1, 1024),
    in_channels=whole(1, 64),
    out_channels=whole(1, 64),
    block_out_channels=SIDES,
    base_dim=whole(1, 1 << 13),
    decoder_base_dim=optional(whole(1, 1 << 13)),
    dim_mult=SIDES,
    layers_per_block=whole(1, 32),
    num_res_blocks=whole(1, 32),
    norm_num_groups=whole(1, 1024),
    patch_size=optional(whole(1, 64)),
    temporal_compression_ratio=number(1, 64),
    temperal_downsample=listed(truth, 1, 8),
    scaling_factor=optional(POSITIVE),
    shift_factor=optional(number(-1e6, 1e6)),
    latents_mean=PER_CHANNEL,
    latents_std=PER_CHANNEL_POSITIVE,
)


def read_vae_config(name: str, classes: dict[str, Geometry]) -> tuple[str, dict[str, Any]]:
    """(class, configuration) of the VAE in a folder; the class must be one of diffusers' ``classes``.

    Raises FileNotFoundError or ValueError, naming the flag and what to do."""
    path = Path(name).expanduser() / FILES[0]
    try:
        config = read_file(path, VAE_CONFIG)
        found = config.get("_class_name", "AutoencoderKL")
        if found in classes:
            channels = classes[found](config)[0]
            for key in ("latents_mean", "latents_std"):
                if config.get(key) is not None and len(config[key]) != channels:
                    raise ValueError(f"{path}: {key} has {len(config[key])} numbers for {channels} channels")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"--vae {name}: {path} doesn't exist; use ema, mse or a folder: {_needs()}") from error
    except KeyError as error:
        raise ValueError(f"--vae {name}: {path} isn't the configuration of a VAE: no {error}; {_needs()}") from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--vae {name}: {path} isn't the configuration of a VAE: {reason(path, error)}; {_needs()}"
        ) from error
    if found not in classes:
        raise ValueError(f"--vae {name}: is a {found}, not an {' or '.join(classes)}; {_needs()}")
    return found, config


def _needs() -> str:
    return f"--vae PATH needs a folder with {' and '.join(FILES)}, and --vae none trains on pixels"


def vae_folder(name: str) -> Path:
    """The folder of ``--vae name``: the user's, or of a VAE of the hub that in the cache, downloaded if need be."""
    if name not in HUB:
        return Path(name).expanduser()
    repository, commit = HUB[name]
    return fetch(repository, commit, FILES, (), f"--vae {name}: {repository}", _needs())
