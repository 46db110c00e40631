"""From latents to files: decoding in order and on several ranks, and errors in threads."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import sample
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.encoders.pictures import to_uint8
from opendit.encoders.vae import PixelCodec, VAECodec
from opendit.encoders.video_vae import FrameCodec, VideoVAECodec
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from opendit.parallel.mesh import Mesh, init_mesh, make_replicas
from opendit.sampling.output_pipeline import OutputPipeline, Writers
from tests.encoders.test_vae import small_vae
from tests.encoders.test_video_vae import small_wan
from tests.ranks import run_ranks


def in_tiles(codec: VAECodec | VideoVAECodec) -> VAECodec | VideoVAECodec:
    codec.tile = 16
    return codec


CODECS = {
    "pictures": (lambda: VAECodec(small_vae(scaling_factor=0.3), chunk=2), (4, 3, 5)),
    "frames": (lambda: FrameCodec(VAECodec(small_vae(scaling_factor=0.3), chunk=2)), (4, 3, 2, 3)),
    "clips": (lambda: VideoVAECodec(small_wan()), (4, 2, 3, 2)),
    "pixels": (lambda: PixelCodec(1), (1, 3, 5)),
    "frames of pixels": (lambda: FrameCodec(PixelCodec(3)), (3, 4, 3, 5)),
    "pictures in tiles": (lambda: in_tiles(VAECodec(small_vae(scaling_factor=0.3), chunk=2, tiling=True)), (4, 7, 9)),
    "clips in tiles": (lambda: in_tiles(VideoVAECodec(small_wan(), tiling=True)), (4, 2, 5, 3)),
}


def batches_of(shape: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.arange(first, first + size), torch.randn(size, *shape, generator=generator))
        for first, size in ((0, 3), (7, 1), (3, 3), (20, 2))
    ]


def through(name: str, ranks=None, leads: bool = True) -> tuple[list[tuple[list[int], np.ndarray]], int]:
    """Return the delivered (indices, pictures), and the number of rows that this rank decodes."""
    make, shape = CODECS[name]
    codec, delivered, rows, static = make(), [], [], torch.empty(3, *shape)
    inner = codec.codec if isinstance(codec, FrameCodec) else codec
    what = "decode_whole" if "tiles" in name else "decode_in_slices"
    decode = getattr(inner, what)
    setattr(inner, what, lambda latents: rows.append(len(latents)) or decode(latents))

    def deliver(index, pictures):
        delivered.append((index.tolist(), pictures))

    with OutputPipeline(codec, torch.device("cpu"), deliver, ranks, leads) as pipeline:
        for index, latents in batches_of(shape):
            # As with recorded steps, the next batch is drawn into the same memory.
            pipeline.put(index, static[: len(index)].copy_(latents))
    return delivered, sum(rows)


def expected(name: str) -> list[tuple[list[int], np.ndarray]]:
    make, shape = CODECS[name]
    codec = make()
    return [(index.tolist(), to_uint8(codec.decode(latents))) for index, latents in batches_of(shape)]


@pytest.mark.parametrize("name", CODECS)
def test_what_is_delivered_is_what_the_codec_decodes(name):
    compare(through(name)[0], expected(name))


def compare(ours, theirs) -> None:
    assert [index for index, _ in ours] == [index for index, _ in theirs]
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape and other.std() > 1
        assert np.abs(mine.astype(int) - other).max() <= 1  # convolutions round differently in other batches


def tiles_in(name: str) -> int:
    make, shape = CODECS[name]
    return make().tiles(torch.empty(1, *shape)).count


def on_ranks(mesh: Mesh, sequence: int, cfg_parallel: bool) -> tuple:
    group = init_mesh(sequence_parallel=sequence)
    replica = make_replicas(group, cfg_parallel)
    return replica.leads, replica.ranks.size, [through(name, replica.ranks, replica.leads) for name in CODECS]


@pytest.mark.parametrize(("world", "sequence", "cfg_parallel"), [(2, 2, False), (4, 2, True)])
def test_the_ranks_of_a_replica_share_the_decoding(world, sequence, cfg_parallel):
    ranks = run_ranks(world, on_ranks, sequence, cfg_parallel)
    rows = {"frames": 3, "frames of pixels": 4} | {name: tiles_in(name) for name in CODECS if "tiles" in name}
    assert rows["pictures in tiles"] > 4 and rows["clips in tiles"] > 1
    for i, name in enumerate(CODECS):
        for leads, size, decoded in ranks:
            delivered, decoded_rows = decoded[i]
            # Every rank decodes an equal share; the last one is padded.
            assert size == world
            assert decoded_rows == sum(-(-n * rows.get(name, 1) // world) for n in (3, 1, 3, 2)), name
            if leads:
                compare(delivered, expected(name))
            else:
                assert delivered == []
    assert [leads for leads, *_ in ranks] == [True] + [False] * (world - 1)


# ------------------------------------------------------------------------------------------ threads


def test_writers_run_everything_and_no_more_than_some_wait():
    done, most, gate, lock = [], [0, 0], threading.Event(), threading.Lock()

    def work(number):
        gate.wait(10)
        with lock:
            done.append(number)

    with Writers(2, 3) as writers:
        handed = threading.Thread(target=lambda: [(writers.put(work, n), most.__setitem__(0, n)) for n in range(50)])
        handed.start()
        time.sleep(0.2)
        assert most[0] == 4 and not done  # two run and three wait, so the sixth is blocked
        gate.set()
        handed.join()
    assert sorted(done) == list(range(50))


@pytest.mark.parametrize("kind", [OSError, ValueError, MemoryError])
def test_a_writers_error_ends_it(kind):
    done = []

    def work(number):
        if number == 3:
            raise kind("broken")
        done.append(number)

    with pytest.raises(kind, match="broken"), Writers(1, 2) as writers:
        for number in range(1000):
            writers.put(work, number)
    assert done == [0, 1, 2]
    with pytest.raises(kind, match="broken"), Writers(3, 9) as writers:
        writers.put(work, 3)  # the error comes after the last task was submitted


def test_an_error_outside_does_not_wait_for_what_has_not_begun():
    done, gate = [], threading.Event()
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(KeyError), Writers(1, 100) as writers:
        for number in range(50):
            writers.put(lambda number=number: (gate.wait(10), done.append(number)))
        raise KeyError
    assert done == [0]


@pytest.mark.parametrize(
    ("error", "says", "traceback"),
    [
        (PermissionError(13, "Permission denied"), "error: [Errno 13] Permission denied: ", False),
        (MemoryError("for a picture"), "error: out of memory (for a picture)", False),
        (AssertionError("a defect"), "error: AssertionError: a defect", True),
    ],
)
def test_a_thread_that_fails_ends_the_run_with_one_line(
    error, says, traceback, tmp_path, no_ranks, monkeypatch, capsys
):
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=5)
    info = {"model": "DiT-Ti/2", "config": config.to_dict(), "vae": "none", "image_size": 8}
    path = tmp_path / "ema.safetensors"
    save_file(DiT(config).state_dict(), path, metadata={METADATA_KEY: json.dumps(info)})
    count, true_save = [0], Image.Image.save

    def save(self, *args, **options):
        count[0] += 1
        if count[0] == 6:
            raise error
        true_save(self, *args, **options)

    monkeypatch.setattr(Image.Image, "save", save)
    argv = f"--ckpt {path} --num_samples 40 --batch_size 4 --num_sampling_steps 1 --cfg_scale 1 --output {tmp_path}/o"
    before = threading.active_count()
    with pytest.raises(SystemExit) as stop:
        sample.main(argv.split())
    said = capsys.readouterr()
    lines = [line for line in said.err.strip().splitlines() if line.startswith("error: ")]
    assert stop.value.code == 1 and len(lines) == 1 and lines[0].startswith(says), said.err
    assert ("Traceback" in said.err) == traceback and "Done" not in said.out
    assert len(list((tmp_path / "o").glob("0*.png"))) < 40
    deadline = time.monotonic() + 10  # on a busy machine, threads take a moment to end
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
