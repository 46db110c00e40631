"""Blends of clips and of cached latents: every sample is that of its source, and a batch has one shape."""

import numpy as np
import pytest
import torch
from PIL import Image

from opendit.data import SampleKey, build_dataset, build_loader, build_schedule
from opendit.data.make_latents import make_latents
from opendit.data.shards.program import make_indexes
from opendit.data.video_files import write_mp4
from opendit.encoders import VAECodec
from opendit.encoders.video_vae import FrameCodec
from tests.data.shards.tars import write_tar
from tests.data.test_video_latents import Letters

FRAMES = 4
VIDEO = dict(use_video=True, num_frames=FRAMES, frame_interval=2)


@pytest.fixture(scope="module")
def codec():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, scaling_factor=0.5, **kinds)
    return FrameCodec(VAECodec(vae, name="small"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory, codec):
    """Write a.csv with 5 clips and 3 pictures, b.csv with 4 clips, and the latents of each."""
    folder, random = tmp_path_factory.mktemp("blend"), np.random.default_rng(0)
    for name, clips, pictures in (("a", 5, 3), ("b", 4, 0)):
        lines = ["path,text"]
        for i in range(clips):
            write_mp4(folder / f"{name}{i}.mp4", random.integers(0, 256, (12, 20, 24, 3), dtype=np.uint8), 24)
            lines.append(f"{name}{i}.mp4,clip {name} {i}")
        for i in range(pictures):
            Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / f"{name}{i}.png")
            lines.append(f"{name}{i}.png,picture {name} {i}")
        (folder / f"{name}.csv").write_text("\n".join(lines))
        made = build_dataset(str(folder / f"{name}.csv"), 16, seed=0, **VIDEO)
        how = dict(image_size=16, flips=False, batch_size=2, num_workers=0, shard_size=3, encoder=Letters())
        make_latents(made, codec, folder / f"latents_{name}", **how)
    return folder


@pytest.mark.parametrize("names", [("a.csv", "b.csv"), ("latents_a", "latents_b")])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_those_of_their_source(sources, names, workers):
    """Clips have the same windows as in their source, latents have their captions and embeddings, and a batch has one
    shape."""
    data = build_dataset(
        ",".join(f"{sources / name}:{weight}" for name, weight in zip(names, (3, 1), strict=True)), 16, seed=0, **VIDEO
    )
    parts = [build_dataset(str(sources / name), 16, seed=0, **VIDEO) for name in names]
    schedule = build_schedule(data, 2, 1, 0)
    assert len(data) == 12 and schedule.micro_batches == 1
    how = dict(dp_rank=0, dp_size=1, batch_size=2, end_step=60, num_workers=workers)
    seen, drawn = {1: 0, FRAMES: 0}, [0, 0]
    with build_loader(data, schedule, **how) as loader:
        for batch in loader:
            rows = schedule.rows(batch.step)
            seen[batch.x.shape[2]] += 1
            for place, row in enumerate(rows):
                source, there = (0, row) if row < 8 else (1, row - 8)
                drawn[source] += 1
                item = parts[source][SampleKey(there, batch.step, place)]
                assert torch.equal(batch.x[place], item.x) and batch.text[place] == item.text == data.caption(row)
                if item.embedding is not None:
                    of_batch = [part[place] for part in batch.embedding]
                    assert all(map(torch.equal, of_batch, item.embedding))
    assert min(seen.values()) > 5 and abs(drawn[0] / 120 - 0.75) < 0.02


def test_latents_of_other_sizes_or_encoders_are_refused(sources, codec, tmp_path):
    for name, change, message in (
        ("other_frames", dict(num_frames=2), "--num_frames 2"),
        ("no_text", dict(encoder=None), "differ in text_encoder.*letters and None"),
        ("pixels", None, "differ in kind.*latents and pixels"),
    ):
        other = sources / "b.csv"
        if change is not None:
            video = VIDEO | {key: value for key, value in change.items() if key != "encoder"}
            how = dict(image_size=16, flips=False, batch_size=2, num_workers=0, shard_size=3)
            made = build_dataset(str(other), 16, seed=0, **video)
            make_latents(made, codec, tmp_path / name, encoder=change.get("encoder", Letters()), **how)
            other = tmp_path / name
        with pytest.raises(ValueError, match=message):
            build_dataset(f"{sources / 'latents_a'}:1,{other}:1", 16, seed=0, **VIDEO)


def test_tars_of_clips_alone_and_of_pictures_alone(sources, tmp_path):
    """Each set has one shape; together they have two."""
    for name, files in (("clips", sorted(sources.glob("b*.mp4"))), ("pictures", sorted(sources.glob("a*.png")))):
        (tmp_path / name).mkdir()
        members = [(f"{i}{file.suffix}", file.read_bytes()) for i, file in enumerate(files)]
        members = [each for i, each in enumerate(members) for each in (each, (f"{i}.txt", b"words"))]
        write_tar(tmp_path / name / "x.tar", members)
        make_indexes(str(tmp_path / name))
    both = f"{tmp_path}/clips:0.5,{tmp_path}/pictures:0.5"
    data = build_dataset(both, 16, seed=0, **VIDEO)
    assert data.shapes().array.tolist() == [1] * 4 + [0] * 3
    with build_loader(
        data, build_schedule(data, 2, 1, 0), dp_rank=0, dp_size=1, batch_size=2, end_step=6, num_workers=0
    ) as batches:
        assert {tuple(batch.x.shape[1:]) for batch in batches} == {(3, FRAMES, 16, 16), (3, 1, 16, 16)}
    assert (
        build_dataset(f"{tmp_path}/clips:1,{sources}/b.csv:1", 16, seed=0, **VIDEO).shapes().array.tolist() == [1] * 8
    )
