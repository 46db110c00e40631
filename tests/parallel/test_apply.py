"""The one order in which a model is changed: each step finds what it needs, and none undoes another."""

import torch

from opendit.kernels import recompute
from opendit.models import DiT, DiTConfig
from opendit.models.attention import Attention
from opendit.models.blocks import is_cut
from opendit.models.layers import TORCH_OPS
from opendit.parallel import apply
from opendit.parallel.apply import apply_parallel
from tests.models.test_dit import randomised

CONFIG = DiTConfig((4, 4), 2, 2, 32, 2, 2, num_classes=3)


def test_steps_come_in_their_order(monkeypatch):
    model, called = DiT(CONFIG), []

    def watch(owner, name):
        found = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: called.append(name) or found(*args, **more))

    watch(DiT, "use"), watch(apply, "recompute_in"), watch(DiT, "compile_blocks")
    assert apply_parallel(model, recompute="cheap", compiled=True, backend="eager") is model
    assert called == ["use", "recompute_in", "compile_blocks"] and all(map(is_cut, model.blocks))


def test_no_step_undoes_another():
    attend, made = Attention(32, 2).attend, []

    def counted(q, k, v):
        made.append(q.shape)
        return attend(q, k, v)

    model = randomised(DiT(CONFIG))
    arguments = torch.randn(3, 2, 4, 4), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 3])
    grads = []
    for more in ({}, {"recompute": "mlp"}, {"grad_checkpoint": True}):
        made.clear()
        apply_parallel(model, ops=TORCH_OPS, attend=counted, **more).zero_grad()
        output = model(*arguments)
        kept = "recompute" in more
        assert (model.blocks[0].ops.linear_gelu is not TORCH_OPS.linear_gelu) == kept
        output.square().mean().backward()
        assert len(made) == (4 if "grad_checkpoint" in more else 2)
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


def test_the_other_order_would_lose_the_policy():
    """What the order is for."""
    model = DiT(CONFIG)
    recompute.recompute_in(model, "mlp")
    model.use()
    assert model.blocks[0].ops == TORCH_OPS
