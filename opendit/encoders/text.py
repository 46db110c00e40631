"""Encode captions with the frozen text encoders CLIP and T5, from a local folder or the hub.

A text encoder is no ``nn.Module``, so that a model's state can't contain one. The encoder ``bytes`` is trained with the
model (see opendit.models.conditioning); only its name and sizes are here.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from opendit.common.utils import shown
from opendit.encoders.folder import (
    CONFIG,
    fetch,
    lazy_module,
    loading,
    pinned,
    reason,
    transformers_model,
)
from opendit.encoders.vae import module_fingerprint
from opendit.models.conditioning import TextCondition, masked_mean

BYTES = ("bytes", 128, 64)  # kind, default width, default number of tokens
# Limits the bytes encoder's default number of tokens, because attention's memory grows quadratically.
MOST_BYTES = 512
MOST_TEXT_TOKENS = 16_384  # maximum of --max_text_tokens
# Short name -> (repository on the hub, commit, geometry). Flan-T5 is used instead of T5, because its repository has
# safetensors. For CLIP, only this commit has safetensors.
HUB = {
    "clip": ("openai/clip-vit-base-patch32", "c237dc49a33fc61debc9276459120b7eac67e7ef", ("clip", 512, 77)),
    "t5": ("google/flan-t5-large", "0613663d0d48ea86ba8cb3d7a44f0f65dc596a2a", ("t5", 1024, 120)),
}
T5_TOKENS = 120  # T5 has no maximum; PixArt-alpha uses this number (Chen et al. 2024)
# model_type in config.json -> (kind, class of ``transformers``).
CLASSES = {
    "clip": ("clip", "CLIPTextModel"),
    "clip_text_model": ("clip", "CLIPTextModel"),
    "t5": ("t5", "T5EncoderModel"),
    "mt5": ("t5", "MT5EncoderModel"),
    "umt5": ("t5", "UMT5EncoderModel"),
}
CAPTIONS_AT_ONCE = 64
STEM = "model"
FILES = (CONFIG, f"{STEM}.safetensors")
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "spiece.model",
)  # fmt: skip
# The chat template of a language model's tokenizer, if it is not in tokenizer_config.json.
CHAT_TEMPLATE = "chat_template.jinja"
MOST_TOKENIZER_BYTES = 64 << 20
# Tokenizer classes of ``transformers`` that read only TOKENIZER_FILES and CHAT_TEMPLATE.
TOKENIZERS = (
    None, "CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast", "PreTrainedTokenizerFast",
    "TokenizersBackend",
)  # fmt: skip


class TextEncoder:
    """A frozen encoder of ``transformers`` with its tokenizer. Every caption is padded or cut to ``max_tokens`` tokens.

    kind: "clip" (the pooled vector is the end token's output) or "t5" (the pooled vector is the tokens' mean). width: D
    of the tokens. dtype: dtype of weights and activations on a GPU, see :func:`working_dtype`."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        name: str,
        kind: str,
        width: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.name, self.kind, self.width, self.max_tokens = name, kind, width, max_tokens
        self.device = torch.device(device)
        self.dtype = dtype = working_dtype(kind, self.device, dtype)
        self.model = model.eval().requires_grad_(False).to(self.device, dtype)
        self.tokenizer = tokenizer
        self.tokenizer.padding_side = "right"

    @torch.no_grad()
    def encode(self, captions: list[str]) -> TextCondition:
        """Encode captions to tokens (B, L, D), mask (B, L) and pooled (B, D), on the encoder's device."""
        parts = [
            self._encode(captions[start : start + CAPTIONS_AT_ONCE])
            for start in range(0, len(captions), CAPTIONS_AT_ONCE)
        ]
        return TextCondition.cat(parts)

    def _encode(self, captions: list[str]) -> TextCondition:
        words = self.tokenizer(
            captions, padding="max_length", truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self.device)
        mask = words.attention_mask.bool()
        mask[:, 0] = True  # give empty captions one token, even if the tokenizer adds no begin and end tokens
        output = self.model(input_ids=words.input_ids, attention_mask=mask.long())
        tokens = output.last_hidden_state
        return TextCondition(tokens, mask, output.pooler_output if self.kind == "clip" else masked_mean(tokens, mask))

    def count_tokens(self, captions: list[str]) -> list[int]:
        """Count each caption's tokens before cutting, including begin and end tokens."""
        if not captions:
            return []
        return [len(ids) for ids in self.tokenizer(captions, verbose=False).input_ids]

    def fingerprint(self) -> str:
        """Hash all values that embeddings depend on: the weights, the vocabulary and the length."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return module_fingerprint(self.model, f"{self.kind} {self.max_tokens}", vocabulary)


def working_dtype(kind: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an encoder computes: fp32 on a CPU, ``dtype`` on a GPU, but never fp16 for T5."""
    if device.type != "cuda":
        return torch.float32
    # T5 was trained in bf16, and its activations exceed the range of fp16.
    return torch.bfloat16 if kind == "t5" and dtype == torch.float16 else dtype


