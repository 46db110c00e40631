"""The buffer of a save: copies of what lies on the device and of what --offload keeps in host memory."""

from types import SimpleNamespace

import torch

from opendit.checkpoint.save import THREADS, HostBuffer


def test_many_copies_from_host_memory_are_whole_when_they_were_waited_for(monkeypatch):
    """Copy as for a GPU, which is never asked: more tensors than threads, some of them empty, some large."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    tensors = [torch.randn(size, 3) for size in (1, 0, 70_000, 5, 100_000, 3) * (THREADS + 1)]
    buffer = HostBuffer(sum(t.numel() for t in tensors), torch.device("cpu"))
    buffer.device = SimpleNamespace(type="cuda")
    for _ in range(2):
        buffer.clear()
        copies = [buffer.copy(tensor) for tensor in tensors]
        buffer.wait()
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
        ends = [copy.data_ptr() for copy in copies if copy.numel()]
        assert ends == sorted(set(ends))
        for tensor in tensors:
            tensor.add_(1)
    assert len(waited) == 2
