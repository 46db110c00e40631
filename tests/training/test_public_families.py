"""Training every public model family on buckets: losses match diffusers, and two ranks match one."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import train
from opendit.data.row_arrays import FOLDER
from opendit.data.video_files import write_mp4
from tests.encoders.published_folders import TRANSFORMERS, write_pipeline
from tests.models.families.oracles import ORACLES
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs
from train import EagerPasses

# Height and width of each picture or clip in units, and the unit of a family in pixels.
SIDES = [(4, 4), (2, 6), (3, 4), (4, 4), (6, 2), (2, 2), (3, 4), (2, 6)]
UNITS = {"wan": 16, "ltx": 32}
FRAMES = {"wan": 5, "ltx": 9}
CAPTIONS = ["a seven", "a seven of many words, and so of more than three tokens", "", "fog"]


WAYS = ["--tensor_parallel_size 2", "--sequence_parallel_size 2", "--pipeline_parallel_size 2 --grad_accumulation 2"]


def flags_of(folder, name, outputs):
    """Return the flags of a short run on buckets. Write the pipeline's folder, with media, if it is new."""
    unit, frames, random = UNITS.get(name, 16), FRAMES.get(name), np.random.default_rng(0)
    if not folder.exists():
        write_pipeline(folder, name)
        rows = ["path,text"]
        for number, sides in enumerate(SIDES):
            pixels = random.integers(0, 256, (frames or 1, *(unit * side for side in sides), 3), np.uint8)
            file = folder / f"{number}.{'mp4' if frames else 'png'}"
            write_mp4(file, pixels, 8) if frames else Image.fromarray(pixels[0]).save(file)
            rows.append(f'{file.name},"{CAPTIONS[number % 4]}"')
        (folder / "media.csv").write_text("\n".join(rows) + "\n")
    clips = f"--use_video --num_frames {frames}" if frames else ""
    flags = f"--pretrained {folder} --data_path {folder}/media.csv --image_size {4 * unit} {clips} --num_workers 0"
    flags += f" --bucket_tokens {32 if frames else 16} --batch_size 2 --max_steps 3 --sample_every 0 --ckpt_every 0"
    return f"{flags} --log_every 1 --mixed_precision fp32 --max_text_tokens 96 --outputs {outputs}".split()


def losses_of(outputs):
    (log,) = outputs.glob("0*/log.jsonl")
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def programs(mesh, runs):
    several_programs()
    for argv in runs:
        train.main(argv)


@pytest.mark.parametrize("name", ["qwen_image", "flux2", "sd3", "lumina2", "ltx", "cosmos2"])
def test_two_ranks_have_the_curve_of_one(name, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    more = ["--lr", "1e-2", "--warmup_steps", "0"]
    train.main([*flags_of(tmp_path / name, name, tmp_path / "one"), *more, "--grad_accumulation", "2"])
    outputs = [tmp_path / str(number) for number in range(len(WAYS))]
    runs = [[*flags_of(tmp_path / name, name, at), *more, *way.split()] for at, way in zip(outputs, WAYS, strict=True)]
    for argv in runs[:2]:
        argv += ["--grad_accumulation", "2"]
    run_ranks(2, programs, runs)
    expected = losses_of(tmp_path / "one")
    assert len(set(expected)) == 3
    for way, at in zip(WAYS, outputs, strict=True):
        assert off_by(losses_of(at), expected) < 2e-5, way


@pytest.mark.parametrize("name", sorted(set(TRANSFORMERS) - {"wan_i2v", "wan_i2v_a14b", "wan_ti2v", "wan_a14b"}))
def test_losses_of_buckets_are_those_of_diffusers_network(name, tmp_path, monkeypatch, capsys):
    """Steps with a vanishing learning rate. The micro-batches differ in shape."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    seen, true_losses = [], EagerPasses.losses
    monkeypatch.setattr(
        EagerPasses, "losses", lambda self, batch: seen.append((batch, true_losses(self, batch))) or seen[-1][1]
    )
    folder = tmp_path / name
    train.main([*flags_of(folder, name, tmp_path / "out"), "--lr", "1e-12"])
    assert re.search(r"^  licence +\S+", capsys.readouterr().out, re.MULTILINE)
    values = json.loads((folder / "transformer/config.json").read_text())
    oracle = ORACLES[name.removesuffix("_klein")](
        torch.float32, **{key: value for key, value in values.items() if key[0] != "_"}
    )
    oracle.module.load_state_dict(load_file(folder / "transformer/diffusion_pytorch_model.safetensors"))
    for batch, found in seen:
        t = batch.t.float().view(-1, *[1] * (batch.x0.dim() - 1))
        x = (1 - t) * batch.x0 + t * batch.noise
        with torch.no_grad():
            output = oracle.theirs(x, 1000 * batch.t.float(), batch.condition)
        expected = (output - (batch.noise - batch.x0)).square().flatten(1).mean(1)
        assert torch.allclose(found, expected, rtol=1e-4), (name, x.shape)
    assert len({batch.x0.shape for batch, _ in seen}) > 1 and len(seen) == 3
