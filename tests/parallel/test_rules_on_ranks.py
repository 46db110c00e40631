"""Partial results from the slices of plans' rules add up to the full result, in float64 in one process."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models.plan import Column, Row, Rule, Vocabulary
from opendit.models.zoo import CLASSES, build_model, plan_of
from opendit.parallel.rules import (
    local_slices,
    local_tensor,
    rule_of,
)
from tests.models import test_zoo
from tests.models.test_dit import randomised

HEADS, KV_HEADS = 12, 6
SHAPE = {"in_channels": 3, "hidden_size": 48, "depth": 1, "num_heads": HEADS}
PICTURE = SHAPE | {"input_size": (8, 6), "patch_size": 2}
CLIP = SHAPE | {"input_size": (4, 8, 6), "patch_size": (2, 2, 3)}
# Ranks use these parameters for different heads or experts, so the gradient is a sum over the ranks.
SUMMED = ("q_norm.weight", "k_norm.weight", "router.weight")
MODELS = {
    "DiT": CLASSES["DiT"].config(**PICTURE, text=test_zoo.TEXT, qk_norm=True),
    "ST-DiT": CLASSES["ST-DiT"].config(**CLIP, text=test_zoo.TEXT, bias=False, full_attention=True),
    "EC-DiT": CLASSES["EC-DiT"].config(**PICTURE, num_classes=5, experts=6, expert_hidden=10, adaln_lora=5),
    "MovieGen": CLASSES["MovieGen"].config(**CLIP, text=test_zoo.TEXT, kv_heads=KV_HEADS, bias=True, qk_norm=True),
    "MovieGen, no bias": CLASSES["MovieGen"].config(**CLIP, num_classes=5, kv_heads=KV_HEADS, mlp_ratio=2.0),
}
Weights = dict[str, Tensor]


def product(x: Tensor, w: Weights, name: str, bias: bool = True) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias") if bias else None)


def attend(q: Tensor, k: Tensor, v: Tensor, w: Weights, mask: Tensor | None = None) -> Tensor:
    """Attention of heads (B, N, H, d) to shared keys and values (B, M, K, d), returned as (B, N, H d)."""
    if "q_norm.weight" in w:
        q, k = (x * (x.square().mean(-1, True) + 1e-6).rsqrt() * w[f"{n}_norm.weight"] for n, x in (("q", q), ("k", k)))
    shared = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(2)


def attention_of_a_rank(x: Tensor, w: Weights, rank: int, size: int) -> Tensor:
    d = SHAPE["hidden_size"] // HEADS
    heads = HEADS // size
    q, rest = product(x, w, "qkv").unflatten(-1, (-1, d)).split((heads, w["qkv.weight"].shape[0] // d - heads), dim=2)
    k, v = rest.chunk(2, dim=2)
    return product(attend(q, k, v, w), w, "proj", bias=False)


def cross_attention_of_a_rank(x: Tensor, w: Weights, rank: int, size: int, tokens: Tensor, mask: Tensor) -> Tensor:
    q = product(x, w, "q").unflatten(-1, (HEADS // size, -1))
    k, v = product(tokens, w, "kv").unflatten(-1, (2, HEADS // size, -1)).unbind(2)
    return product(attend(q, k, v, w, mask), w, "proj", bias=False)


def mlp_of_a_rank(x: Tensor, w: Weights, rank: int, size: int) -> Tensor:
    hidden = product(x, w, "fc1")
    if hidden.shape[-1] == 2 * w["fc2.weight"].shape[1]:
        a, b = hidden.chunk(2, dim=-1)
        hidden = F.silu(a) * b
    else:
        hidden = F.gelu(hidden, approximate="tanh")
    return product(hidden, w, "fc2", bias=False) + experts_of_a_rank(x, w, rank)


def experts_of_a_rank(x: Tensor, w: Weights, rank: int) -> Tensor | float:
    """Compute one sample and expert at a time; each of this rank's experts chooses among all tokens."""
    if "router.weight" not in w:
        return 0.0
    affinity, here = product(x, w, "router").softmax(-1), len(w["expert_fc1"])
    chosen = math.ceil(2.0 * x.shape[1] / affinity.shape[-1])
    out = torch.zeros_like(x)
    for sample in range(len(x)):
        for i in range(here):
            weight, token = affinity[sample, :, rank * here + i].topk(chosen)
            y = F.gelu(x[sample, token] @ w["expert_fc1"][i], approximate="tanh") @ w["expert_fc2"][i]
            out = out.index_put((torch.full_like(token, sample), token), weight[:, None] * y, accumulate=True)
    return out


