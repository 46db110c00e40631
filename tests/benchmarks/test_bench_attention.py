"""benchmarks/bench_attention.py on a CPU: its counts and rows, and that it continues after a kernel's failure."""

import csv

import pytest
import torch

from benchmarks import bench_attention
from benchmarks.bench_attention import Case, Kernel, errors, main, reference, repeats

TINY = ["--device", "cpu", "--lengths", "48", "--short", "17", "--tokens", "96", "--head_dims", "72", "--rounds", "1"]


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v


def test_cases():
    assert Case.of(8192, 128) == Case(8192, 128, 24, 4)
    assert Case.of(74240, 72) == Case(74240, 72, 4, 1)  # one of four ranks
    assert Case(7, 8, 3, 2).forward_flop() == 2 * 3 * (2 * 7 * 7 * 8 + 2 * 7 * 7 * 8)  # q k^T, and scores times v


def test_errors_are_those_of_output_and_gradients():
    case = Case(9, 8, 2, 3)
    exact = reference(case, torch.bfloat16, "cpu")
    fine = errors(Kernel("plain", lambda: plain), case, torch.bfloat16, "cpu", exact)
    assert all(0 < error < 2e-2 for error in fine)
    # zeroed queries and keys spoil the output and dv, and leave q and k without gradients
    flat = errors(Kernel("flat", lambda: lambda q, k, v: plain(0 * q, 0 * k, v)), case, torch.bfloat16, "cpu", exact)
    assert flat[0] > 0.1 and flat[1:3] == pytest.approx((1, 1)) and flat[3] > 0.1


def test_same_bits_are_seen():
    case, calls = Case(9, 8, 2, 3), []

    def drifting(q, k, v):
        calls.append(torch.are_deterministic_algorithms_enabled())
        return plain(q, k, v) * (1 + len(calls))

    assert repeats(Kernel("plain", lambda: plain), case, torch.bfloat16, "cpu")
    assert not repeats(Kernel("drifting", lambda: drifting, deterministic=True), case, torch.bfloat16, "cpu")
    assert all(calls) and not torch.are_deterministic_algorithms_enabled()


def test_a_kernel_that_fails_is_named_and_the_rest_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_attention, "flash_attn", lambda: None)
    main([*TINY, "--kernels", "flash_attn", "math", "--results", str(tmp_path / "rows.csv")])
    out = capsys.readouterr().out
    assert out.count("failed: ModuleNotFoundError") == 1 and "math, 2 x 48 tokens, 16 heads of 72" in out
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    metrics = {"relative error of out", "relative error of dq", "relative error of dk", "relative error of dv"}
    assert {row["metric"] for row in rows} == metrics | {"TFLOP/s forward", "TFLOP/s backward"}
    assert all(row["case"].startswith("math") and float(row["value"]) >= 0 for row in rows)


def test_no_measurement_begins_after_its_time(capsys):
    main([*TINY, "--kernels", "math", "--seconds", "0"])
    out = capsys.readouterr().out
    assert "no time left for 2: math, 17 tokens, head size 72; math, 2 x 48 tokens, 16 heads of 72" in out


@pytest.mark.parametrize("name", bench_attention.DEFAULT)
def test_default_kernels_exist(name):
    assert bench_attention.KERNELS[name].name == name
