"""What LoRA's parameters take of an architecture's rules: with y = W x + (alpha / rank) B A x, A (rank, in) and B (out,
rank) are divided as W is."""

from collections.abc import Collection, Mapping

from opendit.models.plans.terms import Replicated, Row, Rule

SUMMED = Replicated(partial_gradient=True)


def with_lora(rules: Mapping[str, Rule], layers: Collection[str]) -> dict[str, Rule]:
    """``rules`` with those of what peft's layers have in the place of every linear layer whose name ends in one of
    ``layers``.

    Where ranks have different output features of W, they have the same of B, and all of A, which is applied to all of x
    for features of their own. Where they have different input features, they have the same of A, and all of B: the sum
    of their products is that of W's and of B A's.
    """
    found = {}
    for pattern, rule in rules.items():
        layer, _, kind = pattern.rpartition(".")
        if layer.rpartition(".")[2] not in layers or not layer.startswith("blocks."):
            continue
        found[f"{layer}.base_layer.{kind}"] = rule
        if kind == "weight":
            a, b = (rule, SUMMED) if isinstance(rule, Row) else (SUMMED, rule)
            found |= {f"{layer}.lora_A.*.weight": a, f"{layer}.lora_B.*.weight": b}
    return {**rules, **found}
