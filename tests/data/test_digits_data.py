"""The built-in digits."""

import pytest
import torch

from opendit.data import SampleKey, build_dataset, digits_split


def test_the_split_is_stratified_disjoint_and_whole():
    (train, train_labels), (test, test_labels) = digits_split("train"), digits_split("test")
    assert train.shape[1:] == (1, 8, 8) and train.dtype == torch.float32 and train_labels.dtype == torch.int64
    assert len(train) + len(test) == 1797 and abs(len(test) - 360) <= 5
    counts = torch.bincount(torch.cat((train_labels, test_labels)), minlength=10)
    assert (torch.bincount(test_labels, minlength=10) / counts - 0.2).abs().max() < 0.01
    assert float(train.min()) == -1 and float(train.max()) == 1
    assert len(torch.cat((train, test)).flatten(1).unique(dim=0)) == 1797  # so no picture is in both
    with pytest.raises(ValueError, match="train and test"):
        digits_split("val")


def test_the_split_never_changes():
    """A model's held-out numbers compare across versions only if the held-out pictures stay the same."""
    images, labels = digits_split("test")
    assert len(labels) == 359 and labels[:12].tolist() == [3, 7, 3, 9, 0, 8, 7, 0, 8, 0, 3, 3]
    assert int(((images + 1) * 8).sum()) == 111461


def test_native_size_is_untouched_and_never_mirrored():
    data = build_dataset("digits", 8, seed=3)
    images, labels = digits_split("train")
    assert len(data) == len(images) and (about := data.describe()).kind == "pixels" and about.num_classes == 10
    assert data.sample_shape == (1, 8, 8) and not data.random_flip
    for row in (0, 700, len(data) - 1):
        item = data[SampleKey(row, 5, 9)]
        assert torch.equal(item.x, images[row]) and item.y == int(labels[row]) and item.skipped == ()
    data[SampleKey(0, 0, 0)].x.zero_()  # changing an item must not change the data set
    assert torch.equal(data[SampleKey(0, 0, 0)].x, images[0])


@pytest.mark.parametrize("size", [4, 16, 32])
def test_other_sizes_are_resized_within_the_range(size):
    data = build_dataset("digits", size, seed=0)
    x = torch.stack([data[SampleKey(row, 0, 0)].x for row in range(50)])
    assert x.shape == (50, 1, size, size) and float(x.min()) >= -1 and float(x.max()) <= 1
    assert torch.allclose(x.mean((1, 2, 3)), digits_split("train")[0][:50].mean((1, 2, 3)), atol=0.08)


def test_held_out_pictures_and_mirroring_on_request():
    data = build_dataset("digits", 8, seed=0, split="test", random_flip=True)
    images = digits_split("test")[0]
    x = torch.stack([data[SampleKey(i, 0, i)].x for i in range(64)])
    mirrored = (x == images[:64].flip(-1)).flatten(1).all(1) & (x != images[:64]).flatten(1).any(1)
    assert 10 < int(mirrored.sum()) < 54
    assert torch.equal(x[~mirrored], images[:64][~mirrored])
    assert "digits (test): 359 pictures of 10 classes" in data.describe().text
