"""benchmarks/bench_public.py on a CPU: equal networks, its rows, and weights under wrong names."""

import argparse
import csv
import functools
from collections import Counter

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bench_public
from benchmarks.bench_public import (
    COMPILED,
    EAGER,
    ENGINE,
    ENGINE_FLOAT8,
    SUBJECTS,
    Bench,
    Measurement,
    Pair,
    by_our_names,
    lora_floor_of,
    main,
    tiny,
    work_of,
)
from opendit.models.attention import local_attention

TINY = ["--tiny", "--rounds", "1", "--seconds_a_turn", "0", "--without", COMPILED]


def test_all_parts_of_all_models(tmp_path, capsys):
    main([*TINY, "--train", "--lora", "2", "--results", str(tmp_path / "rows.csv")])
    out = capsys.readouterr().out
    assert "failed" not in out and "MORE THAN ROUNDING" not in out and "NOT FINITE" not in out
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    found = {row["metric"] for row in rows if row["case"].startswith("tiny Wan-1.3B 9 frames 48x80 fp32 ours")}
    assert found == {
        "forward ms", "forward peak GiB", "output RMS difference", "latents of 4 steps RMS difference", "4 steps s",
        "training step ms", "training step peak GiB", "median parameter's gradient RMS difference",
        "step of LoRA 2, all kept ms", "step of LoRA 2, all kept peak GiB", "step of LoRA 2, blocks recomputed ms",
        "step of LoRA 2, blocks recomputed peak GiB",
    }  # fmt: skip
    floors = Counter(row["metric"] for row in rows if row["case"].endswith("products and attention alone"))
    timed = ("forward ms", "step of LoRA 2, all kept ms", "step of LoRA 2, blocks recomputed ms")
    assert floors == dict.fromkeys(timed, len(SUBJECTS))
    errors = [float(row["value"]) for row in rows if "RMS" in row["metric"]]
    assert len(errors) == 21 and max(errors) < 1e-5


def test_a_reference_is_computed_in_bf16(capsys):
    main([*TINY, "--precision", "bf16", "--models", "flux"])
    out = capsys.readouterr().out
    assert "failed" not in out and "MORE THAN ROUNDING" not in out
    assert "output, ours against fp32" in out and "latents of 6 steps, ours, rounded times against fp32" in out


@pytest.mark.parametrize("name", SUBJECTS)
def test_weights_under_wrong_names_show(name, capsys, monkeypatch):
    def wrong(model, theirs):
        found = by_our_names(model, theirs)
        weight = next(key for key in sorted(found) if key.startswith("blocks.1.") and key.endswith("qkv.weight"))
        found[weight] = torch.roll(found[weight], len(found[weight]) // 3, 0)
        return found

    monkeypatch.setattr(bench_public, "by_our_names", wrong)
    main([*TINY, "latents", "--models", name])
    assert "output, ours against diffusers eager" in (out := capsys.readouterr().out) and "MORE THAN ROUNDING" in out


def test_a_part_that_fails_leaves_the_others(capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of order\nand more")

    monkeypatch.setattr(bench_public.Pair, "ours", fail)
    main([*TINY, "--models", "flux"])
    out = capsys.readouterr().out
    assert "ours failed: RuntimeError: out of order\n" in out and "forward diffusers eager: " in out
    assert "6 steps, diffusers eager: " in out


def test_nothing_begins_after_its_time(capsys):
    main([*TINY, "--seconds", "0"])
    out = capsys.readouterr().out
    assert out.count("no time left for ") == len(SUBJECTS) and " ms" not in out


def test_latents_in_fp8_are_compared_with_those_in_bf16(tmp_path):
    args = argparse.Namespace(seconds=60, results=str(tmp_path / "rows.csv"), record=False)
    bench = Bench(args, torch.device("cpu"), torch.bfloat16)
    errors = {EAGER: (0.9, 0.4), ENGINE: (0.5, 0.02), ENGINE_FLOAT8: (0.7, 0.06)}
    Measurement(bench, tiny("flux")).differences("latents", errors, of="fp32")
    rows = {row["case"]: row for row in csv.DictReader((tmp_path / "rows.csv").open())}
    assert rows[f"tiny FLUX.1 64x96 bf16 {ENGINE_FLOAT8} against fp32"]["baseline"] == ENGINE
    assert [line[-1] for line in bench.table] == ["", "0.050", "3.000"]


def test_a_turn_lasts_the_given_time(monkeypatch):
    calls = Counter()
    monkeypatch.setattr(bench_public, "milliseconds", lambda work, device: (work(), 10.0)[1])
    bench = Bench(argparse.Namespace(rounds=3, seconds_a_turn=0.05, seconds=60), torch.device("cpu"), torch.float32)
    ways = {name: functools.partial(calls.update, [name]) for name in ("floor", "ours")}
    assert bench.in_turns(ways) == {"floor": 10 / 5, "ours": 10 / 5}
    assert calls == {"floor": 3 * (1 + 5), "ours": 3 * (1 + 5)}  # one call finds the number of calls that fit


@pytest.mark.parametrize("name", ("flux", "z-image", "wan-1.3b"))
def test_the_floor_of_lora_has_the_products_of_a_step_with_frozen_weights(name):
    bench = Bench(argparse.Namespace(seconds=60), torch.device("cpu"), torch.float32)
    pair = Pair(bench, tiny(name))
    model, (c, (tokens, mask)) = pair.plain, pair.plain.condition(pair.time, pair.y)
    ready, x, context = list(model.modulations(c)), pair.noise.clone().requires_grad_(), (tokens.requires_grad_(), mask)
    model.use(attend=torch.nn.functional.scaled_dot_product_attention)
    work, counted = work_of(lambda: model.predict(x, ready, context), x.device, x.dtype), []
    for recomputed in (False, True):
        model.grad_checkpoint = recomputed
        floor = lora_floor_of(work, local_attention, recomputed)
        for call in (floor, lambda: model.predict(x, ready, context).sum().backward()):
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                call()
            counted.append(counter.get_total_flops())
    floor, step, recomputed_floor, recomputed_step = counted
    assert floor == step and recomputed_floor > 1.3 * floor
    assert recomputed_floor == pytest.approx(recomputed_step, rel=0.02)  # also repeats the layers around the blocks
