"""Sequence parallelism without other processes: attention to parts of the keys, plans, and bad input."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

import train
from opendit.config.command_line import parse
from opendit.config.components import ParallelFlags
from opendit.config.parallel_sizes import check_sequence_parallel
from opendit.config.train import TrainConfig
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from opendit.parallel.collectives import Group
from opendit.parallel.hardware import HardwareModel
from opendit.parallel.sequence import sequence_shape
from opendit.parallel.sequence.choose import Shape, make_plan
from opendit.parallel.sequence.peer_memory import Buffer, PeerMemory
from opendit.parallel.sequence.products import weight_gradient, zeros_but_own
from opendit.parallel.sequence.ulysses import (
    attend_part,
    attend_part_backward,
    merge,
    reference_backward,
    reference_forward,
)


@pytest.mark.parametrize(
    "forward,backward", [(attend_part, attend_part_backward), (reference_forward, reference_backward)]
)
def test_merged_parts_are_attention_to_all_keys(forward, backward):
    q, k, v, dout = (torch.randn(2, 3, length, 8, dtype=torch.float64) for length in (5, 9, 9, 5))
    q *= 3  # makes the log-sum-exps differ
    parts = [slice(0, 2), slice(2, 3), slice(3, 9)]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    exact = torch.softmax(leaves[0] @ leaves[1].mT / 8**0.5, dim=-1) @ leaves[2]
    exact.backward(dout)
    for order in itertools.permutations(parts):
        out, lse = forward(q, k[:, :, order[0]], v[:, :, order[0]])
        for part in order[1:]:
            out, lse = merge(out, lse, *forward(q, k[:, :, part], v[:, :, part]))
        assert torch.allclose(out, exact, rtol=1e-12) and torch.allclose(lse, (q @ k.mT / 8**0.5).logsumexp(-1))
    grads = [backward(dout, q, k[:, :, part], v[:, :, part], out, lse) for part in parts]
    dq, dk, dv = sum(g[0] for g in grads), torch.cat([g[1] for g in grads], 2), torch.cat([g[2] for g in grads], 2)
    for ours, leaf in zip((dq, dk, dv), leaves, strict=True):
        assert torch.allclose(ours, leaf.grad, rtol=1e-10, atol=1e-12)


def test_merging_is_exact_where_one_part_outweighs_the_other():
    out, lse = torch.randn(1, 1, 2, 4), torch.tensor([[[200.0, -200.0]]])
    part, part_lse = torch.randn(1, 1, 2, 4), torch.tensor([[[-200.0, 200.0]]])
    merged, merged_lse = merge(out.clone(), lse, part, part_lse)
    assert torch.equal(merged[..., 0, :], out[..., 0, :]) and torch.equal(merged[..., 1, :], part[..., 1, :])
    assert torch.equal(merged_lse, torch.full_like(lse, 200.0))


@pytest.mark.parametrize("rank,ranks", [(0, 2), (1, 2), (1, 3), (0, 1)])
def test_a_weights_gradient_is_zero_but_for_the_own_rows(rank, ranks, monkeypatch):
    own, width, x = 5, 5 * ranks, torch.randn(7, 5 * ranks, dtype=torch.float64)
    grad = torch.randn(7, 3 * own, dtype=torch.float64)
    expected = torch.zeros(3 * width, width, dtype=torch.float64)
    for s, part in enumerate(grad.split(own, 1)):
        expected[s * width + rank * own : s * width + (rank + 1) * own] = part.T @ x
    # Uninitialised memory is often zero, so fill it with NaN.
    monkeypatch.setattr(Tensor, "new_empty", lambda like, *shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    group = Group(None, rank, ranks)
    whole = zeros_but_own(torch.randn(3 * own, width), torch.float64, group)
    torch.testing.assert_close(weight_gradient(grad, x, group, whole), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind,ranks,heads,message",
    [
        ("fastseq", 3, 16, "fastseq: 16 heads .*3 ranks.*use ring or auto"),
        ("ulysses", 5, 16, "ulysses: 16 heads .*use ring or auto"),
        ("usp", 4, 5, "usp: 5 heads"),
        ("usp", 3, 6, "usp: 3 ranks are no grid.*use ring or auto"),
        ("usp", 2, 4, "usp: 2 ranks are no grid"),
        ("megatron", 2, 4, "choose one of auto, fastseq"),
    ],
)
def test_types_that_the_heads_forbid(kind, ranks, heads, message):
    with pytest.raises(ValueError, match=message):
        make_plan(kind, ranks, Shape(64, 64, heads))


def test_auto_takes_only_what_the_model_can_attend_by():
    """For a tiny model on 2 ranks ring is cheapest, but it needs its own attention kernel."""
    config = model_config("vDiT-Ti/122", input_size=(32, 32), in_channels=4, frames=4, num_classes=3, qk_norm=True)
    for attention, expected in (("auto", "ring"), ("flash", "ulysses")):
        types = ParallelFlags().sequence_types(config.sequence_types, attention)
        shape = Shape(config.tokens, config.hidden_size, config.num_heads, types=types)
        plan = make_plan("auto", 2, shape)
        config.check_sequence_parallel(plan.kind)
        assert plan.kind == expected and ("ring" in plan.reason) == (attention == "auto")
    with pytest.raises(ValueError, match="by fastseq, ulysses only, and its 4 heads can't .* use a size that divides"):
        make_plan("auto", 3, shape)
    with pytest.raises(ValueError, match="ulysses: 4 heads can't .* use a size that divides them"):
        make_plan("ulysses", 3, shape)


def test_groups_must_divide_the_heads_of_a_rank():
    assert make_plan("ulysses", 2, Shape(64, 64, 8), groups=4, hardware=HardwareModel(direct=True)).groups == 4
    with pytest.raises(ValueError, match="4 heads a rank can't be exchanged in 3 groups"):
        make_plan("ulysses", 2, Shape(64, 64, 8), groups=3)


def test_copy_engines_exchange_more_groups_than_collectives():
    """A Wan-1.3B clip with guidance on 2 ranks. With collectives, 4 groups were slower than 2."""
    shape = Shape(32760, 1536, 12, 2, types=("ulysses",), plain=False)
    assert make_plan("auto", 2, shape).groups == 2
    assert make_plan("auto", 2, shape, hardware=HardwareModel(engines=True)).groups == 4


def test_auto_takes_the_cheapest_that_the_heads_allow():
    sizes = itertools.product((2, 3, 4, 6, 8), (256, 8192, 65536), ((384, 6), (1152, 16), (3072, 24)))
    for direct, (ranks, tokens, (hidden, heads)) in itertools.product((False, True), sizes):
        shape, hardware = Shape(tokens, hidden, heads), HardwareModel(direct=direct)
        chosen, others = make_plan("auto", ranks, shape, hardware=hardware), []
        for kind in ("fastseq", "ulysses", "ring", "usp"):
            try:
                others.append(make_plan(kind, ranks, shape, hardware=hardware))
            except ValueError:
                assert chosen.kind != kind
        assert chosen.seconds == min(other.seconds for other in others)
        assert f"{chosen.kind} {chosen.seconds * 1e6:.0f}" in str(chosen)
    # FastSeq sends less below 3 ranks and Ulysses above; with this slow link only the volume matters.
    slow, shape = (
        HardwareModel(link=1e9, latency=0, matmul=1e18, attention=1e18, attention_backward=1e18),
        Shape(8192, 1152, 16),
    )
    assert [make_plan("auto", ranks, shape, hardware=slow).kind for ranks in (2, 4, 8)] == [
        "fastseq",
        "ulysses",
        "ulysses",
    ]


class LocalMemory:
    """A stand-in for torch's symmetric memory with one rank and no GPU."""

    def __init__(self, size: int, meet):
        self.buffer, self.barrier = torch.empty(size, dtype=torch.uint8), meet
        self.buffer_size, self.buffer_ptrs = size, [self.buffer.data_ptr()]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.buffer.view(dtype).view(sizes)


