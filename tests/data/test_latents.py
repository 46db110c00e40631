"""Cached latents are written, read back, resumed or refused."""

import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from opendit.data import BatchSchedule, DataError, LatentDataset, SampleKey, build_dataset, build_loader
from opendit.data.base import View
from opendit.data.latents import CachedSample, write_shard
from opendit.data.make_latents import make_latents, pick_dtype
from opendit.diffusion.random import Stream, integers
from opendit.encoders import VAECodec, sample_moments
from tests.data.shards.tars import latents_in, latents_of


@pytest.fixture(scope="module")
def codec():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, scaling_factor=0.5, **kinds)
    return VAECodec(vae, name="small")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Write 45 pictures of 16x16 in two classes, one of them broken after its header."""
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for i in range(45):
        path = root / ("ab"[i // 20 % 2]) / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
        if i == 21:
            path.write_bytes(path.read_bytes()[:200])
    return root


def make(pictures, codec, output, **options):
    data = build_dataset(str(pictures), 16, seed=0)
    defaults = dict(image_size=16, flips=True, batch_size=4, num_workers=0, shard_size=10)
    return make_latents(data, codec, output, **(defaults | options))


@pytest.fixture(scope="module")
def made(pictures, codec, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "latents"
    make(pictures, codec, output)
    return output


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_files_are_as_documented(pictures, codec, made):
    (index,) = json.loads((made / "index.json").read_text())["sizes"]
    tars = [f"latents-16-{i:05d}-of-00005.tar" for i in range(5)]
    assert sorted(contents(made)) == sorted([".index.lock", "index.json", *tars, *(f"{tar}.index" for tar in tars)])
    assert [shard["count"] for shard in index["shards"]] == [10, 10, 9, 10, 5] and index["count"] == 44
    assert index["class_names"] == ["a", "b"] and index["image_size"] == 16 and index["vae"] == "small"
    assert (index["scaling_factor"], index["shift_factor"], index["flips"]) == (0.5, 0, True)
    assert index["latent_shape"] == [4, 8, 8] and len(index["skipped"]) == 1 and "b/21.png: " in index["skipped"][0]
    bad = [str(path) for path in sorted(pictures.rglob("*.png"))].index(str(pictures / "b" / "21.png"))
    shards = [latents_in(made / shard["file"]) for shard in index["shards"]]
    assert [row for shard in shards for row in shard] == [row for row in range(45) if row != bad]
    tensors, label = shards[0][0]
    assert tensors["moments"].shape == (2, 8, 8, 8) and tensors["moments"].dtype == torch.float16 and label == b"0"


def test_round_trip(pictures, codec, made):
    """Cached latents equal the codec's output for the picture and its mirror image, to fp16 precision."""
    source = build_dataset(str(pictures), 16, seed=3)
    rows = list(latents_of(made))
    data = build_dataset(str(made), 16, seed=3)
    assert isinstance(data, LatentDataset) and data.describe().kind == "latents" and data.random_flip
    assert len(data) == 44 and data.describe().num_classes == 2 and data.sample_shape == (8, 8, 8)
    assert (data.vae, data.scaling_factor, data.shift_factor) == ("small", 0.5, 0)
    flips = integers(3, 6, torch.arange(44), Stream.FLIP, 2)
    assert 0 < int(flips.sum()) < 44
    for i, row in enumerate(rows):
        item = data[SampleKey(i, 6, i)]
        x = source.read(row, View(flip=bool(flips[i]))).x
        torch.testing.assert_close(item.x, codec.moments(x[None])[0], rtol=1e-3, atol=1e-3)
        assert item.y == source.label(row) and item.x.dtype == torch.float32
        assert not torch.allclose(item.x, codec.moments(x[None].flip(-1))[0], rtol=1e-3, atol=1e-3)
    noise = torch.randn(1, 4, 8, 8)
    latents = sample_moments(item.x[None], noise, data.scaling_factor, data.shift_factor)
    torch.testing.assert_close(latents, codec.encode(x[None], noise), rtol=2e-3, atol=2e-3)
    assert "cached latents (4x8x8, --vae small) of 44 pictures" in data.describe().text


