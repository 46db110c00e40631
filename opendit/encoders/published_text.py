"""Encode prompts for published models, through the pipeline classes of diffusers.

A pipeline is built from tokenizers and text encoders only. Its method ``encode_prompt`` applies templates, cleaning and
padding. The table PROMPTS gives the method's arguments and the layout of its result. For all families, the final result
is a :class:`TextCondition`: tokens (B, L, D), mask (B, L) and pooled (B, P), with P = 0 if there is no pooled vector.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from opendit.common.utils import hash_parts, shown
from opendit.config.architectures import family_in, name_of_folder
from opendit.encoders.folder import (
    CONFIG,
    PIPELINE_INDEX,
    check_index,
    lazy_module,
    loading,
    read_json_of,
    refuse_adapters,
    stored_bytes,
    transformers_model,
    weight_shapes,
)
from opendit.encoders.text import STEM, TOKENIZERS, check_tokenizer, check_vocabulary
from opendit.encoders.vae import module_fingerprint
from opendit.models.conditioning import TextCondition
from opendit.models.families import FAMILIES
from opendit.models.families.base import Family

# limits memory: for 16 captions of 512 tokens, a layer of UMT5-XXL needs 1.5 GiB for the scores and softmax
CAPTIONS_AT_ONCE = 16
# Class of ``transformers`` -> accepted values of model_type in config.json.
MODEL_TYPES = {
    "CLIPTextModel": ("clip_text_model", "clip"),
    "CLIPTextModelWithProjection": ("clip_text_model", "clip"),
    "T5EncoderModel": ("t5",),
    "UMT5EncoderModel": ("umt5",),
    "Qwen3Model": ("qwen3",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl",),
    "Mistral3ForConditionalGeneration": ("mistral3",),
    "Gemma2Model": ("gemma2",),
}
CLASSES_OF_TOKENIZERS = (
    *TOKENIZERS, "Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast", "LlamaTokenizer",
    "LlamaTokenizerFast",
)  # fmt: skip
# Class of a processor for text and pictures -> class of its tokenizer.
TOKENIZER_OF = {"PixtralProcessor": "PreTrainedTokenizerFast"}
# A tokenizer's folder must have all files in one of these sets.
VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",))
# A prompt that shows which cleaning steps a pipeline applies.
PROBE = "  It&amp;#39;s a “caf\u00c3\u00a9”\n "


@dataclass(frozen=True)
class Prompts:
    """The arguments of a pipeline's ``encode_prompt``, and the layout of its result.

    The result is a tuple. Its first item is the tokens: a tensor (B, L, D), or a list of B tensors of unequal length.
    """

    # Names of the components that compute the tokens.
    encoder: str = "text_encoder"
    tokenizer: str = "tokenizer"
    # Arguments of ``encode_prompt`` besides prompt, device and max_sequence_length.
    settings: Mapping[str, Any] = field(default_factory=dict)
    pooled: tuple[str, ...] = ()  # names of the components for the pooled vector; () if there is none
    pooled_at: int = 1  # index of the pooled vector in the result
    # True if the result's second item is the mask (B, L). The item may be None if no token is padding.
    masked: bool = False
    layers: int = 1  # a token is the concatenated output of this many encoder layers
    dropped: int = 0  # number of template tokens missing at the start
    # function (pipeline, prompt) -> the text to tokenize, for example the prompt in a chat template
    written: Callable[[Any, str], str] = lambda pipeline, prompt: prompt
    # True if negative prompts, including the empty prompt, are encoded without ``written``. Then the result's third and
    # fourth items are the negative prompts' tokens and mask.
    bare: bool = False
    unused: str | None = None  # name of a component that the pipeline requires but never uses here


def _chat(pipeline: Any, prompt: str, thinking: bool) -> str:
    """Return the prompt as a user's message in the chat template, like ZImagePipeline and Flux2KleinPipeline."""
    message = [{"role": "user", "content": prompt}]
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinking}
    return pipeline.tokenizer.apply_chat_template(message, **options)


