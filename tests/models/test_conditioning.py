"""Test captions in a model: padding, cross-attention, the null condition, and conditions as batches."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from opendit.checkpoint.pretrained import load_state
from opendit.models.attention import CrossAttention, masked_attention
from opendit.models.conditioning import CaptionEmbedder, TextCondition, TextConfig, masked_mean, where
from opendit.models.dit import DiTConfig
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model, model_config
from tests.models.test_dit import randomised
from tests.models.test_vdit import text_batch

TEXT = TextConfig("t5", 20, 9, cross_attention=True)
IMAGE = DiTConfig((8, 8), 2, 3, 32, 2, 2, text=TEXT)
VIDEO = VDiTConfig((4, 4, 4), (2, 2, 2), 3, 32, 2, 2, text=TEXT)


def captions(lengths, seed=3) -> TextCondition:
    return TextCondition(*text_batch(len(lengths), 9, 20, lengths, seed, torch.float32))


def inputs(config, batch):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, config.in_channels, *config.input_size, generator=generator)
    return x, torch.linspace(0, 999, batch).long()


@pytest.mark.parametrize("config", [IMAGE, VIDEO])
def test_what_padding_holds_does_not_matter(config):
    model = randomised(build_model(config))
    y = captions((1, 4, 9))
    x, t = inputs(config, 3)
    output = model(x, t, y)
    assert output.isfinite().all() and output.std() > 0.01
    junk = torch.where(y.mask.unsqueeze(-1), y.tokens, torch.full_like(y.tokens, 1e4))
    assert torch.equal(model(x, t, TextCondition(junk, y.mask, y.pooled)), output)
    seen = y.tokens.clone()
    seen[1, 3] += 1
    changed = model(x, t, TextCondition(seen, y.mask, y.pooled))
    assert not torch.equal(changed[1], output[1]) and torch.equal(changed[[0, 2]], output[[0, 2]])
    mask = y.mask.clone()
    mask[1, 3] = False
    assert not torch.equal(model(x, t, TextCondition(y.tokens, mask, y.pooled))[1], output[1])


@pytest.mark.parametrize("config", [IMAGE, VIDEO])
def test_samples_of_a_batch_are_apart(config):
    model = randomised(build_model(config))
    y = captions((1, 4, 9, 2))
    x, t = inputs(config, 4)
    output = model(x, t, y)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(x[order], t[order], y[order]), output[order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x[1:2], t[1:2], y[1:2]), output[1:2], rtol=1e-4, atol=1e-5)


def test_the_pooled_vector_alone_conditions_without_cross_attention():
    config = DiTConfig((8, 8), 2, 3, 32, 2, 2, text=TextConfig("clip", 20, 9))
    model = randomised(build_model(config))
    y, other = captions((1, 4, 9)), captions((9, 9, 9), seed=4)
    x, t = inputs(config, 3)
    output = model(x, t, y)
    assert torch.equal(model(x, t, TextCondition(other.tokens, other.mask, y.pooled)), output)
    assert not torch.equal(model(x, t, TextCondition(y.tokens, y.mask, other.pooled)), output)
    assert not any("cross_attn" in name or "text_encoder" in name for name in model.state_dict())


def test_cross_attention_starts_as_nothing():
    """A new model's cross-attention adds nothing, but has gradients."""
    model = build_model(IMAGE)
    without = build_model(DiTConfig((8, 8), 2, 3, 32, 2, 2, text=TextConfig("t5", 20, 9)))
    for one in (model, without):  # except the zero-initialised output of the cross-attention
        generator = torch.Generator().manual_seed(0)
        for name, parameter in one.named_parameters():
            if "adaLN" in name or name.startswith("final_layer"):
                parameter.data.normal_(std=0.1, generator=generator)
    without.load_state_dict({k: v for k, v in model.state_dict().items() if k in without.state_dict()})
    x, t = inputs(IMAGE, 3)
    y = captions((1, 4, 9))
    output = model(x, t, y)
    assert torch.equal(output, without(x, t, y)) and output.std() > 0.01
    output.square().sum().backward()
    assert all(block.cross_attn.proj.weight.grad.any() for block in model.blocks)


@pytest.mark.parametrize("n,m", [(1, 1), (7, 5), (16, 77)])
def test_masked_attention_closed_form(n, m):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, length, 8, generator=generator).double() for length in (n, m, m))
    mask = torch.rand(3, m, generator=generator) < 0.5
    mask[:, 0] = True
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask[:, None, None], -torch.inf)
    torch.testing.assert_close(masked_attention(q, k, v, mask), scores.softmax(-1) @ v)
    torch.testing.assert_close(masked_attention(q, k, v, mask.fill_(True)), scaled_dot_product_attention(q, k, v))


def test_the_mask_is_not_spread_over_the_queries(monkeypatch):
    """The mask reaches torch as (B, 1, 1, M), so no N x M tensor is created."""
    import torch.nn.functional as F

    seen = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: seen.append(k["attn_mask"]) or real(*a, **k))
    CrossAttention(16, 2)(torch.randn(3, 50, 16), torch.randn(3, 7, 16), torch.ones(3, 7, dtype=torch.bool))
    assert [tuple(mask.shape) for mask in seen] == [(3, 1, 1, 7)] and seen[0].dtype == torch.bool


