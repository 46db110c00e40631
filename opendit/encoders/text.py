"""Words -> embeddings: the frozen text encoders CLIP and T5, from a local folder or the hub.

A text encoder is a plain object, not a module, so it never ends up in a model's state. The encoder that is trained with
a model, ``bytes``, is opendit.models.bytes_text; here it has a size and a name only.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from opendit.encoders.vae import from_hub, module_fingerprint
from opendit.models.conditioning import masked_mean

BYTES = ("bytes", 128, 64)  # kind, width and tokens of the trained encoder unless flags say otherwise
# Short name -> repository of the hub and its geometry. Flan-T5's repository has safetensors and a tokenizer that needs
# no further package; T5's own have neither.
HUB = {
    "clip": ("openai/clip-vit-base-patch32", ("clip", 512, 77)),
    "t5": ("google/flan-t5-large", ("t5", 1024, 120)),
}
T5_TOKENS = 120  # T5 knows no longest caption; PixArt-alpha's choice (Chen et al. 2024)
# model_type of config.json -> (kind, class of transformers)
CLASSES = {
    "clip": ("clip", "CLIPTextModel"),
    "clip_text_model": ("clip", "CLIPTextModel"),
    "t5": ("t5", "T5EncoderModel"),
    "mt5": ("t5", "MT5EncoderModel"),
    "umt5": ("t5", "UMT5EncoderModel"),
}
CAPTIONS_AT_ONCE = 64


class TextTokens(NamedTuple):
    """Encoded captions: tokens (B, L, D), mask (B, L) bool (True: a token, False: padding), pooled (B, D)."""

    tokens: Tensor
    mask: Tensor
    pooled: Tensor


class TextEncoder:
    """A frozen encoder of transformers with its tokenizer.

    kind: "clip" (pooled: the output at the end token) or "t5" (pooled: the mean over the tokens). width: D.
    max_tokens: L, to which every caption is padded or cut, so that all batches have one shape. dtype: of weights and
    activations on a GPU; a CPU always computes in fp32.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer,
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
        if self.device.type != "cuda":
            dtype = torch.float32
        elif kind == "t5" and dtype == torch.float16:
            dtype = torch.bfloat16  # T5 was trained in bf16, and its activations leave the range of fp16
        self.dtype = dtype
        self.model = model.eval().requires_grad_(False).to(self.device, dtype)
        self.tokenizer = tokenizer
        self.tokenizer.padding_side = "right"

    @torch.no_grad()
    def encode(self, captions: list[str]) -> TextTokens:
        """Captions to tokens (B, L, D), mask (B, L) and pooled (B, D), on the encoder's device and in its dtype."""
        parts = [
            self._encode(captions[start : start + CAPTIONS_AT_ONCE])
            for start in range(0, len(captions), CAPTIONS_AT_ONCE)
        ]
        return TextTokens(*(torch.cat(field) for field in zip(*parts, strict=True)))

    def _encode(self, captions: list[str]) -> TextTokens:
        words = self.tokenizer(
            captions, padding="max_length", truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self.device)
        mask = words.attention_mask.bool()
        mask[:, 0] = True  # a tokenizer without begin and end tokens leaves nothing of an empty caption
        output = self.model(input_ids=words.input_ids, attention_mask=mask.long())
        tokens = output.last_hidden_state
        return TextTokens(tokens, mask, output.pooler_output if self.kind == "clip" else masked_mean(tokens, mask))

    def fingerprint(self) -> str:
        """A hash of the weights, the vocabulary and the length: of all that the embeddings depend on."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return module_fingerprint(self.model, f"{self.kind} {self.max_tokens}", vocabulary)


def text_geometry(name: str) -> tuple[str, int, int]:
    """(kind, width, most tokens of a caption) of ``--text_encoder name``, without making or downloading weights.

    kind is bytes, clip or t5. Raises FileNotFoundError or ValueError as ``load_text_encoder`` does."""
    if name == "bytes":
        return BYTES
    if name in HUB:
        return HUB[name][1]
    return _geometry(name, _read_config(name))


def load_text_encoder(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    max_tokens: int | None = None,
) -> TextEncoder:
    """The frozen encoder of ``--text_encoder name``: "clip" or "t5" (from the local cache or the hub), another
    repository of the hub such as openai/clip-vit-large-patch14, or a folder in transformers' format.

    max_tokens: captions are padded and cut to this many, by default the longest that CLIP knows, and 120 with T5.
    Raises FileNotFoundError or ValueError, naming the flag and what to do, if there is no such encoder."""
    if name == "bytes":
        raise ValueError("--text_encoder bytes is a part of the model, there is nothing to load")
    kind, width, longest = text_geometry(name)
    tokens = longest if max_tokens is None else max_tokens
    if tokens < 1 or (kind == "clip" and tokens > longest):
        bounds = f"1 to {longest}" if kind == "clip" else "at least 1"
        raise ValueError(f"--max_text_tokens {tokens}: --text_encoder {name} takes {bounds}")
    model, tokenizer = _load(name)
    return TextEncoder(
        model, tokenizer, name=name, kind=kind, width=width, max_tokens=tokens, device=device, dtype=dtype
    )


def _load(name: str):
    """(model, tokenizer) of transformers."""
    import transformers  # seconds to import, so only where an encoder is really used

    where = _where(name)
    model_class = getattr(transformers, CLASSES[_read_config(name)["model_type"]][1])

    def fetch(local_files_only: bool):
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=local_files_only)
        model, report = model_class.from_pretrained(
            where, local_files_only=local_files_only, output_loading_info=True, dtype=torch.float32
        )
        if report["missing_keys"]:  # transformers would go on with random weights
            raise ValueError(f"its weights lack {sorted(report['missing_keys'])[0]}")
        return model, tokenizer

    if not _is_folder(name):
        return from_hub(fetch, f"--text_encoder {name}: {where}", _needs())
    try:
        return fetch(True)
    except Exception as error:
        raise ValueError(f"--text_encoder {name}: {where} can't be loaded ({error}); {_needs()}") from error


def _is_folder(name: str) -> bool:
    """Whether a name is a path; if not, it is a repository of the hub."""
    return name not in HUB and (Path(name).expanduser().exists() or name.count("/") != 1 or name[0] in "./~")


def _where(name: str) -> str:
    """The folder, or the repository of the hub."""
    return HUB[name][0] if name in HUB else str(Path(name).expanduser())


def _read_config(name: str) -> dict:
    if _is_folder(name):
        path = Path(_where(name)) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"--text_encoder {name}: {path} doesn't exist; {_needs()}")
    else:
        from huggingface_hub import hf_hub_download

        path = from_hub(
            lambda local: Path(hf_hub_download(_where(name), "config.json", local_files_only=local)),
            f"--text_encoder {name}: {_where(name)}",
            _needs(),
        )
    try:
        config = json.loads(path.read_text())
        _geometry(name, config)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--text_encoder {name}: {path} isn't the configuration of a text encoder; {_needs()}"
        ) from error
    return config


def _geometry(name: str, config: dict) -> tuple[str, int, int]:
    found = config.get("model_type")
    if found not in CLASSES:
        raise ValueError(f"--text_encoder {name} is a model of type {found}, not {', '.join(CLASSES)}; {_needs()}")
    if CLASSES[found][0] == "t5":
        return "t5", config["d_model"], T5_TOKENS
    text = config.get("text_config", config)
    # CLIP's own defaults are left out of some configurations, e.g. of openai/clip-vit-base-patch32.
    return "clip", text.get("hidden_size", 512), text.get("max_position_embeddings", 77)


def _needs() -> str:
    return (
        "--text_encoder PATH needs a folder with a CLIP or T5 of transformers (config.json, model.safetensors and the "
        "tokenizer's files), and --text_encoder bytes trains its own"
    )
