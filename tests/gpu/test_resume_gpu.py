"""Test on GPUs that a resumed run with --deterministic has the same bits as an uninterrupted one."""

import json

import pytest
import torch

from tests.checkpoint.test_resume import ARGV, assert_same_bits, losses, run_of, trainings
from tests.encoders.test_vae import small_vae
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HALF, WHOLE = 30, 80
FAST = "--enable_flashattn --enable_modulate_kernel --enable_layernorm_kernel --deterministic".split()
SETTINGS = {  # fp16's loss scale settles in the first steps, so skipped steps are tested too
    "zero2-fp16": ["--plugin", "zero2", "--mixed_precision", "fp16"],
    "zero2-bf16": ["--plugin", "zero2", "--mixed_precision", "bf16", "--grad_accumulation", "2"],
    "gemini-bf16": ["--plugin", "gemini", "--mixed_precision", "bf16"],
    "ddp-bf16": ["--plugin", "ddp", "--mixed_precision", "bf16"],
}


def test_fifty_steps_after_a_resume_are_bit_identical(tmp_path):
    small_vae().save_pretrained(tmp_path / "vae")
    world = min(2, torch.cuda.device_count())
    before, after = [], []
    for name, settings in SETTINGS.items():
        argv = [*ARGV, *FAST, *settings, "--vae", str(tmp_path / "vae"), "--batch_size", "8"]
        before.append([*argv, "--max_steps", str(WHOLE), "--outputs", str(tmp_path / name / "whole")])
        before.append([*argv, "--max_steps", str(HALF), "--outputs", str(tmp_path / name / "parts")])
        after.append(
            [*argv, "--max_steps", str(WHOLE), "--outputs", str(tmp_path / name / "parts"), "--load", "latest"]
        )
    run_ranks(world, trainings, before)
    run_ranks(world, trainings, after)
    for name in SETTINGS:
        whole, parts = tmp_path / name / "whole", tmp_path / name / "parts"
        assert len(losses(whole)) == WHOLE and losses(parts) == losses(whole), name
        latest = "checkpoints/latest"
        assert_same_bits(run_of(whole) / latest, run_of(parts) / latest)
        states = [json.loads((run_of(outputs) / latest / "state.json").read_text()) for outputs in (whole, parts)]
        assert states[0] == states[1], name  # scaler, counters, attention kernel
        assert states[0]["fingerprint"]["attention"] != "auto"
