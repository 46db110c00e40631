"""Forged or damaged caches of latents are refused at the start, or found by checksums during training."""

import hashlib
import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from PIL import Image

import train
from opendit.data import BatchSchedule, DataError, build_dataset, build_loader, files
from opendit.data.files import Verification
from opendit.data.make_latents import make_latents
from opendit.encoders import VAECodec
from tests.encoders.test_vae import small_vae
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def codec():
    return VAECodec(small_vae(), name="ema")


def make(root, codec, output, **options):
    data = build_dataset(str(root), 16, seed=0)
    make_latents(data, codec, output, image_size=16, flips=True, batch_size=8, num_workers=0, shard_size=7, **options)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(24):
        path = root / "ab"[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture(scope="module")
def made(pictures, codec, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "latents"
    make(pictures, codec, output)
    return output


@pytest.fixture
def cache(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cache")


def edit(cache, change):
    index = json.loads((cache / "index.json").read_text())
    change(index["sizes"][0])
    (cache / "index.json").write_text(json.dumps(index))


def refusal(cache) -> str:
    with pytest.raises(ValueError) as stop:
        build_dataset(str(cache), 16, seed=0)
    assert "\n" not in str(stop.value) and str(cache) in str(stop.value)
    return str(stop.value)


def flip_a_bit(path, at=-5):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------ at the start


def shard(**values):
    return lambda index: index["shards"][1].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.update(scaling_factor=0), "scaling_factor is 0"),
        (lambda i: i.update(scaling_factor=-0.5), "scaling_factor is -0.5"),
        (lambda i: i.update(scaling_factor="0.5"), "scaling_factor is '0.5'"),
        (lambda i: i.update(scaling_factor=[0.5, 0.5]), "scaling_factor is not one number, nor one for each of 4"),
        (lambda i: i.update(shift_factor=None), "shift_factor is null"),
        (lambda i: i.update(shift_factor=[0] * 5), "shift_factor is not one number"),
        (lambda i: i.update(count=25), "count is 25, its shards' counts are 24"),
        (lambda i: i.update(count=-1), "count is -1"),
        (lambda i: i.update(count=10**30), "count is 1000"),
        (lambda i: i.pop("count"), "count is missing"),
        (lambda i: i.update(latent_shape=[4, 8]), "latent_shape is a list of 2"),
        (lambda i: i.update(latent_shape=[4, 8, 10**9]), "latent_shape[2] is"),
        (lambda i: i.update(flips=1), "flips is 1"),
        (lambda i: i.update(class_names=[]), "class_names is empty"),
        (lambda i: i.update(class_names=["a"]), "index.json names 1 classes"),
        (lambda i: i.update(class_names="ab"), "class_names is 'ab'"),
        (lambda i: i.update(conditioning="text"), "index.json tells of captions, its tars have classes"),
        (lambda i: i.update(conditioning="both"), "conditioning is 'both'"),
        (lambda i: i.update(text={"encoder": "t5", "max_tokens": 4}), "conditioning is not text"),
        (lambda i: i.update(video={"num_frames": 4, "frame_interval": 1, "short_clips": "skip"}), "latent_shape is"),
        (lambda i: i.update(shards=[]), "count is 24, its shards' counts are 0"),
        (lambda i: i.update(shards={}), "shards is an object"),
        (lambda i: i.update(more=1), "more is not known"),
        (lambda i: i.update(shards=i["shards"] * 2, count=48), "shards name a file twice"),
        (shard(file="../latents.safetensors"), "sizes[0].shards[1].file is '../latents.safetensors'"),
        (shard(file="/etc/passwd"), "sizes[0].shards[1].file is '/etc/passwd'"),
        (shard(file="a\0b"), "sizes[0].shards[1].file is"),
        (shard(file="no.tar"), "no.tar is missing"),
        (shard(file="index.json"), "index.json.index is missing"),
        (shard(count=6), "count is 24, its shards' counts are 23"),
        (shard(bytes=-1), "shards[1].bytes is -1"),
        (shard(bytes=10), "bytes instead of 10"),
        (shard(sha256="0" * 64), "is of another tar than index.json means"),
        (shard(sha256="0"), "shards[1].sha256 is '0'"),
        (shard(evil=1), "shards[1].evil is not known"),
    ],
)
def test_an_index_that_can_not_be_true_is_refused_at_the_start(change, message, cache):
    edit(cache, change)
    assert message in refusal(cache)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": NaN}', "[" * 10_000, "\0", '{"a": 1, "a": 2}'])
def test_an_index_that_is_no_json(text, cache):
    (cache / "index.json").write_text(text)
    assert "index.json can't be read" in refusal(cache) or "unfinished latents" in refusal(cache)


def test_shards_are_regular_files(cache):
    path = sorted(cache.glob("*.tar"))[1]
    path.unlink()
    os.mkfifo(path)
    assert f"{path} is missing, or no regular file" in refusal(cache)
    path.unlink()
    path.write_bytes(b"\0" * 100)
    edit(cache, shard(bytes=100))
    assert "is of another tar than index.json means" in refusal(cache)


# ------------------------------------------------------------------------------------------ checksums


def test_the_index_has_every_shard_s_checksum(made):
    (index,) = json.loads((made / "index.json").read_text())["sizes"]
    for entry in index["shards"]:
        assert entry["sha256"] == hashlib.sha256((made / entry["file"]).read_bytes()).hexdigest()


def batches(cache, **options):
    data = build_dataset(str(cache), 16, seed=0)
    options = {"dp_rank": 0, "dp_size": 1, "num_workers": 0, **options}
    return build_loader(data, BatchSchedule(24, 4, 0), batch_size=4, **options)


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "verification"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_flipped_bit_ends_the_reading_with_the_shard_s_name(workers, cache):
    with batches(cache, end_step=20, num_workers=workers) as loader:
        assert len(list(loader)) == 20 and loader.verification.damage is None
    path = sorted(cache.glob("*.tar"))[2]
    flip_a_bit(path)
    with batches(cache, num_workers=workers) as loader:
        next(loader)  # the first step does not wait for checksums
        with pytest.raises(DataError, match=f"--data_path {cache}: {path} is damaged: its checksum.*preprocess.py"):
            for _ in loader:
                time.sleep(0.01)
    assert not threads()


def test_the_ranks_share_the_files(cache):
    data = build_dataset(str(cache), 16, seed=0)
    shares = [set(data.fingerprint().checksums.share(rank, 3).files) for rank in range(3)]
    assert set().union(*shares) == set(data.checksums) and sum(map(len, shares)) == 4


def test_a_verification_ends_at_once_wherever_it_is(tmp_path, monkeypatch):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 36)
    monkeypatch.setattr(files, "READ_AT_ONCE", 1 << 20)
    verification = Verification(tmp_path, {"large": "0" * 64}, "--data_path X")
    assert not threads()
    verification.check()
    started = time.monotonic()
    time.sleep(0.1)
    verification.check()
    verification.close()
    verification.close()
    assert time.monotonic() - started < 5 and not threads() and verification.damage is None
    for name, reason in (("gone", "can't be read"), ("large", "is damaged")):
        if name == "large":
            (tmp_path / name).write_bytes(b"x")
        verification = Verification(tmp_path, {name: "0" * 64}, "--data_path X")
        with pytest.raises(DataError, match=f"--data_path X: .*{name} {reason}"):
            for _ in range(1000):
                verification.check()
                time.sleep(0.01)
        verification.close()


