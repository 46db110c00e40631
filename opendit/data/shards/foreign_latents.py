"""Latents that another program put into tars: a sample's array is its member ``.npz``, ``.npy`` or ``.safetensors``.

``preprocess.py index DIR --latents FORM`` writes the tars' indexes and an ``index.json`` that says what the arrays are;
``TarLatents`` then reads them where they lie. Of a VAE with C latent channels, before its scaling factor, a form is

    mean_std     (2C, [t,] h, w)   mean and standard deviation
    mean_logvar  (2C, [t,] h, w)   mean and logarithm of the variance: diffusers' ``latent_dist.parameters``
    sample       (C, [t,] h, w)    the mean, or a latent that was drawn once: it is taken as it is at each use

A dimension of 1 in front, of a batch, is taken off. The array NAME's mirror image is NAME_flip, where there is one.
"""

import io
import zipfile
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

SUFFIXES = ("safetensors", "npz", "npy")
MIRRORED = "_flip"
_USUAL = ("moments", "latents", "latent")  # names of the array, where several have its shape
_TIMES = 128  # bytes of all arrays of a sample for each number of its latents: a small .npz can unpack to anything


def arrays_of(
    content: bytes, suffix: str, shape: tuple[int, ...], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """The arrays of numbers in a member, by name; that of a ``.npy`` is called "". names: only these are unpacked.

    shape: (2C, [t,] h, w), of the latents among them. Raises ValueError where a ``.npz`` unpacks to far more than such
    latents take, and any exception of a stranger's bytes."""
    if suffix == ".safetensors":
        return load(content)
    if suffix == ".npy":
        return {"": torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))}
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        if (size := sum(member.file_size for member in packed.infolist())) > (most := _TIMES * int(np.prod(shape))):
            raise ValueError(f"its .npz unpacks to {size:,} bytes, more than {most:,}")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files if names is None or name in names}
    return {name: torch.from_numpy(array) for name, array in found.items() if array.dtype.kind in "fi"}


def choose_arrays(arrays: Mapping[str, Tensor], form: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The name of the array of latents, and of that of the mirror image where there is one.

    Raises ValueError if no array has the shape, or several that are not called as usual."""
    stored = _stored_shape(form, shape)
    fits = [name for name in arrays if _fits(arrays[name], stored) and not name.endswith(MIRRORED)]
    chosen = [name for name in _USUAL if name in fits][:1] or fits
    if len(chosen) != 1:
        of = ", ".join(f"{name[:40] or 'a .npy'} {list(array.shape)}" for name, array in arrays.items())
        which = "several of them fit" if fits else f"none is {list(stored)} of floating point"
        raise ValueError(f"it has {of or 'no arrays'}, and {which}")
    mirrored = f"{chosen[0]}{MIRRORED}"
    return (chosen[0], mirrored) if mirrored in arrays and _fits(arrays[mirrored], stored) else (chosen[0],)


def read_moments(content: bytes, suffix: str, foreign: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    """Mean and standard deviation (F, 2C, [t,] h, w) fp32 of a sample, and of its mirror image if F is 2.

    foreign: what the index says of these latents: ``form``, ``array`` and, with mirror images, ``mirrored``. Raises
    ValueError for an array that is missing, of another shape or not finite, and as :func:`arrays_of`."""
    names = [foreign[key] for key in ("array", "mirrored") if key in foreign]
    arrays, stored = arrays_of(content, suffix, shape, names), _stored_shape(foreign["form"], shape)
    views = []
    for name in names:
        if name not in arrays:
            raise ValueError(f"it has no array {name!r}")
        if not _fits(arrays[name], stored):
            raise ValueError(f"latents of shape {list(arrays[name].shape)}, not {list(stored)}")
        views.append(_moments(arrays[name].reshape(stored).float(), foreign["form"]))
    found = torch.stack(views)
    if not found.isfinite().all():
        raise ValueError("latents that are not finite")
    return found


def _moments(x: Tensor, form: str) -> Tensor:
    if form == "sample":
        return torch.cat([x, torch.zeros_like(x)])
    if form == "mean_logvar":
        mean, logvar = x.chunk(2)
        return torch.cat([mean, torch.exp(0.5 * logvar.clamp(-30, 20))])  # the limits are diffusers'
    return x


def _stored_shape(form: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] // 2, *shape[1:]) if form == "sample" else shape


def _fits(array: Tensor, shape: tuple[int, ...]) -> bool:
    return array.is_floating_point() and tuple(array.shape) in (shape, (1, *shape))
