"""Token routing under every type of sequence parallelism is compared with one process."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opendit.config.components import TokenRoute
from opendit.diffusion.random import draw_kept_tokens
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.variants import MovieGenConfig
from opendit.parallel.mesh import init_mesh
from tests.parallel.test_sequence import fresh, inputs, strategy, summed
from tests.ranks import run_ranks

ROUTE = TokenRoute(1, 3, 0.4)
IMAGE = DiTConfig((6, 10), 2, 3, 48, 4, 12, num_classes=5)  # 15 tokens, of which 9 are kept
CONFIGS = {
    "plain": IMAGE,
    "modern": replace(IMAGE, norm="rms", mlp="swiglu", positions="rope", qk_norm=True),
    "sprint": replace(IMAGE, sprint=(1, 3)),
    "clips": MovieGenConfig((2, 6, 6), (1, 2, 2), 2, 48, 4, 2, text=TextConfig("bytes", 32, 7, True)),  # 18, 11 kept
}
KINDS = ("fastseq", "fastseq, kept", "ulysses", "ring", "direct fastseq", "direct ulysses")
CASES = {
    2: [(name, kind) for name in CONFIGS for kind in (KINDS if name in ("modern", "sprint") else ("fastseq", "ring"))],
    4: [("modern", "fastseq"), ("modern", "usp"), ("plain", "usp"), ("sprint", "fastseq")],
}


def run(model: DiT, samples: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    index, config = torch.arange(samples), model.config
    model.route = ROUTE.first, ROUTE.last
    *arguments, weights = inputs(config, index, config.input_size)
    more = {} if config.sprint is None else {"dropped": index == 1}
    output = model(*arguments, kept=draw_kept_tokens(ROUTE, config.tokens, 0, 1, index), **more)
    (output * weights).sum().backward()
    return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def differences(mesh) -> dict[tuple[str, str, bool], tuple[float, float]]:
    """Return relative errors of the output and of the worst gradient."""
    mesh, found = init_mesh(sequence_parallel=mesh.world_size), {}
    for name, kind in CASES[mesh.world_size]:
        whole, wanted = run(fresh(CONFIGS[name]))
        for checkpointed in (False, True) if kind == "fastseq" else (False,):
            model = fresh(CONFIGS[name])
            model.grad_checkpoint = checkpointed
            output, gradients = run(model.use(sequence=strategy(mesh, kind, CONFIGS[name])))
            off = [
                (gradient / mesh.world_size - wanted[key]).norm() / wanted[key].norm()
                for key, gradient in summed(gradients).items()
            ]
            found[name, kind, checkpointed] = ((output - whole).norm() / whole.norm()).item(), max(off).item()
    return found


@pytest.mark.parametrize("ranks", sorted(CASES))
def test_output_and_every_gradient_are_those_of_one_process(ranks):
    found = run_ranks(ranks, differences)[0]
    assert len(found) == len(CASES[ranks]) + [kind for _, kind in CASES[ranks]].count("fastseq")
    assert max(output for output, _ in found.values()) < 1e-5 and max(off for _, off in found.values()) < 1e-4, found
