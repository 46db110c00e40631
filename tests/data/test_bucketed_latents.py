"""Caches of several shapes (``preprocess.py latents --bucket_tokens``): their contents, and training as from the
files."""

import json
from itertools import cycle

import numpy as np
import pytest
import torch
from PIL import Image

import preprocess
import train
from opendit.data import build_dataset, build_schedule
from opendit.data.shaped import crop_media, shape_latents, token_size
from opendit.data.video_files import write_mp4
from opendit.models.families import FAMILIES
from tests.encoders.published_folders import load_codec_of, write_pipeline
from tests.numbers import off_by

ROWS = 14
PICTURES = [(64, 64), (64, 128), (120, 64), (66, 70), (48, 48), (130, 60), (64, 64)]
CLIPS = [(5, 32, 32), (1, 32, 64), (5, 64, 32), (3, 32, 32), (1, 40, 40), (5, 32, 32), (2, 64, 32)]
FLAGS = {
    "flux": "--image_size 64 --bucket_tokens 16",
    "wan": "--image_size 32 --bucket_tokens 12 --use_video --num_frames 5",
}
PATCH = {"flux": (2, 2), "wan": (1, 2, 2)}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Write two pipelines, captioned media of several sizes, and captioned pictures of one size."""
    root, random = tmp_path_factory.mktemp("buckets"), np.random.default_rng(0)
    tables = {name: ["path,text"] for name in ("flux", "wan", "equal")}
    for number, picture, clip in zip(range(ROWS), cycle(PICTURES), cycle(CLIPS)):
        Image.fromarray(random.integers(0, 256, (*picture, 3), np.uint8)).save(root / f"{number}.png")
        tables["flux"].append(f"{number}.png,caption {number}")
        if clip[0] > 1:
            write_mp4(root / f"{number}.mp4", random.integers(0, 256, (*clip, 3), np.uint8), 8)
        else:
            Image.fromarray(random.integers(0, 256, (*clip[1:], 3), np.uint8)).save(root / f"still{number}.png")
        tables["wan"].append(f"{number}.mp4,{number}" if clip[0] > 1 else f"still{number}.png,{number}")
        Image.fromarray(random.integers(0, 256, (64, 64, 3), np.uint8)).save(root / f"equal{number}.png")
        tables["equal"].append(f"equal{number}.png,{number}")
    for name, lines in tables.items():
        (root / f"{name}.csv").write_text("\n".join(lines) + "\n")
    for name in PATCH:
        write_pipeline(root / name, name)
    return root


def make(root, name, output, *more, data=None):
    argv = ["latents", "--data_path", f"{root}/{data or name}.csv", "--output", str(output), "--num_workers", "0"]
    return preprocess.main([*argv, "--pretrained", str(root / name), *FLAGS[name].split(), *more])


@pytest.fixture(scope="module")
def made(root, tmp_path_factory):
    caches = {name: tmp_path_factory.mktemp("made") / name for name in PATCH}
    for name, output in caches.items():
        assert make(root, name, output, "--shard_size", "60KB") == 0
    return caches


def opened(path, name):
    clips = {"use_video": True, "num_frames": 5} if name == "wan" else {}
    return build_dataset(str(path), 64 if name == "flux" else 32, seed=0, **clips)


def shaped(root, made, name):
    """Return the files and the cache of a family, both with the shapes of the family's flags."""
    small, video = (16, False) if name == "flux" else (12, True)
    files = crop_media(
        opened(root / f"{name}.csv", name),
        token_size(PATCH[name], 8, 4 if video else 1),
        small,
        "--bucket_tokens",
        image_size=32 if video else 64,
        num_frames=5 if video else 1,
        frame_interval=1,
        short_clips="skip",
        fps=None,
        max_upscale=1.25,
    )
    return files, shape_latents(opened(made[name], name), token_size(PATCH[name]), small, "--bucket_tokens")


@pytest.mark.parametrize("name", PATCH)
def test_a_cache_holds_every_sample_at_its_own_shape(root, made, name):
    files, cached = shaped(root, made, name)
    codec = load_codec_of(root / name, FAMILIES[name])
    found = {cached.caption(row): cached.read(row) for row in range(len(cached))}
    assert len(found) == len(files) >= ROWS - 4 and len({item.x.shape for item in found.values()}) > 3
    for row in range(len(files)):
        wanted = codec.moments(files.read(row).x[None])[0]
        torch.testing.assert_close(found[files.caption(row)].x, wanted, rtol=1e-3, atol=1e-3)
    (index,) = json.loads((made[name] / "index.json").read_text())["sizes"]
    most = int(FLAGS[name].split()[3])
    assert index["settings"]["bucket_tokens"] == most >= cached.tokens.max() and len(index["shards"]) > 4
    assert f"--bucket_tokens {most}" in cached.describe().text


@pytest.mark.parametrize("name", PATCH)
@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (2, 2)])
def test_batches_come_as_from_the_files(root, made, name, batch, parts):
    files, cached = shaped(root, made, name)
    rows = [build_schedule(data, batch, parts, 3, bucket_tokens=16) for data in (files, cached)]
    assert rows[0].steps_per_epoch == rows[1].steps_per_epoch
    for step in range(2 * rows[0].steps_per_epoch + 1):
        assert list(rows[0].ends(step)) == list(rows[1].ends(step))
        pairs = zip((files, cached), rows, strict=True)
        wanted, found = ([data.caption(row) for row in each.rows(step)] for data, each in pairs)
        assert wanted == found


