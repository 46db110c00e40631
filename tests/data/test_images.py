"""Pictures in folders: pixels, unreadable files, the folder's layout, and mirroring."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from opendit.data import DataError, SampleKey, build_dataset
from opendit.data.base import View, to_pixels
from opendit.data.picture_file import center_crop, to_tensor
from opendit.data.pictures_and_clips import FolderDataset
from opendit.data.row_arrays import TextTable
from opendit.diffusion.random import Stream, integers


def picture(path, size=(40, 30), color=(200, 100, 50), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)
    return path


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def tree(root, classes=2, each=10):
    for label in range(classes):
        for i in range(each):
            picture(root / f"class{label}" / f"{i:03d}.png", color=(label * 100, i * 5, 7))
    return root


# ---------------------------------------------------------------- pixels


def test_crop_of_a_grey_picture_and_its_range():
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    x = to_tensor(center_crop(grey, 16), flip=False)
    assert x.shape == (1, 16, 16) and x.dtype == torch.float32
    assert torch.equal(x.flatten(), (torch.arange(256) / 127.5 - 1))
    assert torch.equal(to_tensor(grey, flip=True), x.flip(-1))


# ---------------------------------------------------------------- unreadable files


def break_file(path, how):
    if how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("this is no picture")
    elif how == "truncated":
        noise(64, 64).save(path.with_suffix(".jpg"), quality=95)
        data = path.with_suffix(".jpg").read_bytes()
        path.with_suffix(".jpg").unlink()
        path.write_bytes(data[: len(data) // 2])
    elif how == "float":
        Image.fromarray(np.full((8, 8), np.nan, dtype=np.float32)).save(path.with_suffix(".tif"))
        path.with_suffix(".tif").rename(path)


@pytest.mark.parametrize("how", ["empty", "text", "truncated", "float"])
def test_a_bad_file_is_replaced_by_the_next_row_and_named(tmp_path, how):
    tree(tmp_path, each=20)
    bad = tmp_path / "class0" / "019.png"  # the last of its class: the replacement's label must be its own
    break_file(bad, how)
    data = FolderDataset(str(tmp_path), 16, seed=1, random_flip=False)
    item, following = data[SampleKey(19, 0, 0)], data[SampleKey(20, 0, 0)]
    assert torch.equal(item.x, following.x) and (item.y, following.y) == (1, 1)
    assert len(item.skipped) == 1 and item.skipped[0].startswith(f"{bad}: ") and following.skipped == ()
    assert data[SampleKey(18, 0, 0)].skipped == ()


def test_the_last_row_is_replaced_by_the_first(tmp_path):
    tree(tmp_path, each=20)
    break_file(tmp_path / "class1" / "019.png", "empty")
    data = FolderDataset(str(tmp_path), 16, random_flip=False)
    item = data[SampleKey(39, 0, 0)]
    assert item.y == 0 and torch.equal(item.x, data[SampleKey(0, 0, 0)].x)


def test_headers_are_checked_at_the_start(tmp_path):
    tree(tmp_path, each=20)
    for i in (3, 4):
        break_file(tmp_path / "class0" / f"{i:03d}.png", "empty")
    FolderDataset(str(tmp_path), 16)  # 2 of 40 are 5 %
    break_file(tmp_path / "class1" / "007.png", "text")
    with pytest.raises(ValueError, match=r"--data_path .*of 40 .*3 can't be read, more than 5%.*class0/003\.png"):
        build_dataset(str(tmp_path), 16, seed=0)
    build_dataset(str(tmp_path), 16, seed=0, max_bad=0.1)
    for path in tmp_path.rglob("*.png"):
        break_file(path, "empty")
    with pytest.raises(ValueError, match="none can be read"):
        build_dataset(str(tmp_path), 16, seed=0)


def test_all_rows_unreadable_later_ends_the_search(tmp_path):
    data = FolderDataset(str(tree(tmp_path)), 16)
    for path in tmp_path.rglob("*.png"):
        break_file(path, "truncated")
    with pytest.raises(DataError, match="20 files in turn can't be read"):
        data[SampleKey(5, 0, 0)]


# ---------------------------------------------------------------- layout


def test_classes_are_sorted_subfolders_searched_to_any_depth(tmp_path):
    picture(tmp_path / "b" / "deep" / "er" / "x.JPEG")
    picture(tmp_path / "a" / "y.png")
    picture(tmp_path / "a" / ".hidden.png")
    picture(tmp_path / ".cache" / "z.png")
    picture(tmp_path / "loose.png")
    (tmp_path / "a" / "notes.txt").write_text("-")
    data = FolderDataset(str(tmp_path), 8)
    assert data.class_names == ["a", "b"] and len(data) == 2 and data.describe().num_classes == 2
    assert [data.label(row) for row in range(2)] == [0, 1]
    assert data.sample_shape == (3, 8, 8) == tuple(data[SampleKey(0, 0, 0)].x.shape)
    assert "2 pictures of 2 classes" in data.describe().text and "\n" not in data.describe().text


def test_a_flat_folder_is_one_class(tmp_path):
    picture(tmp_path / "flowers" / "1.png")
    picture(tmp_path / "flowers" / "2.jpg")
    (tmp_path / "flowers" / "nothing").mkdir()
    data = FolderDataset(str(tmp_path / "flowers"), 8)
    assert data.class_names == ["flowers"] and len(data) == 2 and data.label(1) == 0


def test_layout_errors_name_the_flag_and_the_fix(tmp_path):
    with pytest.raises(FileNotFoundError, match="--data_path .* is empty"):
        build_dataset(str(tmp_path), 8, seed=0)
    (tmp_path / "readme.txt").write_text("-")
    with pytest.raises(FileNotFoundError, match="holds no pictures.*subfolder"):
        build_dataset(str(tmp_path), 8, seed=0)
    picture(tmp_path / "cats" / "1.png")
    (tmp_path / "dogs").mkdir()
    with pytest.raises(ValueError, match="no pictures in the class folders dogs"):
        build_dataset(str(tmp_path), 8, seed=0)


def test_a_folder_of_splits_is_not_taken_for_classes(tmp_path):
    tree(tmp_path / "train")
    tree(tmp_path / "val")
    with pytest.raises(ValueError, match=r"holds splits.*--data_path .*/train"):
        build_dataset(str(tmp_path), 8, seed=0)
    assert build_dataset(str(tmp_path / "train"), 8, seed=0).describe().num_classes == 2


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_path_table_is_a_list(paths):
    table = TextTable.of(paths)
    assert list(table) == paths and len(table) == len(paths)
    if paths:
        assert table[-1] == paths[-1]


# ---------------------------------------------------------------- mirroring


def test_flips_are_keyed_by_seed_step_and_index_only(tmp_path):
    for i in range(3):
        (tmp_path / "c").mkdir(exist_ok=True)
        noise(16, 16, seed=i).save(tmp_path / "c" / f"{i}.png")
    data = build_dataset(str(tmp_path), 16, seed=7)
    plain = build_dataset(str(tmp_path), 16, seed=7, random_flip=False)
    assert data.random_flip and not plain.random_flip
    seen = set()
    for step in range(4):
        wanted = integers(7, step, torch.arange(16), Stream.FLIP, 2)
        for index in range(16):
            for row in range(3):
                x = plain[SampleKey(row, step, index)].x
                expected = x.flip(-1) if wanted[index] else x
                assert torch.equal(data[SampleKey(row, step, index)].x, expected)
            seen.add(int(wanted[index]))
        sample_keys = [SampleKey(index % 3, step, index) for index in range(16)]
        for sample_key, item in zip(sample_keys, data.__getitems__(sample_keys), strict=True):
            assert torch.equal(item.x, data[sample_key].x)
    assert seen == {0, 1}
    other = build_dataset(str(tmp_path), 16, seed=8)
    assert any(not torch.equal(data[SampleKey(0, 0, i)].x, other[SampleKey(0, 0, i)].x) for i in range(16))


@pytest.mark.parametrize("flip", [False, True])
def test_bytes_become_the_same_pixels_on_the_device(tmp_path, flip):
    (tmp_path / "a").mkdir()
    noise(21, 17).save(tmp_path / "a" / "x.png")
    data = FolderDataset(str(tmp_path), 16)
    floats = data.read(0, View(flip=flip)).x
    as_bytes = data.read(0, View(flip=flip, as_bytes=True)).x
    assert as_bytes.dtype == torch.uint8 and torch.equal(to_pixels(as_bytes), floats)
