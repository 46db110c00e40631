"""Cached latents in tars as data sets: their views, shapes and sizes, damage, and tars on a server.

Other tests compare the latents with the codec itself.
"""

import json
import pickle
import shutil
import threading
from functools import partial
from http.server import ThreadingHTTPServer

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from safetensors.torch import load

from opendit.data import DataError, SampleKey, build_dataset, build_loader, build_schedule
from opendit.data.base import Medium, View
from opendit.data.latents import ABOUT
from opendit.data.make_latents import make_latents
from opendit.data.shaped import TokenSize, shape_latents
from opendit.data.shards import store
from opendit.data.shards.index import index_of
from opendit.data.video_files import write_mp4
from opendit.encoders import VAECodec
from opendit.encoders.video_vae import FrameCodec
from tests.data.shards.test_remote import Handler
from tests.data.test_video_latents import Letters
from tests.encoders.test_vae import small_vae

VIDEO = dict(use_video=True, num_frames=4, frame_interval=2)


@pytest.fixture(scope="module")
def codec():
    return VAECodec(small_vae(), name="ema")


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Write 13 pictures of two classes, the last one broken, and media.csv with 3 clips and 4 pictures."""
    root, random = tmp_path_factory.mktemp("media"), np.random.default_rng(0)
    for i in range(13):
        path = root / "classes" / "ab"[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(random.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:200])
    lines = ["path,text"]
    for i in range(7):
        if i % 2:
            write_mp4(root / f"{i}.mp4", random.integers(0, 256, (12, 20, 24, 3), dtype=np.uint8), 24)
        else:
            Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(root / f"{i}.png")
        lines.append(f'{i}.{"mp4" if i % 2 else "png"},"{"é, x" * i}{i}"')
    (root / "media.csv").write_text("\n".join(lines))
    return root


def make(data, codec, output, size=16, **options):
    how = dict(image_size=size, flips=True, batch_size=1, num_workers=0, max_bad=0.5)
    return make_latents(data, codec, output, **(how | options))


@pytest.fixture(scope="module")
def pictures(media, codec, tmp_path_factory):
    """Cache the pictures' latents in tars of limited bytes and in tars of limited samples."""
    root = tmp_path_factory.mktemp("latents")
    data = build_dataset(str(media / "classes"), 16, seed=0)
    make(data, codec, root / "tars", tar_bytes=9000)
    make(data, codec, root / "fives", shard_size=5)
    return root


def same(one, other):
    assert len(one) == len(other)
    one_about, other_about = one.describe(), other.describe()
    for name in (
        "kind conditioning class_names sample_shape random_flip vae scaling_factor shift_factor text_encoder max_tokens"
    ).split():
        assert getattr(one_about, name) == getattr(other_about, name)
    for row in range(len(one)):
        a, b = one[SampleKey(row, 7, row)], other[SampleKey(row, 7, row)]
        assert (
            torch.equal(a.x, b.x)
            and (a.y, a.text) == (b.y, b.text)
            and one.shapes().key(row) == other.shapes().key(row)
        )
        assert (
            torch.equal(one.read(row, View(flip=True)).x, other.read(row, View(flip=True)).x)
            if one.index["flips"]
            else True
        )
        if a.embedding is not None:
            assert all(map(torch.equal, a.embedding, b.embedding))


def test_pictures_are_the_same_in_tars_of_any_size(pictures):
    tars, fives = (build_dataset(str(pictures / name), 16, seed=3) for name in ("tars", "fives"))
    same(tars, fives)
    assert len(list((pictures / "tars").glob("*.tar"))) > 2 and len(tars.index["skipped"]) == 1
    assert [shard["count"] for shard in fives.index["shards"]] == [5, 4, 3]
    same(pickle.loads(pickle.dumps(tars)), fives)
    assert "cached latents (4x4x4, --vae ema) of 12 pictures of 2 classes, 16x16" in tars.describe().text
    assert tars.fingerprint().checksums.share(0, 1).files.keys() == {tar["file"] for tar in tars.index["shards"]}
    flipped = [torch.equal(tars[SampleKey(0, step, 0)].x, tars.read(0, View(flip=True)).x) for step in range(20)]
    assert 0 < sum(flipped) < 20  # mirroring is drawn at each use
    schedule = build_schedule(tars, 4, 1, 0)
    with build_loader(tars, schedule, dp_rank=0, dp_size=1, batch_size=4, end_step=3, num_workers=2) as batches:
        assert sorted(int(y) for batch in batches for y in batch.y) == [0] * 6 + [1] * 6
    assert tars.preview(0)[0].width == 16