def test_a_recording_that_fails_in_a_layer_does_not_stop_the_next_one(monkeypatch):
    """No buffer may be used twice in a row; uses inside a CUDA graph are counted separately."""
    recording, barriers = [False], []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])

    def allocate(size: int, *_) -> tuple["LocalMemory", torch.Tensor]:
        made = LocalMemory(size, lambda channel: barriers.append(recording[0]))
        return made, made.buffer

    memory = PeerMemory(Group(None, 0, 1), torch.device("cpu"), allocate)
    for buffer in Buffer:
        memory.rows(buffer, (1, 1, 1, 1, 8), torch.float32)

    def use(*buffers: Buffer) -> None:
        for buffer in buffers:
            memory.ready(buffer)

    use(Buffer.INPUT, Buffer.OUTPUT)
    with pytest.raises(AssertionError, match="twice"):
        use(Buffer.OUTPUT)
    recording[0] = True
    use(Buffer.INPUT)  # the recording failed after this
    recording[0] = False
    use(Buffer.INPUT, Buffer.OUTPUT)
    with pytest.raises(AssertionError, match="twice"):
        use(Buffer.OUTPUT)
    assert barriers == [False, False, True, False, False]


@pytest.mark.parametrize(
    "size,world,message",
    [
        (2, 1, "needs 2 processes and there is one; .*nproc_per_node=2"),
        (2, 3, "does not divide the 3 processes"),
        (8, 4, "does not divide the 4 processes"),
        (0, 4, "out of range; give 1 or more"),
    ],
)
def test_sizes_that_do_not_fit_the_processes(size, world, message):
    with pytest.raises(ValueError, match=message):
        check_sequence_parallel(size, world)
    check_sequence_parallel(1, world)


