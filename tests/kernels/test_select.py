"""Test which kernels are chosen without a GPU, and the reasons in the notes."""

import torch

from opendit.config.components import SpeedFlags
from opendit.kernels.attention import LocalAttention
from opendit.kernels.select import select_kernels
from opendit.models.layers import BlockOps

CPU = torch.device("cpu")


def test_off_is_plain_torch():
    choice = select_kernels(SpeedFlags(), CPU, torch.float32, 32, 16)
    assert choice.ops == BlockOps() and isinstance(choice.attend, LocalAttention)
    assert "off" in choice.ops_note and "--enable_flashattn is off" in choice.attention_note


def test_what_was_asked_for_and_is_not_there_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "apex", None)  # as if not installed
    choice = select_kernels(SpeedFlags(True, True, True), CPU, torch.bfloat16, 32, 16)
    assert choice.ops == BlockOps()
    assert "apex is not installed" in choice.ops_note and "no modulate kernel" in choice.ops_note
    assert "need" in choice.ops_note  # from kernels_available's message
    assert choice.attend.backend == "auto" and "cpu" in choice.attention_note


def test_fp8_that_can_not_run_is_said():
    choice = select_kernels(SpeedFlags(fp8=True), CPU, torch.bfloat16, 32, 16)
    assert choice.ops == BlockOps() and "no FP8: kernels need a CUDA GPU" in choice.ops_note
