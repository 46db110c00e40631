"""safetensors files whose names are not UTF-8."""

import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from opendit.common.tensor_files import open_mapped


@pytest.mark.parametrize("name", ["plain", "漢字", "caf\udce9"])
def test_a_file_of_any_name_is_read(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(4)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"k": "v"})
    (tmp_path / "x.safetensors").rename(folder / "x.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    with open_mapped(folder / "x.safetensors") as file:
        assert file.metadata() == {"k": "v"} and tuple(file.get_slice("a").get_shape()) == (3, 5)
        assert all(torch.equal(file.get_tensor(key), tensor) for key, tensor in tensors.items())
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError):
        open_mapped(folder / "missing")
    (folder / "short").write_bytes(b"\x00")
    with pytest.raises(SafetensorError):
        open_mapped(folder / "short")