def test_the_size_of_an_encoders_output_does_not_matter():
    """Outputs of CLIP and T5 differ by orders of magnitude."""
    embedder, y = CaptionEmbedder(TEXT, 32).double(), text_batch(3, 9, 20, (1, 4, 9))
    small, large = TextCondition(*y), TextCondition(y[0] * 1000, y[1], y[2] * 1000)
    (a, (tokens_a, _)), (b, (tokens_b, _)) = embedder(small), embedder(large)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tokens_a, tokens_b, rtol=1e-4, atol=1e-5)


def test_masked_mean():
    tokens = torch.arange(24.0).view(2, 3, 4)
    tokens[0, 2] = torch.nan  # padding may hold anything
    mean = masked_mean(tokens, torch.tensor([[True, True, False], [True, True, True]]))
    assert torch.equal(mean, torch.stack([tokens[0, :2].mean(0), tokens[1].mean(0)]))
    assert masked_mean(tokens.half(), torch.ones(2, 3, dtype=torch.bool)).dtype == torch.float16


# ---------------------------------------------------------------- conditions as batches


def test_conditions_are_indexed_joined_and_moved():
    y = captions((1, 4, 9))
    assert len(y) == 3 and y.shape == (3, 9, 20)
    for rows in (slice(1, None), torch.tensor([2, 0]), [1], torch.tensor([True, False, True])):
        part = y[rows]
        assert torch.equal(part.tokens, y.tokens[rows]) and torch.equal(part.mask, y.mask[rows])
        assert torch.equal(part.pooled, y.pooled[rows]) and len(part) == len(y.pooled[rows])
    both = TextCondition.cat((y, y[:1].expand_as(y)))
    assert len(both) == 6 and torch.equal(both.pooled[3:], y.pooled[:1].expand(3, -1))
    assert torch.equal(both[:3].tokens, y.tokens) and torch.equal(both.mask[4], y.mask[0])
    moved = y.to(torch.bfloat16)
    assert (moved.tokens.dtype, moved.mask.dtype, moved.pooled.dtype) == (torch.bfloat16, torch.bool, torch.bfloat16)
    assert torch.equal(moved.mask, y.mask) and y.to("cpu", non_blocking=True).mask.dtype == torch.bool
    with pytest.raises(RuntimeError):
        captions((3,))[:1].expand_as(TextCondition(torch.zeros(2, 5, 20), torch.ones(2, 5).bool(), torch.zeros(2, 20)))


def test_dropped_rows_become_the_null_condition():
    dropped = torch.tensor([True, False, True])
    labels = torch.tensor([1, 2, 3])
    assert where(dropped, torch.tensor([9]), labels).tolist() == [9, 2, 9]
    ids = torch.arange(12).view(3, 4)
    assert where(dropped, torch.full((1, 4), -1), ids).tolist() == [[-1] * 4, [4, 5, 6, 7], [-1] * 4]
    y, null = captions((1, 4, 9)), captions((2,), seed=8)
    got = where(dropped, null, y)
    for field in ("tokens", "mask", "pooled"):
        assert torch.equal(getattr(got, field)[1], getattr(y, field)[1])
        assert torch.equal(getattr(got, field)[0], getattr(null, field)[0])
        assert torch.equal(getattr(got, field)[2], getattr(null, field)[0])
    assert got.mask.dtype == torch.bool
    assert where(dropped, null.to(torch.float64), y.to(torch.float16)).tokens.dtype == torch.float16


# ---------------------------------------------------------------- weights


def test_a_label_model_has_the_parameters_it_had():
    names = set(build_model(model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=3)).state_dict())
    assert not any("cross_attn" in n or "text_encoder" in n or "temporal" in n for n in names)
    assert "y_embedder.embedding_table.weight" in names


def test_weights_of_other_text_models_are_refused(tmp_path):
    from opendit.models.zoo import Weights

    model = build_model(IMAGE)
    other = build_model(DiTConfig((8, 8), 2, 3, 32, 2, 2, text=TextConfig("clip", 24, 9, True)))
    with pytest.raises(ValueError, match="of another shape .first: y_embedder"):
        load_state(model, Weights(other.state_dict(), tmp_path))


def test_half_precision_does_not_round_the_scale_of_guidance():
    """The scale is multiplied by 1000 and embedded like timesteps, so it stays in fp32."""
    scale = torch.tensor([1.47, 3.6])
    y = TextCondition(torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), torch.randn(2, 4), scale)
    halved = y.to("cpu", torch.bfloat16)
    assert halved.tokens.dtype == halved.pooled.dtype == torch.bfloat16 and halved.mask.dtype == torch.bool
    assert torch.equal(halved.guidance, scale) and halved.guidance.dtype == torch.float32
    assert replace(y, guidance=None).to(torch.bfloat16).guidance is None
