"""Captions beside cached latents: their words and, of a frozen text encoder, their embeddings.

A shard of n rows with captions has, besides its latents, the tensors

    captions    (bytes,) uint8          the captions in UTF-8, one after the other
    caption_ends (n,) int64             where each one ends
    tokens      (sum of L_i, D) float16  every caption's tokens, without padding, one caption after the other
    token_ends  (n,) int64
    pooled      (n, D) float16

the last three only with an encoder. ``empty-caption.safetensors`` holds tokens (L, D) and pooled (D,) of the empty
string, once a folder: a dropped caption becomes this.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from opendit.common.safe_files import replacing
from opendit.common.tensor_files import open_safetensors, shapes_in, write_tensors
from opendit.data.base import DataError, Embedding
from opendit.encoders.text import TextEncoder

EMPTY = "empty-caption.safetensors"


def pack_captions(captions: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors ``captions`` and ``caption_ends`` of a shard."""
    encoded = [caption.encode("utf-8", "surrogatepass") for caption in captions]
    text = np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()
    return {
        "captions": torch.from_numpy(text),
        "caption_ends": torch.tensor(list(accumulate(map(len, encoded))), dtype=torch.int64),
    }


def embed(encoder: TextEncoder, captions: list[str]) -> list[tuple[Tensor, Tensor]]:
    """Return every caption's tokens (L_i, D) without padding and its pooled vector (D,), float16 on the CPU.

    encoder: ``encode(captions)`` gives tokens (B, L, D), mask (B, L) bool and pooled (B, D). Raises DataError if a
    number doesn't fit float16.
    """
    made = encoder.encode(captions)
    tokens, mask, pooled = made.tokens.half().cpu(), made.mask.cpu(), made.pooled.half().cpu()
    parts = [(row[kept], vector) for row, kept, vector in zip(tokens, mask, pooled, strict=True)]
    for caption, (row, vector) in zip(captions, parts, strict=True):
        if not (row.isfinite().all() and vector.isfinite().all()):
            raise DataError(f"the embedding of the caption {caption!r} overflows float16; take another --text_encoder")
    return parts


def pack_embeddings(parts: list[tuple[Tensor, Tensor]], width: int) -> dict[str, Tensor]:
    """Return the tensors ``tokens``, ``token_ends`` and ``pooled`` of a shard. width: D, for a shard without rows."""
    tokens, pooled = [row for row, _ in parts], [vector for _, vector in parts]
    return {
        "tokens": torch.cat(tokens) if parts else torch.empty(0, width, dtype=torch.half),
        "token_ends": torch.tensor(list(accumulate(map(len, tokens))), dtype=torch.int64),
        "pooled": torch.stack(pooled) if parts else torch.empty(0, width, dtype=torch.half),
    }


def write_empty_caption(folder: Path, encoder: TextEncoder) -> str:
    """Write ``EMPTY``, completely or not at all. Return its SHA-256."""
    tokens, pooled = embed(encoder, [""])[0]
    with replacing(folder / EMPTY, temporary=EMPTY + ".partial") as new:
        return write_tensors(new, {"tokens": tokens, "pooled": pooled}, {})["sha256"]


def read_empty_caption(folder: Path, max_tokens: int) -> Embedding:
    """Read the empty string's embedding, padded to ``max_tokens``. Raises ValueError if its file is missing, incomplete
    or has other shapes."""
    try:
        with open_safetensors(folder / EMPTY) as file:
            shapes = shapes_in(file, folder / EMPTY)
            tokens, pooled = shapes.get("tokens", ()), shapes.get("pooled", ())
            if len(tokens) != 2 or tokens[0] > max_tokens or pooled != tokens[1:] or len(shapes) != 2:
                raise ValueError(f"it holds {shapes}, not tokens (up to {max_tokens}, D) and pooled (D,)")
            return padded(file.get_tensor("tokens").half(), file.get_tensor("pooled").half(), max_tokens)
    except ValueError as error:
        raise ValueError(
            f"--data_path {folder}: {EMPTY} can't be read ({error}); copy it or run preprocess.py again"
        ) from error


def load_empty_caption(content: bytes, max_tokens: int, name: str) -> Embedding:
    """Read an empty caption's embedding from a file's bytes; see :func:`read_empty_caption`. Raises ValueError that
    names the file."""
    try:
        found = load(content)
        tokens, pooled = found["tokens"], found["pooled"]
        if tokens.dim() != 2 or len(tokens) > max_tokens or pooled.shape != tokens.shape[1:]:
            raise ValueError(
                f"it holds {tuple(tokens.shape)} and {tuple(pooled.shape)}, not (up to {max_tokens}, D), (D,)"
            )
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{name} can't be read ({error}); copy it again") from error
    return padded(tokens.half(), pooled.half(), max_tokens)


def padded(tokens: Tensor, pooled: Tensor, max_tokens: int) -> Embedding:
    """Pad tokens (L, D) with zeros to (max_tokens, D), and return them with the mask that tells them apart."""
    out = tokens.new_zeros(max_tokens, tokens.shape[1])
    out[: len(tokens)] = tokens
    return Embedding(out, torch.arange(max_tokens) < len(tokens), pooled)


class CaptionTable(Sequence[Any]):
    """The captions of all shards, in two arrays, which forked workers share (see ``images.PathTable``)."""

    def __init__(self, shards: list[tuple[np.ndarray, np.ndarray]]):
        """shards: ``captions`` and ``caption_ends`` of every shard."""
        before = np.cumsum([0] + [len(text) for text, _ in shards])
        self.text = np.concatenate([text for text, _ in shards])
        self.ends = np.concatenate([ends + start for (_, ends), start in zip(shards, before, strict=False)])

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        row = range(len(self))[row]
        start = self.ends[row - 1] if row else 0
        return self.text[start : self.ends[row]].tobytes().decode("utf-8", "surrogatepass")