@pytest.fixture(scope="module")
def mixed(media, codec, tmp_path_factory):
    """Cache the latents of clips and pictures with captions."""
    root = tmp_path_factory.mktemp("mixed")
    data = build_dataset(str(media / "media.csv"), 16, seed=0, **VIDEO)
    make(data, FrameCodec(codec), root, tar_bytes=6500, flips=False, encoder=Letters())
    return root


def test_clips_among_pictures(mixed):
    tars = build_dataset(str(mixed), 16, seed=0, **VIDEO)
    assert tars.shapes().array.tolist() == [0] * 4 + [1] * 3 and tars.max_tokens == 12
    assert tars.shapes().latents() == [(2, (1, 4, 4)), (4, (1, 4, 4)), (6, (4, 4, 4)), (7, (4, 4, 4))]
    assert "3 clips and 4 pictures" in tars.describe().text
    assert all(tars.shapes().key(tars.next_row(row)) == tars.shapes().key(row) for row in range(7))
    assert [shard["count"] for shard in tars.index["shards"]] == [2, 2, 2, 1]  # not one each, nor all in one
    assert tars.preview(0)[0] == Medium(1, 16, 16) and tars.preview(6)[0] == Medium(4, 16, 16)


@pytest.mark.parametrize("tokens", ["bucket_tokens", "pack_tokens"])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_by_shape(mixed, tokens, workers):
    """Latents of pictures have one frame and those of clips four, which no index says."""
    plain = build_dataset(str(mixed), 16, seed=0, random_flip=False, **VIDEO)
    data = shape_latents(plain, TokenSize(1, 1, (1, 1)), 64, tokens)
    assert data.token_counts()[:].tolist() == [16] * 4 + [64] * 3
    schedule = build_schedule(data, 1, 1, 0, **{tokens: 64}, attention=100.0)
    how = dict(dp_rank=0, dp_size=1, batch_size=1, end_step=10, num_workers=workers)
    seen = []
    with build_loader(data, schedule, **how) as loader:
        for batch in loader:
            rows = [[plain.caption(row) for row in range(7)].index(text) for text in batch.text]
            assert all(torch.equal(x, plain.read(row).x) for x, row in zip(batch.x, rows, strict=True))
            assert sum(data.token_counts()[row] for row in rows) <= 64
            seen += rows
    assert set(seen) == set(range(7))


def test_empty_captions_are_captions(media, codec, tmp_path):
    """Rows of a table may have empty captions, also with cached embeddings."""
    (media / "empty.csv").write_text('path,text\n0.png,a\n2.png,\n4.png,"  "\n6.png,b\n')
    data = build_dataset(str(media / "empty.csv"), 16, seed=0)
    make(data, codec, tmp_path, tar_bytes=6500, flips=False, encoder=Letters())
    tars = build_dataset(str(tmp_path), 16, seed=0)
    assert all(map(torch.equal, tars.read(1).embedding, tars.empty_caption))
    assert [tars.caption(row) for row in range(4)] == ["a", "", "", "b"]


def test_pictures_alone_that_were_encoded_as_clips_have_one_frame(media, codec, tmp_path):
    lines = [line for line in (media / "media.csv").read_text().splitlines() if "mp4" not in line]
    (media / "pictures.csv").write_text("\n".join(lines))
    data = build_dataset(str(media / "pictures.csv"), 16, seed=0, **VIDEO)
    make(data, FrameCodec(codec), tmp_path, tar_bytes=6500, flips=False)
    tars = build_dataset(str(tmp_path), 16, seed=0, **VIDEO)
    assert tars.read(0).x.shape == (8, 1, 4, 4) and {size for _, size in tars.shapes().latents()} == {(1, 4, 4)}


def test_webdataset_reads_them(pictures):
    data = build_dataset(str(pictures / "tars"), 16, seed=0)
    tars = [str(tar.path) for tar in data.shards]
    found = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))
    assert [int(sample["__key__"]) for sample in found] == [*range(6), *range(7, 13)] and ABOUT not in found[0]
    for row, sample in enumerate(found):
        assert torch.equal(load(sample["safetensors"])["moments"][1].float(), data.read(row, View(flip=True)).x)
        assert int(sample["cls"]) == data.label(row)


