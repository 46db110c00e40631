"""benchmarks/bench_public.py on a CPU: equal networks, its rows, and weights under wrong names."""

import csv

import pytest
import torch

from benchmarks import bench_public
from benchmarks.bench_public import COMPILED, SUBJECTS, by_our_names, main

TINY = ["--tiny", "--rounds", "1", "--repeats", "1", "--without", COMPILED]


def test_all_parts_of_all_models(tmp_path, capsys):
    main([*TINY, "--train", "--results", str(tmp_path / "rows.csv")])
    out = capsys.readouterr().out
    assert "failed" not in out and "MORE THAN ROUNDING" not in out and "NOT FINITE" not in out
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    found = {row["metric"] for row in rows if row["case"].startswith("tiny Wan-1.3B 9 frames 48x80 fp32 ours")}
    assert found == {
        "forward ms", "forward peak GiB", "output RMS difference", "latents of 4 steps RMS difference", "4 steps s",
        "training step ms", "training step peak GiB", "median parameter's gradient RMS difference",
    }  # fmt: skip
    floors = [row["case"] for row in rows if row["case"].endswith("products and attention alone")]
    assert len(floors) == len(SUBJECTS)
    errors = [float(row["value"]) for row in rows if "RMS" in row["metric"]]
    assert len(errors) == 17 and max(errors) < 1e-5


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