def losses(root, name, data, outputs, *more):
    argv = "--max_steps 5 --log_every 1 --ckpt_every 0 --warmup_steps 0 --lr 1e-3 --sample_every 0 --num_workers 0"
    argv = [*argv.split(), *FLAGS[name].split(), "--pretrained", str(root / name), "--mixed_precision", "fp32", *more]
    train.main([*argv, "--data_path", str(data), "--outputs", str(outputs)])
    (run,) = outputs.glob("0*")
    return [json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", PATCH)
def test_training_from_a_cache_has_the_curve_of_the_files(root, made, name, tmp_path):
    wanted = losses(root, name, root / f"{name}.csv", tmp_path / "files")
    found = losses(root, name, made[name], tmp_path / "cache")
    assert len(set(wanted)) == 5 and off_by(found, wanted) < 2e-3


def test_equal_samples_are_those_of_a_cache_of_one_size(root, tmp_path):
    make(root, "flux", tmp_path / "bucketed", data="equal")
    argv = ["latents", "--data_path", str(root / "equal.csv"), "--output", str(tmp_path / "plain"), "--image_size"]
    preprocess.main([*argv, "64", "--pretrained", str(root / "flux"), "--num_workers", "0"])
    one, other = (losses(root, "flux", tmp_path / kind, tmp_path / f"{kind} run") for kind in ("bucketed", "plain"))
    assert one == other


def test_a_stopped_job_goes_on_and_several_sizes_lie_in_one_folder(root, made, tmp_path, capsys):
    make(root, "flux", tmp_path, "--shard_size", "60KB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before == {path.name: path.read_bytes() for path in made["flux"].iterdir()}
    (tmp_path / "index.json").unlink()
    gone = sorted(tmp_path.glob("*.tar"))[2]
    gone.unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")}
    make(root, "flux", tmp_path, "--shard_size", "60KB")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert make(root, "flux", tmp_path, "--bucket_tokens", "32") == 2
    assert "bucket_tokens 16 there, 32 now" in capsys.readouterr().err
    assert make(root, "flux", tmp_path, "--image_size", "32") == 0
    sizes = json.loads((tmp_path / "index.json").read_text())["sizes"]
    assert [index["image_size"] for index in sizes] == [32, 64]


def test_an_index_of_other_shapes_is_refused(root, made, tmp_path):
    index = json.loads((made["flux"] / "index.json").read_text())
    for path in made["flux"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = index["sizes"][0]["shards"][-1]
    shard["latent_shape"][1:] = [shard["latent_shape"][2] + 2, shard["latent_shape"][1]]
    (tmp_path / "index.json").write_text(json.dumps(index))
    data = opened(tmp_path, "flux")
    with pytest.raises(Exception, match=r"moments of shape \[1, 8, .*\], not "):
        data.read(len(data) - 1)
    shard["latent_shape"] = [5, 8, 8]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"latent_shape of latents-64-.*tar is \[5, 8, 8\]"):
        opened(tmp_path, "flux")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bucket_tokens", "8"], "--bucket_tokens 8: a picture of --image_size 64 has 16 tokens"),
        (["--model", "vDiT-XL/222"], "--model vDiT-XL/222: takes clips; add --use_video"),
        (["--model", "DiT-XXL/2"], "--model DiT-XXL/2: no such model"),
    ],
)
def test_what_does_not_go_together_is_refused(root, tmp_path, capsys, more, message):
    assert make(root, "flux", tmp_path, *more) == 2
    assert message in capsys.readouterr().err


def test_our_own_models_name_their_patch(root, tmp_path, capsys):
    argv = ["latents", "--data_path", str(root / "flux.csv"), "--output", str(tmp_path / "cache"), "--num_workers", "0"]
    argv += ["--image_size", "64", "--vae", str(root / "flux" / "vae"), "--bucket_tokens", "4"]
    assert preprocess.main(argv) == 2
    assert "--bucket_tokens 4: tokens of an unknown model; add --model, such as DiT-XL/2" in capsys.readouterr().err
    assert preprocess.main([*argv, "--model", "DiT-Ti/4"]) == 0
    how = "--model DiT-Ti/4 --text_encoder bytes --image_size 64 --bucket_tokens 4 --max_steps 2 --batch_size 1"
    how += " --sample_every 0 --num_workers 0 --mixed_precision fp32"
    train.main([*how.split(), "--data_path", str(tmp_path / "cache"), "--outputs", str(tmp_path / "out")])
    assert list(tmp_path.glob("out/0*/checkpoints/latest"))
    argv = [*how.replace("--bucket_tokens 4", "--positions learned").split(), "--data_path", str(tmp_path / "cache")]
    with pytest.raises(SystemExit):
        train.main([*argv, "--outputs", str(tmp_path / "out")])
    assert "samples of several sizes, but this model has learned positions" in capsys.readouterr().err
