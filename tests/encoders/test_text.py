"""Frozen text encoders match transformers' own models, and a missing encoder causes a helpful error."""

import json
import time

import pytest
import torch

from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.encoders import folder as folder_module
from opendit.encoders.text import BYTES, HUB, load_text_encoder, text_geometry
from opendit.models.conditioning import TextCondition
from opendit.training.data_plan import open_data
from opendit.training.model_plan import plan_model

CAPTIONS = ["", "a seven moving left", "zwei fünf", "a seven " * 20]


def save_clip(path, **options):
    """Write and return a tiny CLIP text model with a byte-level BPE of single letters and a few merges."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [bytes([b]).decode("latin-1") for b in range(33, 256) if b not in range(127, 161) and b != 173]
    merges = [("s", "e"), ("v", "e"), ("se", "ve"), ("seve", "n</w>"), ("o", "n</w>")]
    pieces = letters + [letter + "</w>" for letter in letters] + ["".join(pair) for pair in merges]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    CLIPTokenizer(vocab=vocabulary, merges=merges).save_pretrained(path)
    torch.manual_seed(0)
    config = {
        "vocab_size": len(vocabulary),
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 30,
        "bos_token_id": vocabulary["<|startoftext|>"],
        "eos_token_id": vocabulary["<|endoftext|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
        **options,
    }
    model = CLIPTextModel(CLIPTextConfig(**config)).eval()
    model.save_pretrained(path)
    return model


def save_t5(path):
    """Write and return a tiny T5 encoder with a Unigram tokenizer of letters and one word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁seven", -1.0)]
    pieces += [(c, -5.0) for c in "▁abcdefghijklmnopqrstuvwxyzü"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(pieces), d_model=20, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    model = T5EncoderModel(config).eval()
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip")
    return str(path), save_clip(path)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    path = tmp_path_factory.mktemp("t5")
    return str(path), save_t5(path)


@torch.no_grad()
def one_by_one(encoder, model, caption):
    """Encode one caption without padding through transformers."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(encoder.name)(
        caption, truncation=True, max_length=encoder.max_tokens, return_tensors="pt"
    )
    return model(**words)


def check(encoder, model, pooled_of):
    got = encoder.encode(CAPTIONS)
    assert isinstance(got, TextCondition) and got.tokens.dtype == torch.float32 and got.mask.dtype == torch.bool
    assert got.tokens.shape == (4, encoder.max_tokens, encoder.width) and got.pooled.shape == (4, encoder.width)
    for row, caption in enumerate(CAPTIONS):
        expected = one_by_one(encoder, model, caption)
        length = expected.last_hidden_state.shape[1]
        assert got.mask[row].tolist() == [True] * length + [False] * (encoder.max_tokens - length)
        torch.testing.assert_close(got.tokens[row, :length], expected.last_hidden_state[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.pooled[row], pooled_of(expected)[0], rtol=1e-4, atol=1e-5)
    assert got.mask.sum(1).tolist()[-1] == encoder.max_tokens  # cut
    assert torch.cdist(got.pooled, got.pooled).add(10 * torch.eye(4)).min() > 1e-3
    assert not got.tokens.requires_grad and not got.tokens.is_inference()


def test_clip_is_transformers(clip):
    path, model = clip
    encoder = load_text_encoder(path, device="cpu", dtype=torch.float16)
    assert (encoder.kind, encoder.width, encoder.max_tokens) == text_geometry(path) == ("clip", 24, 30)
    check(encoder, model, lambda output: output.pooler_output)


def test_t5_is_transformers(t5):
    path, model = t5
    encoder = load_text_encoder(path, device="cpu", max_tokens=26)
    assert text_geometry(path) == ("t5", 20, 120) and (encoder.kind, encoder.width) == ("t5", 20)
    check(encoder, model, lambda output: output.last_hidden_state.mean(dim=1))
    assert load_text_encoder(path, device="cpu").max_tokens == 120


def test_the_text_model_of_a_whole_clip(tmp_path, clip):
    """openai/clip-vit-base-patch32 also holds a vision model. Only the text model is loaded, with its weights."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    save_clip(tmp_path)  # the tokenizer
    text = CLIPTextConfig.from_pretrained(clip[0])
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(1)
    CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict())).save_pretrained(tmp_path)
    whole = CLIPModel.from_pretrained(tmp_path).eval()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "clip"
    encoder = load_text_encoder(str(tmp_path), device="cpu")
    assert (encoder.kind, encoder.width, encoder.max_tokens) == ("clip", 24, 30)
    check(encoder, whole.text_model, lambda output: output.pooler_output)