def text_geometry(name: str) -> tuple[str, int, int]:
    """Return (kind, width, default number of tokens) of ``--text_encoder name`` without reading its weights. The kind
    is "bytes", "clip" or "t5". CLIP's default is its maximum. Raises as :func:`load_text_encoder`."""
    if name == "bytes":
        return BYTES
    if name in HUB:
        return HUB[name][2]
    return _geometry(_read_config(name, _folder(name, (CONFIG,), ())))


def fitting_tokens(longest: int) -> int:
    """Return the ``bytes`` encoder's default number of tokens, for captions of up to ``longest`` tokens."""
    shortest = BYTES[2]
    return min(MOST_BYTES, max(1, -(-longest // shortest)) * shortest)


def check_tokens(name: str, kind: str, longest: int, tokens: int) -> None:
    """Raise ValueError if the encoder ``name`` can't pad or cut captions to ``tokens`` tokens. CLIP needs at least two,
    begin and end, and at most ``longest``; others need one. kind, longest: from :func:`text_geometry`."""
    least = 2 if kind == "clip" else 1
    if tokens < least or (kind == "clip" and tokens > longest):
        bounds = f"{least} to {longest}" if kind == "clip" else f"at least {least}"
        raise ValueError(f"--max_text_tokens {tokens}: out of range of --text_encoder {name}; give {bounds}")


def load_text_encoder(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    max_tokens: int | None = None,
    precision: str = "bf16",
) -> TextEncoder:
    """Load the frozen encoder of ``--text_encoder name``.

    name: "clip", "t5", another repository on the hub with its commit (ORGANISATION/NAME@COMMIT), or a folder in
    transformers' format. max_tokens: captions are padded or cut to this number of tokens, by default CLIP's maximum, or
    120 for T5. precision: storage of linear layers' weights, one of ``opendit.config.names.BASE_PRECISIONS``; bf16 is
    ``dtype``. Raises FileNotFoundError or ValueError, naming the flag and the fix, if the encoder is missing or bad."""
    if name == "bytes":
        raise ValueError("--text_encoder bytes: a part of the model, with nothing to load; take it from there")
    kind, width, longest = text_geometry(name)
    tokens = longest if max_tokens is None else max_tokens
    check_tokens(name, kind, longest, tokens)
    stored: dict[str, Any] = {}
    if precision != "bf16":
        device = torch.device(device)
        stored = dict(dtype=working_dtype(kind, device, dtype), kind=precision, device=device)
    model, tokenizer = _load(name, encoder_folder(name), **stored)
    return TextEncoder(
        model, tokenizer, name=name, kind=kind, width=width, max_tokens=tokens, device=device, dtype=dtype
    )


def encoder_folder(name: str) -> Path:
    """Return the folder of the frozen encoder ``--text_encoder name``. Downloads a missing encoder."""
    return _folder(name, FILES, TOKENIZER_FILES)


def _load(name: str, folder: Path, **stored: Any):
    """Load (model, tokenizer) with ``transformers``. stored: further arguments of :func:`transformers_model`."""
    config = _read_config(name, folder)
    with loading(f"--text_encoder {name}: {folder}", f"; {_needs()}"):
        check_tokenizer(folder)
        model = transformers_model(folder, CLASSES[config["model_type"]][1], STEM, **stored)
        how: dict[str, Any] = dict(local_files_only=True, trust_remote_code=False)
        tokenizer = lazy_module("transformers").AutoTokenizer.from_pretrained(folder, **how)
        if config["model_type"].startswith("clip") and not isinstance(model.config.eos_token_id, int):
            raise ValueError(f"its eos_token_id is {model.config.eos_token_id!r}, no number")
        check_vocabulary(tokenizer, model)
    return model, tokenizer


def check_vocabulary(tokenizer: Any, model: Any) -> None:
    """Raise ValueError if the tokenizer has tokens for which the model has no embeddings."""
    words, known = max(tokenizer.get_vocab().values()), model.get_input_embeddings().num_embeddings
    if words >= known:
        raise ValueError(f"its tokenizer has tokens up to {words}, and its weights {known} embeddings")


def check_tokenizer(folder: Path, classes: tuple[str | None, ...] = TOKENIZERS) -> None:
    """Raise ValueError if the tokenizer's class is not in ``classes``, or if a file is too large or not regular."""
    from opendit.common.json_models import read_file  # imports pydantic, so only when a file is read
    from opendit.encoders.schema import PRETRAINED

    for name in (*TOKENIZER_FILES, CHAT_TEMPLATE):
        path = folder / name
        if os.path.lexists(path) and not (path.is_file() and path.stat().st_size <= MOST_TOKENIZER_BYTES):
            raise ValueError(f"{path} is no regular file of at most {MOST_TOKENIZER_BYTES:,} bytes")
    path = folder / "tokenizer_config.json"
    found = read_file(path, PRETRAINED).get("tokenizer_class") if path.is_file() else None
    if found not in classes:
        raise ValueError(f"{path}: tokenizer_class is {shown(found)}, none of {', '.join(filter(None, classes))}")


def _is_folder(name: str) -> bool:
    """Return True if ``name`` is a path, False if it is a repository on the hub."""
    return name not in HUB and (Path(name).expanduser().exists() or name.count("/") != 1 or name[0] in "./~")


def _folder(name: str, files: tuple[str, ...], also: tuple[str, ...]) -> Path:
    """Return an encoder's folder, downloaded if needed. files: required files. also: optional files."""
    if _is_folder(name):
        return Path(name).expanduser()
    repository, commit = HUB[name][:2] if name in HUB else pinned(name) or (name, None)
    if commit is None:
        raise ValueError(
            f"--text_encoder {name}: a repository of the hub needs its commit, for others may change what is there: "
            f"--text_encoder {name}@COMMIT, of 40 hexadecimal digits; {_needs()}"
        )
    return fetch(repository, commit, files, also, f"--text_encoder {name}: {repository}", _needs())


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    from opendit.common.json_models import read_file
    from opendit.encoders.schema import TEXT

    path = folder / CONFIG
    try:
        config = read_file(path, TEXT)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"--text_encoder {name}: {path} doesn't exist; {_needs()}") from error
    except (OSError, ValueError) as error:
        why = reason(path, error)
        raise ValueError(
            f"--text_encoder {name}: {path} isn't the configuration of a text encoder: {why}; {_needs()}"
        ) from error
    found = config.get("model_type")
    if found not in CLASSES:
        raise ValueError(
            f"--text_encoder {name}: is a model of type {shown(found)}, not {', '.join(CLASSES)}; {_needs()}"
        )
    if CLASSES[found][0] == "t5" and "d_model" not in config:
        raise ValueError(
            f"--text_encoder {name}: {path} isn't the configuration of a text encoder: no d_model; {_needs()}"
        )
    return config


def _geometry(config: dict[str, Any]) -> tuple[str, int, int]:
    if CLASSES[config["model_type"]][0] == "t5":
        return "t5", config["d_model"], T5_TOKENS
    text = config.get("text_config") or config
    # Some configurations, for example openai/clip-vit-base-patch32, omit values that equal CLIP's defaults.
    return "clip", text.get("hidden_size", 512), text.get("max_position_embeddings", 77)


def _needs() -> str:
    return (
        "--text_encoder PATH needs a folder with a CLIP or T5 of transformers (config.json, model.safetensors and the "
        "tokenizer's files), and --text_encoder bytes trains its own"
    )
