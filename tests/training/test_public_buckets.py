"""Public models trained by buckets of several shapes (--bucket_tokens): losses of all families against diffusers."""

import json

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
from train import EagerPasses

# Family -> width and height of media, in units of the side that its patches need; and pixels of this unit.
SIDES = [(4, 4), (2, 6), (3, 4), (4, 4), (6, 2), (2, 2), (3, 4), (2, 6)]
UNITS = {"wan": 16, "ltx": 32}
FRAMES = {"wan": 5, "ltx": 9}
CAPTIONS = ["a seven", "a seven of many words, and so of more than three tokens", "", "fog"]


@pytest.mark.parametrize("name", sorted(set(TRANSFORMERS) - {"wan_i2v", "wan_i2v_a14b", "wan_ti2v", "wan_a14b"}))
def test_losses_of_buckets_are_those_of_diffusers_network(name, tmp_path, monkeypatch):
    """Steps with a vanishing learning rate, on micro-batches of two samples, each of another shape."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    folder, random, rows = write_pipeline(tmp_path / name, name), np.random.default_rng(0), ["path,text"]
    unit, frames = UNITS.get(name, 16), FRAMES.get(name)
    for number, sides in enumerate(SIDES):
        pixels = random.integers(0, 256, (frames or 1, *(unit * side for side in sides), 3), np.uint8)
        file = tmp_path / f"{number}.{'mp4' if frames else 'png'}"
        write_mp4(file, pixels, 8) if frames else Image.fromarray(pixels[0]).save(file)
        rows.append(f'{file.name},"{CAPTIONS[number % 4]}"')
    (tmp_path / "media.csv").write_text("\n".join(rows) + "\n")
    seen, true_losses = [], EagerPasses.losses
    monkeypatch.setattr(
        EagerPasses, "losses", lambda self, batch: seen.append((batch, true_losses(self, batch))) or seen[-1][1]
    )
    clips = f"--use_video --num_frames {frames}" if frames else ""
    flags = f"--pretrained {folder} --data_path {tmp_path}/media.csv --image_size {4 * unit} {clips} --batch_size 2"
    flags += f" --bucket_tokens {32 if frames else 16} --num_workers 0 --sample_every 0 --lr 1e-12 --max_steps 3"
    flags += f" --ckpt_every 0 --mixed_precision fp32 --max_text_tokens 96 --outputs {tmp_path}/out"
    train.main(flags.split())
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
