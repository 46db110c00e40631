"""Test Muon and MeanFlow on GPUs: bf16 iterations against fp32, several ranks, and runs with kernels."""

import math

import pytest
import torch

from opendit.parallel.muon import orthogonalise
from tests.checkpoint.test_resume import ARGV, assert_same_bits, losses, run_of, trainings
from tests.parallel.test_muon import WAYS, all_trained, off_by, plain_run
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAST = "--enable_flashattn --enable_modulate_kernel --enable_layernorm_kernel --deterministic".split()


def test_iterations_in_bf16_are_near_those_in_fp32():
    torch.manual_seed(0)
    shapes = [(1152, 1152)] * 5 + [(4608, 1152), (1152, 4608)]
    gradients = [torch.randn(shape, device="cuda") for shape in shapes]
    exact, rounded = ([g.clone() for g in gradients] for _ in range(2))
    orthogonalise(exact, torch.float32)
    orthogonalise(rounded, torch.bfloat16)
    for one, other in zip(rounded, exact, strict=True):
        assert off_by(one, other) < 3e-2
        values = torch.linalg.svdvals(one) / (0.2 * math.sqrt(max(one.shape)))
        assert 0.5 < values[len(values) // 2] < 1.3 and values[0] < 1.4


def test_curves_are_those_of_one_plain_process():
    world = min(2, torch.cuda.device_count())
    wanted, weights, _ = plain_run()
    for found, masters, _ in run_ranks(world, all_trained, WAYS[world])[0]:
        assert found == pytest.approx(wanted, rel=1e-3)  # products in TF32
        assert max(off_by(masters[name].cpu(), weights[name]) for name in weights) < 2e-2


@pytest.mark.parametrize("more", [["--optimizer", "muon"], ["--objective", "meanflow", "--meanflow_guidance", "2"]])
def test_runs_with_kernels_resume_bit_for_bit(tmp_path, more):
    argv = [*ARGV, *FAST, *more, "--vae", "none", "--batch_size", "8", "--mixed_precision", "bf16"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runs = [
        [*argv, "--max_steps", "20", "--outputs", str(whole)],
        [*argv, "--max_steps", "10", "--outputs", str(parts)],
    ]
    runs.append([*argv, "--max_steps", "20", "--outputs", str(parts), "--load", "latest"])
    run_ranks(min(2, torch.cuda.device_count()), trainings, runs)
    assert losses(parts) == losses(whole) and all(map(math.isfinite, losses(whole).values()))
    assert_same_bits(run_of(whole) / "checkpoints/latest", run_of(parts) / "checkpoints/latest")
