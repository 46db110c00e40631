"""The attention kernel of new and resumed runs."""

from types import SimpleNamespace

import pytest
import torch

from opendit.kernels.attention import LocalAttention
from opendit.kernels.select import KernelChoice
from opendit.models.layers import BlockOps
from opendit.models.zoo import model_config
from opendit.training import prepare as preparing


@pytest.mark.parametrize(
    ("chosen", "stored", "deterministic", "flashattn", "used"),
    [
        ("cudnn", None, False, True, "cudnn"),
        ("cudnn", "efficient", False, True, "efficient"),  # as in the checkpoint
        ("cudnn", "math", False, True, "cudnn"),  # math does not run here, so a note is printed
        ("cudnn", None, True, True, "flash"),  # cuDNN's gradients are not deterministic
        ("cudnn", "cudnn", True, True, "flash"),
        ("flash", "cudnn", True, True, "flash"),
        ("efficient", None, True, True, "efficient"),  # fp32
        ("auto", "flash", False, False, "auto"),
        ("auto", None, True, False, "flash"),  # torch's own choice may be cuDNN
        ("auto", "auto", True, False, "flash"),
    ],
)
@pytest.mark.parametrize("asked", ("auto", "efficient"))
def test_attention_of_resumed_and_deterministic_runs(
    chosen, stored, deterministic, flashattn, used, asked, monkeypatch
):
    if asked != "auto":  # the flag overrides the checkpoint
        chosen = used = asked

    def resolve(wanted, *_, tiled):
        if wanted == "math":
            raise ValueError("builds the N x N matrix")
        return wanted, "asked for"

    monkeypatch.setattr(preparing, "resolve_attention", resolve)
    mesh = SimpleNamespace(device=torch.device("cuda"), broadcast_object=lambda value: value)
    speed = dict(enable_flashattn=flashattn, attention=asked, mixed_precision="bf16")
    flags = SimpleNamespace(deterministic=deterministic, **speed)
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=3)
    kernels, notes = KernelChoice(BlockOps(), LocalAttention(chosen), "", "measured"), []
    agreed = preparing.agree_on_attention(kernels, stored, flags, config, mesh, notes)
    assert agreed.attend.backend == used and (agreed.attention_note == "measured") == (used == chosen)
    assert len(notes) == (stored == "math" and asked == "auto")