def test_several_sizes_lie_side_by_side(media, codec, pictures, tmp_path):
    output = tmp_path / "latents"
    shutil.copytree(pictures / "tars", output)
    before = {path.name: path.read_bytes() for path in output.glob("latents-16-*")}
    large = build_dataset(str(media / "classes"), 32, seed=0)
    make(large, codec, output, 32, tar_bytes=30000)
    assert before == {path.name: path.read_bytes() for path in output.glob("latents-16-*")}
    small, other = (build_dataset(str(output), size, seed=0) for size in (16, 32))
    assert len(small) == len(other) == 12 and other.sample_shape == (8, 8, 8) and small.sample_shape == (8, 4, 4)
    assert (
        small.fingerprint().identity
        == build_dataset(str(pictures / "tars"), 16, seed=0).fingerprint().identity
        != other.fingerprint().identity
    )
    with pytest.raises(ValueError, match="made at --image_size 16 and 32, but this run has --image_size 64"):
        build_dataset(str(output), 64, seed=0)
    index = (output / "index.json").read_bytes()
    make(large, codec, output, 32, tar_bytes=30000)  # nothing is left to do
    assert (output / "index.json").read_bytes() == index
    (media / "classes" / "c").mkdir()
    shutil.copy(media / "classes" / "a" / "00.png", media / "classes" / "c" / "99.png")
    try:
        with pytest.raises(ValueError, match="holds latents of 16 px of other data; pass another folder"):
            make(build_dataset(str(media / "classes"), 24, seed=0), codec, output, 24, tar_bytes=30000)
    finally:
        shutil.rmtree(media / "classes" / "c")
    assert (output / "index.json").read_bytes() == index


@pytest.fixture
def copy(pictures, tmp_path):
    return shutil.copytree(pictures / "tars", tmp_path / "copy")


def test_a_damaged_sample_is_replaced_and_its_tar_named(copy):
    data = build_dataset(str(copy), 16, seed=0)
    record, path = data.shards[1].index.record(0), data.shards[1].path
    with open(path, "r+b") as file:
        file.seek(record.medium_at + 150)
        file.write(b"\x55\xaa")
    item = data[SampleKey(len(data.shards[0]), 0, 0)]
    assert item.skipped == (f"{data.source(len(data.shards[0]))}: damaged: its checksum is not the index's",)
    assert path in item.skipped[0]
    check = data.fingerprint().checksums.share(0, 1)
    check.check()
    check.wait()
    with pytest.raises(DataError, match=f"{path} is damaged"):
        check.check()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda tar: tar.unlink(), "is missing"),
        (lambda tar: index_of(tar).unlink(), "tar.index is missing"),
        (lambda tar: tar.write_bytes(tar.read_bytes()[:-1]), "bytes instead of"),
        (
            lambda tar: index_of(tar).write_bytes(index_of(sorted(tar.parent.glob("*.tar"))[1]).read_bytes()),
            "another tar",
        ),
        (lambda tar: (tar.parent / "index.json").unlink(), "holds unfinished latents"),
        (lambda tar: (tar.parent / "index.json").write_text("{"), "can't be read"),
    ],
)
def test_what_is_missing_or_another_one_is_told_at_the_start(copy, spoil, says):
    spoil(sorted(copy.glob("*.tar"))[0])
    with pytest.raises(ValueError, match=says):
        build_dataset(str(copy), 16, seed=0)


def test_other_shapes_than_the_index_says_are_named(copy):
    index = json.loads((copy / "index.json").read_text())
    index["sizes"][0]["latent_shape"] = [4, 3, 4]
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"ValueError: moments of shape \[2, 8, 4, 4\], not \[2, 8, 3, 4\]"):
        build_dataset(str(copy), 16, seed=0)[SampleKey(0, 0, 0)]


def test_latents_of_a_server(media, codec, tmp_path, monkeypatch):
    data = build_dataset(str(media / "media.csv"), 16, seed=0)
    make(data, codec, tmp_path / "latents", flips=False, tar_bytes=5000, encoder=Letters())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "latents")))
    server.faults, server.ranges = [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "cache"))
    try:
        far = build_dataset(f"http://127.0.0.1:{server.server_port}", 16, seed=0)
        near = build_dataset(str(tmp_path / "latents"), 16, seed=0)
        same(far, near)
        assert (
            all(map(torch.equal, far.empty_caption, near.empty_caption))
            and far.fingerprint().identity == near.fingerprint().identity
        )
        with pytest.raises(ValueError, match="made at --image_size 16, but this run has --image_size 32"):
            build_dataset(f"http://127.0.0.1:{server.server_port}/", 32, seed=0)
    finally:
        server.shutdown()
        server.server_close()
