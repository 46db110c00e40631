"""Host memory for state, and work that is delayed until it is waited for."""

import gc
import weakref

import pytest
import torch

from opendit.parallel.host_memory import HostMemory, SideStream, padded

CPU = torch.device("cpu")


def test_tensors_lie_one_after_the_other_and_begin_at_multiples():
    like = [torch.empty(3, 5), torch.empty(0, 7), torch.empty(()), torch.empty(64)]
    memory = HostMemory(200, CPU)
    (first, nothing, single, last), end = memory.take(like, 8, 16)
    assert end == 8 + 16 + 0 + 16 + 64 == 8 + sum(padded(t.numel(), 16) for t in like)
    for tensor, shape, at in ((first, (3, 5), 8), (single, (), 24), (last, (64,), 40)):
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.float32
        assert tensor.data_ptr() == memory.numbers.data_ptr() + 4 * at and not tensor.any()
    assert nothing.shape == (0, 7)
    first.fill_(1), single.fill_(2), last.fill_(3)
    assert memory.numbers.sum() == 15 + 2 + 3 * 64
    with pytest.raises(RuntimeError):
        memory.take(like, 180)


def test_the_memory_goes_with_its_last_tensor():
    memory = HostMemory(1 << 20, CPU)
    pages = weakref.ref(memory.pages)
    (part,), _ = memory.take([torch.empty(5)], 0)
    del memory
    gc.collect()
    assert pages() is not None and part.add_(1).sum() == 5
    del part
    gc.collect()
    assert pages() is None
    assert HostMemory(0, CPU).numbers.numel() == 0


def test_work_beside_is_done_once_in_order_and_not_before_it_is_waited_for():
    done, side = [], SideStream(CPU)
    for number in range(3):
        side.run(lambda number=number: done.append(number))
    assert done == []
    side.join()
    assert done == [0, 1, 2]
    side.run(lambda: done.append(3))
    side.finish()
    side.finish()
    assert done == [0, 1, 2, 3]
