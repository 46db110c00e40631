"""Test the byte-level text encoder: ids, padding, and that it learns to read within seconds."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from opendit.diffusion.guidance import cfg_model
from opendit.models.conditioning import (
    BEGIN,
    FIRST_BYTE,
    PADDING,
    VOCABULARY,
    BytesEncoder,
    TextConfig,
    encode_bytes,
)
from opendit.models.dit import DiTConfig
from opendit.models.zoo import build_model, model_config
from tests.models.test_dit import randomised

TEXT = TextConfig("bytes", 32, 24)


def decode(ids) -> str:
    return bytes(i - FIRST_BYTE for i in ids.tolist() if i >= FIRST_BYTE).decode("utf-8")


def test_ids_of_captions():
    ids = encode_bytes(["", "ab", "a\x00é"], 6)
    assert ids.dtype == torch.int64 and ids.shape == (3, 6)
    assert ids[0].tolist() == [BEGIN, 0, 0, 0, 0, 0]
    assert ids[1].tolist() == [BEGIN, 97 + 2, 98 + 2, 0, 0, 0]
    assert ids[2].tolist() == [BEGIN, 97 + 2, 0 + 2, 0xC3 + 2, 0xA9 + 2, 0]
    assert int(encode_bytes(["\udfff"], 4).max()) < VOCABULARY and decode(encode_bytes(["a\ud800b"], 9)[0]) == "a?b"
    assert encode_bytes([], 6).shape == (0, 6) and encode_bytes(["abc"], 1).tolist() == [[BEGIN]]
    with pytest.raises(ValueError, match="--max_text_tokens 0"):
        encode_bytes(["a"], 0)


@pytest.mark.parametrize("length,whole", [(3, ""), (4, "€"), (5, "€"), (6, "€"), (7, "€€"), (9, "€€😀"[:2])])
def test_captions_are_cut_between_characters(length, whole):
    assert decode(encode_bytes(["€€😀"], length)[0]) == whole


@given(st.text(), st.integers(1, 40))
def test_ids_hold_the_longest_whole_beginning(caption, length):
    ids = encode_bytes([caption], length)[0]
    kept = decode(ids)
    clean = caption.encode("utf-8", "replace").decode()
    assert clean.startswith(kept) and ids[0] == BEGIN
    size = len(kept.encode())
    assert (ids[1 + size :] == PADDING).all() and (ids[: 1 + size] != PADDING).all()
    assert kept == clean or len(clean[: len(kept) + 1].encode()) > length - 1


def test_padding_changes_nothing_and_the_empty_caption_works():
    torch.manual_seed(0)
    encoder = BytesEncoder(TEXT).double()
    long, short = encoder(encode_bytes(["", "seven"], 24)), encoder(encode_bytes(["", "seven"], 8))
    assert long.tokens.shape == (2, 24, 32) and long.mask.sum(1).tolist() == [1, 6] and len(long) == 2
    torch.testing.assert_close(long.pooled, short.pooled)
    torch.testing.assert_close(long.tokens[1, :6], short.tokens[1, :6])
    torch.testing.assert_close(long.pooled[0], long.tokens[0, 0])  # the mean over the begin token
    torch.testing.assert_close(long.pooled[1], long.tokens[1, :6].mean(0))
    assert long.pooled.isfinite().all()


def test_different_captions_differ_by_letters_and_by_their_order():
    torch.manual_seed(0)
    pooled = BytesEncoder(TEXT)(encode_bytes(["", "on", "no", "non", "a seven", "a sever"], 24)).pooled
    distances = torch.cdist(pooled, pooled) + 10 * torch.eye(6)
    assert distances.min() > 0.01


def test_the_encoder_belongs_to_the_model():
    model = build_model(DiTConfig((4, 4), 2, 2, 32, 2, 2, text=TEXT))
    names = {n for n, _ in model.named_parameters() if n.startswith("text_encoder.")}
    assert "text_encoder.embedding.weight" in names
    randomised(model)(torch.randn(2, 2, 4, 4), torch.tensor([1, 2]), encode_bytes(["a", "b"], 24)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if n in names)
    frozen = build_model(DiTConfig((4, 4), 2, 2, 32, 2, 2, text=TextConfig("clip", 32, 24)))
    assert not any(n.startswith("text_encoder") for n in frozen.state_dict())


@pytest.mark.parametrize("cross", [False, True])
def test_guidance_takes_ids_and_the_empty_caption(cross):
    config = DiTConfig((4, 4), 2, 2, 32, 2, 2, text=TextConfig("bytes", 32, 12, cross))
    model = randomised(build_model(config)).double()
    x, t = torch.randn(3, 2, 4, 4).double(), torch.tensor([1, 20, 300])
    y, null = encode_bytes(["a", "seven", ""], 12), encode_bytes([""], 12)
    cond, uncond = model(x, t, y), model(x, t, null.expand(3, -1))
    guided = cfg_model(model, y, null, 3.0)(x, t)
    torch.testing.assert_close(guided[:, :2], uncond[:, :2] + 3 * (cond[:, :2] - uncond[:, :2]))
    torch.testing.assert_close(guided[2], cond[2])  # the empty caption is the null condition
    assert (guided[0] - cond[0]).abs().max() > 1e-3


@pytest.mark.parametrize("width,expected", [(128, 4), (96, 3), (20, 1), (32, 1)])
def test_heads_fit_any_width(width, expected):
    encoder = BytesEncoder(TextConfig("bytes", width, 8))
    encoder(encode_bytes(["abc"], 8))
    assert encoder.blocks[0].attn.num_heads == expected


def test_a_model_learns_what_captions_say():
    """Train 100 steps on a pattern per digit and a ramp per direction, with captions like "a seven moving left"."""
    digits = "zero one two three four five six seven eight nine".split()
    directions = "up down left right".split()
    ids = encode_bytes([f"a {digit} moving {way}" for digit in digits for way in directions], 32)
    which = torch.arange(40)
    ramp = torch.linspace(-1, 1, 4).expand(4, 4)
    ramps = torch.stack([ramp.T, -ramp.T, ramp, -ramp])
    torch.manual_seed(0)
    pictures = (torch.randn(10, 4, 4)[which // 4] + ramps[which % 4]).unsqueeze(1)
    config = model_config("DiT-Ti/2", input_size=(4, 4), in_channels=1, text=TextConfig("bytes", 64, 32))
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    blank, t = torch.zeros(40, 1, 4, 4), torch.zeros(40)
    for _ in range(100):
        loss = F.mse_loss(model(blank, t, ids)[:, :1], pictures)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        drawn = model(blank, t, ids)[:, :1]
    nearest = torch.cdist(drawn.flatten(1), pictures.flatten(1)).argmin(1)
    assert (nearest == which).float().mean() >= 0.9, f"loss {loss.item():.3f}"
