"""benchmarks/bench_base_precision.py on a CPU, with the model whose errors docs/finetuning.md lists."""

import csv

from benchmarks.bench_base_precision import main

# The largest error of the output, of a median matrix's gradient, and of any matrix's gradient.
BOUNDS = {"bf16": (0, 0, 0), "int8": (0.005, 0.02, 0.04), "fp8": (0.015, 0.06, 0.1), "nf4": (0.05, 0.2, 0.35)}
BYTES = {"bf16": 4, "int8": 1.06, "fp8": 1, "nf4": 0.57}  # a CPU keeps the base of bf16 runs in fp32


def test_errors_are_within_the_stated_bounds(tmp_path, capsys):
    main(["--blocks", "1", "2", "--width", "256", "--tokens", "64", "--results", str(tmp_path / "rows.csv")])
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    found = {}
    for row in rows:
        assert row["bench"] == "base precision"
        kind = row["case"].split(", ")[3].removesuffix(" base")
        found.setdefault(kind, {})[row["metric"]] = float(row["value"])
    assert found.keys() == BOUNDS.keys() and f"{found['nf4']['error, A median']:.2e}" in capsys.readouterr().out
    for kind, (output, median, largest) in BOUNDS.items():
        errors = found[kind]
        assert errors["error, output"] <= output and errors["bytes a weight"] <= BYTES[kind], (kind, errors)
        for matrix in "AB":
            assert errors[f"error, {matrix} median"] <= median, (kind, errors)
            assert errors[f"error, {matrix} largest"] <= largest, (kind, errors)
    for metric in found["bf16"].keys() - {"bytes a weight"}:
        assert 0 < found["int8"][metric] < found["fp8"][metric] < found["nf4"][metric], metric
