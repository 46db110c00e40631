"""Cache latents and embeddings with the components of public models' folders, and train from these caches."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import preprocess
import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.data import build_dataset
from opendit.data.latents import EMPTY, embed, form_of
from opendit.data.video_files import write_mp4
from opendit.encoders.conditioner import PublishedConditioner
from opendit.encoders.published_text import load_published_text, text_encoder_bytes
from opendit.models.conditioning import TextConfig
from opendit.models.families import FAMILIES
from opendit.parallel.hardware import H200
from opendit.training.auto_parallel import Circumstances, Search, data_of
from tests.encoders.published_folders import (
    CLIP_WIDTH,
    GEMMA_WIDTH,
    PROJECTED,
    QWEN_WIDTH,
    T5_WIDTH,
    load_codec_of,
    write_pipeline,
)
from tests.numbers import off_by

WORDS = ("seven", "a seven of many words, and so of more than thirty two tokens", "", "one")
ROWS = 8
SIZE = {name: 32 if name in ("wan", "ltx") else 64 for name in FAMILIES}
FRAMES = {"wan": 5, "ltx": 9}
# Tokens of the cached captions, and widths of tokens and of pooled vectors.
FORMS = {
    "flux": (512, T5_WIDTH, CLIP_WIDTH),
    "z_image": (None, QWEN_WIDTH, 0),
    "wan": (None, T5_WIDTH, 0),
    "qwen_image": (None, QWEN_WIDTH, 0),
    "lumina2": (None, GEMMA_WIDTH, 0),
    "flux2_klein": (512, 3 * QWEN_WIDTH, 0),
    "ltx": (None, T5_WIDTH, 0),
    "cosmos2": (None, T5_WIDTH, 0),
    "sd3": (333, T5_WIDTH, PROJECTED),
}
NAMES = [name for name in FAMILIES if name != "flux2"]  # flux2 is klein with other text encoders


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Write the pipeline of every family, and captioned pictures and clips."""
    root, random = tmp_path_factory.mktemp("public"), np.random.default_rng(0)
    rows = {suffix: ["path,text"] for suffix in (".png", *(f"{name}.mp4" for name in FRAMES))}
    for number in range(ROWS):
        Image.fromarray(random.integers(0, 256, (64, 64, 3), np.uint8)).save(root / f"{number}.png")
        for name, frames in FRAMES.items():
            write_mp4(root / f"{number}{name}.mp4", random.integers(0, 256, (frames, 32, 32, 3), np.uint8), 8)
        for suffix, lines in rows.items():
            lines.append(f'{number}{suffix},"{WORDS[number % 4]}"')
    for suffix, lines in rows.items():
        (root / f"{suffix.partition('.')[0] or 'png'}.csv").write_text("\n".join(lines) + "\n")
    for name in NAMES:
        write_pipeline(root / name, name)
    return root


def flags_of(name):
    clips = ["--use_video", "--num_frames", str(FRAMES[name])] if name in FRAMES else []
    return [*clips, "--image_size", str(SIZE[name])]


def raw(root, name):
    return f"{root}/{name if name in FRAMES else 'png'}.csv"


def make(root, name, output, *more):
    argv = ["latents", "--data_path", raw(root, name), "--output", str(output), "--pretrained", str(root / name)]
    return preprocess.main([*argv, *flags_of(name), "--num_workers", "0", *more])


def opened(path, name):
    clips = {"use_video": True, "num_frames": FRAMES[name]} if name in FRAMES else {}
    return build_dataset(str(path), SIZE[name], seed=0, **clips)


