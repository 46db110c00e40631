"""Test the limits by compute capability: what is available on a GPU, the messages, and the documented table."""

from pathlib import Path

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels import attention
from opendit.kernels.common import FEATURES, TRITON, kernels_available, missing, pretended
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.select import select_kernels
from opendit.kernels.short_attention import short_is_faster

CARDS = {"H200": (9, 0), "H100": (9, 0), "A100": (8, 0), "L40S, 4090": (8, 9)}
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU on which torch's own attention kernels run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "usable", lambda backend, *shape: backend != "flash_attn")


def test_a_feature_begins_and_ends_with_a_capability():
    with pretended((8, 9)):
        assert missing("kernels") is None
        assert missing("float8") == "FP8 needs compute capability 9.0 (Hopper) or newer, this GPU has 8.9"
        with pretended((10, 0)):
            assert missing("float8") is None and "9.0 (Hopper) only, this GPU has 10.0" in missing("short_attention")
        assert missing("float8") is not None  # restored
    for feature in FEATURES.values():
        assert feature.oldest >= (8, 0) and (feature.newest is None or feature.newest >= feature.oldest)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.parametrize(("capability", "kernels", "float8", "first"), [
    ((7, 5), False, False, "flash"), ((8, 0), True, False, "flash"), ((8, 9), True, False, "flash"),
    ((9, 0), True, True, "cudnn"), ((10, 0), True, True, "cudnn"),
])  # fmt: skip
def test_what_a_run_takes_on_a_card(gpu, capability, kernels, float8, first):
    """With all speed flags on, unsupported features are left out and the notes say why."""
    flags = SpeedFlags(True, True, True, fp8=True)
    shown = ".".join(map(str, capability))
    with pretended(capability):
        assert kernels_available(GPU, torch.bfloat16)[0] == kernels
        assert float8_available(GPU, torch.bfloat16)[0] == float8
        assert short_is_faster(GPU) == (capability == (9, 0))
        choice = select_kernels(flags, GPU, torch.bfloat16, 72, 256, inference=True)
    assert choice.ops.float8 == float8 and choice.attention_note.startswith(first)
    if not float8:
        assert "no FP8: " in choice.ops_note and f"this GPU has {shown}" in choice.ops_note
    if not kernels:
        assert "no modulate kernel: kernels need compute capability 8.0 (Ampere)" in choice.ops_note
    assert ("for few and short samples" in choice.attention_note) == (capability == (9, 0))


def test_the_documented_table_is_what_the_checks_say():
    text = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    header = next(row for row in rows if "H200" in row)
    cells = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows if len(row) == len(header)}
    features = {
        "fused kernels (`--enable_*_kernel`)": "kernels",
        "FlashAttention 4 (`flash-attn-4`)": "flash_attn_3",
        "`--fp8`": "float8",
        "[kernel for few and short samples](kernels.md#attention)": "short_attention",
    }
    for row, feature in features.items():
        with pretended((7, 0)):
            assert (cells[row]["V100"] == "no") == (missing(feature) is not None), row
    for card, capability in CARDS.items():
        assert cells["compute capability"][card] == ".".join(map(str, capability))
        with pretended(capability):
            for row, feature in features.items():
                assert (cells[row][card] == "no") == (missing(feature) is not None), (row, card)
            order = attention.torch_preferences(capability, torch.bfloat16)
        said = cells["`--enable_flashattn`"][card].partition(",")[0]
        assert said.lower() == order[0][0], card
