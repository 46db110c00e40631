"""Streaming frozen blocks from host memory gives the same bits, and copies no more than necessary."""

from dataclasses import replace

import pytest
import torch

from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.models.finetuning import B, Lora, add_lora
from opendit.parallel.apply import apply_parallel
from opendit.parallel.host_memory import AHEAD, StreamedBlocks, blocks_of, spread_numbers
from opendit.training.memory import Setup, estimate
from tests.kernels.test_public_fp8 import SIZES, VALUES, given

DEPTH = 6
CPU = torch.device("cpu")


def model_of(recomputed, family="flux"):
    """Return a FLUX.1 with two kinds of blocks, or a Wan, with nonzero LoRA weights."""
    torch.manual_seed(0)
    depth = dict(num_layers=2, num_single_layers=DEPTH - 2) if family == "flux" else dict(num_layers=DEPTH)
    config = public_config(family, VALUES[family] | depth, SIZES[family])
    model = PublicDiT(config)
    add_lora(model, Lora(2, 4.0, ""), (), seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("bias"):
            parameter.data.normal_(0, 0.3 if name.endswith(B) else 0.1)
    model.grad_checkpoint = recomputed
    return model.train()


def stream(model, count, deferred):
    """Move a model's blocks to host memory."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    streamed = StreamedBlocks(model, count, CPU, deferred)
    for name, kept in streamed.host.items():
        kept.copy_(values[name])
    for slot in streamed.slots:
        slot.fill_(255)  # NaN
    return streamed


def step(model, seed):
    """Return the losses of a step and of a forward pass without gradients, and the gradients."""
    model.zero_grad()
    x, t, y = given("flux", torch.float32)
    x = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    loss = model(x, t, y).square().mean()
    loss.backward()
    with torch.no_grad():
        again = model(x, t, y).square().mean()
    return loss.detach(), again, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("count", "deferred", "recomputed", "blocks"),
    (
        (1, True, True, None),
        (2, False, True, None),
        (4, True, "but_attention", None),
        (DEPTH, False, True, None),
        (99, True, True, None),
        (2, True, True, 3),
        (3, False, "but_attention", 4),
        (99, True, "but_attention", 4),
    ),
)
def test_it_has_the_bits_of_blocks_that_stay(count, deferred, recomputed, blocks):
    whole, model = model_of(recomputed), model_of(recomputed)
    if blocks is not None:
        apply_parallel(model, grad_checkpoint=recomputed, recompute_blocks=blocks)
    streamed = stream(model, count, deferred)
    assert streamed.blocks == min(count, blocks or DEPTH)
    numbers = {int(name.split(".")[1]) for name in streamed.host}
    assert len(numbers) == streamed.blocks and all(model.blocks[number].recomputed for number in numbers)
    how = dict(grad_checkpoint=True, recompute_blocks=blocks, offload=f"blocks:{count}")
    setup = Setup(precision="fp32", lora=Lora(2, 4.0, ""), **how)
    needs, resident = (estimate(model.config, replace(setup, offload=how), 1) for how in (setup.offload, "none"))
    assert needs.host == {"blocks": sum(kept.nbytes for kept in streamed.host.values())}
    moved = resident.states["weights"] - needs.states["weights"]
    assert moved == needs.host_total and resident.total - needs.total < moved
    for seed in range(2):
        (loss, again, found), (wanted, wanted_again, gradients) = step(model, seed), step(whole, seed)
        assert torch.equal(loss, wanted) and torch.equal(again, wanted_again)
        assert found.keys() == gradients.keys() and len(found) > 20
        assert all(torch.equal(found[name], gradients[name]) for name in found)


def test_what_is_there_is_not_copied_again():
    """The first pass copies all blocks; later passes do not copy those that are still in a slot."""
    model = model_of(True)
    streamed = stream(model, DEPTH, True)
    x, t, y = given("flux", torch.float32)
    for first in (True, False):
        before = streamed.copied
        loss = model(x, t, y).square().mean()
        forward = streamed.copied - before
        loss.backward()
        assert (forward, streamed.copied - before - forward) == (DEPTH - (0 if first else AHEAD + 1), DEPTH - AHEAD - 1)
    few = stream(model_of(True), AHEAD + 1, True)
    assert few.copied == 0 and len(few.slots) == AHEAD + 1


def test_passes_begin_with_empty_slots_once_one_was_recorded():
    whole, model = model_of(True), model_of(True)
    streamed = stream(model, DEPTH, True)
    step(model, 0)
    streamed.recorded = True
    for slot in streamed.slots:
        slot.fill_(255)  # the replay of a recording left other values
    assert torch.equal(step(model, 1)[0], step(whole, 1)[0])


def test_modulations_and_keys_by_themselves_have_their_blocks():
    """Call modulate and keys_values alone, as sampling does for many steps at once."""
    whole, model = model_of(False), model_of(False)
    stream(model, DEPTH, False)
    with torch.no_grad():
        c = torch.randn(3, whole.config.hidden_size)
        for block, other in zip(model.blocks, whole.blocks, strict=True):
            assert torch.equal(block.modulate(c), other.modulate(c))
    whole, model = model_of(False, "wan"), model_of(False, "wan")
    stream(model, DEPTH, True)
    captions = torch.randn(2, 5, whole.config.hidden_size), torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        for block, other in zip(model.blocks, whole.blocks, strict=True):
            for found, wanted in zip(block.keys_values(captions), other.keys_values(captions), strict=True):
                assert torch.equal(found, wanted)


def test_the_blocks_that_stay_are_spread():
    assert spread_numbers(7, 3) == [2, 4, 6] and spread_numbers(5, 5) == [0, 1, 2, 3, 4]
    assert spread_numbers(57, 20)[:4] == [2, 5, 8, 11] and len(spread_numbers(57, 20)) == 20
    assert blocks_of([5, 7, 9, 3], 2) == (10, 14) and blocks_of([5, 7, 9, 3], 99) == (24, 27)
