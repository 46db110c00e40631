"""A resumed run equals an uninterrupted one bit for bit, or within rounding if its setup has changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from opendit.checkpoint.pretrained import weights_in
from tests.encoders.test_vae import small_vae
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs

# All randomness is in use: label drop (the default), flips, VAE sampling and shuffling. Step 4 is in mid-epoch.
ARGV = "--model DiT-Ti/2 --image_size 16 --random_flip --num_workers 0 --log_every 1 --lr 3e-4".split()
ARGV += (
    "--sample_steps 2 --sample_cfg_scale 1 --sample_every 0 --warmup_steps 3 --ema_decay 0.9 0.99 --ema_warmup".split()
)
HALF, WHOLE = 4, 8
SETTINGS = {
    "zero2-bf16": ["--plugin", "zero2", "--mixed_precision", "bf16", "--grad_accumulation", "2"],
    "gemini-bf16": ["--plugin", "gemini", "--mixed_precision", "bf16"],
    "fsdp-bf16": ["--plugin", "fsdp", "--mixed_precision", "bf16", "--grad_accumulation", "2"],
    "ddp-fp32": ["--plugin", "ddp", "--mixed_precision", "fp32", "--grad_accumulation", "2"],
}


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    small_vae().save_pretrained(folder)
    return str(folder)


def trainings(mesh, runs: list[list[str]]) -> None:
    several_programs()
    for argv in runs:
        train.main(argv)


def run_of(outputs: Path) -> Path:
    (run,) = outputs.iterdir()
    return run


def losses(outputs: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_of(outputs) / "log.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)  # no step twice
    return {line["step"]: line["loss"] for line in lines}


def assert_same_bits(one: Path, other: Path) -> None:
    """Check that two checkpoints of the same kind and number of ranks hold bitwise equal tensors."""
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files == sorted(path.name for path in other.glob("*.safetensors"))
    if (one / "model.shards.json").is_file():
        needed = {f"{name}-shard-00000-of-" for name in ("model", "ema", "exp_avg", "exp_avg_sq")}
        assert needed <= {name[: name.index("-of-") + 4] for name in files}
        assert all((one / path.name).read_text() == path.read_text() for path in other.glob("*.shards.json"))
    else:
        assert {"model.safetensors", "ema.safetensors", "optimizer_000.safetensors"} <= set(files)
    for name in files:
        a, b = load_file(one / name), load_file(other / name)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name


@pytest.mark.timeout(600)  # many processes that each import everything
def test_every_plugin_resumes_bit_for_bit(tmp_path, vae):
    common = [*ARGV, "--vae", vae, "--batch_size", "4"]
    before, after = [], []
    for name, settings in SETTINGS.items():
        argv = [*common, *settings]
        before.append([*argv, "--max_steps", str(WHOLE), "--outputs", str(tmp_path / name / "whole")])
        before.append([*argv, "--max_steps", str(HALF), "--outputs", str(tmp_path / name / "parts")])
        after.append(
            [*argv, "--max_steps", str(WHOLE), "--outputs", str(tmp_path / name / "parts"), "--load", "latest"]
        )
    run_ranks(2, trainings, before)
    run_ranks(2, trainings, after, fresh=True)
    for name in SETTINGS:
        whole, parts = tmp_path / name / "whole", tmp_path / name / "parts"
        assert list(losses(whole)) == list(range(1, WHOLE + 1))
        assert losses(parts) == losses(whole), name
        latest = "checkpoints/latest"
        assert_same_bits(run_of(whole) / latest, run_of(parts) / latest)
        assert weights_in(run_of(parts) / latest, "ema_0.99").is_file()


def test_ddp_on_four_ranks_resumes_bit_for_bit(tmp_path, vae):
    """With more than two ranks, the order of a sum depends on the layout of torch's buckets."""
    argv = [*ARGV, "--vae", vae, "--batch_size", "2", *SETTINGS["ddp-fp32"]]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(
        4,
        trainings,
        [
            [*argv, "--max_steps", "8", "--outputs", str(whole)],
            [*argv, "--max_steps", "4", "--outputs", str(parts)],
            [*argv, "--max_steps", "8", "--outputs", str(parts), "--load", "latest"],
        ],
    )
    assert losses(parts) == losses(whole) and list(losses(whole)) == list(range(1, 9))
    assert_same_bits(run_of(whole) / "checkpoints/latest", run_of(parts) / "checkpoints/latest")


