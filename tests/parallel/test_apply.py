"""apply_parallel changes a model in a fixed order, and no step undoes another."""

from dataclasses import replace

import torch

from opendit.kernels import recompute
from opendit.kernels.operations import FLOAT8, MODULATE, NORM, SPLIT, chosen
from opendit.models.attention import Attention
from opendit.models.blocks import is_cut
from opendit.models.dit import DiT, DiTConfig
from opendit.models.initialization import fits
from opendit.models.layers import TORCH_OPS, BlockOps, Projection
from opendit.models.zoo import plan_of
from opendit.parallel import apply
from opendit.parallel.apply import apply_parallel
from opendit.parallel.fsdp import float8_weights
from tests.models import test_zoo
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
    model = DiT(CONFIG)
    recompute.recompute_in(model, "mlp")
    model.use()
    assert model.blocks[0].ops == TORCH_OPS


@test_zoo.every_config
def test_plans_say_which_projections_operations_are_given(config):
    model, given, called = test_zoo.model_of(config), {}, []

    def watched(operation: str):
        function = getattr(TORCH_OPS, operation) or joined(operation)

        def watch(*args):
            layer = next(a for a in args if isinstance(a, Projection))
            given.setdefault(layer, set()).add(operation)
            before = len(called)
            result = function(*args)
            del called[before:]  # the operation's reference calls the layer itself
            return result

        return watch

    def joined(operation: str):
        def both(x, gate, z, layer, *more):
            return x, TORCH_OPS.layernorm_modulate(x + gate[:, None] * layer(z), *more[-2:])

        return both

    operations = BlockOps.names(projection=True)
    kernels = replace(TORCH_OPS, **{operation: watched(operation) for operation in operations})
    model.use(ops=kernels)
    for module in model.modules():
        if isinstance(module, Projection):
            module.register_forward_hook(lambda module, *_: called.append(module))
    model(*test_zoo.inputs(config))
    names = {module: name for name, module in model.named_modules()}
    projections = plan_of(config).projections(config)
    expected = {name: ops for name in names.values() for pattern, ops in projections.items() if fits(pattern, name)}
    assert {names[layer] for layer in given} == set(expected)
    assert all(found <= set(expected[names[layer]]) for layer, found in given.items())
    assert not {names[layer] for layer in called} & set(expected)  # torch does not call them either


def test_weights_in_float8_are_those_of_its_operations():
    model = DiT(CONFIG)
    matrices = [
        f"blocks.{i}.{name}.weight" for i in range(2) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ]
    for switches in (set(), {MODULATE, NORM, SPLIT}):
        assert float8_weights(model.use(ops=chosen(switches))) == []
    assert float8_weights(apply_parallel(model, ops=chosen({FLOAT8}))) == matrices
    without = chosen({FLOAT8}).by_reference(["linear_gate_residual_layernorm_modulate", "linear_gelu"])
    assert float8_weights(model.use(ops=without)) == [name for name in matrices if "qkv" in name]
    assert float8_weights(apply_parallel(model, ops=chosen({FLOAT8}), compiled=True, backend="eager")) == []
