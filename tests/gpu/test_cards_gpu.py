"""Test LoRA's frozen blocks on a GPU, kept in host memory or stored in fewer bits. Blocks in host memory give the same
bits as resident ones, with less GPU memory. The kernels for stored weights match their references."""

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.encoders.folder import transformers_model
from opendit.kernels import base_precision as stored
from opendit.kernels.common import interpreting, kernels_available
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.recording import GraphRecorder
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextCondition
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.models.finetuning import B, Lora, add_lora
from opendit.parallel.apply import apply_parallel
from opendit.parallel.host_memory import StreamedBlocks
from opendit.parallel.tensor import allocate
from opendit.training.prepare import make_deterministic
from tests.models.families.oracles import FLUX

AVAILABLE, REASON = kernels_available("cuda", torch.bfloat16)
pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason=REASON)
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
VALUES = FLUX | dict(num_layers=3, num_single_layers=5, attention_head_dim=128, num_attention_heads=8)
VALUES |= dict(axes_dims_rope=(16, 56, 56))


@pytest.fixture(autouse=True)
def deterministic():
    """Make attention add gradients in a fixed order."""
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)


def config():
    return public_config("flux", VALUES, (32, 32))


def values():
    """Return a value for every parameter, on the GPU, with nonzero LoRA."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    with torch.device("meta"):
        model = PublicDiT(config())
    add_lora(model, Lora(4, 8.0, ""), (), seed=0)
    found = {}
    for name, parameter in model.named_parameters():
        numbers = torch.randn(parameter.shape, device=DEVICE, generator=generator)
        found[name] = (0.02 * numbers + (1.0 if "norm" in name and not name.endswith(B) else 0)).to(DTYPE)
    return found


def model_of(kind, offload, float8):
    with torch.device("meta"):
        model = PublicDiT(config()).to(DTYPE)
    add_lora(model, Lora(4, 8.0, ""), (), seed=0)
    if kind != "bf16":
        stored.store_base(model, kind, DTYPE, DEVICE)
    speed = SpeedFlags(True, True, True, fp8=float8, attention="flash")
    kernels = select_kernels(speed, DEVICE, DTYPE, 128, model.config.tokens)
    apply_parallel(model, ops=kernels.ops, attend=kernels.attend, grad_checkpoint=True)
    streamed = StreamedBlocks(model, offload, DEVICE) if offload else None
    allocate(model, DEVICE)
    layers, found = dict(stored.base_layers(model)), values()
    for name, parameter in model.named_parameters():
        part = parameter.data if streamed is None else streamed.host.get(name, parameter.data)
        if name in layers:
            layers[name].store(part, found[name], torch.clone)
        else:
            part.copy_(found[name])
    del found
    return model.train()


def steps(model):
    """Return the losses and gradients of some steps, and the peak memory."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    y = TextCondition(
        torch.randn(1, 64, VALUES["joint_attention_dim"], device=DEVICE, generator=generator),
        torch.ones(1, 64, dtype=torch.bool, device=DEVICE),
        torch.randn(1, VALUES["pooled_projection_dim"], device=DEVICE, generator=generator),
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(4):
        x = torch.randn(1, VALUES["in_channels"] // 4, 32, 32, device=DEVICE, generator=generator)
        loss = model(x, torch.full((1,), 300.0 + step, device=DEVICE), y).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    return (
        losses,
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        torch.cuda.max_memory_allocated(),
    )


FLOAT8 = pytest.param(True, marks=pytest.mark.skipif(not float8_available(DEVICE, DTYPE)[0], reason="no FP8 products"))


@pytest.mark.parametrize("kind", ("bf16", "fp8", "int8", "nf4"))
@pytest.mark.parametrize("float8", (False, FLOAT8))
def test_streamed_blocks_have_the_bits_of_resident_ones(kind, float8):
    wanted, gradients, before = steps(model_of(kind, 0, float8))
    for count in (8, 3):
        found, other, peak = steps(model_of(kind, count, float8))
        assert found == wanted and other.keys() == gradients.keys()
        assert all(torch.equal(other[name], gradients[name]) for name in gradients)
        assert peak < before or count == 3


@pytest.mark.parametrize("count", (8, 2))
def test_a_recorded_step_copies_its_blocks(count):
    """Record a CUDA graph of a step, and run passes between its replays that leave other blocks in the ring buffer."""
    whole, model, recorder = model_of("nf4", 0, False), model_of("nf4", count, False), GraphRecorder()
    # Hooks cut the stack as streaming does. Blocks fused with the next would round differently.
    for block in whole.blocks:
        block.register_forward_pre_hook(lambda *_: None)
    x, t = torch.empty(1, VALUES["in_channels"] // 4, 32, 32, device=DEVICE), torch.full((1,), 300.0, device=DEVICE)
    y = TextCondition(
        torch.ones(1, 64, VALUES["joint_attention_dim"], device=DEVICE),
        torch.ones(1, 64, dtype=torch.bool, device=DEVICE),
        torch.ones(1, VALUES["pooled_projection_dim"], device=DEVICE),
    )

    def step(of):
        of.zero_grad(set_to_none=True)
        loss = of(x, t, y).float().square().mean()
        loss.backward()
        return loss.detach()

    x.normal_()
    with recorder.side_stream():
        for _ in range(3):
            step(model)
    found, replay = recorder.record(lambda: step(model))
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for _ in range(4):
        x.normal_()
        replay()
        kept = {name: gradient.clone() for name, gradient in gradients.items()}
        assert torch.equal(found, step(whole))
        assert all(torch.equal(kept[n], p.grad) for n, p in whole.named_parameters() if p.grad is not None)
        with torch.no_grad():
            equal = torch.equal(model(x, t, y), whole(x, t, y))
        assert equal


@pytest.mark.parametrize("kind", ("int8", "nf4"))
def test_the_kernel_has_the_references_bits(kind):
    for shape in ((3072, 12288), (9216, 3072), (7, 2050)):
        weight = 0.02 * torch.randn(shape, device=DEVICE)
        rows = stored.quantise(weight, kind)
        assert torch.equal(rows.cpu(), stored.quantise(weight.cpu(), kind))
        scale = torch.ones(1, device=DEVICE)
        found = stored.dense(rows, kind, shape[1], DTYPE, scale)
        assert torch.equal(found, stored.dense_reference(rows, kind, shape[1], DTYPE, scale))


@pytest.mark.parametrize(("rows", "shape"), ((1, (9216, 3072)), (7, (18432, 3072)), (64, (304, 1168))))
def test_a_weight_in_float8_is_read_in_place(rows, shape):
    """All codes are dequantised exactly, and products with few rows read the float8 weight directly."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    codes[codes & 127 == 127] = 0  # not NaN
    descale = torch.tensor([2.0**-9], device=DEVICE)
    weight = stored.BaseWeight(codes.view(DTYPE), "fp8", shape[1], descale)
    exact = codes.view(torch.float8_e4m3fn).double() * 2.0**-9
    assert torch.equal(weight.dense().double(), exact)
    x, bias = torch.randn(rows, shape[1], device=DEVICE, dtype=DTYPE), torch.randn(shape[0], device=DEVICE, dtype=DTYPE)
    want = x.double() @ exact.t() + bias.double()
    assert (weight.product(x, bias).double() - want).norm() < 5e-3 * want.norm()


@pytest.mark.parametrize("kind", ("fp8", "int8", "nf4"))
def test_text_encoders_are_quantised_on_the_gpu(kind, tmp_path):
    """A T5 quantised on the GPU has the same bytes as on the CPU, and its embeddings match the dequantised weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=64, d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4)
    transformers.T5EncoderModel(config).bfloat16().save_pretrained(tmp_path)
    how = tmp_path, "T5EncoderModel", "model", DTYPE
    plain = transformers_model(*how).to(DEVICE).eval()
    found, there = (transformers_model(*how, kind, device).to(DEVICE).eval() for device in (DEVICE, "cpu"))
    for (name, layer), (_, other) in zip(stored.base_layers(found), stored.base_layers(there), strict=True):
        assert torch.equal(layer.weight.view(torch.uint8), other.weight.view(torch.uint8)), name
        plain.get_parameter(name).data.copy_(layer.matrix.dense())
    words = torch.arange(48, device=DEVICE).view(2, 24)
    with torch.no_grad():
        one, two = (model(input_ids=words).last_hidden_state for model in (found, plain))
    torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ("fp8", "nf4"))
def test_float8_products_of_stored_weights_are_near_those_of_dense_ones(kind):
    if not float8_available(DEVICE, DTYPE)[0]:
        pytest.skip("no FP8 products")
    wanted, gradients, _ = steps(model_of(kind, 0, False))
    found, other, _ = steps(model_of(kind, 0, True))
    assert all(abs(one / two - 1) < 0.03 for one, two in zip(found, wanted, strict=True))
    errors = sorted(float((other[n] - gradients[n]).norm() / gradients[n].norm()) for n in gradients)
    assert errors[len(errors) // 2] < 0.15
