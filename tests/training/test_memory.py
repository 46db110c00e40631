"""The memory estimate matches measurements, and the memory flags and --compile work in full runs."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train
from benchmarks.bench_public import SUBJECTS, tiny
from opendit.config.command_line import parse
from opendit.config.components import TokenRoute
from opendit.config.train import TrainConfig
from opendit.diffusion.random import draw_kept_tokens
from opendit.kernels.eight_bit_moments import EightBits
from opendit.kernels.recompute import recompute_in
from opendit.models.conditioning import TextCondition, TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.public_config import public_config
from opendit.models.finetuning import Lora, add_lora
from opendit.models.zoo import build_model, model_config
from opendit.parallel.apply import apply_parallel
from opendit.parallel.collectives import Group
from opendit.parallel.tensor import divide
from opendit.training.memory import GIB, Setup, advice, describe, estimate, largest_batch, lora_parameters, parts
from opendit.training.step_cost import training_flops
from tests.memory import kept_bytes
from tests.models.test_dit import randomised
from tests.ranks import run_ranks

XL = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=1000)
LABELS = DiTConfig((16, 16), 2, 2, 96, 4, 3, num_classes=3)
CAPTIONS = DiTConfig((16, 16), 2, 2, 96, 4, 3, text=TextConfig("t5", 8, 16, cross_attention=True), mlp_ratio=3.0)

# ------------------------------------------------------------------------------------------------------ the formulas


def own_bytes(
    mesh, plugin: str, precision: str, rank: int | None = None, eight_bits=False
) -> tuple[dict[str, int], int]:
    """Return the bytes of each state on this rank, and of its gradients after a backward pass. ``rank`` is LoRA's."""
    from opendit.checkpoint.ema import EMA
    from opendit.parallel.engines import build_engine

    model = randomised(DiT(LABELS))
    if rank is not None:
        add_lora(model, Lora(rank, rank, ""), (), seed=0)
    engine = build_engine(model, mesh, plugin=plugin, precision=precision, eight_bits=eight_bits)
    ema = EMA(engine, [0.9, 0.99])
    with engine.micro_batch(last=True):
        engine.backward(engine.forward(*inputs(LABELS)).float().square().mean())
    params = list(engine.module.parameters())
    held = engine.gradients if plugin == "zero2" else [p.grad for p in params]
    gradients = sum(g.nbytes for g in held if g is not None)
    engine.step()
    moments = [t for state in engine.adam.state.values() for key, t in state.items() if key != "step"]
    moments = [part for t in moments for part in ((t.codes, t.scales) if isinstance(t, EightBits) else (t,))]
    states = {
        "weights": sum(p.nbytes for p in params),
        "moments": sum(t.nbytes for t in moments),
        "averages": ema.bytes_per_rank(),
    }
    if plugin == "zero2":
        states["masters"] = sum(master.nbytes for master in engine.masters().values())
    return states, gradients


def inputs(config: DiTConfig, batch: int = 2):
    generator = torch.Generator().manual_seed(batch)
    x, t = torch.randn(batch, config.in_channels, *config.input_size, generator=generator), torch.arange(batch) * 100
    if config.text is None:
        return x, t, torch.arange(batch) % 3
    tokens = torch.randn(batch, config.text.max_tokens, config.text.width, generator=generator)
    return x, t, TextCondition(tokens, tokens[..., 0] < 1, tokens.mean(1))


@pytest.mark.parametrize(
    ("world", "plugin", "precision"),
    ((1, "zero2", "bf16"), (2, "zero2", "bf16"), (2, "zero2", "fp32"), (2, "ddp", "fp32")),
)
@pytest.mark.parametrize("rank", (None, 5), ids=("all weights", "LoRA"))
def test_states_are_those_of_the_engine(world, plugin, precision, rank):
    lora = None if rank is None else Lora(rank, rank, "")
    needs = estimate(LABELS, Setup(plugin=plugin, precision=precision, world=world, averages=2, lora=lora), 2)
    for states, gradients in run_ranks(world, own_bytes, plugin, precision, rank):
        for name, held in states.items():
            assert needs.states[name] == pytest.approx(held, rel=5e-3), name  # shards are rounded up
        expected = needs.states.get("gradients", needs.gradients_at_the_end)
        assert gradients == pytest.approx(expected, rel=5e-3)
        assert set(needs.states) - {"gradients"} == set(states)


