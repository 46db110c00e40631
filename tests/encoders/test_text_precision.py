"""Text encoders in fewer bits (--text_precision) match encoders with the dequantised weights."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import T5Config, T5EncoderModel

from opendit.encoders.folder import transformers_model
from opendit.encoders.published_text import load_published_text, text_encoder_bytes
from opendit.encoders.text import load_text_encoder
from opendit.kernels.base_precision import base_layers
from opendit.models.families import FAMILIES
from tests.encoders.published_folders import write_pipeline
from tests.encoders.test_text import clip, t5  # noqa: F401 (fixtures)
from tests.memory import kept_bytes, peak_bytes

KINDS = ("fp8", "int8", "nf4")
CAPTIONS = ["a seven moving left", "", "seven boats"]


def with_the_weights_of(plain, stored):
    """Set the weights of linear layers in ``plain`` to the dequantised ones. Return the number of these weights."""
    layers = dict(base_layers(stored))
    for name, layer in layers.items():
        plain.get_parameter(name).data.copy_(layer.matrix.dense())
    return sum(plain.get_parameter(name).numel() for name in layers)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_embeddings_are_those_of_the_dequantised_weights(name, tmp_path):
    folder, family = write_pipeline(tmp_path, name), FAMILIES[name]
    for kind in KINDS:
        plain = load_published_text(folder, family, device="cpu")
        before = plain.encode(CAPTIONS).tokens
        encoder = load_published_text(folder, family, device="cpu", precision=kind)
        assert encoder.fingerprint() != plain.fingerprint()
        model = encoder.model
        assert with_the_weights_of(plain.model, model) > sum(p.numel() for p in plain.model.parameters()) / 4
        found, wanted = encoder.encode(CAPTIONS), plain.encode(CAPTIONS)
        for one, other in ((found.tokens, wanted.tokens), (found.pooled, wanted.pooled)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not torch.equal(before, wanted.tokens) and not any(p.requires_grad for p in model.parameters())
        layers = dict(base_layers(model))
        size = sum(p.nbytes if n in layers else 2 * p.numel() for n, p in model.named_parameters())
        assert text_encoder_bytes(folder, family, kind) == size


@pytest.mark.parametrize("name", ("clip", "t5"))
@pytest.mark.parametrize("kind", KINDS)
def test_encoders_of_a_folder_of_transformers(name, kind, request):
    folder, _ = request.getfixturevalue(name)
    encoder, plain = load_text_encoder(folder, device="cpu", precision=kind), load_text_encoder(folder, device="cpu")
    with_the_weights_of(plain.model, encoder.model)
    found, wanted = encoder.encode(CAPTIONS), plain.encode(CAPTIONS)
    assert torch.equal(found.mask, wanted.mask)
    for one, other in ((found.tokens, wanted.tokens), (found.pooled, wanted.pooled)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def large_t5(folder):
    """Write a T5 with 8 M weights, only a few of them in embedding tables."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=256, d_kv=32, d_ff=512, num_layers=12, num_heads=8)
    model = T5EncoderModel(config)
    model.bfloat16().save_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_holds_one_tensor_beside_the_stored_ones(kind, tmp_path):
    large_t5(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors").values()
    whole, largest = sum(t.nbytes for t in tensors), max(t.numel() for t in tensors)

    def load():
        return transformers_model(tmp_path, "T5EncoderModel", "model", torch.bfloat16, kind)

    load()  # imports and caches
    kept = kept_bytes(load)
    assert kept < (0.6 if kind != "nf4" else 0.35) * whole
    assert peak_bytes(load) < kept + 32 * largest + 300_000 < 0.95 * whole  # nf4 makes temporary 4-byte numbers
