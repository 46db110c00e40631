"""Several commands write latents to one folder at once."""

import threading
from copy import copy

import pytest

from opendit.data import build_dataset
from opendit.data.files import file_locked
from opendit.data.latents_index import LOCK, read_indexes
from opendit.data.make_latents import make_latents
from opendit.encoders import VAECodec
from tests.data.shards.tars import picture
from tests.encoders.test_vae import small_vae


@pytest.fixture(scope="module")
def codec():
    return VAECodec(small_vae(), name="ema")


@pytest.fixture
def make(tmp_path, codec):
    """Return make(size, then=...), which caches the latents of three pictures and calls ``then`` once it has begun."""
    for i in range(3):
        path = tmp_path / "pictures" / "a" / f"{i}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(picture(i))

    def make(size, then=lambda: None, names="pictures"):
        mine, moments = copy(codec), codec.moments

        def encode(pixels):
            nonlocal then
            then, now = (lambda: None), then
            now()
            return moments(pixels)

        mine.moments = encode
        data = build_dataset(str(tmp_path / names), size, seed=0)
        options = dict(image_size=size, flips=False, batch_size=1, num_workers=0, tar_bytes=10_000)
        return make_latents(data, mine, tmp_path / "latents", **options)

    return make


def sizes(folder):
    return [index["image_size"] for index in read_indexes(folder)]


def test_sizes_that_are_made_at_once_are_all_in_the_index(make, tmp_path):
    folder, between = tmp_path / "latents", []

    def second():
        make(32, third)
        between.append(sizes(folder))

    def third():
        make(24)
        between.append(sizes(folder))

    make(16, second)
    assert between == [[24], [24, 32]] and sizes(folder) == [16, 24, 32]
    assert all(len(build_dataset(str(folder), size, seed=0)) == 3 for size in (16, 24, 32))
    make(24, lambda: between.append(sizes(folder)))  # all sizes exist, so nothing is encoded
    assert len(between) == 2 and sizes(folder) == [16, 24, 32]


def test_other_data_that_were_made_at_once_are_refused(make, tmp_path):
    (tmp_path / "others" / "a").mkdir(parents=True)
    (tmp_path / "others" / "a" / "9.png").write_bytes(picture(9))
    with pytest.raises(ValueError, match="holds latents of 32 px of other data; pass another folder"):
        make(16, lambda: make(32, names="others"))
    assert sizes(tmp_path / "latents") == [32]


def test_the_index_is_changed_by_one_at_a_time(make, tmp_path):
    make(16)
    folder, done = tmp_path / "latents", threading.Event()
    work = threading.Thread(target=lambda: (make(32), done.set()))
    with file_locked(folder / LOCK):
        work.start()
        assert not done.wait(0.5) and sizes(folder) == [16] and not list(folder.glob("latents-32-*"))
    work.join()
    assert done.is_set() and sizes(folder) == [16, 32]