def test_mirroring_can_be_turned_off_or_left_out(pictures, codec, made, tmp_path):
    data = build_dataset(str(made), 16, seed=3, random_flip=False)
    assert all(torch.equal(data[SampleKey(0, 0, i)].x, data[SampleKey(0, 0, 0)].x) for i in range(10))
    make(pictures, codec, tmp_path, flips=False)
    plain = build_dataset(str(tmp_path), 16, seed=3)
    assert not plain.random_flip and torch.equal(plain[SampleKey(5, 0, 0)].x, data[SampleKey(5, 0, 0)].x)
    with pytest.raises(ValueError, match="no mirrored latents.*--flip"):
        build_dataset(str(tmp_path), 16, seed=3, random_flip=True)


def test_worker_processes_read_the_same(made):
    data, schedule = build_dataset(str(made), 16, seed=0), BatchSchedule(44, 8, 0)
    data[SampleKey(0, 0, 0)]  # files opened here must not disturb the workers
    options = dict(dp_rank=0, dp_size=1, batch_size=8, end_step=10)
    for a, b in zip(
        build_loader(data, schedule, num_workers=0, **options),
        build_loader(pickle.loads(pickle.dumps(data)), schedule, num_workers=2, **options),
        strict=True,
    ):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


def test_what_a_sample_takes_of_its_shard_is_counted(made):
    data = build_dataset(str(made), 16, seed=0)
    tensors, _ = latents_in(sorted(made.glob("*.tar"))[0])[3]
    assert data.read(3).bytes_read == len(save(tensors)) > 2 * 2 * 2 * 4 * 8 * 8  # with the mirror image


def test_a_deleted_or_damaged_shard_is_made_again_and_the_others_kept(pictures, codec, made, tmp_path, monkeypatch):
    for name, data in contents(made).items():
        (tmp_path / name).write_bytes(data)
    shards = sorted(tmp_path.glob("*.tar"))
    shards[1].unlink()
    shards[3].write_bytes(shards[3].read_bytes()[:-100])
    encoded = []
    moments = codec.moments
    monkeypatch.setattr(codec, "moments", lambda x: encoded.append(len(x)) or moments(x))
    make(pictures, codec, tmp_path)
    assert sum(encoded) == 2 * (10 + 10) and contents(tmp_path) == contents(made)
    make(pictures, codec, tmp_path)  # nothing is left to do
    assert sum(encoded) == 2 * (10 + 10) and contents(tmp_path) == contents(made)


def test_worker_processes_write_the_same(pictures, codec, made, tmp_path):
    make(pictures, codec, tmp_path, num_workers=2)
    assert contents(tmp_path) == contents(made)


@pytest.mark.parametrize("change", [{"flips": False}, {"shard_size": 20}, {"other_vae": True}, {"more_pictures": True}])
def test_other_settings_are_refused_and_nothing_is_touched(pictures, codec, made, tmp_path, change):
    before = contents(made)
    data = build_dataset(str(pictures), 16, seed=0)
    if change.pop("more_pictures", False):
        data.class_names = ["a", "c"]
    if change.pop("other_vae", False):
        codec = VAECodec(codec.vae, name="small")
        codec.scaling_factor = 0.4
    options = dict(image_size=16, flips=True, batch_size=4, num_workers=0, shard_size=10)
    with pytest.raises(ValueError, match=f"--output {made}: holds latents of other settings .*there, .*now"):
        make_latents(data, codec, made, **(options | change))
    assert contents(made) == before


