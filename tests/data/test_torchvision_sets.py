"""torchvision's data sets are recognised by their files. The tests use small fakes in the real formats."""

import pickle

import numpy as np
import pytest
import torch
from torchvision import datasets

from opendit.data import SampleKey, build_dataset

RANDOM = np.random.default_rng(0)


def fake_cifar10(root):
    """Write files with two pictures each. The pixels' value is the picture's number in the set."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        data = np.stack([np.full(3072, 2 * i + k, np.uint8) for k in range(2)])
        data[:, 0] = 255  # red, top left corner
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [i % 10, (i + 1) % 10]}))
    names = [f"class {i}" for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    return folder


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(header + array.tobytes())


def fake_mnist(root, name):
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    arrays = {}
    for stem, count in (("train", 6), ("t10k", 3)):
        images = RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        write_idx(folder / f"{stem}-images-idx3-ubyte", images)
        write_idx(folder / f"{stem}-labels-idx1-ubyte", labels)
        arrays[stem] = images, labels
    return folder, arrays


@pytest.fixture
def unchecked(monkeypatch):
    """Remove the checksums, which the fakes can't match."""
    for kind in (datasets.CIFAR10, datasets.STL10):
        for name in ("train_list", "test_list"):
            files = [[file, None] for file, _ in getattr(kind, name) if kind is datasets.CIFAR10 or "train_" in file]
            monkeypatch.setattr(kind, name, files)
    monkeypatch.setitem(datasets.CIFAR10.meta, "md5", None)
    split_list = {split: [*where, None] for split, (*where, _) in datasets.SVHN.split_list.items()}
    monkeypatch.setattr(datasets.SVHN, "split_list", split_list)


def test_cifar10_from_its_root_or_its_own_folder(tmp_path, unchecked):
    folder = fake_cifar10(tmp_path)
    for path in (tmp_path, folder):
        data = build_dataset(str(path), 32, seed=0, random_flip=False)
        assert len(data) == 10 and data.describe().num_classes == 10 and data.sample_shape == (3, 32, 32)
        assert data.class_names[3] == "class 3" and "CIFAR-10 (train)" in data.describe().text
        item = data[SampleKey(5, 0, 0)]
        assert item.y == 3
        assert torch.equal(item.x[1:], torch.full((2, 32, 32), 5 / 127.5 - 1))
        assert item.x[0, 0, 0] == 1 and item.x[0, 0, 31] < 1
    test = build_dataset(str(tmp_path), 32, seed=0, split="test", random_flip=False)
    assert len(test) == 2 and test[SampleKey(1, 0, 0)].x[2, 5, 5] == torch.tensor(11 / 127.5 - 1)
    assert build_dataset(str(tmp_path), 64, seed=0)[SampleKey(0, 0, 0)].x.shape == (3, 64, 64)


def test_cifar10_is_mirrored_by_default(tmp_path, unchecked):
    fake_cifar10(tmp_path)
    data = build_dataset(str(tmp_path), 32, seed=0)
    corners = {
        (float(data[SampleKey(0, 0, i)].x[0, 0, 0]), float(data[SampleKey(0, 0, i)].x[0, 0, 31])) for i in range(20)
    }
    assert data.random_flip and corners == {(1.0, -1.0), (-1.0, 1.0)}


def test_a_damaged_cifar10_is_refused_unopened(tmp_path):
    fake_cifar10(tmp_path)  # its checksums are wrong, so its pickles must not be loaded
    with pytest.raises(ValueError, match=r"--data_path .*cifar-10-batches-py: CIFAR-10 can't be read .*corrupted"):
        build_dataset(str(tmp_path), 32, seed=0)


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_mnist_like_sets_keep_one_channel(tmp_path, name):
    folder, arrays = fake_mnist(tmp_path, name)
    for path in (tmp_path, folder.parent, folder):
        data = build_dataset(str(path), 28, seed=0)
        assert len(data) == 6 and data.sample_shape == (1, 28, 28) and not data.random_flip
        item = data[SampleKey(4, 0, 1)]
        assert item.y == 4 and torch.equal(item.x[0], torch.from_numpy(arrays["train"][0][4]) / 127.5 - 1)
    assert data.class_names[9] == ("9" if name == "MNIST" else "Ankle boot")
    assert len(build_dataset(str(tmp_path), 28, seed=0, split="test")) == 3