def test_a_kept_shard_that_is_damaged_is_made_again(pictures, codec, made, cache):
    whole = {path.name: path.read_bytes() for path in made.iterdir()}
    flip_a_bit(sorted(cache.glob("*.tar"))[0])
    make(pictures, codec, cache)
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == whole
    (cache / "index.json").write_text("{")
    make(pictures, codec, cache)  # a damaged index is written again
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == whole


def encode(mesh, pictures, output):
    for _ in range(2):  # the second run keeps all shards
        make(pictures, VAECodec(small_vae(), name="ema"), output, rank=mesh.rank, world_size=mesh.world_size)


def test_two_ranks_write_the_same_index(pictures, made, tmp_path):
    run_ranks(2, encode, pictures, tmp_path / "two")
    assert (tmp_path / "two" / "index.json").read_bytes() == (made / "index.json").read_bytes()


def test_training_ends_with_one_line_about_the_shard(cache, tmp_path, no_ranks, capsys):
    path = sorted(cache.glob("*.tar"))[1]
    flip_a_bit(path)
    argv = "--model DiT-Ti/2 --image_size 16 --batch_size 4 --num_workers 0 --epochs 500 --no_save".split()
    argv += ["--sample_every", "0", "--data_path", str(cache), "--outputs", str(tmp_path / "runs")]
    started = time.monotonic()
    with pytest.raises((SystemExit, DataError)) as stop:
        train.main(argv)
    told = capsys.readouterr().err + str(stop.value)
    assert f"{path} is damaged: its checksum is not the index's" in told
    assert time.monotonic() - started < 60 and not threads()