def test_a_strange_index_is_not_overwritten(pictures, codec, tmp_path):
    (tmp_path / "index.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="index.json of something else"):
        make(pictures, codec, tmp_path)
    assert (tmp_path / "index.json").read_text() == '{"mine": 1}'


def test_too_many_unreadable_files_stop_without_an_index(pictures, codec, tmp_path):
    with pytest.raises(DataError, match=r"1 of the 45 files.*more than --max_bad 0.01.*21\.png"):
        make(pictures, codec, tmp_path, max_bad=0.01)
    assert not (tmp_path / "index.json").exists()
    with pytest.raises(ValueError, match="unfinished latents"):
        build_dataset(str(tmp_path), 16, seed=0)


def test_a_shard_may_be_empty(pictures, codec, made, tmp_path):
    make(pictures, codec, tmp_path, shard_size=1)
    data = build_dataset(str(tmp_path), 16, seed=0, random_flip=False)
    whole = build_dataset(str(made), 16, seed=0, random_flip=False)
    assert len(data) == 44 and len(list(tmp_path.glob("*.tar"))) == 45
    for row in range(44):
        a, b = data[SampleKey(row, 0, 0)], whole[SampleKey(row, 0, 0)]
        torch.testing.assert_close(a.x, b.x, rtol=2e-3, atol=2e-3)  # in other batches the last bit may differ
        assert a.y == b.y


def test_overflow_is_an_error(pictures, codec, tmp_path, monkeypatch):
    moments = codec.moments
    monkeypatch.setattr(codec, "moments", lambda x: moments(x) * 1e6)
    with pytest.raises(DataError, match="rows 0 to 3 overflow.*--mixed_precision"):
        make(pictures, codec, tmp_path)


def test_reading_errors_name_both_sides(made, tmp_path):
    with pytest.raises(ValueError, match=r"made at --image_size 16, but this run has --image_size 32"):
        build_dataset(str(made), 32, seed=0)
    for name, data in contents(made).items():
        (tmp_path / name).write_bytes(data)
    shard = sorted(tmp_path.glob("*.tar"))[2]
    shard.write_bytes(shard.read_bytes() + b"0")
    with pytest.raises(ValueError, match=r"latents-16-00002-of-00005.tar has [\d,]+ bytes instead of"):
        build_dataset(str(tmp_path), 16, seed=0)
    shard.unlink()
    with pytest.raises(ValueError, match=r"latents-16-00002-of-00005.tar is missing"):
        build_dataset(str(tmp_path), 16, seed=0)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        build_dataset(str(tmp_path), 16, seed=0)


def test_grey_pictures(codec, tmp_path):
    data = build_dataset("digits", 16, seed=0)
    data.images, data.labels = data.images[:6], data.labels[:6]
    make_latents(data, codec, tmp_path, image_size=16, flips=data.random_flip, batch_size=4, num_workers=0)
    latents = build_dataset(str(tmp_path), 16, seed=0)
    assert not latents.random_flip and len(latents) == 6
    x = data[SampleKey(2, 0, 0)].x.repeat(3, 1, 1)
    torch.testing.assert_close(latents[SampleKey(2, 0, 0)].x, codec.moments(x[None])[0], rtol=1e-3, atol=1e-3)


def test_shards_are_the_same_bytes_and_whole_or_absent(tmp_path, monkeypatch):
    samples = [CachedSample(0, {"moments": torch.ones(1, 2, 1, 1).half()}, label=0)]
    for name in "ab":
        write_shard(tmp_path / name, samples, {"x": 1, "y": 2}, ["p: q"])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def fail(source, target, **options):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError):
        write_shard(tmp_path / "c", samples, {}, [])
    assert not (tmp_path / "c").exists()


def test_precision():
    assert pick_dtype("auto", torch.device("cpu")) == pick_dtype("fp32", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.float16
    assert pick_dtype("bf16", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ValueError, match="--mixed_precision fp16: needs a GPU"):
        pick_dtype("fp16", torch.device("cpu"))