def test_a_root_of_several_sets_asks_which(tmp_path):
    fake_mnist(tmp_path, "MNIST")
    fake_mnist(tmp_path, "FashionMNIST")
    with pytest.raises(ValueError, match=r"several data sets; pass --data_path .*/MNIST/raw or .*/FashionMNIST/raw"):
        build_dataset(str(tmp_path), 28, seed=0)
    assert "Fashion" in build_dataset(str(tmp_path / "FashionMNIST"), 28, seed=0).describe().text


def test_stl10(tmp_path, unchecked):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    pictures = RANDOM.integers(0, 256, (4, 3, 96, 96), dtype=np.uint8)
    (folder / "train_X.bin").write_bytes(pictures.transpose(0, 1, 3, 2).tobytes())
    (folder / "train_y.bin").write_bytes(np.array([1, 10, 5, 2], np.uint8).tobytes())
    (folder / "class_names.txt").write_text("\n".join(f"kind{i}" for i in range(10)))
    data = build_dataset(str(folder), 96, seed=0, random_flip=False)
    item = data[SampleKey(1, 0, 0)]
    assert item.y == 9 and data.class_names[9] == "kind9"
    assert torch.equal(item.x, torch.from_numpy(pictures[1]) / 127.5 - 1)


def test_svhn(tmp_path, unchecked):
    scipy = pytest.importorskip("scipy.io")
    pictures = RANDOM.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    scipy.savemat(tmp_path / "train_32x32.mat", {"X": pictures, "y": np.array([[10], [1], [2], [3]])})
    data = build_dataset(str(tmp_path), 32, seed=0)
    item = data[SampleKey(0, 0, 0)]
    assert item.y == 0 and not data.random_flip
    assert torch.equal(item.x, torch.from_numpy(pictures[..., 0]).permute(2, 0, 1) / 127.5 - 1)


def test_paths_that_name_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="--data_path /no/such/place: doesn't exist"):
        build_dataset("/no/such/place", 32, seed=0)
    (tmp_path / "list.txt").write_text("-")
    with pytest.raises(ValueError, match="--data_path .*list.txt: is a file"):
        build_dataset(str(tmp_path / "list.txt"), 32, seed=0)
    with pytest.raises(ValueError, match="--image_size 0"):
        build_dataset("digits", 0, seed=0)
    with pytest.raises(ValueError, match="no split 'test'"):
        build_dataset(str(tmp_path), 32, seed=0, split="test")


def test_arrays_that_do_not_fit_together(tmp_path):
    folder, _ = fake_mnist(tmp_path, "MNIST")
    write_idx(folder / "train-labels-idx1-ubyte", np.array([0, 1, 2, 3, 4, 200], np.uint8))
    with pytest.raises(ValueError, match="MNIST is damaged: labels from 0 to 200 of 10 classes; download it again"):
        build_dataset(str(tmp_path), 28, seed=0)
    write_idx(folder / "train-labels-idx1-ubyte", np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="MNIST is damaged: 6 pictures and 5 labels"):
        build_dataset(str(tmp_path), 28, seed=0)
    write_idx(folder / "train-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8))
    with pytest.raises(ValueError, match=f"--data_path {folder}: MNIST (is damaged|can't be read)"):
        build_dataset(str(tmp_path), 28, seed=0)
    (folder / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\3" + b"\xff\xff\xff\xff" * 3)
    with pytest.raises(ValueError, match=f"--data_path {folder}: MNIST can't be read"):
        build_dataset(str(tmp_path), 28, seed=0)