def _described(pipeline: Any, prompt: str) -> str:
    """Return the prompt in the template of QwenImagePipeline."""
    return pipeline.prompt_template_encode.format(prompt)


def _conversation(pipeline: Any, prompt: str) -> str:
    """Return the prompt after the instruction of Flux2Pipeline, in the chat template."""
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input

    (messages,) = format_input([prompt], pipeline.system_message)
    return pipeline.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)


def _cleaned(pipeline: Any, prompt: str) -> str:
    """Clean the prompt like WanPipeline: apply ftfy if it is installed, and replace HTML entities."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return prompt_clean(prompt)


def _instructed(pipeline: Any, prompt: str) -> str:
    """Return the prompt after the instruction of Lumina2Pipeline."""
    return f"{pipeline.system_prompt} <Prompt Start> {prompt}"


PROMPTS = {
    "FluxPipeline": Prompts("text_encoder_2", "tokenizer_2", {"prompt_2": None}, pooled=("text_encoder",)),
    "ZImagePipeline": Prompts(settings={"do_classifier_free_guidance": False}, written=partial(_chat, thinking=True)),
    "WanPipeline": Prompts(settings={"do_classifier_free_guidance": False}, written=_cleaned),
    "Flux2Pipeline": Prompts(written=_conversation, layers=3),
    "Flux2KleinPipeline": Prompts(written=partial(_chat, thinking=False), layers=3),
    "QwenImagePipeline": Prompts(masked=True, dropped=34, written=_described),
    "StableDiffusion3Pipeline": Prompts(
        "text_encoder_3",
        "tokenizer_3",
        {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False},
        pooled=("text_encoder", "text_encoder_2"),
        pooled_at=2,
    ),
    "LTXPipeline": Prompts(settings={"do_classifier_free_guidance": False}, masked=True),
    "Cosmos2TextToImagePipeline": Prompts(settings={"do_classifier_free_guidance": False}, unused="safety_checker"),
    "Lumina2Pipeline": Prompts(
        settings={"do_classifier_free_guidance": False}, masked=True, written=_instructed, bare=True
    ),
}


class PublishedText:
    """A published model's frozen text encoders, called through its pipeline.

    width: D of the tokens. pooled_width: P of the pooled vector. max_tokens: prompts are cut to this number of tokens,
    and padded to it unless the family removes padding."""

    def __init__(
        self, pipeline: Any, family: Family, *, name: str, device: torch.device | str, max_tokens: int | None = None
    ):
        self.pipeline, self.family, self.name, self.device = pipeline, family, name, torch.device(device)
        self.prompts = PROMPTS[family.pipelines[0]]
        self.max_tokens = max_tokens or family.text.tokens
        self.width = self._component(self.prompts.encoder).config.get_text_config().hidden_size * self.prompts.layers
        configs = {name: self._component(name).config.to_dict() for name in self.prompts.pooled}
        self.pooled_width = sum(_pooled_width(family, name, config) for name, config in configs.items())

    @property
    def dtype(self) -> torch.dtype:
        return self._component(self.prompts.encoder).dtype

    @property
    def model(self) -> torch.nn.ModuleDict:
        """All text encoders, by the names of their components."""
        names = sorted(name for name in self.family.components if name.startswith("text_encoder"))
        return torch.nn.ModuleDict({name: self._component(name) for name in names})

    @torch.no_grad()
    def encode(self, captions: list[str], away: bool = False) -> TextCondition:
        """Encode captions on the encoders' device and in their dtype.

        The family's ``Text.padding`` determines the tokens after a caption's last token:

        - "attend": the encoder's outputs. L = max_tokens, and the mask is True everywhere.
        - "zero": zeros, with mask False. L = max_tokens.
        - "remove": zeros, with mask False. L = the longest caption's length.

        away: True for negative prompts; some families encode them differently."""
        tokens: list[Tensor] = []
        pooled: list[Tensor] = []
        for start in range(0, len(captions), CAPTIONS_AT_ONCE):
            part = captions[start : start + CAPTIONS_AT_ONCE]
            with _quiet(type(self.pipeline).__module__):
                # ZImagePipeline overwrites the list of prompts, so pass a copy.
                bare = away and self.prompts.bare
                more = {"do_classifier_free_guidance": True, "negative_prompt": list(part)} if bare else {}
                found = self.pipeline.encode_prompt(
                    prompt=list(part),
                    device=self.device,
                    max_sequence_length=self.max_tokens - self.family.text.beside,
                    **{**self.prompts.settings, **more},
                )
            found = found[2:] if bare else found
            rows = list(found[0])
            if self.prompts.masked and found[1] is not None:
                rows = [row[mask.bool()] for row, mask in zip(rows, found[1], strict=True)]
            tokens += rows
            of_all = found[self.prompts.pooled_at] if self.prompts.pooled else found[0][0].new_zeros(len(part), 0)
            pooled.append(of_all)
        shortest = min(len(row) for row in tokens)
        return TextCondition(*self._padded(tokens), torch.cat(pooled), shortest=shortest)

    def _padded(self, tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Pad captions of unequal length. Return tokens (B, L, D) and mask (B, L)."""
        if self.family.text.padding == "zero":
            stacked = torch.stack(tokens)
            return stacked, stacked.ne(0).any(-1)
        masks = [torch.ones(len(row), dtype=torch.bool, device=row.device) for row in tokens]
        return pad_sequence(tokens, batch_first=True), pad_sequence(masks, batch_first=True)

    def count_tokens(self, captions: list[str]) -> list[int]:
        """Count each caption's tokens before cutting, including the template's tokens."""
        if not captions:
            return []
        written = [self.prompts.written(self.pipeline, caption) for caption in captions]
        found = self._component(self.prompts.tokenizer)(written, verbose=False).input_ids
        more = self.family.text.beside - self.prompts.dropped
        return [len(ids) + more for ids in found]

    def fingerprint(self) -> str:
        """Hash all values that embeddings depend on: weights, vocabularies, length, cleaning and templates."""
        parts = [self.family.pipelines[0], str(self.max_tokens), self.prompts.written(self.pipeline, PROBE)]
        for component in sorted(self.family.components):
            if component.startswith("text_encoder"):
                parts.append(module_fingerprint(self._component(component), component))
            elif component.startswith("tokenizer"):
                parts += [component, json.dumps(sorted(self._component(component).get_vocab().items()))]
        return hash_parts(*parts)

    def _component(self, name: str) -> Any:
        return getattr(self.pipeline, name)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Suppress warnings of the logger ``name``. FluxPipeline would warn about each caption with over 77 CLIP tokens."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# ------------------------------------------------------------------------------------------ folders


