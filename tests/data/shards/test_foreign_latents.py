"""Latents in tars that another program made are read as the arrays that were put there."""

import io
import json
import pickle
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save

import preprocess
from opendit.data import SampleKey, build_dataset, build_loader, build_schedule
from opendit.data.base import View
from opendit.data.latents_index import INDEX
from opendit.data.shaped import TokenSize, shape_latents
from opendit.data.shards.program import index_latents
from opendit.encoders.vae import load_codec
from opendit.encoders.video_vae import load_video_codec
from tests.data.shards.tars import picture, write_tar
from tests.encoders.test_vae import small_vae
from tests.encoders.test_video_vae import MAKERS

SHAPE = (4, 4, 4)  # latents of a picture with 16 pixels a side


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    path = tmp_path_factory.mktemp("vae")
    small_vae(scaling_factor=0.3, shift_factor=0.25).save_pretrained(path)
    return str(path)


def arrays(number, channels, shape=SHAPE[1:], names=("moments",)):
    random = np.random.default_rng(number)
    return {name: random.normal(size=(channels, *shape)).astype(np.float32) for name in names}


def npz(found):
    file = io.BytesIO()
    np.savez_compressed(file, **found)
    return file.getvalue()


def npy(found):
    file = io.BytesIO()
    np.save(file, next(iter(found.values())))
    return file.getvalue()


def safetensors(found):
    return save({name: torch.from_numpy(array) for name, array in found.items()})


PACK = {"npz": npz, "npy": npy, "safetensors": safetensors}


