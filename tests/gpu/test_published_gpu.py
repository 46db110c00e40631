"""Test loading published weights onto a GPU through page-locked buffers. The values are right although buffers are
reused, loading is fast, and host memory never holds a copy of all weights."""

import time

import pytest
import torch

from opendit.checkpoint.foreign import open_published
from opendit.checkpoint.matched import BUFFER_BYTES, BUFFERS, DeviceReader, fill
from opendit.parallel.layout import Shard
from tests.checkpoint import published

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GIB = 1 << 30


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@pytest.mark.parametrize("size", (16, 1000, BUFFER_BYTES))
def test_pieces_are_the_tensor_whatever_the_buffers(tmp_path, size):
    theirs = published.weights(64)
    folder = published.write_pipeline(tmp_path / "small", theirs, 2)
    tensors = open_published(folder, published.FAMILIES).tensors(published.shapes(64))
    reader, expected = DeviceReader(tensors, "cuda", buffer_bytes=size), published.ours(theirs)
    found = {name: reader(name, Shard(tuple(tensor.shape), ())) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        assert found[name].is_cuda and torch.equal(found[name].cpu(), tensor), name
    model = published.network(64)
    fill(model, tensors, "cuda", torch.float32)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter.cpu(), expected[name].float()), name


def test_gigabytes_from_a_warm_disk(tmp_path):
    """The required speed loads a model of 24 GB in 8 s."""
    width = 8192
    folder = published.write_pipeline(tmp_path / "large", published.weights(width), 2)
    tensors = open_published(folder, published.FAMILIES).tensors(published.shapes(width))
    torch.zeros(1, device="cuda")
    before, begun = anonymous_bytes(), time.perf_counter()
    model = published.network(width)
    fill(model, tensors, "cuda")
    torch.cuda.synchronize()
    seconds, size = time.perf_counter() - begun, sum(p.nbytes for p in model.parameters())
    print(f"{size / 1e9:.2f} GB in {seconds:.2f} s: {size / seconds / 1e9:.2f} GB/s")
    assert size > 2e9 and size / seconds > 3e9
    assert anonymous_bytes() - before < BUFFERS * BUFFER_BYTES + GIB // 4
