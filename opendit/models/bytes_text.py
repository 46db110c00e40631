"""A small text encoder that reads bytes, is trained with the model and needs no download.

A caption is encoded as ids (L,) int64: ``BEGIN``, then each UTF-8 byte b as b + 2, then ``PADDING``. Because of the
begin token, even the empty caption has a token to attend to. The ids of the empty caption are the null condition of
guidance.
"""

import torch
from torch import Tensor, nn

from opendit.models.attention import CrossAttention
from opendit.models.conditioning import TextCondition, TextConfig, masked_mean
from opendit.models.layers import Mlp, layer_norm
from opendit.models.positions import sincos_position_table

PADDING, BEGIN, FIRST_BYTE = 0, 1, 2
VOCABULARY = FIRST_BYTE + 256
LAYERS, HEAD_SIZE, MLP_RATIO = 2, 32, 2


def encode_bytes(captions: list[str], max_tokens: int) -> Tensor:
    """Encode captions as ids (B, max_tokens) int64. A caption that is too long is cut between two characters.

    Lone surrogates, which file names may contain and UTF-8 can't encode, become "?".
    Raises ValueError if max_tokens is less than 1, because the begin token needs one.
    """
    if max_tokens < 1:
        raise ValueError(f"--max_text_tokens {max_tokens}: not even the begin token fits; give 1 or more")
    ids = torch.full((len(captions), max_tokens), PADDING)
    for row, caption in zip(ids, captions, strict=True):
        cut = caption.encode("utf-8", errors="replace")[: max_tokens - 1]
        whole = cut.decode("utf-8", errors="ignore").encode("utf-8")  # drops an incomplete character at the end
        row[0] = BEGIN
        row[1 : 1 + len(whole)] = torch.tensor(list(whole), dtype=torch.int64) + FIRST_BYTE
    return ids


def byte_tokens(captions: list[str]) -> list[int]:
    """Return the number of tokens of each caption before captions are cut: the begin token and one per UTF-8 byte."""
    return [1 + len(caption.encode("utf-8", errors="replace")) for caption in captions]


class BytesBlock(nn.Module):
    """A pre-norm Transformer block in which tokens attend only to tokens whose mask is True."""

    def __init__(self, width: int):
        super().__init__()
        self.attn = CrossAttention(width, heads(width))
        self.mlp = Mlp(width, MLP_RATIO * width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = layer_norm(x)
        x = x + self.attn(normed, normed, mask)
        return x + self.mlp(layer_norm(x))


class BytesEncoder(nn.Module):
    """Encoder of ids (B, L) int64, L <= max_tokens, as a :class:`TextCondition` of the configured width.

    The pooled vector is the mean over the tokens. In a test with 40 captions ("a seven moving left"), a classifier read
    digit and direction from the pooled vector. It learned all captions within 50 steps at a learning rate of 1e-3. The
    output of the begin token instead of the mean took slightly longer. A convolution over neighbouring bytes before the
    encoder made no difference.
    """

    positions: Tensor  # (1, max_tokens, width), a table in DiTConfig.tables

    def __init__(self, text: TextConfig):
        super().__init__()
        self.embedding: nn.Embedding = nn.Embedding(VOCABULARY, text.width)
        table = sincos_position_table(text.width, text.max_tokens, device=torch.get_default_device())
        self.register_buffer("positions", table.unsqueeze(0))
        self.blocks: nn.ModuleList = nn.ModuleList(BytesBlock(text.width) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> TextCondition:
        mask = ids != PADDING
        x = self.embedding(ids)
        x = (x + self.positions[:, : ids.shape[1]]).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return TextCondition(x, mask, masked_mean(x, mask))


def heads(width: int) -> int:
    """Return the number of attention heads: heads of size 32 if 32 divides the width, otherwise a single head."""
    return width // HEAD_SIZE if width % HEAD_SIZE == 0 else 1


def parameters(text: TextConfig) -> int:
    """Return the number of the encoder's weights."""
    w = text.width
    block = 4 * w * w + 4 * w + 2 * w * MLP_RATIO * w + MLP_RATIO * w + w
    return VOCABULARY * w + LAYERS * block


def forward_flops(text: TextConfig) -> int:
    """Return the FLOPs of the matrix products for one caption (2 per multiply-add)."""
    w, n = text.width, text.max_tokens
    block = 2 * n * 4 * w * w + 4 * n * n * w + 4 * n * w * MLP_RATIO * w
    return LAYERS * block
