"""CLIP score: how well pictures fit their captions (Hessel et al. 2021), without that paper's factor of 2.5."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.encoders.folder import one_line
from opendit.evaluation.transformers_networks import load_model, read_config

AT_ONCE = 256  # captions


def caption_embeddings(folder: Path, captions: list[str], device: torch.device) -> tuple[Tensor, list[bool]]:
    """CLIP's projected embeddings of captions (N, D), and which of them were longer than it reads, so that their end
    counts for nothing. Equal captions are embedded once.

    Raises ValueError for a folder without CLIP's text model and tokenizer.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    if config.get("model_type") != "clip":
        raise ValueError(f"{folder} holds no CLIP of pictures and words, which a CLIP score needs")
    model = load_model(folder, "CLIPTextModelWithProjection").to(device)
    try:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{folder} holds no tokenizer that can be loaded: {one_line(error)}") from error
    longest = model.config.max_position_embeddings
    different = list(dict.fromkeys(captions))
    embeddings, cut = [], {}
    for first in range(0, len(different), AT_ONCE):
        part = different[first : first + AT_ONCE]
        lengths = [len(ids) for ids in tokenizer(part)["input_ids"]]
        cut |= {caption: length > longest for caption, length in zip(part, lengths, strict=True)}
        words = tokenizer(part, padding="max_length", truncation=True, max_length=longest, return_tensors="pt")
        with torch.inference_mode():
            output = model(**{name: words[name].to(device) for name in ("input_ids", "attention_mask")})
        embeddings.append(output.text_embeds)
    rows = {caption: number for number, caption in enumerate(different)}
    index = torch.tensor([rows[caption] for caption in captions], device=device)
    return torch.cat(embeddings)[index], [cut[caption] for caption in captions]


def clip_scores(pictures: Tensor, captions: Tensor) -> Tensor:
    """100 max(cos, 0) of embeddings (N, D) of pictures and of their captions: (N,).

    Of a clip (N, T, D) the mean over its frames.
    """
    pictures, captions = F.normalize(pictures.double(), dim=-1), F.normalize(captions.double(), dim=-1)
    if pictures.ndim == 2:
        pictures = pictures[:, None]
    return 100 * (pictures * captions[:, None]).sum(dim=-1).clamp_min(0).mean(dim=1)
