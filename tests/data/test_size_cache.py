"""Facts about large data sets are found once a machine, are mapped from files later, and equal those of small ones."""

import numpy as np
import pytest

from opendit.data import build_dataset, row_arrays
from opendit.data.base import Shapes
from opendit.data.held_out import hold_out
from opendit.data.shaped import TokenSize, shape_latents
from opendit.data.shards import dataset as shards
from opendit.data.shards.program import make_indexes
from opendit.data.video_files import write_mp4
from tests.data.shards.tars import picture, write_tar


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """Write two tars of pictures with clips among them."""
    monkeypatch.setenv(row_arrays.FOLDER, str(tmp_path / "sizes"))
    write_mp4(tmp_path / "c.mp4", np.zeros((4, 16, 16, 3), np.uint8), 24)
    (tmp_path / "tars").mkdir()
    for tar in range(2):
        members = []
        for i in range(5):
            clip = i % 2 == tar
            content = (tmp_path / "c.mp4").read_bytes() if clip else picture(i)
            members += [(f"{tar}{i}.{'mp4' if clip else 'png'}", content), (f"{tar}{i}.txt", b"words")]
        write_tar(tmp_path / "tars" / f"{tar}.tar", members)
    make_indexes(str(tmp_path / "tars"))
    return tmp_path / "tars"


def facts(folder):
    """Return everything that depends on the lists of rows."""
    pictures = build_dataset(str(folder), 8, seed=0)
    both = build_dataset(str(folder), 8, seed=0, use_video=True, num_frames=2)
    rest, held = hold_out(both, 0.3)
    found = [[data.source(row) for row in range(len(data))] for data in (pictures, both, rest, held)]
    identities = [data.fingerprint().identity for data in (pictures, both, rest, held)]
    keys = [pictures.used.keys, *(data.shapes().array for data in (both, rest, held))]
    return found, identities, [each.tolist() for each in keys], keys


def is_mapped(array):
    return isinstance(array, np.memmap) or isinstance(array.base, np.memmap)


def test_large_data_sets_are_what_small_ones_are(mixed, tmp_path, monkeypatch):
    *small, arrays = facts(mixed)
    assert not any(map(is_mapped, arrays)) and not list((tmp_path / "sizes").glob("*"))
    monkeypatch.setattr(row_arrays, "LARGE", 1)
    for _ in ("made", "mapped"):
        *large, arrays = facts(mixed)
        assert large == small and all(map(is_mapped, arrays))
        # The second time no row is looked at.
        monkeypatch.setattr(shards.IndexedTar, "shapes", None)
    with pytest.raises(ValueError, match="--validate_share 0.99: of 10 samples 10 are held out"):
        hold_out(build_dataset(str(mixed), 8, seed=0, use_video=True, num_frames=2), 0.99)


def test_shapes_of_latents(mixed, monkeypatch):
    data = build_dataset(str(mixed), 8, seed=0)
    sizes = np.array([(1, 4, 4), (2, 4, 8), (1, 4, 4), (2, 2, 2)] * 2, dtype=np.int32)[: len(data)]
    runs = [(end, tuple(size)) for end, size in enumerate(sizes.tolist(), 1)]
    monkeypatch.setattr(type(data), "shapes", lambda self: Shapes(latents=lambda: runs))
    small = shape_latents(data, TokenSize(1, 1, (2, 2)), 64, "--pack_tokens")
    monkeypatch.setattr(row_arrays, "LARGE", 1)
    for _ in ("made", "mapped"):
        large = shape_latents(data, TokenSize(1, 1, (2, 2)), 64, "--pack_tokens")
        assert isinstance(large.keys, np.memmap) and large.fingerprint().identity == small.fingerprint().identity
        assert large.sizes[large.keys, 1:].tolist() == sizes[:, 1:].tolist()
        assert large.token_counts()[np.arange(len(data))].tolist() == [
            small.token_counts()[np.array([row])].item() for row in range(len(data))
        ]
        monkeypatch.setattr(np, "repeat", None)  # the second time no row is looked at
