"""Embed captions for a cache of latents, and read and write the embedding of the empty string.

A folder's ``empty-caption.safetensors`` has tokens (L, D) and pooled (P,) of the empty string, which replaces dropped
captions. P equals D unless the index records another width. In a public model the pooled vector comes from a separate
encoder, or is absent (P = 0). Embeddings that an encoder of a public model computes in bfloat16 are stored in bfloat16,
without loss of precision or range. The index records this dtype.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from opendit.common.json_file import MIB, read_bounded
from opendit.common.safe_files import replacing
from opendit.common.tensor_files import write_tensors
from opendit.data.base import DataError, Embedding
from opendit.encoders.published_text import PublishedText
from opendit.encoders.text import TextEncoder

EMPTY, MOST_EMPTY = "empty-caption.safetensors", 256 * MIB
AnyEncoder = TextEncoder | PublishedText
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class EmbeddingForm(NamedTuple):
    """The format of an encoder's cached embeddings: widths of tokens and pooled vectors, and a key of ``DTYPES``."""

    width: int
    pooled: int
    dtype: str = "fp16"

    def numbers(self, max_tokens: int) -> int:
        """Return how many numbers the embedding of a caption of ``max_tokens`` tokens has."""
        return max_tokens * self.width + self.pooled


def form_of(encoder: AnyEncoder) -> EmbeddingForm:
    """Return the format in which an encoder's embeddings are stored."""
    if isinstance(encoder, PublishedText):
        half = "bf16" if encoder.dtype == torch.bfloat16 else "fp16"
        return EmbeddingForm(encoder.width, encoder.pooled_width, half)
    return EmbeddingForm(encoder.width, encoder.width)


def embed(encoder: AnyEncoder, captions: list[str], **how: bool) -> list[tuple[Tensor, Tensor]]:
    """Return, for each caption, (tokens (L_i, D) without padding, pooled vector (P,)) on the CPU.

    The dtype is that of :func:`form_of`. encoder: ``encode(captions, **how)`` returns tokens (B, L, D), mask (B, L)
    bool and pooled (B, P). Raises DataError if a number overflows the dtype."""
    made, dtype = encoder.encode(captions, **how), DTYPES[form_of(encoder).dtype]
    tokens, mask, pooled = made.tokens.to(dtype).cpu(), made.mask.cpu(), made.pooled.to(dtype).cpu()
    parts = [(row[kept], vector) for row, kept, vector in zip(tokens, mask, pooled, strict=True)]
    for caption, (row, vector) in zip(captions, parts, strict=True):
        if not (row.isfinite().all() and vector.isfinite().all()):
            name = str(dtype).removeprefix("torch.")
            raise DataError(f"the embedding of the caption {caption!r} overflows {name}; take another --text_encoder")
    return parts


def write_empty_caption(folder: Path, encoder: AnyEncoder) -> str:
    """Write the file ``EMPTY`` atomically, and return its SHA-256."""
    how = {"away": True} if isinstance(encoder, PublishedText) else {}
    tokens, pooled = embed(encoder, [""], **how)[0]
    with replacing(folder / EMPTY, temporary=EMPTY + ".partial") as new:
        return write_tensors(new, {"tokens": tokens, "pooled": pooled}, {})["sha256"]


def read_empty_caption(content: bytes, text: dict[str, Any], name: str) -> Embedding:
    """Return the embedding of the empty string, from the bytes of its file, padded to ``max_tokens``.

    text: the ``TextEncoding`` of the cache's index. Raises ValueError, naming the file, if the file is incomplete or
    its tensors have other shapes."""
    try:
        found = load(content)
        if found.keys() != {"tokens", "pooled"}:
            raise ValueError(f"it holds {', '.join(found)}, not tokens and pooled")
        tokens, pooled = found["tokens"], found["pooled"]
        most, dtype = text["max_tokens"], DTYPES[text.get("dtype", "fp16")]
        width = text.get("pooled", tokens.shape[-1] if tokens.dim() else 0)
        if tokens.dim() != 2 or len(tokens) > most or pooled.shape != (width,):
            of = f"tokens (up to {most}, D) and pooled ({text.get('pooled', 'D')},)"
            raise ValueError(f"it holds {tuple(tokens.shape)} and {tuple(pooled.shape)}, not {of}")
        return padded(tokens.to(dtype), pooled.to(dtype), most)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{name} can't be read ({error}); copy it or run preprocess.py again") from error


def open_empty_caption(folder: Path, text: dict[str, Any]) -> Embedding:
    """Return the embedding of the empty string from a folder. Raises ValueError like :func:`read_empty_caption`."""
    name = f"--data_path {folder}: {EMPTY}"
    try:
        content = read_bounded(folder / EMPTY, MOST_EMPTY)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} can't be read ({error}); copy it or run preprocess.py again") from error
    return read_empty_caption(content, text, name)


def padded(tokens: Tensor, pooled: Tensor, max_tokens: int) -> Embedding:
    """Return an embedding with tokens (L, D) zero-padded to (max_tokens, D). The mask is True for real tokens."""
    out = tokens.new_zeros(max_tokens, tokens.shape[1])
    out[: len(tokens)] = tokens
    return Embedding(out, torch.arange(max_tokens) < len(tokens), pooled)