def text_widths(folder: Path, family: Family) -> tuple[int, int]:
    """Return (width of the tokens, width of the pooled vector or 0) without reading weights."""
    prompts = _prompts(family)
    width = prompts.layers * _width(_encoder_config(folder, prompts.encoder, family))
    return width, sum(_pooled_width(family, name, _encoder_config(folder, name, family)) for name in prompts.pooled)


def text_encoder_bytes(folder: Path, family: Family, kind: str = "bf16") -> int:
    """Return the text encoders' size in bytes, from the headers of their files. kind: value of --text_precision. Raises
    FileNotFoundError or ValueError."""
    encoders = [component for component in family.components if component.startswith("text_encoder")]
    return sum(stored_bytes(folder.expanduser() / component, STEM, kind) for component in encoders)


def published_geometry(name: str) -> tuple[int, int, int] | None:
    """Return (token width, width of the pooled vector, maximum tokens per prompt) for a pipeline's folder, without
    reading weights. Return None for anything else."""
    folder = Path(name).expanduser()
    family = family_in(name_of_folder(folder) or "")
    if family is None or not (folder / PIPELINE_INDEX).is_file():
        return None
    found = FAMILIES[family]
    return *text_widths(folder, found), found.text.tokens


def check_text(folder: Path, family: Family) -> None:
    """Check a folder's index, tokenizers and text encoders, but not the weights' values. Does not import
    ``transformers``. Raises FileNotFoundError or ValueError; the message names the file and the problem."""
    _prompts(family)
    check_index(folder, family)
    for component in family.components:
        path = folder / component
        if component.startswith("tokenizer"):
            if not any(all((path / name).is_file() for name in names) for names in VOCABULARIES):
                raise FileNotFoundError(f"{path} has no {' or '.join(map(' and '.join, VOCABULARIES))}")
            check_tokenizer(path, CLASSES_OF_TOKENIZERS)
        elif component.startswith("text_encoder"):
            _encoder_config(folder, component, family)
            refuse_adapters(path)
            weight_shapes(path, STEM)


