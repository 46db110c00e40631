"""Test initial values: the generator, the distributions, and that values depend only on seed, name and position. The
references are Philox in Python integers, closed forms, and torch's own initialisation."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from opendit.config.architectures import NAMES, VIDEO_NAMES
from opendit.models import initialization
from opendit.models.initialization import (
    CHUNK,
    GRID,
    Constant,
    Distribution,
    FanInUniform,
    Normal,
    XavierUniform,
    canonical_name,
    distribution_of,
    draw,
    initialize,
    initialize_parameter,
)
from opendit.models.zoo import build_model
from tests.models.test_zoo import every_config
from tests.parallel.test_rules import CONFIGS as EVERY_OPTION
from tests.training import recorded_estimates

NAME, SHAPE = "blocks.3.attn.qkv.weight", (1536, 640)
CONFIGS = recorded_estimates.configs() | EVERY_OPTION
MASK = 2**64 - 1


def values(distribution: Distribution, seed=1, name=NAME, shape=SHAPE, start=0, count=None) -> torch.Tensor:
    return draw(distribution, seed, name, shape, start, torch.empty(math.prod(shape) if count is None else count))


# ----------------------------------------------------------------------------------------------------- the generator


def philox(counter: int, key: int) -> list[int]:
    """Return four words of Philox-4x64-10 (Salmon et al. 2011, fig. 2 and table 2). The counter has 256 bits and the
    key 128."""
    x, (k0, k1) = [counter >> 64 * i & MASK for i in range(4)], (key & MASK, key >> 64)
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [p1 >> 64 ^ x[1] ^ k0, p1 & MASK, p0 >> 64 ^ x[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return x


def test_the_reference_has_the_published_answer():
    """Compare with Random123's known answer in kat_vectors: philox4x64, 10 rounds, counter and key zero."""
    assert philox(0, 0) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


@pytest.mark.parametrize("block", [0, 1, 1000, 2**40])
def test_words_are_philox_s(block):
    key = (77 << 64) + 5
    expected = [*philox(block, key), *philox(block + 1, key)]
    assert initialization.random_words(key, 4 * block, 8).tolist() == expected


