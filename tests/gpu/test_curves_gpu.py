"""Test on the digits data set and a GPU that speed-ups do not change the loss curve."""

import json

import pytest
import torch

import train
from opendit.kernels.fp8_linear import float8_available

AVAILABLE, REASON = float8_available("cuda", torch.bfloat16)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS = "--enable_modulate_kernel --enable_layernorm_kernel --enable_flashattn --enable_cuda_graph"
ROUTED = "--route 2:10:0.5 --positions rope --objective flow"
SPRINT = f"{ROUTED.replace('0.5', '0.75:sprint')} --route_until 200"
RUN = (
    "--model DiT-S/2 --data_path digits --image_size 8 --vae none --lr 3e-4 --mixed_precision bf16 --num_workers 0 "
    "--log_every 1 --ckpt_every 0 --sample_every 100000 --sample_steps 2"
)


@pytest.mark.parametrize(
    ("flags", "reference", "steps", "batch", "bound"),
    [
        pytest.param(
            f"{KERNELS} --fp8",
            KERNELS,
            500,
            256,
            0.02,
            id="fp8",
            marks=pytest.mark.skipif(not AVAILABLE, reason=REASON),
        ),
        pytest.param(KERNELS, "", 300, 64, 0.025, id="kernels"),
        pytest.param(f"{KERNELS} {ROUTED}", ROUTED, 300, 64, 0.025, id="routed"),
        pytest.param(f"{KERNELS} {SPRINT}", SPRINT, 300, 64, 0.025, id="sprint"),
    ],
)
def test_the_mean_of_every_fifty_losses(tmp_path, flags, reference, steps, batch, bound):
    curves = []
    for name, more in (("reference", reference), ("flags", flags)):
        sizes = f"--batch_size {batch} --max_steps {steps} --outputs {tmp_path / name}"
        train.main([*RUN.split(), *sizes.split(), *more.split()])
        (log,) = tmp_path.glob(f"{name}/*/log.jsonl")
        curves.append(torch.tensor([json.loads(line)["loss"] for line in log.read_text().splitlines()]))
    want, got = curves
    assert len(want) == len(got) == steps and want[-50:].mean() < 0.5 * want[:5].mean()
    by_fifty = (got - want).view(-1, 50).mean(1) / want.view(-1, 50).mean(1)
    print("relative difference of the loss, by 50 steps:", [f"{x:.4f}" for x in by_fifty.tolist()])
    assert by_fifty.abs().max() < bound
