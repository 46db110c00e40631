"""benchmarks/bench_sampling.py on a CPU: its table, its rows and its profile."""

import csv

from benchmarks.bench_sampling import main

TINY = ["--model", "DiT-Ti/8", "--image_size", "64", "--steps", "3", "--trials", "1", "--batches", "1", "2"]


def test_all_variants_take_turns(tmp_path, capsys):
    main([*TINY, "--profile", "--kernels", "3", "--results", str(tmp_path / "rows.csv")])
    out = capsys.readouterr().out
    assert "engine fp8 is left out: " in out and "engine bf16, batch 2" in out and "kernel by kernel" in out
    errors = [float(part.split()[0]) for part in out.split("relative error of latents ")[1:]]
    assert len(errors) == 1 and max(errors) < 1e-5
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert len(rows) == 2 * 3 and {row["metric"] for row in rows} == {"img/s"}
    assert all(float(row["value"]) > 0 for row in rows) and sum(bool(row["ratio"]) for row in rows) == 2 * 2


def test_approximations_are_variants(capsys):
    asked = ["taylor:2:1", "guidance_every:2"]
    main([*TINY[:-2], "1", "--steps", "4", "--without", "eager bf16", "plain compiled", "--approximations", *asked])
    out = capsys.readouterr().out
    assert all(f"batch 1, engine bf16 {setting}: first call" in out for setting in asked)
    assert "blocks evaluated in one of 2 steps" in out and "half evaluated every 2 steps" in out


def test_nothing_begins_after_its_time(capsys):
    main([*TINY, "--seconds", "0"])
    out = capsys.readouterr().out
    assert out.count("no time left for ") == 2 * 3 and "ms" not in out
