"""ST-DiT with each sample's tokens divided among ranks, compared with one process in float64."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from opendit.config.parallel_sizes import ParallelDims
from opendit.kernels.recompute import recompute_in
from opendit.models.dit import DiT
from opendit.models.variants import STDiTConfig
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sequence import SequenceParallel, sequence_parallel
from opendit.parallel.sequence.axial import FRAMES, PLACES, AllToAll, DirectExchange
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.sequence.fastseq import DirectFastSeq
from tests.models.test_zoo import inputs, model_of
from tests.parallel.tensor.models import CLIP, MODELS, T5
from tests.parallel.tensor.test_layers import compare
from tests.parallel.test_sequence import shared_memory, summed
from tests.ranks import run_ranks

TOLERANCE = 1e-10
LATTE = MODELS["Latte"]  # 3 frames of 5 tokens
ROPE = STDiTConfig(**CLIP, text=T5, qk_norm=True, positions="rope", bias=False, adaln_lora=5)
FULL = MODELS["ST-DiT"]
EVEN = replace(LATTE, input_size=(4, 4, 6), depth=1)  # 4 frames of 6 tokens
LONG = replace(ROPE, input_size=(5, 2, 16), depth=1)  # 5 frames of 8 tokens
ODD = replace(LATTE, input_size=(5, 2, 14), depth=1)  # 5 frames of 7 tokens
PICTURE = replace(LATTE, input_size=(1, 2, 10), depth=1)
ROUND = replace(FULL, qk_norm=False)  # used for ring attention
# Ranks -> (configuration, type, parts of an exchange, samples, recomputation, axis that is divided among ranks).
CASES = {
    2: [
        (LATTE, "auto", 2, 3, False, PLACES),
        (ROPE, "auto", 1, 2, False, PLACES),
        (EVEN, "auto", 3, 1, False, FRAMES),
        (FULL, "fastseq", 2, 2, False, FRAMES),
        (PICTURE, "auto", 2, 2, True, PLACES),
        (EVEN, "direct auto", 3, 2, True, FRAMES),
        (FULL, "direct fastseq", 2, 2, False, FRAMES),
    ],
    3: [
        (ROPE, "auto", 2, 2, True, FRAMES),
        (LONG, "auto", 2, 1, False, PLACES),
        (ROUND, "ring", 2, 2, False, FRAMES),
    ],
    4: [
        (ROPE, "auto", 2, 2, False, FRAMES),  # the last rank has no frame
        (ODD, "auto", 1, 2, True, PLACES),
        (FULL, "ulysses", 3, 1, True, FRAMES),
        (ROUND, "ring", 1, 2, False, FRAMES),
        (PICTURE, "auto", 2, 1, False, PLACES),
        (ROPE, "direct auto", 2, 2, False, FRAMES),
        (FULL, "direct fastseq", 1, 1, True, FRAMES),
    ],
}


def strategy(mesh: Mesh, config: STDiTConfig, kind: str = "auto", parts: int = 2) -> SequenceParallel:
    heads = config.num_heads // mesh.tp_size
    shape = Shape(config.tokens, config.hidden_size, heads, types=config.sequence_types, axial=True)
    made = sequence_parallel(mesh, kind.removeprefix("direct "), shape)
    if not kind.startswith("direct"):
        return replace(made, axial=AllToAll(parts))
    memory = shared_memory(made.group, early=parts > 2)
    full = made.strategy and DirectFastSeq(memory)  # both use the same buffers in turn
    return replace(made, strategy=full, axial=DirectExchange(memory, parts))


def gradients(model: DiT, batch: int, shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(*inputs(model.config, batch))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    grads = torch.autograd.grad((output * weights).sum(), list(model.parameters()))
    named = dict(zip((name for name, _ in model.named_parameters()), grads, strict=True))
    if shared:  # the mean over the ranks, as in engines
        named = {name: grad / dist.get_world_size() for name, grad in summed(named).items()}
    return output.detach(), named


def errors(mesh: Mesh, config: STDiTConfig, kind: str, parts: int, batch: int, again: bool, home: int) -> dict:
    """Return relative errors of the output and every gradient; below a norm of 1e-3 they are scaled absolute errors."""
    model = model_of(config)
    want, of_parameters = gradients(model, batch, False)
    sequence = strategy(mesh, config, kind, parts)
    assert sequence(config.tokens, config.grid).grid.home == home
    model.use(sequence=sequence).grad_checkpoint = again
    output, found = gradients(model, batch, True)
    pairs = {"output": (output, want)} | {name: (found[name], grad) for name, grad in of_parameters.items()}
    return {name: ((a - b).norm() / max(b.norm(), 1e-3)).item() for name, (a, b) in pairs.items()}


def recomputed(mesh: Mesh) -> dict:
    """Return the gradients' differences with and without a recomputation policy, which must be zero."""
    found = []
    for policy in ("none", "half"):
        model = model_of(LATTE).use(sequence=strategy(mesh, LATTE))
        recompute_in(model, policy)
        found.append(gradients(model, 2, True)[1])
    return {name: (grad - found[1][name]).abs().max().item() for name, grad in found[0].items()}


def of_padding(mesh: Mesh) -> list[list[tuple]]:
    """Return the number of padding tokens and their summed gradient sizes in the second block, and of other tokens."""
    found = []
    for config in (LATTE, replace(ODD, depth=2)):
        model = model_of(config).use(sequence=strategy(mesh, config))
        grid = model.sequence(config.tokens, config.grid).grid
        seen = []
        keep = seen.append
        model.blocks[1].register_forward_pre_hook(lambda _, args, keep=keep: args[0].register_hook(keep) and None)
        gradients(model, 2, True)
        real = grid.own(torch.ones(1, config.tokens, 1), grid.home).flatten().bool()
        (grad,) = seen
        found.append([(int(which.sum()), grad[:, which].abs().sum().item()) for which in (~real, real)])
    return found


def every_case(mesh: Mesh) -> dict:
    ranks = mesh.world_size
    shared = init_mesh(sequence_parallel=ranks)
    found = {number: errors(shared, *case) for number, case in enumerate(CASES[ranks])}
    if ranks == 4:
        found["padding"] = of_padding(shared)
        both = init_mesh(dims=ParallelDims(sp=2, tp=2))
        found["tp 2, places"] = compare(both, LATTE, 2, strategy(both, LATTE))
        found["tp 2, direct"] = compare(both, EVEN, 2, strategy(both, EVEN, "direct auto"))
        found["tp 2, full"] = compare(both, FULL, 3, strategy(both, FULL, "fastseq"))
    if ranks == 2:
        found["recomputed"] = recomputed(shared)
    return found


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_output_and_every_gradient_are_those_of_one_process(ranks):
    for number, rank in enumerate(run_ranks(ranks, every_case)):
        padding = rank.pop("padding", [])
        for case, found in rank.items():
            bad = {name: error for name, error in found.items() if not error < TOLERANCE}
            assert not bad, (case, bad)
        for (count, size), (tokens, total) in padding:
            assert size == 0.0 and (count > 0) == (number == 3) and (total > 0) == (tokens > 0), number