def test_no_bar_of_transformers_is_drawn(t5, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    load_text_encoder(t5[0], device="cpu")
    assert "Loading weights" not in capfd.readouterr().err and logging.is_progress_bar_enabled()


def test_many_captions_go_in_parts(clip, monkeypatch):
    encoder = load_text_encoder(clip[0], device="cpu")
    whole = encoder.encode(CAPTIONS * 2)
    monkeypatch.setattr("opendit.encoders.text.CAPTIONS_AT_ONCE", 3)
    for a, b in zip(whole.tensors(), encoder.encode(CAPTIONS * 2).tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_encoder_is_frozen_and_no_module(clip):
    encoder = load_text_encoder(clip[0], device="cpu", dtype=torch.bfloat16)
    assert encoder.dtype == torch.float32 and not encoder.model.training  # half precision is for GPUs
    assert not any(p.requires_grad for p in encoder.model.parameters())
    holder = torch.nn.Linear(1, 1)
    holder.encoder = encoder
    assert set(holder.state_dict()) == {"weight", "bias"}


def test_an_empty_caption_has_a_token_even_without_an_end_token(t5, tmp_path):
    from transformers import PreTrainedTokenizerFast

    path, _ = t5
    encoder = load_text_encoder(path, device="cpu", max_tokens=8)
    plain = PreTrainedTokenizerFast.from_pretrained(path)
    plain.backend_tokenizer.post_processor = None
    encoder.tokenizer = plain
    got = encoder.encode(["", "seven"])
    assert got.mask.sum(1).tolist() == [1, 1] and got.tokens.isfinite().all() and got.pooled.isfinite().all()


def test_fingerprints_tell_encoders_apart(clip, t5):
    a, b = (load_text_encoder(clip[0], device="cpu") for _ in range(2))
    assert a.fingerprint() == b.fingerprint()
    assert a.fingerprint() != load_text_encoder(clip[0], device="cpu", max_tokens=20).fingerprint()
    assert a.fingerprint() != load_text_encoder(t5[0], device="cpu").fingerprint()
    with torch.no_grad():
        next(b.model.parameters()).view(-1)[0] += 1e-3
    assert a.fingerprint() != b.fingerprint()


# ---------------------------------------------------------------- geometry and errors


def test_geometry_needs_no_weights_and_no_hub(monkeypatch, clip, tmp_path):
    monkeypatch.setattr(folder_module, "probe_hub", lambda endpoint: pytest.fail("asked the hub"))
    assert text_geometry("bytes") == BYTES and BYTES[0] == "bytes"
    assert text_geometry("clip") == ("clip", 512, 77) and text_geometry("t5") == ("t5", 1024, 120)
    (tmp_path / "config.json").write_text('{"model_type": "clip", "text_config": {}}')
    assert text_geometry(str(tmp_path)) == ("clip", 512, 77)


def test_a_path_that_is_no_encoder(clip, tmp_path):
    needs = "--text_encoder PATH needs .*config.json.*--text_encoder bytes"
    for call in (text_geometry, lambda p: load_text_encoder(p, device="cpu")):
        for path in ("emma", "./emma", "/no/such/folder"):
            with pytest.raises(FileNotFoundError, match=f"--text_encoder {path}: .*{needs}"):
                call(path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=f"isn't the configuration of a text encoder: .*; {needs}"):
            call(str(tmp_path))
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        with pytest.raises(ValueError, match=f"of type 'bert', not clip.*t5.*{needs}"):
            call(str(tmp_path))
    (tmp_path / "config.json").write_text(clip[1].config.to_json_string())
    with pytest.raises(ValueError, match=f"(?s)can't be loaded .*{needs}"):
        load_text_encoder(str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match="part of the model"):
        load_text_encoder("bytes", device="cpu")


def test_lengths_that_do_not_fit(clip, t5):
    for tokens in (0, 1, 31):  # CLIP's begin and end take two
        with pytest.raises(
            ValueError, match=f"--max_text_tokens {tokens}: out of range of --text_encoder .*; give 2 to 30"
        ):
            load_text_encoder(clip[0], device="cpu", max_tokens=tokens)
    assert load_text_encoder(clip[0], device="cpu", max_tokens=2).encode(["a b c", ""]).mask.all()
    with pytest.raises(ValueError, match="--max_text_tokens 0: .*at least 1"):
        load_text_encoder(t5[0], device="cpu", max_tokens=0)


def test_missing_weights_are_not_made_up(clip, tmp_path):
    from safetensors.torch import load_file, save_file

    save_clip(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = next(n for n in state if "layers.1" in n and n.endswith("fc1.weight"))
    state["another"] = state.pop(name)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lack .*fc1.weight"):
        load_text_encoder(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["clip", "t5", f"openai/clip-vit-large-patch14@{'0' * 40}"])
@pytest.mark.parametrize("offline", [True, False])
def test_an_unreachable_hub_is_told_fast(monkeypatch, tmp_path, name, offline):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))  # an empty cache
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
    start = time.monotonic()
    where = HUB[name][0] if name in HUB else name.partition("@")[0]
    expected = rf"--text_encoder {name}: {where} isn't in the local cache.*--text_encoder PATH .*--text_encoder bytes"
    with pytest.raises(FileNotFoundError, match=expected):
        load_text_encoder(name, device="cpu")
    assert time.monotonic() - start < 15


def test_the_cache_serves_without_the_hub(monkeypatch, tmp_path, clip):
    from huggingface_hub import constants

    repository, commit = tmp_path / "models--openai--clip-vit-base-patch16", "57c216476eefef5ab752ec549e440a49ae4ae5f3"
    snapshot = repository / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(clip[0])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)  # a newer commit does not matter
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(folder_module, "probe_hub", lambda endpoint: pytest.fail("asked the hub"))
    name = f"openai/clip-vit-base-patch16@{commit}"
    assert text_geometry(name) == ("clip", 24, 30)
    assert load_text_encoder(name, device="cpu").width == 24
    with pytest.raises(ValueError, match="needs its commit.*--text_encoder openai/clip-vit-base-patch16@COMMIT"):
        load_text_encoder("openai/clip-vit-base-patch16", device="cpu")


@pytest.mark.parametrize("tokens", [1, 78])
def test_a_length_that_does_not_fit_is_known_before_anything_is_loaded(tokens, tmp_path):
    argv = f"--model DiT-Ti/2 --data_path mock --image_size 32 --text_encoder clip --max_text_tokens {tokens}".split()
    flags = parse(TrainConfig, argv)
    dataset = open_data(flags)
    with pytest.raises(
        ValueError, match=f"--max_text_tokens {tokens}: out of range of --text_encoder clip; give 2 to 77"
    ):
        plan_model(flags, dataset)
