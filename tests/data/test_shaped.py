"""Samples at shapes near their own: what is read, where sizes come from, and what is left out."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from opendit.common.utils import hash_parts
from opendit.data import build_dataset, build_loader, row_arrays
from opendit.data.base import Description, Fingerprint, MediaDataset, Shapes
from opendit.data.held_out import hold_out
from opendit.data.loader import build_schedule
from opendit.data.picture_file import fill_crop, picture_size
from opendit.data.pictures_and_clips import PicturesAndClips
from opendit.data.row_arrays import FOLDER
from opendit.data.shaped import TokenSize, shape_latents, shape_media, shape_table
from opendit.data.shards.program import make_shards
from opendit.data.video_files import write_mp4

TOKEN = TokenSize(1, 1, (8, 8))
SIZES = [(64, 64), (40, 100), (100, 40), (30, 30), (200, 130), (20, 500), (64, 64), (33, 47)]
CLIPS = [(20, 64, 96), (9, 96, 64), (3, 64, 64)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    return tmp_path / "sizes"


def gradient(height, width):
    """Return a picture of any size whose red grows to the right and green downwards."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([red, green, np.zeros_like(red)], axis=-1).round().astype(np.uint8)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shaped")
    (folder / "pictures" / "one").mkdir(parents=True)
    lines = ["path,text"]
    for number, size in enumerate(SIZES):
        path = folder / "pictures" / "one" / f"{number}.png"
        Image.fromarray(gradient(*size)).save(path)
        lines.append(f"pictures/one/{number}.png,picture {number}")
    for number, (frames, *size) in enumerate(CLIPS):
        write_mp4(folder / f"{number}.mp4", np.stack([gradient(*size)] * frames), 24)
        lines.append(f"{number}.mp4,clip {number}")
    (folder / "media.csv").write_text("\n".join(lines))
    return folder


def shaped(path, most=64, upscale=1.25, fine=False, **options):
    data = build_dataset(str(path), 64, seed=0, random_flip=False, **options)
    table = shape_table(64, options.get("num_frames", 1), TOKEN, most, fine)
    return shape_media(data, table, options.get("frame_interval", 1), upscale, "--bucket_tokens")


def test_sizes_are_those_of_the_files(media, tmp_path):
    pictures = build_dataset(str(media / "pictures"), 64, seed=0)
    assert pictures.shapes().media().tolist() == [[1, *size] for size in SIZES]
    video = dict(seed=0, use_video=True, num_frames=8)
    captioned = build_dataset(str(media / "media.csv"), 64, **video)
    assert captioned.shapes().media().tolist() == [[1, *size] for size in SIZES] + [list(clip) for clip in CLIPS]
    (tmp_path / "tars").mkdir()
    make_shards(str(media / "media.csv"), str(tmp_path / "tars"), shard_size=10**6, num_workers=1)
    tars = build_dataset(str(tmp_path / "tars"), 64, **video)
    assert sorted(tars.shapes().media().tolist()) == sorted(captioned.shapes().media().tolist())
    blend = build_dataset(f"{media / 'media.csv'}:1,{tmp_path / 'tars'}:2", 64, **video)
    assert (
        len(blend.shapes().media()) == 22
        and blend.shapes().media()[:11].tolist() == captioned.shapes().media().tolist()
    )


def test_sizes_are_looked_up_once(cache):
    looked = []

    class Pictures(PicturesAndClips):
        rows = 5

        def __len__(self):
            return self.rows

        def fingerprint(self):
            return Fingerprint(lambda: f"of {self.rows}")

        def media_size(self, row):
            looked.append(row)
            return 1, row + 1, 7

    for _ in range(2):
        assert Pictures(8).media_sizes()[:, 1].tolist() == [1, 2, 3, 4, 5]
    assert sorted(looked) == [0, 1, 2, 3, 4]
    (path,) = cache.glob("*.arrays/array.npy")
    path.write_bytes(b"damaged")
    assert Pictures(8).media_sizes()[4].tolist() == [1, 5, 7] and len(looked) == 10
    Pictures.rows = 6
    assert len(Pictures(8).media_sizes()) == 6


