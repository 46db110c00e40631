"""Cached latents of clips and captions are written, read back, resumed or refused."""

import hashlib
import json
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import preprocess
from opendit.data import (
    BucketSchedule,
    DataError,
    LatentDataset,
    SampleKey,
    build_dataset,
    build_loader,
    build_schedule,
)
from opendit.data.latents import padded
from opendit.data.make_latents import make_latents
from opendit.data.video_files import write_mp4
from opendit.encoders import VAECodec
from opendit.encoders.video_vae import FrameCodec
from tests.data.shards.tars import latents_in, latents_of

CLIPS, PICTURES, FRAMES = 9, 5, 4
VIDEO = dict(use_video=True, num_frames=FRAMES, frame_interval=2)


class Tokens(NamedTuple):
    tokens: torch.Tensor
    mask: torch.Tensor
    pooled: torch.Tensor


class Letters:
    """A text encoder with a begin token of ones, then one token a letter. The pooled vector counts the tokens."""

    name, width, max_tokens, calls = "letters", 3, 12, 0

    def encode(self, captions):
        self.calls += 1
        tokens = torch.full((len(captions), self.max_tokens, self.width), 7.0)  # padding must not matter
        mask = torch.zeros(len(captions), self.max_tokens, dtype=torch.bool)
        for i, caption in enumerate(captions):
            codes = [1, *(ord(letter) for letter in caption)][: self.max_tokens]
            tokens[i, : len(codes)] = torch.tensor(codes).float()[:, None] / torch.arange(1, 4)
            mask[i, : len(codes)] = True
        return Tokens(tokens, mask, mask.sum(1, keepdim=True).float().expand(-1, self.width))

    def fingerprint(self):
        return f"letters {self.width}"


@pytest.fixture(scope="module")
def vae():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, scaling_factor=0.5, **kinds)


@pytest.fixture(scope="module")
def codec(vae):
    return FrameCodec(VAECodec(vae, name="small"))


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """Write clips of noise, one broken and one too short, and pictures, with captions of all lengths."""
    folder = tmp_path_factory.mktemp("media")
    random = np.random.default_rng(0)
    lines = []
    for i in range(CLIPS + PICTURES):
        name = f"{i:02d}.png" if i % 3 == 2 else f"{i:02d}.mp4"
        if name.endswith("png"):
            Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / name)
        else:
            write_mp4(folder / name, random.integers(0, 256, (5 if i == 7 else 12, 20, 24, 3), dtype=np.uint8), 24)
        lines.append(f'{name},"{"é, x" * (i % 4)}{i}"')
    (folder / "09.mp4").write_text("no clip")
    (folder / "media.csv").write_text("path,text\n" + "\n".join(lines))
    assert sum(line.startswith(tuple(f"{i:02d}.png" for i in range(99))) for line in lines) == 4
    return folder / "media.csv"


def make(csv, codec, output, source=None, **options):
    data = source or build_dataset(str(csv), 16, seed=0, **VIDEO)
    defaults = dict(image_size=16, flips=False, batch_size=2, num_workers=0, shard_size=4, max_bad=0.5)
    return make_latents(data, codec, output, **({"encoder": Letters()} | defaults | options))


