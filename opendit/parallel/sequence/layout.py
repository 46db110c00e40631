"""From tokens by rank to heads by rank and back, without more passes over memory than the exchange needs.

The *packed* layout of q, k, v is (P, B, n, 3, h, d): the n tokens of each of P ranks, with the h = H / P heads of one
of them. It is what an all-to-all delivers and what FastSeq's projections write; with one sample q, k and v are views
of it that attention takes as they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class _Unpack(torch.autograd.Function):
    """torch's own backward would stack dq, dk, dv, pad the stack and copy it into the packed order: three passes for
    the one that is made here."""

    @staticmethod
    def forward(ctx, packed: Tensor, length: int):
        ctx.shape = packed.shape
        rows = packed.transpose(0, 1).flatten(1, 2)[:, :length]
        return rows.permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        n, length = ctx.shape[2], grads[0].shape[2]
        packed = grads[0].new_empty(ctx.shape)
        whole, rest = divmod(length, n)  # ranks with n tokens; tokens of the rank after them
        by_head = packed.permute(3, 1, 4, 0, 2, 5)  # (3, B, h, P, n, d)
        by_head[:, :, :, whole:].zero_()
        for target, grad in zip(by_head, grads, strict=True):
            target[:, :, :whole].copy_(grad[:, :, : whole * n].unflatten(2, (whole, n)))
            if rest:
                target[:, :, whole, :rest].copy_(grad[:, :, whole * n :])
        return packed, None


def unpack(packed: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, h, length, d) of packed (P, B, n, 3, h, d); tokens past ``length`` are padding and are left out."""
    return _Unpack.apply(packed, length)


def pack_groups(qkv: Tensor, num_heads: int, ranks: int, groups: int) -> list[Tensor]:
    """qkv (B, n, 3 D) of this rank's tokens as ``groups`` tensors (P, B, n, 3, h / groups, d) to send: row p holds a
    share of the heads of rank p, which are heads p h to (p + 1) h."""
    B, n, width = qkv.shape
    h = num_heads // ranks
    by_rank = qkv.view(B, n, 3, ranks, groups, h // groups, width // (3 * num_heads))
    return [group.permute(3, 0, 1, 2, 4, 5).contiguous() for group in by_rank.unbind(4)]


def tokens_by_rank(heads: Tensor, rows: int, ranks: int) -> Tensor:
    """What heads (B, h, N, d) have seen, as (P, B, n, h, d) to send: row p holds the n = ``rows`` tokens of rank p,
    with zeros for padding."""
    by_token, missing = heads.transpose(1, 2), ranks * rows - heads.shape[2]
    if missing:
        by_token = F.pad(by_token, (0, 0, 0, 0, 0, missing))
    return by_token.unflatten(1, (ranks, rows)).transpose(0, 1).contiguous()


def side_by_side(received: list[Tensor]) -> Tensor:
    """(B, n, D) of all heads from the groups (P, B, n, h / groups, d) that came back."""
    return torch.stack([group.permute(1, 2, 0, 3, 4) for group in received], dim=3).flatten(2)
