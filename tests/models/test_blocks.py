"""Test that a stack of blocks can be cut anywhere: outputs and gradients match the uncut model."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from opendit.models.attention import TokenGrid
from opendit.models.blocks import is_cut, run_blocks
from opendit.models.dit import DiT, DiTConfig
from opendit.models.layers import TORCH_OPS, BlockOps
from opendit.models.zoo import build_model, plan_of
from opendit.parallel.rules import shard_units
from tests.models.test_zoo import CONFIGS, every_config, inputs, model_of
from tests.numbers import largest
from tests.ranks import run_ranks


def outcome(model: DiT, arguments: tuple, predict=None) -> list[Tensor]:
    """Return the output and all gradients, for a loss with random weights."""
    model.zero_grad()
    output = (predict or model)(*arguments)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    (output * weights).sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters())]


def cut(model: DiT) -> None:
    """Add hooks to all blocks that do nothing but prevent fusion with the next block."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: None)


@every_config
def test_wherever_a_stack_is_cut_nothing_changes(config):
    model, arguments = model_of(replace(config, depth=3)), inputs(config)

    def beforehand(x, t, y):
        c, context = model.condition(t, y)
        made = tuple(model.modulations(c))
        first = model.predict(x, made, context).detach()
        contexts, positions = model.contexts(context), model.positions(config.grid)
        assert (contexts is None) == (config.text is None)
        again = model.predict(x, made, contexts, positions)
        assert torch.equal(first, again.detach())
        return again

    def in_two(border: int):
        def predict(x, t, y):
            c, context = model.condition(t, y)
            made, (tokens, grid) = list(model.modulations(c)), model.embed(x)
            for part, m in ((model.blocks[:border], made[:border]), (model.blocks[border:], made[border:])):
                stage = nn.ModuleList(part)
                tokens = run_blocks(stage, tokens, m, context, grid)
                assert isinstance(tokens, Tensor) and tokens.shape[:2] == (3, config.tokens)
            return model.unpatchify(model.final_layer(tokens, made[-1]), grid.sizes)

        return predict

    uncut = outcome(model, arguments)
    found = {"beforehand": outcome(model, arguments, beforehand)}
    borders = () if config.input_size[0] == 1 else (0, 1, 2, 3)  # a picture in a patch of two frames must be repeated
    found |= {f"in two at {border}": outcome(model, arguments, in_two(border)) for border in borders}
    cut(model)
    assert all(map(is_cut, model.blocks))
    found["hooked"] = outcome(model, arguments)
    model.modulate_in_blocks = True
    found["modulated inside"] = outcome(model, arguments)
    for way, results in found.items():
        assert all(map(torch.equal, results, uncut)), way


WITH_KERNELS = [config for config in CONFIGS if config.kind in ("dit", "stdit", "moviegen")]


@pytest.mark.parametrize("config", WITH_KERNELS, ids=[f"{c.kind}{CONFIGS.index(c)}" for c in WITH_KERNELS])
def test_joined_operations_are_those_of_blocks_that_finish(config):
    """Blocks of an uncut stack use the joined operation, with the same results; cut blocks do not."""
    borders = []

    def joined(h, gate, z, linear, *norm_and_modulation):
        borders.append(linear)
        h = TORCH_OPS.linear_gate_residual(h, gate, z, linear)
        if len(norm_and_modulation) == 3:
            return TORCH_OPS.residual_rmsnorm_modulate(h, *norm_and_modulation)
        return h, TORCH_OPS.layernorm_modulate(h, *norm_and_modulation)

    model, arguments = model_of(replace(config, depth=3)), inputs(config)
    want = outcome(model, arguments)
    ops = BlockOps(linear_gate_residual_layernorm_modulate=joined, linear_gate_residual_rmsnorm_modulate=joined)
    got = outcome(model.use(ops=ops), arguments)
    assert all(map(torch.equal, got, want))
    ends = [block.mlp.fc2 for block in model.blocks]
    assert [x for x in borders if x in ends] == ([] if config.positions_in_blocks else ends[:-1])
    borders.clear()
    cut(model)
    assert all(map(torch.equal, outcome(model, arguments), want)) and not set(borders) & set(ends)


def test_a_block_that_has_begun_is_the_only_one_to_hold_its_input():
    """Without gradients, a block frees its input and its first norm after their last use. The previous block's hidden
    layer must be freed too. Live tensors are counted at every fc1."""
    made, alive = [], []

    def layernorm_modulate(x, shift, scale):
        made.extend((weakref.ref(x), weakref.ref(y := TORCH_OPS.layernorm_modulate(x, shift, scale))))
        return y

    def linear_gelu(x, linear):
        alive.append(sum(tensor() is not None for tensor in made))
        return TORCH_OPS.linear_gelu(x, linear)

    model = DiT(DiTConfig((4, 4), 2, 2, 32, 3, 2, num_classes=3))
    model.use(ops=BlockOps(layernorm_modulate=layernorm_modulate, linear_gelu=linear_gelu))
    with torch.no_grad():
        model(torch.randn(3, 2, 4, 4), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 3]))
    assert alive == [2, 2, 2]  # the MLP's input and the residual


def test_what_tells_that_a_block_is_cut_is_there():
    """is_cut uses private names of nn.Module."""
    module = nn.Linear(1, 1)
    assert not is_cut(module)
    hooks = (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
    )
    for register in hooks:
        handle = register(lambda *_: None)
        assert is_cut(module)
        handle.remove()
        assert not is_cut(module)
    module.compile(backend="eager")
    assert is_cut(module)


def sharded(mesh, configs: list) -> list[float]:
    """Return the worst relative errors with FSDP2 around the plan's shard units, against one process. Each rank has
    other samples."""
    found = []
    for config, reshard, checkpointed in configs:
        model, arguments = model_of(config), inputs(config, 4)
        want = outcome(model, arguments)
        model.zero_grad()
        model.grad_checkpoint, model.modulate_in_blocks = checkpointed, True
        units = [*shard_units(plan_of(config), dict(model.named_parameters()))]
        for unit in sorted(units, reverse=True):  # the whole model last
            fully_shard(model.get_submodule(unit), reshard_after_forward=reshard)
        assert all(map(is_cut, model.blocks))
        weights = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(1), dtype=want[0].dtype)

        def of_rank(value):
            return value[2 * mesh.rank : 2 * mesh.rank + 2]

        output = model(*map(of_rank, arguments))
        (output * of_rank(weights)).sum().backward()
        got = [p.grad.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
        assert len(got) == len(want) - 1  # every parameter is sharded
        pairs = [(output.detach(), of_rank(want[0])), *((2 * grad, b) for grad, b in zip(got, want[1:], strict=True))]
        found.append(largest(((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in pairs))
    return found


def test_shard_units_around_blocks():
    chosen = [CONFIGS[i] for i in (0, 3, 5, 7, 8, 11)]
    cases = [(config, i % 2 == 0, i % 3 == 1) for i, config in enumerate(chosen)]
    for errors in run_ranks(2, sharded, cases):
        assert largest(errors) < 1e-9, errors


def test_a_grid_says_how_ranks_share_a_sequence():
    assert TokenGrid((2, 3)).shards is None and build_model(CONFIGS[0]).embed(inputs(CONFIGS[0])[0])[1].shards is None