@pytest.fixture(scope="module")
def made(csv, codec, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "latents"
    make(csv, codec, output)
    return output


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_round_trip(csv, codec, made):
    source = build_dataset(str(csv), 16, seed=0, **VIDEO)
    data = build_dataset(str(made), 16, seed=0, **VIDEO)
    rows = list(latents_of(made))
    assert (
        isinstance(data, LatentDataset) and data.describe().conditioning == "text" and data.describe().num_classes == 0
    )
    assert sorted(rows) == [row for row in range(14) if row not in (7, 9)] and len(data) == 12
    assert data.sample_shape == (8, FRAMES, 8, 8) and data.text_encoder == "letters" and data.max_tokens == 12
    for i, row in enumerate(rows):
        item, x = data[SampleKey(i, 3, i)], source.read(row).x
        assert item.x.shape == (8, 1 if row % 3 == 2 else FRAMES, 8, 8) and item.x.dtype == torch.float32
        torch.testing.assert_close(item.x, codec.moments(x[None])[0], rtol=1e-3, atol=1e-3)
        assert data.shapes().key(i) == source.shapes().key(row) and item.text == source.caption(row)
        expected = Letters().encode([item.text])
        assert torch.equal(item.embedding.mask, expected.mask[0])
        assert torch.equal(item.embedding.tokens, expected.tokens[0].half() * expected.mask[0, :, None])
        assert torch.equal(item.embedding.pooled, expected.pooled[0].half())
    assert data.empty_caption.mask.tolist() == [True] + [False] * 11
    assert data.empty_caption.tokens[0].tolist() == pytest.approx([1, 1 / 2, 1 / 3], rel=1e-3)
    assert "8 clips and 4 pictures with captions (encoded by letters)" in data.describe().text


def test_the_files_are_as_documented(made):
    (index,) = json.loads((made / "index.json").read_text())["sizes"]
    assert [shard["shape_key"] for shard in index["shards"]] == [0, 1, 1, 1]
    assert [shard["count"] for shard in index["shards"]] == [4, 4, 2, 2]
    assert index["video"] == {"num_frames": FRAMES, "frame_interval": 2, "short_clips": "skip"}
    assert index["latent_shape"] == [4, FRAMES, 8, 8] and index["text"] == {"encoder": "letters", "max_tokens": 12}
    empty = (made / "empty-caption.safetensors").read_bytes()
    assert index["checksums"] == {"empty-caption.safetensors": hashlib.sha256(empty).hexdigest()}
    assert len(index["skipped"]) == 2 and "too short" in index["skipped"][0]
    samples = latents_in(made / "latents-16-00001-of-00004.tar")
    assert len(samples) == 4
    for tensors, caption in samples.values():
        assert tensors["moments"].shape == (1, 8, FRAMES, 8, 8) and tensors["moments"].dtype == torch.float16
        assert tensors["tokens"].shape == (min(12, 1 + len(caption.decode())), 3) and tensors["pooled"].shape == (3,)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_one_shape_with_captions_and_embeddings(made, workers):
    data = pickle.loads(pickle.dumps(build_dataset(str(made), 16, seed=0, **VIDEO)))
    schedule = build_schedule(data, 4, 2, 0)
    assert isinstance(schedule, BucketSchedule) and schedule.steps_per_epoch == 3
    loader = build_loader(
        data, schedule, dp_rank=0, dp_size=1, batch_size=2, micro_batches=2, end_step=6, num_workers=workers
    )
    batches = list(loader)
    loader.close()
    assert len(batches) == 12 and {b.x.shape[2] for b in batches} == {1, FRAMES}
    for b in batches:
        expected = Letters().encode(list(b.text))
        assert b.embedding.tokens.shape == (2, 12, 3) and torch.equal(b.embedding.mask, expected.mask)
        assert torch.equal(b.embedding.tokens, expected.tokens.half() * expected.mask[..., None])


def test_captioned_pictures_of_an_image_run(csv, codec, tmp_path):
    data = build_dataset(str(csv), 16, seed=0)
    make(csv, codec.codec, tmp_path, source=data, encoder=None)
    latents = build_dataset(str(tmp_path), 16, seed=0)
    assert len(latents) == 4 and latents.sample_shape == (8, 8, 8) and latents.text_encoder is None
    assert [latents[SampleKey(row, 0, 0)].text for row in range(4)] == [data.caption(row) for row in range(4)]
    assert latents[SampleKey(0, 0, 0)].embedding is None and "4 pictures with captions (not" in latents.describe().text
    assert type(build_schedule(latents, 2, 2, 0)) is not BucketSchedule


def test_a_lost_shard_is_made_again_with_the_same_bytes(csv, codec, made, tmp_path):
    for name, data in contents(made).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "latents-16-00002-of-00004.tar").unlink()
    (tmp_path / "index.json").unlink()
    encoder = Letters()
    make(csv, codec, tmp_path, num_workers=2, encoder=encoder)
    assert contents(tmp_path) == contents(made)
    assert encoder.calls == 2 + 1  # the shard's batches and the empty caption