def test_a_table_may_tell_the_sizes(media):
    lines = (media / "media.csv").read_text().splitlines()
    told = ["path,text,height,width,num_frames"]
    told += [f"{lines[1]},640,480,", f"{lines[9]},300,200,77", f"{lines[10]},x,200,77"]
    (media / "told.csv").write_text("\n".join(told))
    data = build_dataset(str(media / "told.csv"), 64, seed=0, use_video=True, num_frames=8)
    assert data.shapes().media().tolist() == [[1, 640, 480], [77, 300, 200], list(CLIPS[1])]


def test_pictures_lie_on_their_side(tmp_path):
    exif = Image.Exif()
    for orientation, size in ((1, (30, 50)), (3, (30, 50)), (6, (50, 30)), (8, (50, 30))):
        exif[274] = orientation
        Image.fromarray(gradient(30, 50)).save(tmp_path / "a.jpg", exif=exif)
        assert picture_size(str(tmp_path / "a.jpg")) == size


@pytest.mark.parametrize("size", [(40, 100), (100, 40), (31, 77), (500, 90)])
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24), (32, 8)])
def test_a_crop_is_the_middle_at_one_scale(size, shape):
    """The picture's colours are its coordinates. The crop has the same middle, and both axes have the same scale."""
    out = np.asarray(fill_crop(Image.fromarray(gradient(*size)), *shape)).astype(float)
    assert out.shape[:2] == shape
    unit = min(size[0] / shape[0], size[1] / shape[1])
    for axis, channel in ((0, 1), (1, 0)):
        line = out[..., channel].mean(axis=1 - axis) / 255 * (size[axis] - 1)
        steps = np.diff(line[2:-2])
        assert abs(line.mean() - (size[axis] - 1) / 2) < 1 + size[axis] / 255 and abs(steps.mean() / unit - 1) < 0.1


def test_samples_have_their_shape(media):
    data = shaped(media / "pictures")
    assert (
        len(data) == len(SIZES)
        and "left out" not in data.describe().text
        and "7 shapes of 16 to 64 tokens" in data.describe().text
    )
    for row in range(len(data)):
        frames, height, width = data.sizes[data.shapes().key(row)].tolist()
        assert tuple(data.read(row).x.shape) == (3, height, width) and frames == 1


def test_clips_have_the_length_that_they_have(media):
    data = shaped(media / "media.csv", most=512, use_video=True, num_frames=8)
    lengths = [data.read(row).x.shape[1] for row in range(len(data))]
    assert lengths[-3:] == [8, 8, 2] and set(lengths[:-3]) == {1}
    assert data.token_counts()[:].max() <= 512
    short = shaped(media / "media.csv", most=512, use_video=True, num_frames=8, frame_interval=2)
    assert [short.read(row).x.shape[1] for row in range(len(short))][-3:] == [8, 4, 2]


