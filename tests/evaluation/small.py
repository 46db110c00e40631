"""Create small feature networks, and weights for Inception, for tests."""

import json
import warnings
from pathlib import Path

import torch
from torch import nn

WIDTH = 12
SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)


class Pictures(nn.Module):
    """A small picture network for TorchScript, which works for pictures from 8 x 8 pixels."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.mixing = nn.Parameter(torch.randn(4 * 4 * 3, width, generator=generator))
        self.head = nn.Parameter(torch.randn(width, 7, generator=generator))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = nn.functional.adaptive_avg_pool2d(x.float() / 127.5 - 1, (4, 4)).flatten(1)
        pool = torch.tanh(x @ self.mixing / 4)
        return {"pool": pool, "spatial": x[:, :20].contiguous(), "logits": pool @ self.head}


class Clips(nn.Module):
    """A small replacement for I3D, with the call signature of StyleGAN-V's file."""

    def __init__(self, width: int):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(4 * 4 * 4 * 3, width, generator=torch.Generator().manual_seed(1)))

    def forward(
        self, x: torch.Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False
    ) -> torch.Tensor:
        assert rescale and resize and return_features
        x = nn.functional.adaptive_avg_pool3d(x / 127.5 - 1, (4, 4, 4)).flatten(1)
        return torch.tanh(x @ self.mixing / 8)


class Plain(nn.Module):
    """A network for pictures or clips that returns a tensor instead of named features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().flatten(2).mean(dim=2)


def script(path: Path, module: nn.Module) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.script(module).save(str(path))
    return path


def pictures(path: Path, width: int = WIDTH, seed: int = 0) -> Path:
    return script(path, Pictures(width, seed))


def clips(path: Path, width: int = 6) -> Path:
    return script(path, Clips(width))


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Fill a module with weights that are equal on every machine: sines of the elements' indices.

    The scale keeps activations from growing or vanishing. Means and variances of norms are filled as well.
    """
    for number, (name, tensor) in enumerate(sorted(module.state_dict().items())):
        if tensor.dtype != torch.float32:
            continue
        places = torch.arange(tensor.numel(), dtype=torch.float64)
        values = torch.sin(places * 1.7 + (places * 0.13).square() % 6.28 + number).float().view(tensor.shape)
        if name.endswith("running_var"):
            values = 1 + values / 2
        elif tensor.ndim == 1:
            values = values / 4 + name.endswith("bn.weight")
        else:
            values *= (3 / tensor[0].numel()) ** 0.5 if tensor.ndim == 4 else 0.1
        tensor.copy_(values)


def picture(height: int, width: int, count: int = 2) -> torch.Tensor:
    """Return uint8 pictures (count, height, width, 3) that are equal on every machine."""
    places = torch.arange(count * height * width * 3, dtype=torch.float64)
    return (127.5 + 127 * torch.sin(places * 0.021 + (places * 1e-3) ** 1.3)).to(torch.uint8).view(-1, height, width, 3)


def write_folder(folder, model, side: int, **preprocessing):
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"crop_size": side, **preprocessing}))
    return folder


def clip_folder(folder: Path):
    """Write a CLIP with random weights, for one-letter words and at most eight tokens. Return (folder, model)."""
    import transformers

    folder.mkdir(exist_ok=True)
    torch.manual_seed(2)
    text = dict(**SMALL, vocab_size=40, max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    config = transformers.CLIPConfig(
        text_config=text | dict(projection_dim=10),
        vision_config=dict(**SMALL, projection_dim=10, image_size=16, patch_size=8),
        projection_dim=10,
    )
    model = transformers.CLIPModel(config).eval()
    letters = {"<|startoftext|>": 0, "<|endoftext|>": 1, **{f"{c}</w>": n for n, c in enumerate("abcdefghij", 2)}}
    letters |= {c: n for n, c in enumerate("abcdefghij", 20)}
    (folder / "vocab.json").write_text(json.dumps(letters))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    return write_folder(folder, model, 16), model