def compare_with_ranks(
    module: nn.Module, rules: dict[str, Rule], of_a_rank: Callable, inputs: list[Tensor], given: tuple, size: int
) -> None:
    """Compare ``module``'s output and gradients with those of simulated ranks.

    Each rank has its slices and a copy of the inputs. The results of ``of_a_rank`` are summed, and each rank then adds
    the biases of its row-parallel layers.
    """
    full = dict(module.named_parameters())
    generator = torch.Generator().manual_seed(3)
    output = module(*inputs, *given)
    upstream = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    named = [*full, *(f"input {i}" for i in range(len(inputs)))]
    wanted = dict(zip(named, torch.autograd.grad((output * upstream).sum(), [*full.values(), *inputs]), strict=True))

    def local(name: str, value: Tensor, rank: int) -> Tensor:
        return local_tensor(value, rules[name], rank, size).detach().clone().requires_grad_()

    ranks = [{name: local(name, value, rank) for name, value in full.items()} for rank in range(size)]
    copies = [[x.detach().clone().requires_grad_() for x in inputs] for _ in range(size)]
    parts = [of_a_rank(copies[r][0], ranks[r], r, size, *copies[r][1:], *given) for r in range(size)]
    total = sum(parts)
    biases = {name.replace("weight", "bias") for name, rule in rules.items() if isinstance(rule, Row)} & set(full)
    sums = [total + sum(ranks[r][name] for name in biases) for r in range(size)]
    for result in sums:
        torch.testing.assert_close(result, output, rtol=1e-10, atol=1e-12)
    for r in range(size):  # each rank adds its own copy of the biases after the sum
        for name in biases:
            (ranks[r][name].grad,) = torch.autograd.grad((sums[r] * upstream).sum(), ranks[r][name], retain_graph=True)
    leaves = [value for rank in ranks for name, value in rank.items() if name not in biases]
    (total * upstream).sum().backward(inputs=[*leaves, *itertools.chain(*copies)])
    for name in full:
        for r in range(size):
            expected = local_tensor(wanted[name], rules[name], r, size)
            found = ranks[r][name].grad
            if name in SUMMED:
                found = sum(rank[name].grad for rank in ranks)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
            assert expected.abs().max() > 1e-6, name
    for i in range(len(inputs)):
        torch.testing.assert_close(sum(c[i].grad for c in copies), wanted[f"input {i}"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_a_block_s_layers_add_up(name, size):
    config = MODELS[name]
    torch.manual_seed(0)
    block, rules = randomised(build_model(config)).blocks[0].double(), plan_of(config).rules(config)
    generator, compared = torch.Generator().manual_seed(1), []

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    for part, module in block.named_children():
        of_parameters = {n: rule_of(rules, f"blocks.0.{part}.{n}") for n, _ in module.named_parameters()}
        inputs, given = [tensor(2, 12, 48)], ()
        if part == "cross_attn":
            inputs, given = [*inputs, tensor(2, 5, 48)], (torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(),)
            of_a_rank = cross_attention_of_a_rank
        elif part == "mlp":
            of_a_rank = mlp_of_a_rank
        elif part in ("attn", "full_attn"):
            of_a_rank = attention_of_a_rank
        else:
            continue
        compare_with_ranks(module, of_parameters, of_a_rank, inputs, given, size)
        compared.append(part)
    assert {"mlp"} < set(compared) and ("cross_attn" in compared) == config.cross_attention


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["DiT", "EC-DiT"])
def test_gathered_modulations_are_the_whole_one(name, size):
    config = MODELS[name]
    torch.manual_seed(0)
    model, rules = randomised(build_model(config)).double(), plan_of(config).rules(config)
    c = torch.randn(2, 48, dtype=torch.float64)
    for path in ("blocks.0.adaLN_modulation", "final_layer.adaLN_modulation"):
        module, locals_ = model.get_submodule(path), []
        for rank in range(size):
            x = F.silu(c)
            for layer in range(1, len(module)):
                w = {
                    n: local_tensor(p, rule_of(rules, f"{path}.{layer}.{n}"), rank, size)
                    for n, p in module[layer].named_parameters()
                }
                x = F.linear(x, w["weight"], w.get("bias"))
            locals_.append(x)
        assert rule_of(rules, f"{path}.{len(module) - 1}.weight") == Column(gathered=True)
        torch.testing.assert_close(torch.cat(locals_, dim=1), module(c))


@pytest.mark.parametrize(("rows", "size"), [(11, 3), (7, 2), (3, 4)])
def test_rows_of_a_table_that_ranks_find_add_up(rows, size):
    table, index = torch.randn(rows, 5), torch.arange(rows).repeat(2)
    found = torch.zeros(2 * rows, 5)
    for rank in range(size):
        mine = local_slices(table.shape, Vocabulary(), rank, size)[0][0]
        here = (index >= mine.start) & (index < mine.stop)
        found[here] += local_tensor(table, Vocabulary(), rank, size)[index[here] - mine.start]
    assert torch.equal(found, table[index])