@pytest.fixture(scope="module")
def made(root, tmp_path_factory):
    """Make the caches of all families and return their folders."""
    caches = {name: tmp_path_factory.mktemp("made") / name for name in NAMES}
    for name, output in caches.items():
        assert make(root, name, output, "--shard_size", "3") == 0
    return caches


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_holds_what_the_folder_encodes(root, made, name):
    family, data, source = FAMILIES[name], opened(made[name], name), opened(raw(root, name), name)
    encoder = load_published_text(root / name, family, device="cpu")
    codec = load_codec_of(root / name, family)
    about = data.describe()
    assert about.text_encoder == str(root / name) and about.vae == str(root / name / "vae")
    for ours, theirs in ((about.scaling_factor, codec.scaling_factor), (about.shift_factor, codec.shift_factor)):
        assert np.array_equal(ours, theirs)
    length, width, pooled = FORMS[name]
    index = json.loads((made[name] / "index.json").read_text())
    assert (index["sizes"][0] if "sizes" in index else index)["text"] == {
        "encoder": str(root / name),
        "max_tokens": family.text.tokens,
        "pooled": pooled,
    }
    assert len(data) == ROWS
    captions = [source.caption(row) for row in range(ROWS)]
    for row, caption in enumerate(captions):
        item, direct = data.read(row), encoder.encode([caption])
        assert item.text == caption
        torch.testing.assert_close(item.x, codec.moments(source.read(row).x[None])[0], rtol=1e-3, atol=1e-3)
        tokens, mask, vector = item.embedding
        assert (
            tokens.shape == (family.text.tokens, width) and tokens.dtype == torch.float16 and vector.shape == (pooled,)
        )
        used = direct.tokens.shape[1]
        assert torch.equal(mask[:used], direct.mask[0]) and not mask[used:].any() and not tokens[used:].any()
        assert length is None or used == mask.sum() == length
        torch.testing.assert_close(tokens[:used].float(), direct.tokens[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(vector.float(), direct.pooled[0], rtol=1e-3, atol=1e-3)
    empty, (tokens, mask, _) = encoder.encode([""], away=True), about.empty_caption
    assert (made[name] / EMPTY).is_file()
    used = empty.tokens.shape[1]
    assert torch.equal(mask[:used], empty.mask[0]) and not mask[used:].any()
    torch.testing.assert_close(tokens[:used].float(), empty.tokens[0], atol=1e-3, rtol=1e-3)


def losses(folder):
    run = sorted(folder.glob("0*"))[-1]
    return [json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_training_from_a_cache_is_training_from_the_files(root, made, name, tmp_path, monkeypatch):
    """Training has the same curve, to the precision of stored embeddings, without text encoders. Grids are drawn."""
    how = "--batch_size 2 --max_steps 4 --log_every 1 --ckpt_every 0 --warmup_steps 0 --lr 1e-3 --label_drop 0.3"
    argv = [*how.split(), *flags_of(name), "--mixed_precision", "fp32", "--num_workers", "1"]
    argv += ["--pretrained", str(root / name), "--sample_steps", "1"]
    train.main([*argv, "--data_path", raw(root, name), "--outputs", str(tmp_path / "raw"), "--sample_every", "0"])
    monkeypatch.setattr("opendit.training.prepare.load_published_text", None)
    train.main([*argv, "--data_path", str(made[name]), "--outputs", str(tmp_path / "cached"), "--sample_every", "4"])
    found, expected = losses(tmp_path / "cached"), losses(tmp_path / "raw")
    assert len(found) == 4 and len(set(expected)) == 4 and off_by(found, expected) < 2e-3
    assert list(tmp_path.glob("cached/0*/samples/*4.png"))


def test_text_encoders_in_fewer_bits_cache_what_they_train_with(root, tmp_path):
    """A cache holds the embeddings of --text_precision. Training with the flag has the same curve, and without it
    another."""
    make(root, "flux", tmp_path / "cache", "--text_precision", "nf4")
    encoder = load_published_text(root / "flux", FAMILIES["flux"], device="cpu", precision="nf4")
    data = opened(tmp_path / "cache", "flux")
    for row in range(ROWS):
        found, direct = data.read(row).embedding, encoder.encode([data.caption(row)])
        torch.testing.assert_close(found.tokens.float(), direct.tokens[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found.pooled.float(), direct.pooled[0], rtol=1e-3, atol=1e-3)
    how = "--batch_size 2 --max_steps 2 --log_every 1 --no_save --warmup_steps 0 --sample_every 0 --label_drop 0.3"
    argv = [*how.split(), *flags_of("flux"), "--mixed_precision", "fp32", "--num_workers", "1"]
    argv += ["--pretrained", str(root / "flux")]
    counted = {}  # bytes of encoders, in the estimate of --card
    for output, more in (("cached", []), ("nf4", ["--text_precision", "nf4"]), ("exact", [])):
        source = tmp_path / "cache" if output == "cached" else raw(root, "flux")
        train.main([*argv, "--data_path", str(source), "--outputs", str(tmp_path / output), *more])
        flags = parse(TrainConfig, [*argv, "--data_path", str(source), *more])
        where = Circumstances(1, 1, 2.0**40, H200, has_gpu=False)
        counted[output] = Search(flags, data_of(flags, where), where).encoders
    whole, fewer = (text_encoder_bytes(root / "flux", FAMILIES["flux"], kind) for kind in ("bf16", "nf4"))
    assert counted["exact"] - counted["nf4"] == whole - fewer > 0
    cached, stored, exact = (losses(tmp_path / output) for output in ("cached", "nf4", "exact"))
    assert off_by(stored, cached) < 5e-4 < off_by(exact, stored)


def test_padding_of_a_batch_is_removed_where_the_family_removes_it(root, made):
    data, family = opened(made["z_image"], "z_image"), FAMILIES["z_image"]
    encoder = load_published_text(root / "z_image", family, device="cpu")
    parts = zip(*(data.read(row).embedding for row in range(2)), strict=True)
    batch = type("Batch", (), {"embedding": [torch.stack(part) for part in parts]})
    text = TextConfig("z_image", QWEN_WIDTH, 512)
    empty = [part.unsqueeze(0) for part in data.describe().empty_caption]
    conditioner = PublishedConditioner(text, torch.device("cpu"), None, None, empty, trim=True)
    found, direct = conditioner.of_batch(batch), encoder.encode([data.caption(row) for row in range(2)])
    assert torch.equal(found.mask, direct.mask)
    torch.testing.assert_close(found.tokens.float(), direct.tokens, rtol=1e-3, atol=1e-3)
    assert conditioner.null().tokens.shape == encoder.encode([""]).tokens.shape


def test_embeddings_of_bf16_encoders_keep_their_bits(root):
    encoder = load_published_text(root / "z_image", FAMILIES["z_image"], device="cpu")
    encoder.pipeline.text_encoder.bfloat16()
    with torch.no_grad():  # so that the embeddings leave the range of float16
        encoder.pipeline.text_encoder.embed_tokens.weight.mul_(2.0**20)
    assert form_of(encoder) == (QWEN_WIDTH, 0, "bf16")
    (tokens, pooled), made = embed(encoder, ["seven"])[0], encoder.encode(["seven"])
    assert tokens.dtype == pooled.dtype == torch.bfloat16 and torch.equal(tokens, made.tokens[0])
    assert tokens.abs().max() > torch.finfo(torch.float16).max


def test_captions_are_cut_to_a_length(root, tmp_path, capsys):
    make(root, "flux", tmp_path / "cache", "--max_text_tokens", "32")
    assert "longer than the 32 tokens" in capsys.readouterr().out
    data = opened(tmp_path / "cache", "flux")
    encoder = load_published_text(root / "flux", FAMILIES["flux"], device="cpu", max_tokens=32)
    found, direct = data.read(1).embedding, encoder.encode([WORDS[1]])
    torch.testing.assert_close(found.tokens.float(), direct.tokens[0], rtol=1e-3, atol=1e-3)
    argv = ["--pretrained", str(root / "flux"), "--data_path", str(tmp_path / "cache"), *flags_of("flux")]
    argv += ["--max_steps", "1", "--mixed_precision", "fp32", "--sample_every", "0", "--outputs", str(tmp_path / "out")]
    train.main([*argv, "--batch_size", "2"])
    with pytest.raises(SystemExit):
        train.main([*argv, "--max_text_tokens", "64"])
    assert "its captions are 32 tokens" in capsys.readouterr().err


def test_the_folder_may_lie_elsewhere(root, made, tmp_path):
    """A cache made with one copy of the folder can be read with another."""
    shutil.copytree(root / "flux", tmp_path / "copy")
    argv = ["--pretrained", str(tmp_path / "copy"), "--data_path", str(made["flux"]), *flags_of("flux")]
    argv += ["--max_steps", "1", "--mixed_precision", "fp32", "--batch_size", "2", "--outputs", str(tmp_path / "out")]
    train.main([*argv, "--sample_steps", "1"])
    assert list(tmp_path.glob("out/0*/samples/*1.png"))


def test_a_stopped_cache_goes_on(root, made, tmp_path):
    make(root, "flux", tmp_path, "--shard_size", "3")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "index.json").unlink()
    next(tmp_path.glob("latents-*-00001-of-00003.tar")).unlink()
    (kept,) = tmp_path.glob("latents-*-00000-of-00003.tar")
    time = kept.stat().st_mtime_ns
    make(root, "flux", tmp_path, "--shard_size", "3")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert kept.stat().st_mtime_ns == time


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("flux", ["--use_video"], "takes pictures; leave --use_video out"),
        ("flux", ["--data_path", "digits"], "has no captions; put name.txt beside name.jpg"),
        ("flux", ["--pretrained", "ROOT"], "is no pipeline of flux, z_image, wan, "),
        ("flux", ["--pretrained", "ROOT/nothing"], "doesn't exist"),
        ("flux", ["--text_encoder", "ROOT/wan"], "_class_name is"),
        ("flux", ["--max_text_tokens", "513"], "513: out of range of flux/flux; give 512 at most"),
        ("sd3", ["--max_text_tokens", "77"], "the first 77 tokens of sd3/sd3 come from other encoders; give 78"),
    ],
)
def test_what_does_not_go_together_is_refused(root, tmp_path, capsys, name, more, message):
    assert make(root, name, tmp_path, *(part.replace("ROOT", str(root)) for part in more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_a_folder_of_captioned_files_with_a_prefix(root, tmp_path, name, capsys):
    """The prefix works with and without a cache, but the captions of cached embeddings can't be shuffled."""
    media, suffix = tmp_path / "media", ".mp4" if name == "wan" else ".png"
    media.mkdir()
    for number in range(4):
        source = root / f"{number}{name if name in FRAMES else ''}{suffix}"
        (media / f"{number}{suffix}").write_bytes(source.read_bytes())
        (media / f"{number}.txt").write_text(f"{number}, a, b")
    cache, folder = tmp_path / "cache", ["--data_path", str(media), "--caption_prefix", "x,"]
    assert make(root, name, cache, *folder) == 0
    cached = opened(cache, name)
    assert [cached.caption(row) for row in range(4)] == [f"x, {number}, a, b" for number in range(4)]
    argv = ["--pretrained", str(root / name), "--mixed_precision", "fp32", "--num_workers", "0", *flags_of(name)]
    argv += "--batch_size 2 --max_steps 1 --sample_every 0 --no_save --shuffle_tags --outputs".split()
    train.main([*argv, str(tmp_path / "runs"), *folder])
    with pytest.raises(SystemExit):
        train.main([*argv, str(tmp_path / "runs"), "--data_path", str(cache)])
    told = capsys.readouterr().err
    assert f"--shuffle_tags: the captions of --data_path {cache} are embedded already; leave it out" in told


@pytest.mark.parametrize(
    ("name", "encoder", "found"),
    [
        ("z_image", "moved", "its captions are 512 tokens of 20 numbers and a vector of 24, z_image/z_image takes"),
        (
            "flux",
            "sd3",
            "its captions were embedded by the text encoders of another model (ROOT/sd3), not of flux/flux",
        ),
    ],
    ids=["other shapes", "equal shapes"],
)
def test_embeddings_of_another_model_are_refused(root, made, tmp_path, name, encoder, found, capsys):
    """The family is known from the folder that made a cache or, without this folder, from the shapes."""
    shutil.copytree(made["flux"], tmp_path / "cache")
    index = tmp_path / "cache" / "index.json"
    index.write_text(index.read_text().replace(f'"encoder": "{root}/flux"', f'"encoder": "{root}/{encoder}"'))
    argv = ["--pretrained", str(root / name), "--data_path", str(tmp_path / "cache"), "--outputs", str(tmp_path)]
    with pytest.raises(SystemExit):
        train.main([*argv, "--image_size", "64", "--mixed_precision", "fp32"])
    assert found.replace("ROOT", str(root)) in capsys.readouterr().err
