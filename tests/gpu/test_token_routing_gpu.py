"""Test routed blocks with kernels on a GPU against torch."""

from dataclasses import replace

import pytest
import torch

from opendit.config.components import SpeedFlags, TokenRoute
from opendit.diffusion.random import draw_kept_tokens
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiTConfig
from opendit.models.segments import Segments
from opendit.models.zoo import build_model
from tests.models.test_dit import randomised

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def compare(config, route, loss):
    """Assert that gradients with kernels in bf16 are as close to fp32 as those of torch in bf16. loss: function of the
    model and the dtype of its input."""
    found = []
    for kernels, dtype in ((False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)):
        model = randomised(build_model(config, 0)).place("cuda", dtype)
        model.route = route.first, route.last
        on = SpeedFlags(kernels, kernels, kernels, False)
        chosen = select_kernels(on, torch.device("cuda"), dtype, config.head_dim, config.tokens)
        model.use(ops=chosen.ops, attend=chosen.attend)
        loss(model, dtype).backward()
        found.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    exact, plain, fused = found
    errors = [float((each - exact).norm() / exact.norm()) for each in (plain, fused)]
    print("relative errors of the gradients in bf16: torch, kernels", errors)
    assert errors[1] < 1.2 * errors[0] + 1e-3


@pytest.mark.parametrize(
    "options", [{}, {"norm": "rms", "mlp": "swiglu", "positions": "rope", "qk_norm": True}, {"sprint": (1, 5)}]
)
def test_kernels_give_the_gradients_of_torch_within_bf16(options):
    config = DiTConfig((32, 32), 2, 4, 384, 6, 6, num_classes=10, **options)
    route, index = TokenRoute(1, 5, 0.5), torch.arange(8, device="cuda")
    more = {"dropped": index % 3 == 0} if "sprint" in options else {}
    kept = draw_kept_tokens(route, config.tokens, 0, 1, index)
    assert torch.equal(kept.cpu(), draw_kept_tokens(route, config.tokens, 0, 1, index.cpu()))
    x, t = torch.randn(8, 4, 32, 32, device="cuda"), torch.rand(8, device="cuda") * 1000
    weights = torch.randn(8, config.out_channels, 32, 32, device="cuda")
    compare(
        config, route, lambda model, dtype: (model(x.to(dtype), t, index, kept=kept, **more).float() * weights).sum()
    )


@pytest.mark.parametrize("options", [{}, {"positions": "rope", "sprint": (1, 5)}], ids=str)
def test_kernels_give_the_gradients_of_torch_in_packs(options):
    config, route = DiTConfig((32, 32), 2, 4, 384, 6, 6, num_classes=10, **options), TokenRoute(1, 5, 0.5)
    sizes = [(32, 32)] * 4 + [(16, 48)] * 3 + [(10, 6), (2, 2)]
    index = torch.arange(len(sizes), device="cuda")
    segments = Segments.of(sizes, config.patch, 2048)
    kept = [
        draw_kept_tokens(route, length, 0, 1, index[i : i + 1])[0] + segments.offsets[i]
        for i, length in enumerate(segments.lengths)
    ]
    segments = replace(segments, kept=tuple(map(len, kept)))
    more = {"kept": torch.cat(kept)[None], **({"dropped": index % 3 == 0} if "sprint" in options else {})}
    x, t = torch.randn(2048, 4, 2, 2, device="cuda"), torch.rand(len(sizes), device="cuda") * 1000
    weights = torch.randn(2048, config.out_channels, 2, 2, device="cuda")
    weights[segments.filled :] = 0
    compare(
        config, route, lambda model, dtype: (model(x.to(dtype), t, index, segments, **more).float() * weights).sum()
    )