def test_moments_in_8_bits_are_those_of_the_engine():
    setup = Setup(precision="fp32", averages=2, eight_bits=True)
    needs, exact = estimate(LABELS, setup, 2), estimate(LABELS, replace(setup, eight_bits=False), 2)
    ((states, _),) = run_ranks(1, own_bytes, "zero2", "fp32", None, True)
    assert states["moments"] == pytest.approx(needs.states["moments"], rel=0.06)  # vectors are kept in fp32
    assert needs.states["moments"] < 0.26 * exact.states["moments"]
    assert needs.states["decoded moments"] == exact.states["moments"]  # a small model decodes all at once
    large = estimate(XL, Setup(eight_bits=True), 2)
    table = 8 * (2**24 + 1152 * 6912)
    assert large.states["decoded moments"] == table
    other = estimate(XL, Setup("ddp", precision="bf16", eight_bits=True), 2)
    assert other.gradients_at_the_end == table and other.states["moments"] == large.states["moments"]


@pytest.mark.parametrize("name", ("DiT-Ti/2", "vDiT-Ti/222", "ST-DiT-Ti/222", "MovieGen-Ti/122", "EC-DiT-Ti/2"))
def test_lora_s_weights_are_counted_without_making_them(name):
    frames = None if name.endswith("/2") else 4
    text = TextConfig("t5", 12, 6, cross_attention=True)
    config = model_config(name, input_size=(8, 8), in_channels=2, frames=frames, text=text)
    model = build_model(config)
    lora = Lora(3, 6, "", ("attn.*", "fc1:2", "kv", "adaLN_modulation.*"))
    add_lora(model, lora, (), seed=0)
    assert lora_parameters(config, lora) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    if name.startswith("MovieGen"):  # its width can't be divided among ranks
        return
    divide(model, Group(None, 1, 2))
    assert lora_parameters(config, lora, 2) == sum(p.numel() for p in model.parameters() if p.requires_grad)


# Torch counts only matrix products that make a new tensor.
IN_PLACE = {torch.ops.aten.addmm_: lambda y, a, b, **_: 2 * a[0] * a[1] * b[1]}


def test_lora_s_work_is_that_of_the_products_that_are_made():
    """The estimated work of LoRA matches torch's count, as frozen weights need no gradients."""
    lora, model = Lora(3, 6, "", ("qkv", "fc1:2")), DiT(LABELS)
    found = []
    for trained in (None, lora):
        if trained is not None:
            add_lora(model, trained, (), seed=0)
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counted:
            model(*inputs(LABELS, 4)).sum().backward()
        found.append(4 * training_flops(LABELS, trained) / counted.get_total_flops())
    # Torch counts one product of attention a second time in the backward pass. With LoRA, nothing before the first
    # adapted layer has a gradient, which the estimate ignores.
    assert 0.97 < found[0] < 1 and 1 <= found[1] / found[0] < 1.05


@pytest.mark.parametrize("config", (LABELS, CAPTIONS), ids=("labels", "captions"))
def test_lora_keeps_no_more_activations_than_training_all_weights(config):
    """LoRA keeps as many if an embedder is trained, too, because every modulation then needs a gradient."""
    setup = Setup(precision="fp32", fused=False, lora=Lora(1, 1, ""))
    unit = 4 * config.tokens * config.hidden_size * 4
    expected = estimate(config, setup, 4).activations - (5 + 5 / 4 * (config.mlp_ratio - 4)) * unit
    kept = []
    for train_too in ((), ("t_embedder.mlp.2.weight",)):
        model = randomised(DiT(config))
        add_lora(model, Lora(1, 1, ""), train_too, seed=0)
        whole = kept_bytes(lambda model=model: model(*inputs(config, 4)))
        model.blocks = torch.nn.ModuleList()
        kept.append(whole - kept_bytes(lambda model=model: model(*inputs(config, 4))))
    assert kept[1] == pytest.approx(expected, rel=0.02) and 0.8 * expected < kept[0] < expected


def test_cast_weights_of_autocast():
    bare, cast = (estimate(XL, Setup("ddp", precision), 0).states for precision in ("fp32", "bf16"))
    assert sum(cast.values()) - sum(bare.values()) == 2 * XL.parameters()


