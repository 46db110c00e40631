"""Test --expert both on a GPU: each network's passes are replayed from its own CUDA graphs."""

import pytest
import torch

from tests.numbers import off_by
from tests.training.test_train import log_of
from tests.training.test_wan_both_experts import AT, tensors_of, trained
from tests.training.test_wan_experts import flags_of, root  # noqa: F401  (root is a fixture)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_steps_of_both_networks_are_replayed(root, tmp_path):  # noqa: F811
    runs = []
    for name in ("eager", "graph"):
        more = ("--max_steps", "24", "--deterministic", *(["--enable_cuda_graph"] if name == "graph" else []))
        runs.append(trained(flags_of(root, tmp_path / name, "both"), tmp_path / name, *more))
    losses = [[line["loss"] for line in log_of(run)] for run in runs]
    assert len(losses[0]) == 24 and off_by(losses[1], losses[0]) < 1e-5
    for at in AT.values():
        one, other = (tensors_of(run / at) for run in runs)
        assert all(torch.allclose(value, other[name], atol=1e-3) for name, value in one.items())
