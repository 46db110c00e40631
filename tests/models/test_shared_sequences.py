"""Test block options with sequence parallelism against one process: outputs and all gradients."""

from dataclasses import replace

import torch

from opendit.models.finetuning import Lora, add_lora
from opendit.models.variants import ECDiTConfig, MovieGenConfig
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.sequence.fastseq import DirectFastSeq
from opendit.parallel.sequence.ulysses import DirectUlysses
from tests.numbers import largest
from tests.parallel.test_sequence import IMAGE, TEXT, TOLERANCE, VIDEO, errors, fresh, many_cases, run
from tests.ranks import run_ranks

NORMED = {"qk_norm": True, "positions": "rope"}
MOVIE = MovieGenConfig((4, 4, 6), (2, 2, 2), 2, 48, 2, 12, num_classes=5)  # 12 tokens
EXPERTS = ECDiTConfig((6, 10), 2, 3, 48, 2, 12, num_classes=5, experts=8, expert_hidden=10, mlp_ratio=2.0)
CASES = [
    (2, "ulysses", replace(IMAGE, **NORMED), None, 2, False),
    (2, "fastseq", replace(VIDEO, num_heads=6, **NORMED), (2, 4, 6), 1, False),  # a shorter clip
    (2, "ulysses", replace(IMAGE, bias=False, adaln_lora=5), None, 1, True),
    (2, "ring", replace(VIDEO, bias=False, positions="learned"), (2, 4, 4), 2, False),
    (2, "ulysses", replace(IMAGE, norm="rms", mlp="swiglu", **NORMED), None, 1, True),
    (2, "fastseq", replace(VIDEO, norm="rms", num_heads=6, **NORMED), (2, 4, 6), 2, False),
    (2, "ring", replace(VIDEO, mlp="swiglu", positions="learned"), (2, 4, 4), 1, False),
    (2, "ulysses", MOVIE, None, 1, False),
    (2, "fastseq", MOVIE, (2, 4, 6), 2, False),
    (2, "fastseq, kept", replace(MOVIE, num_classes=None, text=TEXT.text), (2, 4, 4), 2, True),
    (2, "ring", MOVIE, (2, 4, 4), 2, True),
    # heads that share keys and values
    (2, "ulysses", replace(MOVIE, kv_heads=4), (2, 4, 6), 1, False),
    (2, "fastseq", replace(MOVIE, kv_heads=3, adaln_lora=5), (2, 4, 6), 2, True),
    (2, "ring", replace(MOVIE, kv_heads=2, bias=True), (2, 4, 4), 1, False),
    (2, "fastseq", replace(MOVIE, num_heads=6, kv_heads=2, **NORMED), None, 1, False),
    # every rank prepares its own queries and keys; padding; a rank without tokens
    (2, "ring", replace(IMAGE, **NORMED), None, 2, True),
    (2, "ring", replace(VIDEO, num_heads=6, **NORMED), (2, 4, 6), 1, False),
    (2, "ring", replace(MOVIE, num_heads=6, kv_heads=2, **NORMED), (2, 4, 2), 1, False),
    # experts that choose among the tokens of both ranks: 15 tokens; 5, with 2 on one rank; 2, all chosen
    (2, "ulysses", EXPERTS, None, 2, False),
    (2, "ring", replace(EXPERTS, experts=5, expert_capacity=1.3), (2, 10), 2, True),
    (2, "fastseq", replace(EXPERTS, expert_capacity=8.0), (2, 4), 1, False),
]


FOUR = [
    (4, "usp", replace(IMAGE, **NORMED), None, 1, False),
    (4, "usp", replace(MOVIE, num_heads=6, kv_heads=2, **NORMED), None, 2, True),
    (4, "ring", replace(MOVIE, num_heads=6, kv_heads=3, **NORMED), (2, 4, 6), 1, False),
]


def with_lora(mesh: Mesh) -> list:
    """Return errors of a model with LoRA, where only LoRA is trained."""
    results = []
    for kind in ("ulysses", "fastseq"):
        model = fresh(replace(IMAGE, qk_norm=True))
        add_lora(model, Lora(3, 6.0, "base"), (), seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        shape = Shape(IMAGE.tokens, IMAGE.hidden_size, IMAGE.num_heads, plain=False)
        sequence = sequence_parallel(init_mesh(sequence_parallel=2), kind, shape)
        assert not isinstance(sequence.strategy, DirectUlysses | DirectFastSeq) and "--lora" in sequence.plan.reason
        alone = run(model.use(), torch.arange(2), IMAGE.input_size)
        results.append(errors(init_mesh(sequence_parallel=2), model, sequence, IMAGE.input_size, 2, alone))
    return results


def on_two_ranks(mesh: Mesh) -> list:
    return [*many_cases(mesh, CASES), *with_lora(mesh)]


def test_four_ranks_as_a_grid():
    for results in run_ranks(4, many_cases, FOUR):
        for case, (output, gradient, which) in zip(FOUR, results, strict=True):
            assert largest((output, gradient)) < TOLERANCE, (case, which)


def test_ranks_that_share_samples():
    for results in run_ranks(2, on_two_ranks):
        for case, (output, gradient, which) in zip([*CASES, "LoRA", "LoRA, fastseq"], results, strict=True):
            assert largest((output, gradient)) < TOLERANCE, (case, which)