def test_too_small_or_unreadable_media_are_left_out_and_named(media, tmp_path):
    for number in range(30):
        Image.fromarray(gradient(64, 64)).save(tmp_path / f"{number:02d}.png")
    (tmp_path / "05.png").write_bytes(b"no picture")
    Image.fromarray(gradient(4, 4)).save(tmp_path / "07.png")
    data = shaped(tmp_path)
    assert len(data) == 28 and "05.png" in data.describe().text and "07.png" in data.describe().text
    assert "1 left out, unreadable" in data.describe().text and "--max_upscale 1.25" in data.describe().text
    opened = build_dataset(str(tmp_path), 64, seed=0)
    for number in range(8, 12):
        (tmp_path / f"{number:02d}.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="--bucket_tokens: the size of 5 of 30 files can't be read.*05.png"):
        shape_media(opened, shape_table(64, 1, TOKEN, 64), 1, 1.25, "--bucket_tokens")


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_one_shape_and_the_budgets_samples(media, workers):
    data = shaped(media / "media.csv", most=512, use_video=True, num_frames=8)
    schedule = build_schedule(data, 2, 2, 0, bucket_tokens=512)
    seen = 0
    how = dict(dp_rank=0, dp_size=1, batch_size=1, micro_batches=2, end_step=schedule.steps(60), num_workers=workers)
    with build_loader(data, schedule, **how) as loader:
        for batch in loader:
            rows = schedule.rows(batch.step)
            of_batch = [rows[place] for place in batch.index.tolist()]
            key = data.shapes().key(of_batch[0])
            assert len(of_batch) == 512 // data.tokens[key] and {data.shapes().key(row) for row in of_batch} == {key}
            assert tuple(batch.x.shape[2:]) == tuple(data.sizes[key]) and batch.samples_in_step == len(rows)
            for x, row, text in zip(batch.x, of_batch, batch.text, strict=True):
                assert text == data.caption(row)
                if x.shape[1] == 1:
                    assert torch.equal(x, data.read(row).x)
            seen += len(of_batch)
    assert seen > 60 * len(data) - 3 * 512


def test_cached_latents_keep_their_shapes():
    data = build_dataset("mock", 64, seed=0, use_video=True, num_frames=4)
    found = shape_latents(data, TokenSize(2, 1, (2, 2)), 64, "--bucket_tokens")
    assert found.token_counts()[:3].tolist() == [2 * 4 * 4] * 3
    with pytest.raises(ValueError, match="--bucket_tokens 31: a sample has 32 tokens; raise it"):
        shape_latents(data, TokenSize(2, 1, (2, 2)), 31, "--bucket_tokens")
    with pytest.raises(ValueError, match="do not divide by the model's patch"):
        shape_latents(data, TokenSize(3, 1, (2, 2)), 64, "--bucket_tokens")


class Latents(MediaDataset):
    """Latents without files, with a number of rows for each size in turn."""

    def __init__(self, runs):
        self.counts, self.sizes = zip(*runs, strict=True)

    def __len__(self):
        return sum(self.counts)

    def shapes(self):
        return Shapes(latents=lambda: list(zip(np.cumsum(self.counts).tolist(), self.sizes, strict=True)))

    def fingerprint(self):
        return Fingerprint(lambda: str((self.counts, self.sizes)))

    def describe(self):
        return Description(text="latents", kind="latents", sample_shape=(8, 4, 4, 4), class_names=["one"])


SIDES = st.tuples(st.integers(0, 9), st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SIDES, min_size=1, max_size=5), st.integers(0, 8), st.booleans())
def test_shapes_of_latents_are_those_of_a_list_of_all_rows(cache, runs, held, kept):
    data = Latents([*runs, (3, runs[0][1])])
    sizes = np.repeat(np.array(data.sizes, np.int32), data.counts, axis=0)
    if held:  # only some of the rows
        data = hold_out(data, held / 10)[0]
        sizes = sizes[data.rows[:]]
    shapes, keys = np.unique(sizes, axis=0, return_inverse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_arrays, "LARGE", 1 if kept else 2**20)
        found = shape_latents(data, TokenSize(1, 1, (1, 1)), 64, "--bucket_tokens")
    assert found.sizes.tolist() == shapes.tolist() and found.keys.tolist() == keys.reshape(-1).tolist()
    assert found.sizes.dtype == np.int32 and found.keys.dtype == np.int16 and isinstance(found.keys, np.memmap) == kept
    assert found.token_counts()[:].tolist() == sizes.prod(axis=1).tolist()
    rows = hash_parts("rows", data.fingerprint().identity, np.arange(len(data)).tobytes())
    assert found.fingerprint().identity == hash_parts("shaped", rows, sizes.tobytes())
    assert f"{len(shapes)} shape" in found.describe().text and found.rows[:].tolist() == list(range(len(data)))


