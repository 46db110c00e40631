"""train.py and sample.py with captioned pictures and clips, from a CSV and from cached latents."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import preprocess
import sample
import train
from opendit.data.captioned_media import TableRow, write_csv
from opendit.data.digits import make_demo
from opendit.encoders import pictures as encoders_pictures
from tests.encoders.test_text import save_clip  # a small CLIP with a tokenizer, in a folder
from tests.encoders.test_vae import small_vae

pytestmark = pytest.mark.usefixtures("no_ranks")
COMMON = "--num_workers 0 --log_every 1 --batch_size 4 --max_steps 2 --sample_steps 2 --lr 1e-3".split()


def losses(run) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rows = []
    for i in range(12):
        path = folder / f"{i}.png"
        Image.fromarray(np.full((20, 24, 3), 20 * i, np.uint8)).save(path)
        rows.append(TableRow(path, f"grey, number {i}"))
    write_csv(folder / "pictures.csv", rows)
    return folder / "pictures.csv"


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_demo(tmp_path_factory.mktemp("videos"), clips=8, size=32, frames=12)


def test_text_to_image_with_the_trained_encoder(pictures, tmp_path, monkeypatch):
    argv = ["--data_path", str(pictures), *"--model DiT-Ti/4 --image_size 16 --vae none --cross_attention".split()]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("grey, number 3\n\nund etwas Anderes: größer\n")
    drawn = []

    def save_grid(path, pictures, captions, **options):
        drawn.append((len(pictures), captions))
        encoders_pictures.save_grid(path, pictures, captions, **options)

    monkeypatch.setattr("opendit.training.drawing.save_grid", save_grid)
    train.main([*argv, *COMMON, "--sample_prompts", str(prompts), "--outputs", str(tmp_path)])
    assert drawn and all(each == (2, ["grey, number 3", "und etwas Anderes: größer"]) for each in drawn)
    run = tmp_path / "000-DiT-Ti-4"
    assert all(0.1 < loss < 10 for loss in losses(run))
    output = tmp_path / "samples"
    for given in (["a", "b, c"], [str(prompts)], []):
        archive = tmp_path / "s.npz"
        words = ["--prompt", *given] if given else []
        sample.main(
            ["--ckpt", str(run), *words, "--num_sampling_steps", "2", "--output", str(output), "--npz", str(archive)]
        )
        captions = np.load(archive)["arr_1"].tolist()
        if given:
            assert captions == (given if len(given) > 1 else ["grey, number 3", "und etwas Anderes: größer"])
        else:  # prompts stored with the checkpoint
            assert len(captions) == 12 and "grey, number 0" in captions
        # Files from the previous command are gone.
        assert (output / "000001-b__c.png").is_file() == (given[:1] == ["a"])


def test_clips_with_the_trained_encoder(clips, tmp_path, capsys):
    argv = "--use_video --model vDiT-Ti/2x4x4 --image_size 16 --num_frames 4 --frame_interval 2 --vae none".split()
    train.main(["--data_path", str(clips), *argv, *COMMON, "--outputs", str(tmp_path)])
    run = tmp_path / "000-vDiT-Ti-244"
    assert all(0.1 < loss < 10 for loss in losses(run))
    archive = tmp_path / "s.npz"
    for seed_batch in ("1", "2"):
        sample.main(
            ["--outputs", str(tmp_path), "--use_video", "--prompt", "a seven moving left", "an eight moving up",
             *"--num_sampling_steps 2 --frame_interval 2".split(), "--batch_size", seed_batch,
             "--output", str(tmp_path / seed_batch), "--npz", str(archive) + seed_batch + ".npz"]
        )  # fmt: skip
    one, two = (np.load(str(archive) + name + ".npz")["arr_0"].astype(int) for name in ("1", "2"))
    assert one.shape == (2, 4, 16, 16, 3) and np.abs(one - two).max() <= 1 and one.std() > 1
    import av

    with av.open(str(tmp_path / "1" / "000000-a_seven_moving_left.mp4")) as file:
        assert file.streams.video[0].average_rate == 12 and len(list(file.decode(video=0))) == 4


def test_a_frozen_encoder_and_a_vae_live_and_from_cached_latents(clips, tmp_path):
    """Latents and embeddings computed in the run and those read from the cache give similar losses."""
    vae, clip = tmp_path / "vae", tmp_path / "clip"
    small_vae(scaling_factor=0.3, shift_factor=0.25).save_pretrained(vae)
    save_clip(clip)
    shape = "--use_video --image_size 32 --num_frames 4 --frame_interval 2".split()
    preprocess.main(
        ["latents", "--data_path", str(clips), "--vae", str(vae), "--text_encoder", str(clip), *shape,
         "--output", str(tmp_path / "latents"), "--num_workers", "0"]
    )  # fmt: skip
    argv = [*shape, "--model", "vDiT-Ti/222", "--cross_attention", *COMMON]
    train.main(["--data_path", str(tmp_path / "latents"), *argv, "--outputs", str(tmp_path / "cached")])
    torch.manual_seed(0)
    live = ["--data_path", str(clips), "--vae", str(vae), "--text_encoder", str(clip)]
    train.main([*live, *argv, "--outputs", str(tmp_path / "live")])
    a, b = (losses(tmp_path / name / "000-vDiT-Ti-222") for name in ("cached", "live"))
    # The cache holds the centre window, and a live run draws a random one, so the losses are similar but not equal.
    assert np.allclose(a, b, rtol=0.1) and a != b


@pytest.mark.parametrize(
    "argv,message",
    [
        ("--model vDiT-Ti/222", "add --use_video"),
        ("--use_video --model DiT-Ti/2", "clips need a vDiT"),
        ("--use_video --model vDiT-Ti/244 --num_frames 3", "--num_frames 3: 3 latent frames do not divide by the 2"),
        ("--use_video --model vDiT-Ti/244 --image_size 18", "--image_size 18: does not divide by 4"),
        ("--use_video --model vDiT-Ti/244 --text_encoder {tmp}/none", "--text_encoder"),
        ("--use_video --model vDiT-Ti/244 --num_classes 3", "--num_classes"),
        ("--use_video --model vDiT-Ti/244 --data_path digits", "preprocess.py demo"),
        ("--model DiT-Ti/4 --data_path digits --text_encoder bytes", "needs captions"),
    ],
)
def test_bad_input(argv, message, clips, tmp_path, capsys):
    frames = ["--num_frames", "4"] if "vDiT" in argv else []
    words = ["--data_path", str(clips), *"--image_size 16 --vae none".split(), *frames, *COMMON]
    with pytest.raises(SystemExit) as stop:
        train.main([*words, "--outputs", str(tmp_path), *argv.format(tmp=tmp_path).split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and re.search(re.escape(message), error), error