@pytest.mark.parametrize("config", (LABELS, CAPTIONS), ids=("labels", "captions"))
@pytest.mark.parametrize("level", ("none", "norms", "cheap", "half", "mlp"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_activations_are_what_a_model_keeps(config, level, dtype):
    """This checks torch's operations on a CPU. tests/kernels/test_recompute.py covers the fused kernels."""
    model = randomised(DiT(config)).place("cpu", dtype)
    recompute_in(model, level)
    setup = Setup(precision="fp32" if dtype == torch.float32 else "bf16", fused=False, recompute=level)
    x, t, y = inputs(config, 4)
    kept = kept_bytes(lambda: model(x, t, y))
    # Subtract what is kept outside of the blocks.
    model.blocks = torch.nn.ModuleList()
    kept -= kept_bytes(lambda: model(x, t, y))
    unit = 4 * config.tokens * config.hidden_size * dtype.itemsize
    backward = {"none": 5, "norms": 5, "cheap": 9, "half": 14, "mlp": 14}[level] + 5 / 4 * (config.mlp_ratio - 4)
    assert estimate(config, setup, 4).activations - backward * unit == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("changes", ({}, {"recompute": "cheap"}, {"grad_checkpoint": True}), ids=str)
@pytest.mark.parametrize("fused", (False, True), ids=("tread", "sprint"))
@pytest.mark.parametrize("share", (0.25, 0.75))
def test_routed_blocks_keep_their_tokens_only(changes, fused, share):
    """The estimate with a route is less than without by the memory that a model keeps less."""
    config = replace(LABELS, depth=5, sprint=(1, 4) if fused else None)
    route, setup = TokenRoute(1, 4, share, fused), Setup(precision="fp32", fused=False, **changes)
    model, kept = randomised(build_model(config)), []
    recompute_in(model, setup.recompute)
    model.grad_checkpoint, model.route = setup.grad_checkpoint, (1, 4)
    for indices in (None, draw_kept_tokens(route, config.tokens, 0, 1, torch.arange(4))):
        kept.append(kept_bytes(lambda indices=indices: model(*inputs(config, 4), kept=indices)))
    found = [estimate(config, replace(setup, route=of), 4).activations for of in (None, route)]
    assert found[0] - found[1] == pytest.approx(kept[0] - kept[1], rel=0.05)
    if fused:
        plain = randomised(build_model(replace(config, sprint=None)))
        recompute_in(plain, setup.recompute)
        plain.grad_checkpoint = setup.grad_checkpoint
        more = kept[0] - kept_bytes(lambda: plain(*inputs(config, 4)))
        assert found[0] - estimate(replace(config, sprint=None), setup, 4).activations == pytest.approx(more, rel=0.05)


def test_a_dry_run_counts_the_route(no_ranks, capsys):
    """The memory of the routes was measured (docs/better_training.md)."""
    small = (
        "--model DiT-S/2 --data_path digits --image_size 32 --vae none --objective flow --batch_size 512 --dry_run 1"
    )
    small += " --epochs 100000 --max_steps 300000 --enable_modulate_kernel --enable_layernorm_kernel"
    found = {}
    for route in ("", "2:10:0.5", "2:10:0.75:sprint", "2:10:0.75:sprint --route_until 100000"):
        train.main([*small.split(), "--mixed_precision", "bf16", *(f"--route {route}".split() if route else ())])
        out = capsys.readouterr().out
        rows = r"memory +([\d.]+) GiB", r"time +([\d.]+) ms", r"duration +about ([\d.]+) hours"
        found[route] = [float(match[1]) if (match := re.search(row, out)) else None for row in rows]
        assert ("the memory of a step without it" in out) == ("until" in route)
    dense, tread, sprint, until = found.values()
    assert [dense[0], tread[0], sprint[0]] == pytest.approx([21.5, 14.7, 11.5], rel=0.02)
    fused = 512 * 256 * 384 * 2 * 2 / GIB  # the inputs of SPRINT's projection
    assert until[0] == pytest.approx(dense[0] + fused, abs=0.05)
    assert until[1] == sprint[1] < tread[1] < dense[1]
    assert until[2] == pytest.approx((sprint[2] + 2 * dense[2]) / 3, rel=0.05)


@pytest.mark.parametrize("attention", (False, True))
def test_checkpointed_blocks_keep_their_input_and_modulation_and_may_keep_attention(attention):
    model = randomised(DiT(LABELS))
    model.grad_checkpoint = "but_attention" if attention else True
    kept = kept_bytes(lambda: model(*inputs(LABELS)))
    model.blocks = torch.nn.ModuleList()
    kept -= kept_bytes(lambda: model(*inputs(LABELS)))
    setup = Setup(
        precision="fp32", fused=False, **({"recompute": "but_attention"} if attention else {"grad_checkpoint": True})
    )
    unit = 2 * LABELS.tokens * LABELS.hidden_size * 4 + 2 * 6 * LABELS.hidden_size * 4  # x and m of 2 samples
    unit += attention * 2 * LABELS.tokens * 4 * (LABELS.hidden_size + LABELS.num_heads)
    one = estimate(DiTConfig(**{**vars(LABELS), "depth": 1}), setup, 2).activations
    assert estimate(LABELS, setup, 2).activations - one == 3 * unit
    assert kept == pytest.approx(4 * unit, rel=0.02)


@pytest.mark.parametrize("attention", (False, True))
def test_checkpointed_blocks_keep_the_captions_tokens(attention):
    """FLUX.1's blocks of both kinds, with 24 picture tokens and 7 caption tokens."""
    subject = tiny("flux")
    config = public_config("flux", subject.values, subject.size, subject.tokens)
    setup = Setup(
        precision="fp32", fused=False, **({"recompute": "but_attention"} if attention else {"grad_checkpoint": True})
    )
    x, width = torch.randn(3, config.in_channels, *config.input_size), config.text.width
    y = TextCondition(torch.randn(3, 7, width), torch.ones(3, 7, dtype=torch.bool), torch.randn(3, 10))
    kept = {}
    for double, single in ((2, 3), (3, 3), (2, 4)):
        values = subject.values | {"num_layers": double, "num_single_layers": single}
        model = randomised(build_model(public_config("flux", values, subject.size, 7)))
        model.grad_checkpoint = "but_attention" if attention else True
        kept[double, single] = kept_bytes(lambda model=model: model(x, torch.rand(3), y))
    known = kept[2, 3]
    tokens = 3 * (24 + 7) * 4 * (config.hidden_size + attention * (config.hidden_size + config.num_heads))
    for (depths, found), chunks in zip(list(kept.items())[1:], (12, 3), strict=True):
        modulation = 3 * 4 * config.hidden_size * chunks
        assert found - known == pytest.approx(tokens + modulation, rel=0.05), depths
    one = estimate(replace(config, depth=1), setup, 3).activations
    mean = 3 * 4 * config.hidden_size * (2 * 12 + 3 * 3) // 5
    assert estimate(config, setup, 3).activations - one == pytest.approx(4 * (tokens + mean), rel=0.02)


@pytest.mark.parametrize("attention", (False, True))
def test_blocks_that_are_not_recomputed_keep_all(attention):
    how = {"recompute": "but_attention"} if attention else {"grad_checkpoint": True}

    def kept(**changes) -> int:
        model = apply_parallel(randomised(DiT(LABELS)), **changes)
        return kept_bytes(lambda: model(*inputs(LABELS)))

    none, one, few, every = kept(), kept(**how, recompute_blocks=1), kept(**how, recompute_blocks=3), kept(**how)
    assert every == kept(**how, recompute_blocks=4) == kept(**how, recompute_blocks=9)
    setup = Setup(precision="fp32", fused=False)

    def estimated(**changes) -> float:
        return estimate(LABELS, replace(setup, **changes), 2).activations

    for found, count in ((one, 1), (few, 3), (every, 4)):  # the last block's backward pass has all
        less = estimated() - estimated(**how, recompute_blocks=count)
        assert less == pytest.approx((none - found) * (count - 1) / count, rel=2e-3)
    assert estimated(**how) == estimated(**how, recompute_blocks=4)


def test_measured_peaks():
    """Check the peaks of all training runs in results.csv. Rows of the first commit are left out: they are 7.6 GiB too
    high, because each measurement kept memory from the one before."""
    rows = csv.DictReader(Path(__file__).parents[2].joinpath("benchmarks/results.csv").open())
    pattern = (
        r"DiT-XL/2 (zero2|ddp|gemini) (bf16|fp16)( kernels)? 256px batch (\d+)( deterministic| full EMA| sharded EMA)?"
    )
    found = 0
    for row in rows:
        match = re.fullmatch(pattern, row["case"])
        if row["metric"] != "peak GiB" or not match or row["commit"] == "010ca9a":
            continue
        plugin, precision, kernels, batch, suffix = match.groups()
        world = int(row["gpus"])
        averages = world if suffix == " full EMA" else 1  # for comparison, the benchmark does not shard these averages
        setup = Setup(plugin, precision, world, averages=averages, fused=bool(kernels or row["bench"] == "state"))
        error = estimate(XL, setup, int(batch)).total / GIB / float(row["value"]) - 1
        print(f"{row['case']}, {row['gpus']} GPUs: {row['value']} GiB, {error:+.1%}")
        assert abs(error) < (0.05 if (plugin, precision) == ("gemini", "fp16") else 0.02), row
        found += 1
    assert found >= 15


LORA = Lora(16, 16.0, "")
FP8_LORA = Setup(fp8=True, base_precision="fp8", lora=LORA)
MEASURED = {  # cases of benchmarks/bench_cards.py
    "flux uncapped, all kept": Setup(fp8=True, lora=LORA),
    "flux uncapped, fp8 base": FP8_LORA,
    "flux 22.5": replace(FP8_LORA, recompute="but_attention"),
    "flux 22.5, 41 of 57": replace(FP8_LORA, recompute="but_attention", recompute_blocks=41),
    "flux 14.5": replace(FP8_LORA, recompute="but_attention", offload="blocks:15"),
    "flux 10.5": replace(FP8_LORA, recompute="but_attention", offload="blocks:36"),
    "wan-1.3b uncapped": Setup(lora=LORA, recompute="but_attention"),
    "wan-1.3b 10.5, blocks on the host": Setup(lora=LORA, recompute="but_attention", offload="blocks"),
    "wan-1.3b 10.5, attention recomputed": Setup(lora=LORA, grad_checkpoint=True),
    "wan-1.3b all weights, MLPs recomputed": Setup(recompute="mlp"),
    "wan-1.3b all weights, all but attention recomputed": Setup(recompute="but_attention"),
    "wan-1.3b all weights, blocks recomputed": Setup(grad_checkpoint=True),
}


@pytest.mark.parametrize("case", MEASURED)
def test_measured_peaks_of_public_models(case):
    """FLUX.1 with one picture of 1024 px, and Wan-1.3B with one clip of 33,600 tokens."""
    family, size = ("flux", (128, 128)) if case.startswith("flux") else ("wan", (21, 80, 80))
    config = public_config(family, SUBJECTS[case.split()[0]].values, size, 512)
    rows = csv.DictReader(Path(__file__).parents[2].joinpath("benchmarks/results.csv").open())
    row = [row for row in rows if row["metric"] == "allocated GiB" and row["case"] == case][-1]
    # In the oldest version, a recomputed block kept its branch's output for the frozen gate.
    branch = (4096 + 512) * 3072 * 2 / GIB * (row["commit"] == "c15cbcaa")
    found = estimate(config, MEASURED[case], 1).total / GIB
    assert abs(found / (float(row["value"]) - branch) - 1) < 0.025, (found, row)


def test_lora_of_the_modulation_keeps_what_gates_need():
    config = public_config("flux", SUBJECTS["flux"].values, (128, 128), 512)
    frozen, moved = (
        estimate(config, Setup(lora=Lora(16, 16.0, "", targets)), 1) for targets in (("qkv",), ("qkv", "blocks.3.**"))
    )
    branch = (4096 + 512) * 3072 * 2
    assert moved.activations - frozen.activations == pytest.approx((57 * 2 - 1) * branch)


def test_largest_batch_fits_and_one_more_does_not():
    for setup in (Setup(), Setup(recompute="mlp", accumulate=True), Setup("ddp", world=2), Setup(grad_checkpoint=True)):
        batch = largest_batch(XL, setup, 80 * GIB)
        assert estimate(XL, setup, batch).total <= 80 * GIB < estimate(XL, setup, batch + 1).total
    assert largest_batch(XL, Setup(), 12 * GIB) == 0  # 11.3 GiB of states and 1.3 of gradients


def test_advice_is_the_cheapest_that_is_enough():
    card = 0.94 * 80 * GIB
    assert advice(XL, Setup(), 128, card) is None
    assert advice(XL, Setup(), 256, card) == "--recompute cheap"
    assert advice(XL, Setup(recompute="cheap"), 400, card) == "--recompute mlp"
    assert advice(XL, Setup(plugin="gemini"), 256, card) == "--grad_checkpoint"
    assert advice(XL, Setup(), 4096, card) == "--batch_size 128 with 32 x the --grad_accumulation"
    assert advice(XL, Setup(), 1, 10 * GIB) == "--optimizer adamw8bit"
    assert advice(XL, Setup(), 1, 6 * GIB) == "4 ranks, which share the states"
    assert advice(XL, Setup(muon="bf16"), 1, 9 * GIB) == "2 ranks, which share the states"
    assert "smaller model" in advice(XL, Setup("ddp"), 1, 4 * GIB)
    clip = model_config("vDiT-XL/222", input_size=(64, 64), in_channels=4, frames=2400, num_classes=3)
    assert advice(clip, Setup(world=8), 1, card) == "--sequence_parallel_size 2 --grad_checkpoint"
    assert advice(clip, Setup(world=8, grad_checkpoint=True), 1, card) == "--sequence_parallel_size 2"
    assert advice(clip, Setup(), 1, card) == "2 ranks and --sequence_parallel_size 2 --grad_checkpoint"
    assert advice(clip, Setup(world=8, fp8=True), 1, card) == "--sequence_parallel_size 2 --grad_checkpoint"
    apart = model_config("ST-DiT-XL/122", input_size=(64, 64), in_channels=4, frames=9600, num_classes=3)
    assert advice(apart, Setup(world=8), 1, card) == "32 ranks and --sequence_parallel_size 32 --grad_checkpoint"


@pytest.mark.parametrize("setup", [Setup(), Setup(world=8), Setup("fsdp", world=8, recompute="cheap")])
@pytest.mark.parametrize("batch", [1, 64])  # the peak is at the end of the backward pass, or at its beginning
def test_the_parts_that_are_named_are_all(setup, batch):
    needs = estimate(XL, setup, batch)
    named = [float(number.replace(",", "")) for number in re.findall(r" ([\d,]+\.\d\d)", parts(needs))]
    assert sum(named) == pytest.approx(needs.total / GIB, abs=0.005 * len(named))


def test_the_line_of_the_opening_block():
    setup = Setup(recompute="mlp")
    line = describe(XL, setup, 128, 139.8 * GIB)
    named = "states 11.31, activations 16.86, libraries 0.18"
    assert line.startswith(f"28.35 GiB a rank estimated: {named} (--recompute mlp)")
    assert line.endswith(f"the GPU has 139.8, enough for --batch_size {largest_batch(XL, setup, 0.94 * 139.8 * GIB)}")
    assert "on a CPU in fp32" in describe(XL, Setup(precision="fp32"), 128, None)


# ------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("other", ("grad_checkpoint", "compile"))
def test_recompute_is_not_for_checkpointed_or_compiled_blocks(other, tmp_path):
    flags = parse(TrainConfig, ["--recompute", "cheap", f"--{other}", "--outputs", str(tmp_path)])
    with pytest.raises(ValueError, match=f"--recompute cheap: --{other} .* choose one"):
        flags.resolve(1, False)


@pytest.mark.parametrize("argv", (["--plugin", "gemini", "--mixed_precision", "bf16"], ["--fp8"]))
def test_recompute_falls_back_with_a_note(argv, tmp_path):
    flags, notes = parse(TrainConfig, ["--recompute", "mlp", *argv, "--outputs", str(tmp_path)]).resolve(1, True)
    notes = [note for note in notes if note.startswith("recompute")]
    assert flags.recompute == "none" and len(notes) == 1 and argv[0] in notes[0]


# ------------------------------------------------------------------------------------------------------- whole engines


def curve(mesh, plugin: str, precision: str, how: str) -> list[float]:
    """Return the losses of four steps of two micro-batches. ``how`` is eager, compile or a recomputation level."""
    from opendit.parallel.engines import build_engine

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = DiTConfig((4, 4), 2, 2, 24, 3, 3, num_classes=3)
    model = randomised(DiT(config))
    if how in ("cheap", "mlp"):
        recompute_in(model, how)
    engine = build_engine(model, mesh, plugin=plugin, precision=precision, lr=1e-2, grad_accumulation=2)
    if how == "compile":
        model.compile_blocks(backend="aot_eager", fullgraph=True)
    losses = []
    for _ in range(4):
        for micro in range(2):
            with engine.micro_batch(last=micro == 1):
                loss = (engine.forward(*inputs(config, 2 + mesh.rank)).float() - 1).square().mean() / 2
                engine.backward(loss)
            losses.append(loss.item())
        engine.step()
    if how == "compile":  # one graph for all blocks and one for the final layer, not one per block
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    return losses


def curves(mesh, plugin: str, precision: str) -> dict[str, list[float]]:
    return {how: curve(mesh, plugin, precision, how) for how in ("eager", "cheap", "mlp", "compile")}


@pytest.mark.parametrize(
    ("world", "plugin", "precision"), ((2, "zero2", "bf16"), (1, "zero2", "fp32"), (2, "ddp", "bf16"))
)
def test_engines_take_the_same_steps(world, plugin, precision):
    for found in run_ranks(world, curves, plugin, precision):
        assert found["eager"][-1] < 0.8 * found["eager"][0]  # it learns, so the test depends on every gradient
        assert found["cheap"] == found["mlp"] == found["eager"]
        assert found["compile"] == pytest.approx(found["eager"], rel=1e-5 if precision == "fp32" else 2e-2)


def test_compiled_blocks_have_the_gradients_of_the_model():
    model, results = randomised(DiT(LABELS)), []
    for compiled in (False, True):
        if compiled:
            model.compile_blocks(backend="aot_eager")
        model.zero_grad()
        model(*inputs(LABELS)).square().mean().backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("card", (None, GIB // 8), ids=("CPU", "small GPU"))
@pytest.mark.parametrize("rank", (None, 3), ids=("all weights", "LoRA"))
def test_what_is_needed_is_said_before_it_is_allocated(card, rank, tmp_path, no_ranks, capsys, monkeypatch):
    tiny = "--model DiT-Ti/2 --data_path mock --image_size 64 --num_workers 0 --batch_size 512".split()
    argv = [*tiny, "--mixed_precision", "fp32", "--outputs", str(tmp_path)]
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=4, num_classes=1000)
    if rank is not None:
        torch.save(build_model(config).state_dict(), tmp_path / "base.pt")
        argv += ["--pretrained", str(tmp_path / "base.pt"), "--lora", str(rank)]
    monkeypatch.setattr("opendit.training.summary.card_memory", lambda device: card)
    monkeypatch.setattr("opendit.training.build.empty_model", out_of_memory)
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 1 and "CUDA out of memory" in err.splitlines()[-1]
    lora = None if rank is None else Lora(rank, rank, "")
    setup = Setup(precision="fp32", fused=False, lora=lora)
    assert out.count("GiB a rank estimated") == 1 and describe(config, setup, 512, card) in out
    assert ("the cheapest mitigation is --" in out) == (card is not None)


def out_of_memory(config: DiTConfig, parameters: bool):
    raise torch.OutOfMemoryError("CUDA out of memory")


def start(mesh, argv: list[str]) -> None:
    train.main(argv)


@pytest.mark.parametrize("plugin", ("zero2", "gemini"))
def test_a_run_says_what_it_does(plugin, tmp_path, capfd):
    tiny = "--model DiT-Ti/2 --data_path digits --image_size 8 --vae none --num_workers 0 --batch_size 8".split()
    common = [*tiny, "--max_steps", "1", "--sample_steps", "2", "--ckpt_every", "0", "--outputs", str(tmp_path)]
    how = (
        ["--recompute", "cheap"]
        if plugin == "zero2"
        else ["--compile", "--plugin", "gemini", "--mixed_precision", "bf16"]
    )
    run_ranks(1, start, [*common, *how])
    out = capfd.readouterr().out
    row = re.search(r"memory: (.*)", out).group(1)
    assert "GiB a rank estimated" in row and ("--recompute cheap" in row) == (plugin == "zero2") and "on a CPU" in row
    row = re.search(r"compile +(.*)", out).group(1)
    assert row.startswith("off: Gemini fetches weights" if plugin == "gemini" else "off (--compile is)")


@pytest.mark.parametrize("more", [["--image_size", "16384"], ["--image_size", "4096", "--batch_size", "1400"]])
def test_what_a_machine_without_gpus_can_not_hold_is_refused_at_once(more, tmp_path, capsys, no_ranks):
    tiny = "--model DiT-Ti/2 --data_path digits --vae none --num_workers 0 --outputs".split()
    with pytest.raises(SystemExit) as stop:
        train.main([*tiny, str(tmp_path), *more])
    said = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and re.search(r"needs about [\d,]+ GiB and this machine has", said)
        and "--image_size" in said
    )