def test_values_are_functions_of_the_words(monkeypatch):
    """Compare each element with the formulas in Python floats."""
    keys, words_of = [], initialization.random_words
    monkeypatch.setattr(initialization, "random_words", lambda key, *place: keys.append(key) or words_of(key, *place))
    start = 5 * GRID + 3
    normal, uniform = (values(kind, start=start, count=6).tolist() for kind in (Normal(0.02), XavierUniform()))
    assert keys[0] == keys[1]
    words = [word for block in range(2 * GRID) for word in philox(block, keys[0])]
    for i, element in enumerate(range(start, start + 6)):
        bits = words[element // 2] >> 32 * (element % 2) & 0xFFFFFFFF
        signed = (bits - (bits >> 31 << 32)) >> 8
        assert uniform[i] == pytest.approx((signed + 0.5) / 2**23 * math.sqrt(6 / sum(SHAPE)), rel=1e-6)
        pair = element // 2 * 2
        u, v = ((words[pair + k] >> 11) / 2**53 for k in (0, 1))
        turn = (math.cos, math.sin)[element % 2](2 * math.pi * v)
        assert normal[i] == pytest.approx(0.02 * math.sqrt(-2 * math.log(u)) * turn, rel=1e-6, abs=1e-9)


def test_values_of_a_seed_never_change():
    """Another machine, NumPy or OpenDiT version must draw the same values."""
    assert values(XavierUniform(), count=4).tolist() == pytest.approx(UNIFORM, rel=1e-7)
    assert values(Normal(0.02), count=4).tolist() == pytest.approx(NORMAL, rel=1e-6)


UNIFORM = [-0.006942449137568474, 0.04750794172286987, 0.046635426580905914, 0.017961444333195686]
NORMAL = [0.011993364430963993, 0.022153329104185104, -0.0026850688736885786, 0.0077376589179039]

# ------------------------------------------------------------------------------------------------------ distributions

NORMAL_STD, STACK = 0.02, (6, 40, 3000)
KINDS = {
    "normal": (Normal(NORMAL_STD), SHAPE, stats.norm(scale=NORMAL_STD)),
    "xavier": (XavierUniform(), SHAPE, math.sqrt(6 / (1536 + 640))),
    "convolution": (XavierUniform(), (900, 4, 2, 8, 8), math.sqrt(6 / (900 + 512))),
    "experts": (XavierUniform(stacked=True), STACK, math.sqrt(6 / 3040)),
    "fan in": (FanInUniform(), SHAPE, 1 / math.sqrt(640)),
}


@pytest.mark.parametrize(("distribution", "shape", "exact"), KINDS.values(), ids=KINDS)
def test_distributions_by_their_closed_forms(distribution, shape, exact):
    """Check bounds, mean and standard deviation within five standard errors, and a Kolmogorov-Smirnov test."""
    found = values(distribution, shape=shape).double()
    if not hasattr(exact, "cdf"):
        assert found.abs().max() < exact and found.abs().max() > exact * (1 - 20 / len(found))
        exact = stats.uniform(-exact, 2 * exact)
    std, error = exact.std(), 5 / math.sqrt(len(found))
    assert abs(found.mean()) < std * error
    assert found.std().item() == pytest.approx(std, rel=error)
    assert stats.kstest(found.numpy(), exact.cdf).pvalue > 1e-3


def test_normals_have_tails():
    found = values(Normal(1), shape=(4 * CHUNK,)).abs()
    for sigmas in (3, 4, 4.5):
        expected = len(found) * 2 * stats.norm.sf(sigmas)
        assert abs((found > sigmas).sum().item() - expected) < 5 * math.sqrt(expected)


def test_constants():
    assert (values(Constant(1.5), start=7, count=30) == 1.5).all() and not values(Constant(), count=5).any()


@pytest.mark.parametrize("distribution", [Normal(1), XavierUniform()])
def test_names_seeds_and_positions_are_independent(distribution):
    def correlation(a, b):
        return torch.corrcoef(torch.stack((a, b)))[0, 1].abs().item() * math.sqrt(len(a))

    one = values(distribution)
    for name in ("blocks.2.attn.qkv.weight", "blocks.3.attn.qkv.bias", NAME + " "):
        assert correlation(one, values(distribution, name=name)) < 5
    for seed in (0, 2, 11, -1, 1 + 2**64):
        assert correlation(one, values(distribution, seed=seed)) < 5
    for lag in (1, 2, 3, 4, 7, 8, 16, SHAPE[1], GRID, CHUNK // 4):
        assert correlation(one[:-lag], one[lag:]) < 5
        assert correlation(one[:-lag].square(), one[lag:].square()) < 5


@pytest.mark.parametrize("distribution", [Normal(1), XavierUniform()])
def test_any_range_is_a_part_of_the_whole(distribution, monkeypatch):
    """The bits do not depend on the range, the chunks or the number of threads."""
    shape = (5, CHUNK // 2 - 11)
    whole = values(distribution, shape=shape)

    @settings(max_examples=30, database=None)
    @given(st.integers(0, len(whole)), st.one_of(st.integers(0, 40), st.integers(0, len(whole))))
    def check(start, count):
        part = values(distribution, shape=shape, start=start, count=min(count, len(whole) - start))
        assert torch.equal(part, whole[start : start + count])

    check()
    monkeypatch.setattr(initialization, "CHUNK", 3 * GRID)
    assert torch.equal(values(distribution, shape=shape), whole)


# ------------------------------------------------------------------------------------------------------------- models


def expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_one_distribution(name):
    with torch.device("meta"):
        model = build_model(replace(CONFIGS[name], depth=2))  # all blocks of a model have the same parameters
    patterns = model.initial_distributions()
    for parameter, _ in model.named_parameters():
        fitting = [patterns[pattern] for pattern in patterns if re.fullmatch(expression(pattern), parameter)]
        assert fitting == [distribution_of(model, parameter)], parameter


def test_all_named_models_are_looked_at():
    assert set(CONFIGS) >= {*NAMES, *VIDEO_NAMES}


def test_a_parameter_of_no_pattern_or_of_two_is_an_error():
    layer = nn.Linear(2, 3, bias=False)
    for patterns in ({"bias": Constant()}, {"*": Constant(), "weight": Constant()}):
        layer.initial_distributions = lambda patterns=patterns: patterns
        with pytest.raises(ValueError, match="parameter weight: one pattern of the initial distributions"):
            initialize(layer, 0)


@every_config
def test_built_on_the_meta_device_and_filled_it_is_the_model_built_directly(config):
    directly = build_model(config)
    before = torch.get_rng_state()
    with torch.device("meta"):
        on_meta = build_model(config)
        assert all(t.is_meta for t in build_model(config, seed=3).state_dict().values())
    assert all(t.is_meta for t in on_meta.state_dict().values())
    on_meta.to_empty(device="cpu")
    for tensor in on_meta.state_dict().values():
        tensor.fill_(float("nan"))
    on_meta.fill_tables()
    initialize(on_meta, seed=3)
    made = build_model(config, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    tables = dict(directly.named_buffers())
    initialize(directly, seed=3)
    for name, tensor in directly.state_dict().items():
        assert torch.equal(on_meta.state_dict()[name], tensor) and torch.equal(made.state_dict()[name], tensor), name
        assert name not in tables or torch.equal(tables[name], tensor)
    assert all(p.requires_grad for p in made.parameters())


@every_config
def test_a_model_without_a_seed_is_one_of_torch_s_generator(config):
    torch.manual_seed(5)
    one, two = build_model(config).state_dict(), build_model(config).state_dict()
    torch.manual_seed(5)
    again = build_model(config).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if one[name].std() > 0 and "pos" not in name.split(".")[-1] and "embed." in name]
    assert not any(torch.equal(one[name], two[name]) for name in drawn)


@every_config
def test_layers_of_one_shape_are_different(config):
    model = build_model(config, seed=0)
    drawn = [p.flatten() for p in model.parameters() if p.std() > 0]
    for i, one in enumerate(drawn):
        assert not any(one.shape == other.shape and torch.equal(one, other) for other in drawn[:i])
    stacks = [p for name, p in model.named_parameters() if "expert_fc" in name]
    assert not any(torch.equal(stack[0], stack[1]) for stack in stacks)


@every_config
def test_distributions_are_those_of_torch_s_initialisation(config):
    """Compare every parameter in a two-sample Kolmogorov-Smirnov test. Constants must be equal."""
    torch.manual_seed(0)
    ours, theirs = build_model(config, seed=1), build_model(config, seed=2)
    initialize_as_torch(theirs)
    theirs = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        a, b = parameter.detach().flatten(), theirs[name].detach().flatten()
        if b.min() == b.max():
            assert torch.equal(a, b), name
        else:
            assert stats.ks_2samp(a.numpy(), b.numpy()).pvalue > 1e-5, name
            assert a.std().item() == pytest.approx(b.std().item(), rel=5 / len(a) ** 0.5), name


@torch.no_grad()
def initialize_as_torch(model) -> None:
    """Apply Meta's initialisation with torch.nn.init, module by module."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif type(module).__name__ == "RMSNorm":
            nn.init.ones_(module.weight)
        elif hasattr(module, "expert_fc1"):
            for matrix in (*module.expert_fc1, *module.expert_fc2):
                nn.init.xavier_uniform_(matrix)
    if model.text_encoder is not None:
        nn.init.normal_(model.text_encoder.embedding.weight)
    nn.init.xavier_uniform_(model.x_embedder.proj.weight.flatten(1))
    nn.init.zeros_(model.x_embedder.proj.bias)
    for layer in (model.t_embedder.mlp[0], model.t_embedder.mlp[2]):
        nn.init.normal_(layer.weight, std=0.02)
    zero = [model.final_layer.linear, model.final_layer.adaLN_modulation[-1]]
    zero += [block.adaLN_modulation[-1] for block in model.blocks]
    zero += [] if model.shared_modulation is None else [model.shared_modulation[-1]]
    if model.config.cross_attention and model.config.kind != "stdit":
        zero += [block.cross_attn.proj for block in model.blocks]
    for layer in zero:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)


def test_other_precisions_get_the_rounded_values():
    layer = nn.Linear(6, 7, bias=False).to(torch.bfloat16)
    layer.initial_distributions = lambda: {"weight": XavierUniform()}
    initialize_parameter(layer, 4, "weight")
    assert torch.equal(layer.weight.flatten(), values(XavierUniform(), 4, "weight", (7, 6)).bfloat16())


def test_what_is_wrapped_around_a_module_is_not_in_its_parameters_names():
    assert canonical_name("_orig_mod.blocks.0._fsdp_wrapped_module.attn.qkv.base_layer.weight") == (
        "blocks.0.attn.qkv.weight"
    )
    assert canonical_name(NAME) == NAME and canonical_name(lora := f"{NAME[:-7]}.lora_A.default.weight") == lora