def test_train_answers_before_anything_is_made(tmp_path, no_ranks, capsys, monkeypatch):
    monkeypatch.setattr(DiT, "__init__", lambda *args: pytest.fail("weights were made before the check"))
    monkeypatch.setattr(
        "opendit.training.data_plan.build_dataset", lambda *args, **kwargs: pytest.fail("a data set was made")
    )
    for words, message in (
        (["--sequence_parallel_size", "2"], "error: --sequence_parallel_size 2: needs 2 processes"),
        (
            ["--sequence_parallel_type", "ring"],
            "error: --sequence_parallel_type: does nothing without --sequence_parallel_size",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            train.main([*words, "--outputs", str(tmp_path)])
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_flags_of_a_run_that_fits(tmp_path):
    words = "--sequence_parallel_size 2 --sequence_parallel_type fastseq --keep_gathered".split()
    flags = parse(TrainConfig, [*words, "--outputs", str(tmp_path)])
    flags, _ = flags.resolve(world_size=4, has_gpu=False)
    assert (flags.sequence_parallel_size, flags.sequence_parallel_type, flags.keep_gathered) == (2, "fastseq", True)
    flags = dataclasses.replace(flags, sequence_parallel_type="ring")
    with pytest.raises(ValueError, match="--keep_gathered: .*ring gathers nothing"):
        flags.resolve(world_size=4, has_gpu=False)


def test_an_attention_that_is_asked_for_is_the_one_that_runs():
    words = "--sequence_parallel_size 2 --batch_size 1 --attention math --sequence_parallel_type".split()
    for kind in ("ring", "usp"):
        with pytest.raises(ValueError, match=f"--attention math: .*{kind} has a kernel of its own"):
            parse(TrainConfig, [*words, kind]).resolve(world_size=4, has_gpu=False)
    config = model_config("vDiT-Ti/122", input_size=(32, 32), in_channels=4, frames=4, num_classes=3)
    for options, kind in ((words[:4], "ring"), ([*words, "auto"], "ulysses")):  # ring is cheapest here
        flags = parse(TrainConfig, options)
        shape = sequence_shape(flags, flags.attention, flags.mixed_precision, config, 1)
        assert make_plan("auto", 2, shape).kind == kind
