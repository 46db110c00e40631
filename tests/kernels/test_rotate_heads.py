"""Test rotate_heads in Triton's interpreter against float64, and models with and without it."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from opendit.config.components import SpeedFlags
from opendit.kernels import operations
from opendit.kernels.common import Launch, forced_launch
from opendit.kernels.rotate_heads import fits_across, rotate_heads, rotate_heads_reference
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextCondition
from opendit.models.dit import DiTConfig
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.models.layers import TORCH_OPS, RMSNorm
from opendit.models.positions import grid_coordinates, rotary_table
from opendit.models.zoo import build_model
from tests.kernels.cases import DTYPES, check_rotate_heads, pairwise, rotate_heads_inputs
from tests.models.families.oracles import COSMOS2, FLUX, LTX, SD3, WAN, Z_IMAGE
from tests.models.test_dit import randomised

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
SMALL = {f"rotate_heads_{way}": Launch(rows=4, tiles=2, warps=1) for way in ("forward", "backward")}
HEADS = (64, 72, 80, 96, 128, 256, 10)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "head_dim", "dtype", "norm", "table", "layout"),
    pairwise(
        (1, 3),
        (1, 7, 13),
        ((1, 1), (2, 2), (3, 3), (5, 5), (4, 2)),
        HEADS,
        DTYPES,
        (None, "head", "across"),
        (None, "shared", "of samples"),
        ("projection", "heads first", "inside out"),
        allowed=lambda *row: row[5] is not None or row[6] is not None,
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_forward_and_gradients(batch, length, heads, head_dim, dtype, norm, table, layout):
    with forced_launch(**SMALL):
        check_rotate_heads(batch, length, heads, head_dim, dtype, norm, table, layout)


@pytest.mark.parametrize("norm", ("head", "across"))
def test_default_launch(norm):
    check_rotate_heads(2, 23, (5, 5), 72, BFLOAT16, norm, "shared", weight_dtype=FLOAT32)


def test_tables_that_are_parts_of_longer_ones():
    """Use views, as the streams of a joint block do."""
    (qkv, q_weight, k_weight), _ = arguments(requires_grad=False)
    q, k, _ = qkv.unflatten(-1, (3, 3, 8)).unbind(2)
    of_samples = torch.randn(2, 9, 4, 2)
    for table in (of_samples, of_samples[0], of_samples[:1].expand(2, -1, -1, -1), of_samples.mT.contiguous().mT):
        part = table[..., 3:8, :, :]
        want = rotate_heads_reference(q, k, q_weight, k_weight, part)
        for a, b in zip(rotate_heads(q, k, q_weight, k_weight, part), want, strict=True):
            torch.testing.assert_close(a, b)


def test_norms_of_heads_of_an_odd_size():
    check_rotate_heads(2, 3, (2, 2), 27, FLOAT32, "head", None)


@pytest.mark.parametrize("across", (False, True))
def test_epsilon_counts(across):
    """With values this small, epsilon dominates the norm."""
    q, k, *weights = (x * 1e-3 for x in rotate_heads_inputs(1, 3, (2, 2), 8, FLOAT32, "across" if across else "head"))
    for eps in (1e-6, 1e-5):
        got = rotate_heads(q, k, *weights, eps=eps, across=across)
        want = rotate_heads_reference(*(x.double() for x in (q, k, *weights)), eps=eps, across=across)
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def arguments(norm: str = "head", requires_grad: bool = True):
    torch.manual_seed(0)
    width = 3 * 8 if norm == "across" else 8
    qkv, *weights = torch.randn(2, 5, 3 * 24), torch.randn(width), torch.randn(width)
    return [x.requires_grad_(requires_grad) for x in (qkv, *weights)], rotary_table(grid_coordinates(5), 8)


def rotated(qkv, q_weight, k_weight, table, across=False, function=rotate_heads):
    q, k, v = (qkv * 1.5).unflatten(-1, (3, 3, 8)).unbind(2)
    q, k = function(q, k, q_weight, k_weight, table, 1e-6, across)
    return (q * k.roll(1, 1) + v) * 0.5


@pytest.mark.parametrize("norm", ("head", "across"))
@pytest.mark.parametrize("mode", ("eager", "checkpoint", "compile eager", "compile aot_eager"))
def test_under_what_models_run_in(mode, norm):
    leaves, table = arguments(norm)
    run = rotated
    if mode == "checkpoint":
        run = lambda *args: checkpoint(rotated, *args, use_reentrant=False)  # noqa: E731
    elif mode.startswith("compile"):
        run = torch.compile(rotated, backend=mode.split()[1], fullgraph=True)
    got = run(*leaves, table, norm == "across")
    want = rotated(*leaves, table, norm == "across", rotate_heads_reference)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(out, leaves, weight) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_that_are_not_trained_and_outputs_that_are_not_used():
    (qkv, q_weight, k_weight), table = arguments()
    for used in (0, 1):
        found = []
        for function in (rotate_heads, rotate_heads_reference):
            q, k, _ = qkv.unflatten(-1, (3, 3, 8)).unbind(2)
            outputs = function(q, k, q_weight.detach(), k_weight.detach(), table)
            found.append(torch.autograd.grad(outputs[used].square().sum(), qkv)[0])
        torch.testing.assert_close(*found)


def kept_bytes(function) -> int:
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sum(kept.values())


def test_keeps_what_it_is_given_alone():
    (qkv, q_weight, k_weight), table = arguments()
    q, k, _ = qkv.unflatten(-1, (3, 3, 8)).unbind(2)
    constants = 4 * (2 * 8 + table.numel())
    assert kept_bytes(lambda: rotate_heads(q, k, q_weight, k_weight, table)) == 4 * qkv.numel() + constants
    assert kept_bytes(lambda: rotate_heads(q, k, table=table)) == 4 * table.numel()


def test_registered_as_torch_wants_it():
    (qkv, q_weight, k_weight), table = arguments()
    q, k, _ = qkv.detach().unflatten(-1, (3, 3, 8)).unbind(2)
    rows = q.requires_grad_(), k.requires_grad_()
    for given in ((q_weight, k_weight, table), (q_weight, k_weight, None), (None, None, table)):
        torch.library.opcheck(torch.ops.opendit.rotate_heads.default, (*rows, *given, 1e-6, False))


def test_wrong_inputs_are_refused():
    (qkv, weight, _), table = arguments(requires_grad=False)
    q, k, _ = qkv.unflatten(-1, (3, 3, 8)).unbind(2)
    wide = torch.randn(1, 1, 65, 128)
    assert fits_across(64, 128) and not fits_across(65, 128)
    for given in (
        (q[0], k[0]),
        (q, k[:, :4]),
        (q, k[..., :6]),
        (q, k.half()),
        (q.double(), k.double(), None, None, table),
        (q, k, weight, None, table),
        (q, k, weight[:6], weight, table),
        (q, k, weight, weight, None, 1e-6, True),
        (q, k, weight.double(), weight, table),
        (q, k, None, None, table[:4]),
        (q, k, None, None, table.double()),
        (q[..., :7], k[..., :7], None, None, table[:, :3]),
        (wide, wide, torch.randn(65 * 128), torch.randn(65 * 128), None, 1e-6, True),
    ):
        with pytest.raises(ValueError):
            rotate_heads(*given)


# ------------------------------------------------------------------------------------------------------------- models


def test_norms_of_some_of_the_channels_are_torchs():
    """Tensor-parallel ranks sum the squares over all heads, which no kernel does."""
    torch.manual_seed(0)
    x, norm = torch.randn(1, 2, 3, 4), RMSNorm(12)
    norm.sum_of_ranks = lambda squares: 2 * squares
    q, k = operations.chosen({operations.MODULATE}).normalise_rotate(x, x, norm, norm, None, True)
    want = norm(x.flatten(2)).unflatten(2, (3, 4))
    assert torch.equal(q, want) and torch.equal(k, want)


def outputs_and_gradients(model, given) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = model(*given)
    output.square().mean().backward()
    return {"output": output.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def randomise(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def public(family: str):
    """Return a model of the family with widths that the other kernels support, and its inputs."""
    values, shape, width = {
        "flux": (FLUX | {"num_attention_heads": 6}, (4, 4, 6), "joint_attention_dim"),
        "z_image": (Z_IMAGE | {"dim": 72, "n_heads": 6, "n_kv_heads": 6}, (4, 4, 6), "cap_feat_dim"),
        "wan": (WAN | {"num_attention_heads": 5, "ffn_dim": 72}, (4, 2, 4, 6), "text_dim"),
        "cosmos2": (COSMOS2 | {"num_attention_heads": 5}, (4, 4, 6), "text_embed_dim"),
        "sd3": (SD3 | {"num_attention_heads": 6, "caption_projection_dim": 72}, (4, 4, 6), "joint_attention_dim"),
        "ltx": (
            LTX | {"num_attention_heads": 4, "attention_head_dim": 18, "cross_attention_dim": 72},
            (6, 2, 2, 3),
            "caption_channels",
        ),
    }[family]
    model = randomise(PublicDiT(public_config(family, values, shape[1:])))
    torch.manual_seed(0)
    tokens, mask = torch.randn(2, 40, values[width]), torch.arange(40) < torch.tensor([5, 37])[:, None]
    pooled = torch.randn(2, values.get("pooled_projection_dim", 0))
    text = TextCondition(tokens, mask, pooled, torch.tensor([1.5, 4.0]) if family == "flux" else None)
    return model, (torch.randn(2, *shape), torch.tensor([20.0, 700.0]), text)


def dit(**options):
    config = DiTConfig((4, 4), 2, 2, 72, 2, 3, num_classes=3, **options)
    torch.manual_seed(0)
    return randomise(randomised(build_model(config))), (
        torch.randn(3, 2, 4, 4), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 3]),
    )  # fmt: skip


MODELS = {
    "flux": lambda: public("flux"),
    "z_image": lambda: public("z_image"),
    "wan": lambda: public("wan"),
    "ltx": lambda: public("ltx"),
    "sd3": lambda: public("sd3"),
    "cosmos2": lambda: public("cosmos2"),  # its norm and rotation are separate calls
    "dit": lambda: dit(qk_norm=True, positions="rope"),
    "dit without norms": lambda: dit(positions="rope"),
    "dit without rotations": lambda: dit(qk_norm=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_it_are_those_without(name):
    """Test with this kernel alone and with all kernels."""
    model, given = MODELS[name]()
    want = outputs_and_gradients(model, given)
    kernel = next(k for k in operations.KERNELS if k.operation == "normalise_rotate")
    calls = []

    def counted(*args):
        calls.append(args)
        return kernel.function(*args)

    choice = select_kernels(SpeedFlags(True, True, True), CPU, FLOAT32, 12, 16)
    assert choice.ops.kernel("normalise_rotate") is kernel
    for ops in (replace(TORCH_OPS, normalise_rotate=counted), choice.ops):
        model.use(ops=ops, attend=choice.attend)
        got = outputs_and_gradients(model, given)
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=1e-3, atol=2e-5, msg=lambda m, n=key: f"{n}: {m}")
    only_normalised = name in ("dit without rotations", "sd3", "cosmos2")  # in some calls
    assert calls and any(call[4] is None for call in calls) == only_normalised
    assert any(call[5] for call in calls) == (name == "wan")