@pytest.mark.timeout(600)  # many processes that each import everything
@pytest.mark.parametrize("which", ["some", "all"])
def test_another_world_batch_split_or_plugin_goes_on_within_rounding(tmp_path, vae, which):
    common = [*ARGV, "--vae", vae, "--max_steps", str(WHOLE), "--ckpt_every", str(HALF)]
    fp32 = [*common, "--mixed_precision", "fp32"]
    run_ranks(2, trainings, [[*fp32, "--batch_size", "4", "--outputs", str(tmp_path / "whole")]])
    whole = losses(tmp_path / "whole")
    source = run_of(tmp_path / "whole") / "checkpoints" / f"step_{HALF:07d}"
    changed = {  # world -> (batch size, micro-batches, plugin, other flags)
        1: [(8, 1, "zero2", fp32), (4, 2, "fsdp", fp32)],
        2: [(1, 4, "zero2", fp32), (4, 1, "gemini", [*common, "--mixed_precision", "bf16"])],
        4: [(2, 1, "zero2", fp32), (1, 2, "ddp", fp32), (2, 1, "fsdp", [*fp32, "--data_parallel_replicate", "2"])],
    }
    if which == "some":
        changed = {1: changed[1][1:], 2: changed[2][:1]}
    for world, splits in changed.items():
        runs = []
        for batch, accumulation, plugin, argv in splits:
            outputs = tmp_path / f"{world}-{plugin}"
            run = outputs / "000-DiT-Ti-2"
            shutil.copytree(source, run / "checkpoints" / source.name)
            split = ["--batch_size", str(batch), "--grad_accumulation", str(accumulation), "--plugin", plugin]
            runs.append([*argv, *split, "--outputs", str(outputs), "--load", str(run)])
        run_ranks(world, trainings, runs)
        for _, _, plugin, _ in splits:
            curve = losses(tmp_path / f"{world}-{plugin}")
            assert list(curve) == list(range(HALF + 1, WHOLE + 1))
            # The same samples, noise and state are summed in another order: 1e-5 in fp32. bf16 rounds weights and
            # activations by up to 2^-9, which changes the mean over a batch by at most 1e-2.
            bound = 1e-2 if plugin == "gemini" else 1e-5
            worst = off_by(curve.values(), [whole[step] for step in curve])
            assert worst < bound, (world, plugin, worst)


def test_muon_resumes_bit_for_bit_and_on_other_ranks_within_rounding(tmp_path, capfd):
    common = [*ARGV, "--warmup_steps", "1", "--vae", "none", "--mixed_precision", "fp32"]
    common += ["--optimizer", "muon", "--muon_precision", "fp32"]
    two = [*common, "--batch_size", "4", "--checkpoint_format", "sharded"]
    whole, parts, alone = (tmp_path / name for name in ("whole", "parts", "alone"))
    run_ranks(
        2,
        trainings,
        [
            [*two, "--max_steps", "4", "--ckpt_every", "2", "--outputs", str(whole)],
            [*two, "--max_steps", "2", "--outputs", str(parts)],
            [*two, "--max_steps", "4", "--outputs", str(parts), "--load", "latest"],
        ],
    )
    assert losses(parts) == losses(whole) and list(losses(whole)) == [1, 2, 3, 4]
    assert_same_bits(run_of(whole) / "checkpoints/latest", run_of(parts) / "checkpoints/latest")
    squares = json.loads((run_of(whole) / "checkpoints/latest/exp_avg_sq.shards.json").read_text())
    matrices = {
        f"blocks.{i}.{name}.weight" for i in range(4) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert "x_embedder.proj.weight" in squares["tensors"] and not matrices & squares["tensors"].keys()
    source = run_of(whole) / "checkpoints/step_0000002"
    one = [*common, "--batch_size", "4", "--grad_accumulation", "2", "--plugin", "fsdp", "--checkpoint_format", "whole"]
    shutil.copytree(source, alone / "000-DiT-Ti-2/checkpoints" / source.name)
    train.main([*one, "--max_steps", "4", "--outputs", str(alone), "--load", "latest"])
    assert losses(alone) == pytest.approx({step: losses(whole)[step] for step in (3, 4)}, rel=1e-4)
    with pytest.raises(SystemExit):  # AdamW needs second moments
        train.main([*ARGV, "--vae", "none", "--outputs", str(alone), "--load", str(source)])
    assert "which Muon has stepped; give --optimizer muon" in capfd.readouterr().err


@pytest.mark.parametrize("plugin", ["zero2", "fsdp"])
def test_moments_in_8_bits_resume_bit_for_bit_and_on_other_ranks_within_rounding(plugin, tmp_path):
    common = [*ARGV, "--warmup_steps", "1", "--vae", "none", "--mixed_precision", "fp32", "--optimizer", "adamw8bit"]
    two = [*common, "--batch_size", "4", "--checkpoint_format", "sharded", "--plugin", plugin]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(
        2,
        trainings,
        [
            [*two, "--max_steps", "4", "--ckpt_every", "2", "--outputs", str(whole)],
            [*two, "--max_steps", "2", "--outputs", str(parts)],
            [*two, "--max_steps", "4", "--outputs", str(parts), "--load", "latest"],
        ],
    )
    assert losses(parts) == losses(whole) and list(losses(whole)) == [1, 2, 3, 4]
    assert_same_bits(run_of(whole) / "checkpoints/latest", run_of(parts) / "checkpoints/latest")
    source = run_of(whole) / "checkpoints/step_0000002"
    one = ["--batch_size", "4", "--grad_accumulation", "2", "--checkpoint_format", "whole", "--max_steps", "4"]
    for name, more in (("alone", ["--plugin", "ddp"]), ("exact", ["--optimizer", "adamw"])):  # both can resume it
        shutil.copytree(source, tmp_path / name / "000-DiT-Ti-2/checkpoints" / source.name)
        train.main([*common, *one, *more, "--outputs", str(tmp_path / name), "--load", "latest"])
        assert losses(tmp_path / name) == pytest.approx({step: losses(whole)[step] for step in (3, 4)}, rel=1e-3)
