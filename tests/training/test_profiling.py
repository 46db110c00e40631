"""--profile: the table by kind of work, and the files that a run writes."""

import gzip
import json

import pytest
import torch

import train
from opendit.training.profiling import STEPS, WARMUP, StepProfiler, Work, kind_of, table
from tests.messages import logged


@pytest.mark.parametrize(
    ("name", "kind"),
    (
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_knob_7_64x128x128_4x1x1_kernel0_0", "attention"),
        ("void pytorch_flash::flash_bwd_kernel<Flash_bwd_kernel_traits<96>>", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("_update_kernel", "optimizer and EMA"),
        ("_bias_gelu_backward_kernel", "fused kernels"),
        ("triton_poi_fused_add_mul_0", "compiled"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel>", "other"),
        ("aten::addmm", "matrix products"),
        ("c10d::allreduce_", "communication"),
    ),
)
def test_kinds_of_kernels_and_operators(name, kind):
    assert kind_of(name) == kind


def test_the_table_adds_up():
    works = [Work("aten::mm", 6000.0, 30), Work("_update_kernel", 3000.0, 3), Work("aten::mul", 3000.0, 300)]
    lines = [line.split() for line in table(works, steps=3, longest=2).splitlines()]
    assert lines[1:5] == [
        ["2.000", "50.0%", "10", "matrix", "products"],
        ["1.000", "25.0%", "1", "optimizer", "and", "EMA"],
        ["1.000", "25.0%", "100", "other"],
        ["4.000", "100.0%", "111", "all"],
    ]
    assert [line[-1] for line in lines[7:]] == ["aten::mm", "_update_kernel"]


ARGV = "--model DiT-Ti/2 --image_size 16 --vae none --mixed_precision fp32 --batch_size 4 --num_workers 0 --profile"


def test_a_run_writes_its_profile(tmp_path, no_ranks, capsys, monkeypatch):
    monkeypatch.setattr("opendit.training.drawing.SampleGrids.draw", lambda *_: None)
    train.main([*ARGV.split(), "--max_steps", str(WARMUP + STEPS), "--outputs", str(tmp_path)])
    folder = tmp_path / "000-DiT-Ti-2" / "profile"
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::addmm" in names and f"ProfilerStep#{WARMUP}" in names
    text, out = (folder / "table.txt").read_text(), capsys.readouterr().out
    assert "matrix products" in text and text in out and "writes nothing" not in out


def test_a_run_that_is_too_short_says_so_at_its_start(tmp_path, no_ranks, capsys, monkeypatch):
    class FirstStep(Exception):
        pass

    def first_step(*_):
        raise FirstStep

    monkeypatch.setattr("train.Inputs.of", first_step)
    for short in (1, 0):
        with pytest.raises(SystemExit):
            train.main([*ARGV.split(), "--max_steps", str(WARMUP + STEPS - short), "--outputs", str(tmp_path)])
        out, err = capsys.readouterr()
        assert "FirstStep" in err.splitlines()[-1]
        assert out.count(f"this one takes {WARMUP + STEPS - 1}; let it take") == short


@pytest.mark.parametrize("taken", (WARMUP - 1, WARMUP + STEPS - 1, WARMUP + STEPS))
def test_a_run_that_is_stopped_early_says_so_at_its_end(taken, tmp_path):
    profiler = StepProfiler(True, tmp_path / "profile", torch.device("cpu"), steps=1000)
    with logged() as said:
        for _ in range(taken):
            torch.ones(2, 2) @ torch.ones(2, 2)
            profiler.step()
        profiler.close()
        profiler.close()
    whole = taken == WARMUP + STEPS
    assert (tmp_path / "profile").is_dir() == whole and len(said) == 1
    assert said[0].startswith("profile of" if whole else "note: --profile writes nothing")
    assert whole or f"takes {taken}; let it take {WARMUP + STEPS} or more" in said[0]
