"""``preprocess.py latents --repa`` and ``train.py --repa cached`` match the online encoder: features and losses."""

import json
import re
from pathlib import Path

import pytest
import torch

import preprocess
import train
from opendit.data import build_dataset
from opendit.data.base import BadSample, View
from opendit.encoders.vision import VisionTeacher
from tests.data.test_latents_checks import pictures as drawn  # noqa: F401  (a fixture)
from tests.ranks import run_ranks
from tests.training.test_repa import teacher as teacher
from tests.training.test_train import log_of, start

RUN = (
    "--model DiT-Ti/2 --image_size 16 --num_workers 0 --log_every 1 --objective flow --lr 3e-3 --sample_every 0 "
    "--repa_block 2 --repa_projector conv --max_steps 3 --no_save --mixed_precision fp32"
).split()


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    folder = tmp_path_factory.mktemp("vae")
    AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, scaling_factor=0.5, **kinds).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pictures(drawn):  # noqa: F811
    return str(drawn)


@pytest.fixture(scope="module")
def make(pictures, vae, teacher, tmp_path_factory):
    def latents(*more: str) -> str:
        output = str(tmp_path_factory.mktemp("latents"))
        words = ["--data_path", pictures, "--vae", vae, "--image_size", "16", "--output", output, "--num_workers", "0"]
        assert preprocess.main(["latents", *words, *more]) == 0
        return output

    return latents


def losses(folder):
    return [line["loss"] for line in log_of(folder / "000-DiT-Ti-2")]


@pytest.mark.parametrize("size", ["10", "200KB"], ids=["of a number", "of a size"])
def test_features_and_curve_are_those_of_the_encoder(size, make, pictures, vae, teacher, tmp_path, no_ranks):
    folder = make("--repa", teacher, "--model", "DiT-Ti/2", "--shard_size", size)
    data, plain = (build_dataset(path, 16, seed=0) for path in (folder, pictures))
    assert data.describe().features == (teacher, (4, 4), 12) and f"features by {teacher}" in data.describe().text
    encoder = VisionTeacher(teacher, (4, 4), 0.5, False, torch.device("cpu"), torch.float32)
    for row, flip in ((0, False), (13, True)):
        found, seen = data.read(row, View(flip=flip)).features, plain.read(row, View(flip=flip)).x
        torch.testing.assert_close(found.float(), encoder.features(seen[None])[0], rtol=2e-3, atol=2e-3)
    flags = [*RUN, "--batch_size", "8", "--outputs"]
    train.main([*flags, str(tmp_path / "online"), "--data_path", pictures, "--vae", vae, "--repa", teacher])
    train.main([*flags, str(tmp_path / "cached"), "--data_path", folder, "--repa", "cached"])
    torch.testing.assert_close(losses(tmp_path / "cached"), losses(tmp_path / "online"), rtol=1e-3, atol=0)
    _refuses_others(Path(folder))
    two = [*RUN, "--batch_size", "4", "--outputs", str(tmp_path / "two"), "--data_path", folder, "--repa", "cached"]
    run_ranks(2, start, two)
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "cached"), rtol=2e-5, atol=0)


def _refuses_others(folder: Path) -> None:
    """Check that features are reported as damaged if the index gives another width."""
    before = (folder / "index.json").read_text()
    (folder / "index.json").write_text(before.replace('"width": 12', '"width": 13'))
    with pytest.raises(BadSample, match=r"features of shape \[2, 16, 12\], not \[2, 16, 13\]"):
        build_dataset(str(folder), 16, seed=0).read(0)
    (folder / "index.json").write_text(before)


def test_what_is_missing_or_of_other_tokens_is_named(make, teacher, tmp_path, no_ranks, capsys):
    without, of_4 = make("--no_flip"), make("--repa", teacher, "--model", "DiT-Ti/4", "--no_flip")
    for data, model, repa, said in (
        (without, "DiT-Ti/2", "cached", "--repa cached: --data_path .* has no features; make latents"),
        (without, "DiT-Ti/2", teacher, "and give --repa cached"),
        (of_4, "DiT-Ti/2", "cached", "features of 2 x 2 tokens, the model 4 x 4"),
    ):
        words = ["--data_path", data, "--repa", repa, "--model", model, "--outputs", str(tmp_path)]
        with pytest.raises(SystemExit):
            train.main([*RUN, *words])
        assert re.search(said, capsys.readouterr().err), said
    index = json.loads((Path(of_4) / "index.json").read_text())
    assert index["sizes"][0]["features"] == {"encoder": teacher, "grid": [2, 2], "width": 12}


@pytest.mark.parametrize("flags", ["--bucket_tokens 64 --model DiT-XL/2", "--use_video"])
def test_samples_of_several_sizes_and_clips_are_refused(flags, pictures, teacher, tmp_path, capsys):
    words = ["latents", "--data_path", pictures, "--output", str(tmp_path), "--repa", teacher, *flags.split()]
    assert preprocess.main(words) == 2
    assert f"--repa {teacher}: is for pictures of one size" in capsys.readouterr().err
