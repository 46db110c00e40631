"""benchmarks/read_trace.py reads traces written by these tests."""

import json

import pytest

from benchmarks.read_trace import read_steps, times

STEP = [  # name, category, start, duration
    ("nvjet_sm90_tst_192x8", "kernel", 0, 40),
    ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 30, 25),  # overlaps a product and continues in the gap
    ("void c10d::symmetric_memory::barrier_kernel(unsigned int**)", "kernel", 50, 10),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "kernel", 60, 100),
    ("void c10d::symmetric_memory::barrier_kernel(unsigned int**)", "kernel", 70, 5),  # overlaps attention
    ("_exchange_heads_kernel", "kernel", 163, 20),
    ("_layernorm_modulate_forward_kernel", "kernel", 183, 7),
]


def written(path, steps: int):
    events = [
        dict(ph="X", cat=category, name=name, ts=1e6 + 1000 * step + start, dur=duration)
        for step in range(steps)
        for name, category, start, duration in STEP
    ]
    events += [dict(ph="X", cat="cuda_runtime", name="cudaGraphLaunch", ts=0, dur=9), dict(ph="s", ts=3)]
    path.write_text(json.dumps({"traceEvents": events[::-1]}))
    return path


def test_times_by_kind(tmp_path):
    first, second = read_steps(written(tmp_path / "t.json", 2), 2)
    assert first == second
    expected = {"products": 40, "copies": 25, "barrier": 15, "attention": 100, "exchange": 20, "other kernels": 7}
    assert times(first) == expected | {"gaps": 10 + 3, "step": 190}


def test_another_number_of_steps(tmp_path):
    with pytest.raises(ValueError, match="t.json: 21 kernels and copies are not 2 equal steps"):
        read_steps(written(tmp_path / "t.json", 3), 2)
