"""train.py with tensor, pipeline and sequence parallelism: loss curves, resumption, and errors for wrong sizes."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train
from opendit.parallel.tensor import check_tensor_parallel
from tests.numbers import off_by
from tests.parallel.tensor.models import MODELS
from tests.ranks import run_ranks, several_programs
from tests.training.test_train import QUIET, TINY, log_of, plain_losses

STEPS, HALF, RUN = 4, 2, "000-DiT-Ti-2"  # 8 samples a step
TENSOR = "--tensor_parallel_size 2 --batch_size 4"
PIPELINE = "--pipeline_parallel_size 2 --grad_accumulation 2 --batch_size 2"
SEQUENCE = "--sequence_parallel_size 2 --sequence_parallel_type fastseq --batch_size 4"
WHOLE = {"tensor": TENSOR, "pipeline": PIPELINE, "sequence": SEQUENCE}
HALVES = {
    "tensor by 4": "--tensor_parallel_size 4 --batch_size 8 --plugin ddp",
    "tensor under fsdp": f"{TENSOR} --plugin fsdp",
    "interleaved under fsdp": f"{PIPELINE} --pipeline_schedule interleaved --plugin fsdp",
}
# A run -> the run in WHOLE that it resumes halfway, and its flags.
RESUMED = {
    "tensor, then none": ("tensor", "--batch_size 2"),
    "pipeline, then none": ("pipeline", "--batch_size 2"),
    "pipeline, then under fsdp": ("pipeline", f"{PIPELINE} --plugin fsdp"),
    "sequence, then none": ("sequence", "--batch_size 2"),
}
FROM = {"weights, tensor": TENSOR, "weights": "--batch_size 2"}  # start from the weights of "tensor" after HALF steps
FEW = {"tensor", "pipeline", "tensor, then none", "pipeline, then under fsdp"}
EVERY = {*WHOLE, *HALVES, *RESUMED, *FROM}


def programs(mesh, folder: Path, chosen: set[str]) -> None:
    several_programs()
    common = [*TINY, *QUIET, "--ckpt_every", str(HALF)]
    middle = f"{RUN}/checkpoints/step_{HALF:07d}"
    for name, how in of(chosen, WHOLE):
        train.main([*common, *how.split(), "--max_steps", str(STEPS), "--outputs", str(folder / name)])
    for name, how in of(chosen, HALVES):
        train.main([*common, *how.split(), "--max_steps", str(HALF), "--outputs", str(folder / name)])
    for name, (before, how) in of(chosen, RESUMED):
        if mesh.is_main:
            shutil.copytree(folder / before, folder / name, symlinks=True)
        torch.distributed.barrier()
        train.main([*common, *how.split(), "--max_steps", str(STEPS), "--load", str(folder / name / middle)])
    for name, how in of(chosen, FROM):
        weights = ["--pretrained", str(folder / "tensor" / middle)]
        train.main([*common, *how.split(), "--max_steps", "1", "--outputs", str(folder / name), *weights])


def of(chosen: set[str], runs: dict) -> list[tuple]:
    return [(name, how) for name, how in runs.items() if name in chosen]


def losses_in(outputs: Path) -> list[float]:
    return [line["loss"] for line in log_of(outputs / RUN)]


def drawn_in(outputs: Path, step: int) -> np.ndarray:
    return np.asarray(Image.open(outputs / RUN / "samples" / f"{step:07d}.png")).astype(int)


@pytest.mark.parametrize("chosen", [FEW, EVERY], ids=["few", "every"])
def test_train_py_gives_the_curve_of_one_process_and_resumes_under_another_product(tmp_path, chosen):
    run_ranks(4, programs, tmp_path, chosen)
    wanted, middle, end = (
        plain_losses(STEPS, 8),
        drawn_in(tmp_path / "tensor", HALF),
        drawn_in(tmp_path / "tensor", STEPS),
    )
    assert middle.std() > 10 and end.std() > 10
    for name in chosen & {*WHOLE, *RESUMED}:
        assert len(losses_in(tmp_path / name)) == STEPS and off_by(losses_in(tmp_path / name), wanted) < 1e-5, name
        assert np.abs(drawn_in(tmp_path / name, STEPS) - end).max() <= 1, name
    for name in chosen & {*WHOLE, *HALVES}:
        assert len(losses_in(tmp_path / name)) >= HALF, name
        assert off_by(losses_in(tmp_path / name)[:HALF], wanted[:HALF]) < 1e-5, name
        assert np.abs(drawn_in(tmp_path / name, HALF) - middle).max() <= 1, name
    if chosen == EVERY:
        from_weights, alone = (losses_in(tmp_path / name) for name in FROM)
        assert off_by(from_weights, alone) < 1e-6 and off_by(from_weights, wanted[:1]) > 1e-5
        state = json.loads((tmp_path / "sequence" / RUN / "checkpoints/latest/state.json").read_text())
        assert state["fingerprint"]["sequence"] == "fastseq over 2 ranks" and state["fingerprint"]["global_batch"] == 8


def with_lora(mesh, runs: list[str]) -> None:
    several_programs()
    for flags in runs:
        train.main([*TINY, *QUIET, "--lr", "1e-2", "--deterministic", *flags.split()])


def test_lora_and_its_resumption_follow_one_process(tmp_path):
    """Under fsdp, frozen weights are sharded too, and a second model draws the grids. A resumed run keeps its LoRA."""
    lora = f"--lora 4 --lora_targets attn.* mlp.*:2 --pretrained {tmp_path}/base/{RUN}"
    base = f"--batch_size 4 --max_steps 3 --outputs {tmp_path}/base"
    run_ranks(1, with_lora, [base, f"{lora} --batch_size 8 --max_steps 5 --outputs {tmp_path}/one"])
    freed = f"--plugin fsdp --reshard after_forward --batch_size 4 --outputs {tmp_path}/freed"
    runs = [
        f"{lora} {freed} --max_steps 3 --offload average",
        f"{freed} --max_steps 5 --load latest --offload state",
        f"{lora} --plugin fsdp --batch_size 2 --grad_accumulation 2 --max_steps 5 --outputs {tmp_path}/split",
        f"{lora} {TENSOR} --batch_size 8 --max_steps 5 --outputs {tmp_path}/divided",
    ]
    run_ranks(2, with_lora, runs)
    for name in ("freed", "split", "divided"):
        assert off_by(losses_in(tmp_path / name), losses_in(tmp_path / "one")) < 1e-5, name
        assert np.abs(drawn_in(tmp_path / name, 5) - drawn_in(tmp_path / "one", 5)).max() <= 1, name
    assert np.abs(drawn_in(tmp_path / "one", 5) - drawn_in(tmp_path / "base", 3)).max() > 1


@pytest.mark.parametrize(
    "argv,message",
    [
        ("4 --tensor_parallel_size 3", "does not divide the 4 processes"),
        ("4 --tensor_parallel_size 2 --sequence_parallel_size 4", "with --sequence_parallel_size 4: does not divide"),
        ("4 --tensor_parallel_size 2 --plugin gemini", "does not work with --plugin gemini"),
        ("4 --tensor_parallel_size 2 --fp8", "does not work with --fp8"),
        ("4 --tensor_parallel_size 2 --compile", "does not work with --compile"),
        ("3 --tensor_parallel_size 3", "the 4 heads of --model DiT-Ti/2 can't be divided by it; use 2, 4"),
        ("8 --tensor_parallel_size 4 --plugin fsdp --data_parallel_replicate 4", "in groups of 4 that share samples"),
        ("4 --pipeline_parallel_size 3", "--pipeline_parallel_size 3: does not divide the 4 processes"),
        ("4 --pipeline_parallel_size 2 --tensor_parallel_size 4", "2 with --tensor_parallel_size 4: does not divide"),
        ("4 --pipeline_parallel_size 2 --plugin gemini", "does not work with --plugin gemini"),
        ("4 --lora 2 --pretrained x --plugin gemini", "with --plugin gemini, which has frozen weights whole"),
        (
            "4 --lora 2 --pretrained x --lora_targets qkw",
            "qkw: fits no linear layer; give one of adaLN_modulation.1, ",
        ),
        ("4 --lora 2 --pretrained x --lora_targets fc1:0", "fc1:0: no layer's name; give one as qkv"),
        ("4 --lora 2 --pretrained x --lora_targets fc1:128", "with rank 128: out of range; .* below the width, 128"),
        (
            "4 --lora 2 --pretrained x --lora_targets blocks.0.** --pipeline_parallel_size 2",
            "of pipeline rank 1 have none",
        ),
        ("4 --pipeline_parallel_size 2 --checkpoint_format whole", "does not work with --checkpoint_format whole"),
        ("8 --pipeline_parallel_size 8", "the 4 blocks of --model DiT-Ti/2 make at most 4 stages; use 4 or less"),
        ("4 --pipeline_parallel_size 4 --pipeline_schedule interleaved", "use 2 or less, or 1f1b"),
        ("4 --pipeline_parallel_size 2 --pipeline_schedule interleaved --grad_accumulation 3", "use 4, or 1f1b"),
        ("4 --pipeline_schedule interleaved", "does nothing without --pipeline_parallel_size above 1"),
        ("8 --pipeline_parallel_size 4 --plugin fsdp --data_parallel_replicate 4", "in groups of 4 that share samples"),
    ],
)
def test_a_size_that_does_not_fit_is_an_error_that_names_it(argv, message, capsys):
    with pytest.raises(SystemExit):
        train.main(["--dry_run", *argv.split(), *TINY])
    assert re.search(message, capsys.readouterr().err), message


def test_sizes_that_would_divide_are_named():
    with pytest.raises(ValueError, match="heads of keys and values, 2, can't be divided by it; use 2"):
        check_tensor_parallel(MODELS["MovieGen"], 4)
    six = replace(MODELS["EC-DiT"], experts=6)
    check_tensor_parallel(six, 2)
    with pytest.raises(ValueError, match="number of experts, 6, can't be divided"):
        check_tensor_parallel(six, 4)


def test_a_dry_run_divides_memory_and_batch(capsys):
    run = [*TINY, "--dry_run", "4", "--batch_size", "8"]
    train.main(run), train.main([*run, "--tensor_parallel_size", "2"])
    whole, divided = capsys.readouterr().out.split("nothing was built")[1:]
    assert "8 x 4 ranks x 1 micro-batches = 32" in whole and "8 x 2 ranks x 1 micro-batches = 16" in divided
    assert "layers divided by 2" in divided


def test_a_dry_run_knows_stages(capsys):
    run = [*TINY, "--dry_run", "8", "--batch_size", "8", "--pipeline_parallel_size", "2"]
    train.main(run), train.main([*run, "--grad_accumulation", "16", "--pipeline_schedule", "interleaved"])
    few, many = capsys.readouterr().out.split("nothing was built")[1:]
    assert "8 x 4 ranks x 1 micro-batches = 32" in few and "8 x 4 ranks x 16 micro-batches = 512" in many
    assert "2 stages of 2 + 2 blocks on 2 ranks, 1f1b" in few and "4 stages of 1 + 1 + 1 + 1 blocks on 2 ranks" in many
    assert "every process idles for 50% of a step; with 16 for 6%" in few and "idles" not in many
    assert "pipeline rank 0" in few and "pipeline rank 1" in many
