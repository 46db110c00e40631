"""--given_frames in train.py and sample.py: losses match a plain loop, on one rank or two, and recorded steps match."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import sample
import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.data import BatchSchedule, build_dataset, build_loader
from opendit.data.video_files import write_mp4
from opendit.diffusion.objectives import FlowObjective
from opendit.diffusion.random import Stream, normal, uniform
from opendit.models.conditioning import give, with_given
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model, model_config
from opendit.training.micro_batch import MicroBatch, PackedMicroBatch, Packing
from opendit.training.runners import CUDAGraphRunner, EagerRunner
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs
from tests.training.test_runners import Recorder, engine_of
from tests.training.test_train import log_of
from train import EagerPasses

CLIPS = (
    "--model vDiT-Ti/222 --use_video --data_path mock --num_frames 4 --image_size 8 --vae none --num_workers 0 "
    "--log_every 1 --lr 3e-4 --num_classes 3 --objective flow --no_save --max_steps 4"
).split()
BATCH, FRAMES = 8, 4


def plain_losses(mode: str, steps: int = 4) -> list[float]:
    """Return losses of rectified flow on x_t, mask and given frames, concatenated. The loss covers all frames."""
    flags = parse(TrainConfig, CLIPS)
    dataset = build_dataset(
        "mock", 8, use_video=True, num_frames=FRAMES, vae="none", num_classes=3, seed=flags.global_seed
    )
    schedule = BatchSchedule(len(dataset), BATCH, flags.global_seed)
    loader = build_loader(dataset, schedule, dp_rank=0, dp_size=1, batch_size=BATCH, num_workers=0)
    size = dict(input_size=(8, 8), frames=FRAMES, in_channels=3, num_classes=3, learn_sigma=False, given_frames=mode)
    model = build_model(model_config("vDiT-Ti/222", **size), flags.global_seed)
    adam = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0)
    losses = []
    for _, item in zip(range(steps), loader, strict=False):
        key = (flags.global_seed, item.step, item.index)
        x0 = item.x[:, :3]
        t, noise = uniform(*key, Stream.TIMESTEP).float(), normal(*key, Stream.NOISE, tuple(x0.shape[1:]))
        y = torch.where(uniform(*key, Stream.CONDITION_DROP) < 0.1, 3, item.y)
        network_input = torch.zeros(BATCH, 7, FRAMES, 8, 8)
        for i, u in enumerate(uniform(*key, Stream.CONDITIONING_FRAMES).tolist()):
            network_input[i, :3] = (1 - t[i]) * x0[i] + t[i] * noise[i]
            count = int(u * FRAMES) if mode == "random" else 0 if u < 0.1 else 2
            network_input[i, 3, :count] = 1
            network_input[i, 4:, :count] = x0[i, :, :count]
        loss = (model(network_input, 1000 * t, y) - (noise - x0)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


WAYS = {
    "sequence": "--batch_size 8 --sequence_parallel_size 2",
    "pipeline": "--batch_size 4 --grad_accumulation 2 --pipeline_parallel_size 2",
}


def every_way(mesh, folder: str) -> None:
    several_programs()
    for name, words in WAYS.items():
        code = train.main([*CLIPS, *words.split(), "--given_frames", "random", "--outputs", f"{folder}/{name}"])
        assert not code, name


def test_ranks_follow_the_plain_loop_however_they_share_the_work(tmp_path):
    reference = plain_losses("random")
    run_ranks(2, every_way, str(tmp_path))
    for name in WAYS:
        losses = [line["loss"] for line in log_of(tmp_path / name / "000-vDiT-Ti-222")]
        assert off_by(losses, reference) < 1e-5, name


def test_one_process_with_a_prefix_and_what_can_not_be(tmp_path, no_ranks, capsys):
    flags = [*CLIPS, "--batch_size", "8", "--outputs", str(tmp_path)]
    assert not train.main([*flags, "--given_frames", "prefix:2", "--validate_path", "mock", "--validate_every", "2",
                           "--validate_samples", "16"])  # fmt: skip
    lines = log_of(tmp_path / "000-vDiT-Ti-222")
    assert off_by([line["loss"] for line in lines], plain_losses("prefix:2")) < 1e-5
    assert any(line.get("val_loss") for line in lines)
    capsys.readouterr()
    for words, message in (
        (["--given_frames", "prefix:4"], "--given_frames prefix:4: a clip's latents have 4 in all"),
        (["--given_frames", "all"], "--given_frames all: no such frames; give first, prefix:K or random"),
    ):
        with pytest.raises(SystemExit):
            train.main([*flags, *words])
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    pictures = "--model DiT-Ti/2 --data_path digits --image_size 8 --vae none --given_frames first --outputs"
    with pytest.raises(SystemExit):
        train.main([*pictures.split(), str(tmp_path)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--given_frames" in said and "--use_video" in said


SMALL = VDiTConfig((4, 4, 4), (2, 2, 2), 2, 24, 2, 3, num_classes=3, learn_sigma=False, given_frames="random")


def micro_batch(number: int) -> MicroBatch:
    index = torch.arange(3)
    x, noise = (normal(seed, number, index, Stream.NOISE, (2, 4, 4, 4)) for seed in (1, 2))
    return MicroBatch(x, torch.tensor([0.1, 0.5, 0.9]), noise, index, give(x, (index + number) % 4))


def replayed(mesh) -> tuple[list[float], list[float], int]:
    """Return the losses of eager steps, those of recorded and replayed steps, and the number of replays."""
    found = []
    for recorded in (False, True):
        engine = engine_of(mesh, SMALL, accumulation=1)
        passes, recorder = EagerPasses(engine, FlowObjective()), Recorder(engine)
        runner = CUDAGraphRunner(passes, recorder) if recorded else EagerRunner(passes)
        found.append([runner.train_step([micro_batch(number)]).loss.item() for number in range(8)])
    return *found, recorder.replayed


def test_recorded_steps_take_the_frames_of_their_own_micro_batch():
    [(plain, recorded, times)] = run_ranks(1, replayed)
    assert recorded == plain and times > 2


def test_the_runner_against_the_model_itself():
    torch.manual_seed(0)
    [(loss, want)] = run_ranks(1, one_loss)
    assert loss == pytest.approx(want, rel=1e-6)


def one_loss(mesh):
    engine, batch, objective = engine_of(mesh, SMALL, accumulation=1), micro_batch(1), FlowObjective()
    losses = EagerPasses(engine, objective).losses(batch)
    prepared = objective.prepare(batch.x0, batch.t, batch.noise)
    x = torch.cat([prepared.x_t, batch.given], dim=1)
    assert torch.equal(x, with_given(prepared.x_t, batch.given))
    output = engine.module(x, prepared.timestep, batch.condition)
    return losses.mean().item(), (output - (batch.noise - batch.x0)).square().mean().item()


def test_a_run_a_fine_tuning_and_a_clip_from_a_picture(tmp_path, no_ranks, capsys):
    """Fine-tune a plain clip model for given frames, in full and with LoRA, and sample from a first picture."""
    rng = np.random.default_rng(0)
    lines = ["path,text"]
    for i in range(4):
        write_mp4(tmp_path / f"{i}.mp4", rng.integers(0, 255, (6, 16, 16, 3), dtype=np.uint8), 8)
        lines.append(f"{i}.mp4,clip {i}")
    (tmp_path / "clips.csv").write_text("\n".join(lines) + "\n")
    flags = (
        f"--model vDiT-Ti/222 --use_video --data_path {tmp_path}/clips.csv --num_frames 4 --image_size 8 --vae none "
        f"--num_workers 0 --objective flow --batch_size 4 --max_steps 2 --sample_every 0 --lr 1e-2 --outputs {tmp_path}"
    ).split()
    assert not train.main(flags)
    plain = tmp_path / "000-vDiT-Ti-222"
    capsys.readouterr()
    assert not train.main([*flags, "--pretrained", str(plain), "--given_frames", "first"])
    said = capsys.readouterr().out
    assert "of given frames, which begin at zero" in said and "reused" in said
    assert not train.main([*flags, "--pretrained", str(plain), "--given_frames", "first", "--lora", "4"])
    assert not train.main(
        [*flags, "--given_frames", "first", "--load", str(tmp_path / "001-vDiT-Ti-222"), "--max_steps", "4"]
    )
    Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(tmp_path / "start.png")
    pixels = np.asarray(Image.open(tmp_path / "start.png"))
    draw = f"--num_sampling_steps 3 --prompt a b --npz {tmp_path}/drawn.npz --output {tmp_path}/drawn".split()
    for model in (["--ckpt", str(tmp_path / "001-vDiT-Ti-222")],
                  ["--ckpt", str(plain), "--lora", str(tmp_path / "002-vDiT-Ti-222")]):  # fmt: skip
        sample.main([*model, *draw, "--image", str(tmp_path / "start.png")])
        drawn = np.load(tmp_path / "drawn.npz")["arr_0"]
        assert drawn.shape == (2, 4, 8, 8, 3) and (drawn[:, 0] == pixels).all() and (drawn[:, 1] != pixels).any()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        sample.main(["--ckpt", str(plain), *draw, "--image", str(tmp_path / "start.png")])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "was trained without --given_frames" in said
    assert json.loads((tmp_path / "001-vDiT-Ti-222" / "config.json").read_text())


def test_packs_of_given_frames_are_their_samples_one_by_one():
    torch.manual_seed(1)
    model, objective = randomised(build_model(SMALL)).eval(), FlowObjective()
    sizes = [(4, 4, 4), (4, 4, 4), (2, 4, 6), (1, 4, 4)]
    latents = [torch.randn(1, 2, *size) for size in sizes]
    noise = [torch.randn(1, 2, *size) for size in sizes]
    given = [give(x, torch.tensor([count])) for x, count in zip(latents, (3, 0, 1, 0), strict=True)]
    t, y = torch.tensor([0.2, 0.5, 0.7, 0.9]), torch.arange(4) % 3
    packing = Packing(SMALL.patch, 40, 1)
    segments, (x0, eps, mask) = packing.segments(sizes), map(packing.patches, (latents, noise, given))
    passes = EagerPasses(SimpleNamespace(forward=model), objective)
    packed = passes.losses(PackedMicroBatch(x0, t, eps, y, segments, torch.ones(4), mask))
    for i in range(3):
        one = passes.losses(MicroBatch(latents[i], t[i : i + 1], noise[i], y[i : i + 1], given[i]))
        torch.testing.assert_close(packed[i : i + 1], one, rtol=1e-5, atol=1e-6)
    without = passes.losses(PackedMicroBatch(x0, t, eps, y, segments, torch.ones(4), torch.zeros_like(mask)))
    assert (without[:3:2] - packed[:3:2]).abs().min() > 1e-4 and torch.equal(without[1], packed[1])