def test_shapes_of_latents_take_no_memory_for_each_row(cache):
    """The sizes of 4 M rows would take 48 MB. The first start needs 2 bytes a row and a buffer for hashing."""
    data = Latents([(2_000_000, (1, 2, 2)), (2_000_000, (1, 2, 3))])
    for most in (64_000_000, 1_000_000):
        tracemalloc.start()
        try:
            found = shape_latents(data, TokenSize(1, 1, (1, 1)), 64, "--bucket_tokens")
            assert tracemalloc.get_traced_memory()[1] < most and found.next_row(1_999_999) == 0
        finally:
            tracemalloc.stop()


def same(one, other):
    assert np.array_equal(one.rows, other.rows) and np.array_equal(one.keys, other.keys)
    assert one.describe().text == other.describe().text and one.fingerprint().identity == other.fingerprint().identity
    assert torch.equal(one.read(len(one) - 1).x, other.read(len(one) - 1).x)


def test_what_is_found_for_many_rows_is_kept_and_mapped(media, cache, monkeypatch):
    data, table = build_dataset(str(media / "pictures"), 64, seed=0, random_flip=False), shape_table(64, 1, TOKEN, 64)
    in_memory = shape_media(data, table, 1, 1.25, "--bucket_tokens")
    rows, keys = in_memory.rows.astype(np.int64), in_memory.sizes[in_memory.keys].astype(np.int32)
    whole = hash_parts("shaped", hash_parts("rows", data.fingerprint().identity, rows.tobytes()), keys.tobytes())
    assert in_memory.fingerprint().identity == whole
    monkeypatch.setattr(row_arrays, "LARGE", 1)
    same(shape_media(data, table, 1, 1.25, "--bucket_tokens"), in_memory)
    monkeypatch.setattr("opendit.data.pictures_and_clips.PicturesAndClips.media_sizes", lambda _: 1 / 0)
    again = shape_media(data, table, 1, 1.25, "--bucket_tokens")
    same(again, in_memory)
    assert isinstance(again.rows, np.memmap) and isinstance(again.keys, np.memmap)
    with pytest.raises(ZeroDivisionError):  # another factor or other files need other shapes
        shape_media(data, table, 1, 1.5, "--bucket_tokens")
    with pytest.raises(ZeroDivisionError):
        shape_media(build_dataset(str(media), 64, seed=0), table, 1, 1.25, "--bucket_tokens")


@pytest.mark.parametrize("damage", ("keys.npy", "rows.npy", "about.json"))
def test_kept_shapes_that_are_damaged_are_found_again(media, cache, damage, monkeypatch):
    data, table = build_dataset(str(media / "pictures"), 64, seed=0, random_flip=False), shape_table(64, 1, TOKEN, 64)
    in_memory = shape_media(data, table, 1, 1.25, "--bucket_tokens")
    monkeypatch.setattr(row_arrays, "LARGE", 1)
    for _ in range(2):
        same(shape_media(data, table, 1, 1.25, "--bucket_tokens"), in_memory)
        (file,) = (path.with_name(damage) for path in cache.glob("*.arrays/keys.npy"))
        file.write_bytes(file.read_bytes()[:-3])
    assert not [path for path in cache.iterdir() if path.suffix not in (".lock", ".arrays")]


def test_where_nothing_can_be_written_shapes_are_found_each_time(media, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file" / "sizes"))
    data, table = build_dataset(str(media / "pictures"), 64, seed=0, random_flip=False), shape_table(64, 1, TOKEN, 64)
    in_memory = shape_media(data, table, 1, 1.25, "--bucket_tokens")
    monkeypatch.setattr(row_arrays, "LARGE", 1)
    same(shape_media(data, table, 1, 1.25, "--bucket_tokens"), in_memory)


def test_the_next_row_of_a_shape_is_found_in_a_circle(media):
    data = shaped(media / "pictures")
    for row in range(len(data)):
        alike = [other for other in (*range(row + 1, len(data)), *range(row + 1)) if data.keys[other] == data.keys[row]]
        assert data.next_row(row) == alike[0]
