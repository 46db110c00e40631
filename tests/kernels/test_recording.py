"""Test that torch has the private names that opendit.kernels.recording uses."""

import inspect

import pytest
import torch

from opendit.kernels import recording


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a torch without CUDA")
def test_torch_s_private_names_are_there():
    """These names are needed only after a failed recording on a GPU, where a missing name would be noticed late."""
    private = {word for word in inspect.getsource(recording).split() if word.startswith("torch._C.")}
    assert {name.split("(")[0] for name in private} == {"torch._C._cuda_endAllocateToPool"}
    assert callable(torch._C._cuda_endAllocateToPool)
    for name in ("clone_state", "graphsafe_set_state"):
        assert callable(getattr(torch.Generator, name))