@pytest.mark.parametrize(
    "change", [{"num_frames": 3}, {"frame_interval": 1}, {"short_clips": "interval"}, {"width": 2}]
)
def test_other_settings_are_refused(csv, codec, made, change):
    before, encoder = contents(made), Letters()
    encoder.width = change.pop("width", 3)
    source = build_dataset(str(csv), 16, seed=0, **VIDEO | change)
    with pytest.raises(ValueError, match="holds latents of other settings"):
        make(csv, codec, made, source=source, encoder=encoder)
    assert contents(made) == before


def test_a_shard_may_be_empty(csv, codec, made, tmp_path):
    make(csv, codec, tmp_path, shard_size=1)
    data, whole = (build_dataset(str(folder), 16, seed=0, **VIDEO) for folder in (tmp_path, made))
    assert len(data) == len(whole) == 12
    for row in range(12):
        a, b = data[SampleKey(row, 0, 0)], whole[SampleKey(row, 0, 0)]
        assert a.text == b.text and torch.equal(a.embedding.tokens, b.embedding.tokens) and a.x.shape == b.x.shape


def test_reading_errors_name_the_flag_and_the_fix(csv, codec, made, tmp_path):
    for change, message in [
        ({"use_video": False}, "holds latents of clips; add --use_video"),
        ({"num_frames": 8}, "made with --num_frames 4, but this run has --num_frames 8; pass --num_frames 4"),
        ({"frame_interval": 1}, "made with --frame_interval 2, but"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_dataset(str(made), 16, seed=0, **VIDEO | change)
    make(csv, codec.codec, tmp_path / "pictures", source=build_dataset(str(csv), 16, seed=0))
    with pytest.raises(ValueError, match="holds latents of pictures; .* leave --use_video out"):
        build_dataset(str(tmp_path / "pictures"), 16, seed=0, **VIDEO)
    (tmp_path / "pictures" / "empty-caption.safetensors").unlink()
    with pytest.raises(ValueError, match="empty-caption.safetensors can't be read"):
        build_dataset(str(tmp_path / "pictures"), 16, seed=0)


def test_an_embedding_that_overflows_is_an_error(csv, codec, tmp_path):
    encoder = Letters()
    encoder.encode = lambda captions: Tokens(
        *(t * 1e6 if t.is_floating_point() else t for t in Letters().encode(captions))
    )
    with pytest.raises(DataError, match="the embedding of the caption .* overflows float16"):
        make(csv, codec, tmp_path, encoder=encoder)


def test_preprocess_encodes_a_csv(csv, vae, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    vae.save_pretrained(tmp_path / "vae")
    lines = [line for line in csv.read_text().splitlines() if not line.startswith(("07", "09"))]
    (csv.parent / "sound.csv").write_text("\n".join(lines))
    flags = ["latents", "--data-path", csv.parent / "sound.csv", "--vae", tmp_path / "vae", "--image-size", 16]
    flags += ["--output", tmp_path / "out", "--num_workers", 0]
    flags = [str(flag) for flag in flags]
    clips = ["--use_video", "--num_frames", str(FRAMES), "--frame_interval", "2"]
    assert preprocess.main([*flags, *clips]) == 0
    assert "12 clips in 2 shards: train with --data_path" in capsys.readouterr().out
    assert build_dataset(str(tmp_path / "out"), 16, seed=0, **VIDEO).sample_shape == (8, FRAMES, 8, 8)
    for more, message in [
        ([*clips, "--text_encoder", "bytes"], "--text_encoder bytes: is trained with the model"),
        ([*clips, "--text_encoder", str(tmp_path / "none")], "--text_encoder"),
        (["--data_path", "digits", "--text_encoder", "clip"], "--data_path digits has no captions"),
        ([*clips, "--image_size", "17"], "--image_size 17: no multiple of 2"),
    ]:
        assert preprocess.main([*flags, *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error, error


@given(st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=2), max_size=6))
def test_embeddings_are_padded(rows):
    tokens, pooled = torch.tensor(rows).reshape(-1, 2), torch.randn(2)
    found = padded(tokens, pooled, 7)
    assert torch.equal(found.tokens[found.mask], tokens) and torch.equal(found.pooled, pooled)
    assert not found.tokens[~found.mask].any() and len(found.mask) == 7 and int(found.mask.sum()) == len(rows)