def write(folder, samples, kind="npz", words=lambda i: (f"{i % 3}".encode(), "cls"), per_tar=4):
    """Write samples, dicts of arrays, to tars of ``per_tar``. ``words`` returns the class or caption beside each, with
    its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(samples), per_tar):
        members = []
        for i, sample in list(enumerate(samples))[first : first + per_tar]:
            content, ending = words(i)
            packed = sample if isinstance(sample, bytes) else PACK[kind](sample)
            members += [(f"{i:03d}.{kind}", packed), (f"{i:03d}.{ending}", content)]
        write_tar(folder / f"part-{first:03d}.tar", members)
    return folder


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("form", ["mean_std", "mean_logvar", "sample"])
def test_samples_are_the_arrays_that_were_put_there(kind, form, vae, tmp_path):
    samples = [arrays(i, 4 if form == "sample" else 8) for i in range(6)]
    folder = write(tmp_path / "tars", samples, kind)
    index_latents(str(folder), form, vae=vae, image_size=16)
    data, codec = build_dataset(str(folder), 16, seed=0), load_codec(vae, channels=3, device="cpu")
    assert data.describe().kind == "latents" and (data.scaling_factor, data.shift_factor) == (0.3, 0.25)
    assert (codec.scaling_factor, codec.shift_factor) == (0.3, 0.25) and data.vae == vae and not data.random_flip
    for row, sample in enumerate(samples):
        stored = sample["moments"].astype(np.float64)
        mean, other = (stored, 0 * stored) if form == "sample" else np.split(stored, 2)
        expected = np.concatenate([mean, np.sqrt(np.exp(other)) if form == "mean_logvar" else other])
        item = pickle.loads(pickle.dumps(data))[SampleKey(row, 3, row)]
        assert item.x.dtype == torch.float32 and item.y == row % 3
        np.testing.assert_allclose(item.x.numpy(), expected, rtol=1e-6)
    assert f"cached latents (4x4x4, --vae {vae}) of 6 pictures of 3 classes" in data.describe().text
    schedule = build_schedule(data, 3, 1, 0)
    with build_loader(data, schedule, dp_rank=0, dp_size=1, batch_size=3, end_step=2, num_workers=1) as batches:
        assert sorted(int(y) for batch in batches for y in batch.y) == [0, 0, 1, 1, 2, 2]


def test_mirror_images_captions_and_a_batch_s_dimension(vae, tmp_path):
    """Read caches like MAR's and LightningDiT's: NAME and NAME_flip, one of them with a leading dimension of 1."""
    samples = [arrays(i, 8, names=("moments", "moments_flip")) for i in range(3)]
    for sample in samples:
        sample["moments_flip"] = sample["moments_flip"][None]
        sample["labels"] = np.zeros(1, np.int64)
    folder = write(tmp_path / "tars", samples, words=lambda i: (f"caption {i}".encode(), "txt"))
    index_latents(str(folder), "mean_std", vae=vae, image_size=16)
    data = build_dataset(str(folder), 16, seed=0)
    assert data.random_flip and data.describe().conditioning == "text" and data.caption(2) == "caption 2"
    for row, sample in enumerate(samples):
        assert np.array_equal(data.read(row).x, sample["moments"])
        assert np.array_equal(data.read(row, View(flip=True)).x, sample["moments_flip"][0])


def test_clips(tmp_path):
    folder = tmp_path / "vae"
    MAKERS["wan"]().save_pretrained(folder)
    codec = load_video_codec(str(folder), channels=3, device="cpu")
    channels, *sides = codec.latent_shape(5, 16, 16)
    tars = write(tmp_path / "tars", [arrays(i, 2 * channels, tuple(sides), ("latent",)) for i in range(5)])
    how = dict(use_video=True, num_frames=5, frame_interval=2)
    index_latents(str(tars), "mean_logvar", vae=str(folder), image_size=16, **how)
    data = build_dataset(str(tars), 16, seed=0, **how)
    assert list(data.scaling_factor) == pytest.approx(list(codec.scaling_factor))
    assert list(data.shift_factor) == pytest.approx(list(codec.shift_factor)) and data.read(0).x.shape[1] == 2
    assert data.shapes().latents()[-1] == (5, tuple(sides))
    shaped = shape_latents(data, TokenSize(1, 1, (1, 1)), 2**20, "--pack_tokens")
    assert torch.equal(shaped[SampleKey(3, 0, 3)].x, data.read(3).x)
    with pytest.raises(ValueError, match="holds latents of clips; add --use_video"):
        build_dataset(str(tars), 16, seed=0)
    with pytest.raises(ValueError, match="--num_frames 6"):
        index_latents(str(tars), "mean_logvar", vae=str(folder), image_size=16, use_video=True, num_frames=6)
    with pytest.raises(ValueError, match="is of clips; add --use_video"):
        index_latents(str(tars), "mean_logvar", vae=str(folder), image_size=16)


BOMB = npz({"moments": np.zeros((8, 4, 4), np.float32), "other": np.zeros(10**6)})
OBJECTS = io.BytesIO()
np.savez(OBJECTS, moments=np.array([print, {}], dtype=object))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"\x80\x04 no archive", "zip"),
        (npz(arrays(0, 8))[:-40], "zip"),
        (BOMB, "unpacks to 8,00"),
        (OBJECTS.getvalue(), "Object arrays cannot be loaded|allow_pickle"),
        (npz(arrays(0, 8, (4, 5))), r"latents of shape \[8, 4, 5\], not \[8, 4, 4\]"),
        (npz(arrays(0, 8, names=("other",))), "it has no array 'moments'"),
        (npz({"moments": np.full((8, 4, 4), np.nan, np.float32)}), "not finite"),
        (npz({"moments": np.ones((8, 4, 4), np.int64)}), r"latents of shape"),
    ],
)
def test_what_is_no_such_array_is_replaced_and_named(bad, says, vae, tmp_path):
    folder = write(tmp_path / "tars", [arrays(0, 8), bad, arrays(2, 8)])
    index_latents(str(folder), "mean_std", vae=vae, image_size=16)
    data = build_dataset(str(folder), 16, seed=0)
    item = data[SampleKey(1, 0, 1)]
    assert np.array_equal(item.x, arrays(2, 8)["moments"]) and len(item.skipped) == 1
    assert item.skipped[0].startswith(f"{folder / 'part-000.tar'}: 001.npz: ")
    assert re.search(says, item.skipped[0])


def run(*words):
    return preprocess.main(["index", *map(str, words)])


def test_the_command(vae, tmp_path, capsys):
    folder = write(tmp_path / "tars", [arrays(i, 8) for i in range(6)])
    assert run(folder) == 2
    assert "no picture or clip beside .npz, .cls" in (told := capsys.readouterr().err) and "--latents" in told
    how = ("--vae", vae, "--image_size", 16)
    assert run(folder, "--latents", "mean_std", *how) == 0
    out = capsys.readouterr().out
    assert "latents (4x4x4; mean_std in moments) of 6 pictures with classes in 2 tars: train with --data_path" in out
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*.index")}
    assert run(folder, "--latents", "mean_std", *how) == 0  # the tars are not read again
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.index")} == stamps
    assert run(folder, "--latents", "mean_logvar", *how) == 0
    assert json.loads((folder / INDEX).read_text())["sizes"][0]["foreign"]["form"] == "mean_logvar"
    capsys.readouterr()
    (folder / "class_names.json").write_text('["cat", "dog", "owl", "fox"]')
    assert run(folder, "--latents", "mean_std", *how) == 0
    assert build_dataset(str(folder), 16, seed=0).class_names == ["cat", "dog", "owl", "fox"]
    for words, says in (
        (("--latents", "sample", *how), r"none is [4, 4, 4] of floating point"),
        (("--latents", "mean_std", "--vae", vae, "--image_size", 32), "none is [8, 8, 8] of floating point"),
        (("--latents", "mean_std", "--vae", vae, "--image_size", 18), "--image_size 18: no multiple of 4"),
        (("--latents", "mean_std", "--vae", "none"), "--vae none: has no latents"),
        (("--latents", "mean_std", "--num_frames", 8), "--num_frames: does nothing without --use_video"),
        (("--vae", vae), "--vae: does nothing without --latents"),
        ((), "its tars hold latents with their indexes; train with them, or add --latents"),
    ):
        assert run(folder, *words) == 2, words
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("samples", "words", "says"),
    [
        ([arrays(0, 8, names=("one", "two"))], None, "several of them fit"),
        ([{"moments": np.zeros(3, np.float32)}], None, r"it has moments \[3\], and none is"),
        ([arrays(i, 8) for i in range(8)], lambda i: (b"1", "cls" if i < 4 else "txt"), "keep them in folders"),
    ],
)
def test_tars_that_can_t_be_told(samples, words, says, vae, tmp_path):
    folder = write(tmp_path / "tars", samples, **({"words": words} if words else {}))
    with pytest.raises(ValueError, match=says):
        index_latents(str(folder), "mean_std", vae=vae, image_size=16)
    assert not (folder / INDEX).exists()


def test_pictures_are_no_latents(vae, tmp_path):
    write_tar(tmp_path / "a.tar", [("0.png", picture(0)), ("0.cls", b"0")])
    with pytest.raises(ValueError, match="holds no samples"):
        index_latents(str(tmp_path), "mean_std", vae=vae, image_size=16)
    with pytest.raises(ValueError, match=r"holds no \.tar files; give --latents a folder"):
        index_latents(str(tmp_path / "a.tar"), "mean_std", vae=vae, image_size=16)