def load_published_text(
    folder: Path,
    family: Family,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    max_tokens: int | None = None,
    precision: str = "bf16",
) -> PublishedText:
    """Load the tokenizers and text encoders of a pipeline's folder, after :func:`check_text`.

    dtype: dtype of the weights on a GPU. bf16 replaces fp16, because T5's activations exceed fp16's range. A CPU always
    computes in fp32. max_tokens: prompts are cut to this number of tokens, by default the family's. precision: see
    ``load_text_encoder``. Raises FileNotFoundError or ValueError, naming the file and the problem."""
    check_text(folder, family)
    device = torch.device(device)
    dtype = torch.float32 if device.type != "cuda" else torch.bfloat16 if dtype == torch.float16 else dtype
    components: dict[str, Any] = {}
    # The alphabetical order loads each text encoder before its tokenizer.
    for component, (_, class_name) in sorted(family.components.items()):
        if not component.startswith(("text_encoder", "tokenizer")):
            continue
        with loading(str(folder / component)):
            components[component] = _load(folder / component, class_name, dtype, precision, device)
            if component.startswith("tokenizer"):
                check_vocabulary(components[component], components[component.replace("tokenizer", "text_encoder")])
    for component, module in components.items():
        if component.startswith("text_encoder"):
            module.eval().requires_grad_(False).to(device)
    rest: dict[str, Any] = dict.fromkeys(("scheduler", "vae", "transformer"))
    if (unused := _prompts(family).unused) is not None:
        rest[unused] = torch.nn.Identity()
    pipeline = getattr(lazy_module("diffusers"), family.pipelines[0])(**rest, **components)
    return PublishedText(pipeline, family, name=str(folder), device=device, max_tokens=max_tokens)


def _load(path: Path, class_name: str, dtype: torch.dtype, kind: str, device: torch.device) -> Any:
    if class_name in MODEL_TYPES:
        return transformers_model(path, class_name, STEM, dtype, kind, device)
    tokenizer_class = getattr(lazy_module("transformers"), TOKENIZER_OF.get(class_name, class_name))
    tokenizer = tokenizer_class.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # Disable the warning about long captions, because count_tokens reports them.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _prompts(family: Family) -> Prompts:
    if family.pipelines[0] not in PROMPTS:
        raise ValueError(f"prompts of {family.name} ({family.pipelines[0]}) can't be encoded here")
    return PROMPTS[family.pipelines[0]]


def _encoder_config(folder: Path, component: str, family: Family) -> dict[str, Any]:
    from opendit.encoders.schema import PUBLISHED_TEXT  # imports pydantic, so only when a file is read

    class_name = family.components[component][1]
    path = folder / component / CONFIG
    config = read_json_of(path, PUBLISHED_TEXT, f"it describes a {class_name} of transformers")
    if config.get("model_type") not in MODEL_TYPES[class_name]:
        raise ValueError(f"{path}: model_type is {shown(config.get('model_type'))}, which is no {class_name}")
    if _width(config) is None:
        raise ValueError(f"{path}: hidden_size is missing")
    return config


def _pooled_width(family: Family, component: str, config: dict[str, Any]) -> int:
    """Return the width of an encoder's pooled vector, after the projection if the encoder's class has one."""
    projected = family.components[component][1].endswith("WithProjection")
    return config.get("projection_dim") or 512 if projected else _width(config)


def _width(config: dict[str, Any]) -> Any:
    return (config.get("text_config") or config).get("hidden_size", config.get("d_model"))
