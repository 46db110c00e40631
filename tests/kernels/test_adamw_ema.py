"""Test the fused optimizer step against AdamW, gradient clipping and moving averages written out in float64. The tests
run twice: here with torch, and in a separate process with the kernels in Triton's interpreter."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opendit.kernels.adamw_ema import FusedStep, constant_decays, momentum_reference
from opendit.kernels.common import TRITON, interpreting

SIZES = (1, 7, 1023, 1024, 1025, 5000, 0, 2048)
UNUSED = 3  # this tensor never gets a gradient
BETAS, EPS, LR, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 1e-2, 0.1
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


class Case:
    """Tensors of all sizes, the fused step that updates them, and a float64 copy of the state."""

    def __init__(self, device="cpu", gradient=BFLOAT16, working=BFLOAT16, decays=(0.9,), odd=True, sizes=SIZES, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.device, self.gradient_dtype, self.sizes = device, gradient, sizes
        # Every other tensor starts one element into its storage, so the kernel must not assume that it is aligned.
        self.shift = [i % 2 if odd else 0 for i in range(len(sizes))]
        self.masters = self.tensors()
        self.exp_avgs, self.exp_avg_sqs = self.tensors(0.0), self.tensors(0.0)
        self.working = None if working is None else self.tensors(math.nan, working)
        self.averages = [self.tensors() for _ in decays]
        self.count = torch.zeros((), device=device)
        self.updates = torch.zeros((), device=device)
        self.decays = decays
        self.step = FusedStep(
            self.masters, self.exp_avgs, self.exp_avg_sqs, self.working, count=self.count, betas=BETAS, eps=EPS,
            block=1024,
        )  # fmt: skip
        if decays:
            self.step.attach(self.averages, constant_decays(decays, torch.device(device)), self.updates)
        self.want = [[tensor.double() for tensor in tensors] for tensors in self.state()]

    def tensors(self, value=None, dtype=FLOAT32):
        made = []
        for size, shift in zip(self.sizes, self.shift, strict=True):
            values = (
                torch.randn(size + shift, generator=self.random)
                if value is None
                else torch.full((size + shift,), value)
            )
            made.append(values.to(self.device, dtype)[shift:])
        return made

    def state(self):
        return [self.masters, self.exp_avgs, self.exp_avg_sqs, *self.averages]

    def everything(self):
        """Return a copy of everything that a step may change."""
        tensors = [*sum(self.state(), []), *(self.working or []), self.count, self.updates]
        return [tensor.clone() for tensor in tensors]

    def gradients(self, size=0.1):
        gradients = [(size * g.float()).to(self.gradient_dtype) for g in self.tensors()]
        gradients = [g[:n] for g, n in zip(gradients, self.sizes, strict=True)]
        if len(gradients) > UNUSED:
            gradients[UNUSED] = None
        return gradients

    def run(self, gradients, *, scale=1.0, clip=0.0, lr=LR, parts=1):
        norm, finite = self.step.decide(self.step.square_sum(gradients), scale=scale, clip=clip)
        edges = [len(self.sizes) * part // parts for part in range(parts + 1)]
        for start, stop in zip(edges, edges[1:], strict=False):
            self.step.update(lr=lr, weight_decay=WEIGHT_DECAY, start=start, stop=stop)
        return norm, finite

    def run_in_float64(self, gradients, number, *, scale=1.0, clip=0.0, lr=LR):
        """Apply the formulas of the papers in float64, and return the gradient norm."""
        gradients = [None if g is None else g.double() / scale for g in gradients]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None))
        factor = clip / (norm + 1e-6) if 0 < clip < norm + 1e-6 else 1.0
        masters, exp_avgs, exp_avg_sqs, *averages = self.want
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                gradient = gradient * factor
                exp_avgs[i] = BETAS[0] * exp_avgs[i] + (1 - BETAS[0]) * gradient
                exp_avg_sqs[i] = BETAS[1] * exp_avg_sqs[i] + (1 - BETAS[1]) * gradient**2
                mean = exp_avgs[i] / (1 - BETAS[0] ** number)
                square = exp_avg_sqs[i] / (1 - BETAS[1] ** number)
                masters[i] = masters[i] * (1 - lr * WEIGHT_DECAY) - lr * mean / (square.sqrt() + EPS)
            for decay, shards in zip(self.decays, averages, strict=True):
                shards[i] = decay * shards[i] + (1 - decay) * masters[i]
        return norm

    def compare(self):
        for got, want in zip(self.state(), self.want, strict=True):
            largest = torch.cat(want).abs().max().item()
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=4e-6, atol=5e-7 * largest)
        # The interpreter truncates to bf16, whereas GPUs and torch round to nearest.
        rounding = 2**-7 if interpreting() else 0.0
        for copy, master in zip(self.working or [], self.masters, strict=False):
            torch.testing.assert_close(copy, master.to(copy.dtype), rtol=rounding, atol=0.0)


def check_against_float64(*, clip, scale=1.0, lrs=(1e-2, 3e-3, 1e-3), parts=1, **kind):
    case = Case(**kind)
    for number, lr in enumerate(lrs, start=1):
        gradients = case.gradients(0.1 * scale)
        given = torch.tensor([scale], device=case.device)
        norm, finite = case.run(gradients, scale=given, clip=clip, lr=lr, parts=parts)
        want = case.run_in_float64(gradients, number, scale=scale, clip=clip, lr=lr)
        assert norm.item() == pytest.approx(want, rel=1e-6) and finite.item()
        assert not 0 < want <= clip  # clipping takes effect if it is enabled
        case.compare()
    assert case.count.item() == len(lrs)
    assert case.updates.item() == (len(lrs) if case.decays else 0)


@pytest.mark.parametrize("gradient", (BFLOAT16, FLOAT16, FLOAT32), ids=str)
@pytest.mark.parametrize("working", (BFLOAT16, FLOAT16, FLOAT32, None), ids=str)
def test_steps_against_float64(gradient, working):
    check_against_float64(gradient=gradient, working=working, clip=0.5 if gradient == working else 0.0)


@pytest.mark.parametrize("decays", ((), (0.9,), (0.5, 0.99, 0.9999)), ids=len)
@pytest.mark.parametrize("odd", (False, True))
def test_any_number_of_averages(decays, odd):
    check_against_float64(decays=decays, odd=odd, clip=0.0)


@pytest.mark.parametrize("scale", (8.0, 1024.0))
def test_a_loss_scale_is_taken_out_before_clipping(scale):
    check_against_float64(gradient=FLOAT16, working=FLOAT16, scale=scale, clip=0.5)


@pytest.mark.parametrize("parts", (2, 5))
def test_part_by_part(parts):
    check_against_float64(clip=0.5, parts=parts)


def check_against_torch(device):
    """Assert that fp32 steps without averages match torch.optim.AdamW."""
    case = Case(device, FLOAT32, None, decays=(), odd=False)
    theirs = [master.clone().requires_grad_() for master in case.masters]
    adam = torch.optim.AdamW(theirs, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    for _ in range(5):
        gradients = case.gradients()
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        adam.step()
        case.run(gradients)
    for mine, parameter in zip(case.masters, theirs, strict=True):
        torch.testing.assert_close(mine, parameter.detach(), rtol=2e-6, atol=2e-7)


def test_it_is_torchs_adamw():
    check_against_torch("cpu")


def check_bad_steps_change_nothing(device, bad, gradient):
    """Take a good step, two bad ones and another good one; only the good ones may count."""
    case = Case(device, gradient)
    history = []
    for number in range(4):
        gradients = case.gradients()
        if number in (1, 2):
            gradients[5][-1] = bad
        before = case.everything()
        norm, finite = case.run(gradients, clip=0.5)
        same = [torch.equal(a, b) for a, b in zip(before, case.everything(), strict=True)]
        history.append((finite.item(), math.isfinite(norm.item()), all(same)))
        if finite:
            case.run_in_float64(gradients, case.count.item(), clip=0.5)
            case.compare()
    assert history == [(True, True, False), (False, False, True), (False, False, True), (True, True, False)]
    assert case.count.item() == case.updates.item() == 2


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("gradient", (BFLOAT16, FLOAT16), ids=str)
def test_bad_steps_change_nothing(bad, gradient):
    check_bad_steps_change_nothing("cpu", bad, gradient)


def test_decays_may_change_with_the_updates():
    case = Case(decays=(0.9,))
    case.step.attach(case.averages, lambda n: (n / (n + 10)).clamp(max=0.12).double().view(1), case.updates)
    for number, decay in enumerate((0.0, 1 / 11, 0.12, 0.12), start=1):
        gradients = case.gradients()
        case.run(gradients)
        case.decays = (decay,)
        case.run_in_float64(gradients, number)
        case.compare()


def test_no_gradient_at_all_moves_only_the_averages():
    case = Case()
    before = case.everything()
    norm, finite = case.run([None] * len(SIZES))
    case.run_in_float64([None] * len(SIZES), 1)
    assert norm.item() == 0 and finite.item()
    for a, b in zip(case.averages[0], case.want[3], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-7)
    kept = 3 * len(SIZES)
    assert all(torch.equal(a, b) for a, b in zip(before[:kept], case.everything()[:kept], strict=True))


def test_the_norm_has_the_same_bits_in_every_run():
    case = Case()
    gradients = case.gradients()
    sums = {case.step.square_sum(gradients).item() for _ in range(3)}
    moved = [None if g is None else torch.cat([g, g])[g.numel() :] for g in gradients]  # at other addresses
    assert len(sums | {case.step.square_sum(moved).item()}) == 1


def check_counted(device: str) -> None:
    """Assert that the norm leaves out tensors that other ranks count, but that their NaNs are still detected."""
    case = Case(device)
    gradients, largest = case.gradients(), case.sizes.index(max(case.sizes))
    counted = [i not in (0, largest) for i in range(len(case.sizes))]
    tensors = (case.masters, case.exp_avgs, case.exp_avg_sqs)
    step = FusedStep(*tensors, count=case.count, block=1024, counted=counted)
    pairs = [(g.double(), yes) for g, yes in zip(gradients, counted, strict=True) if g is not None]
    wanted, everything = (sum(g.square().sum() for g, yes in pairs if yes or also) for also in (False, True))
    assert everything > 1.1 * wanted
    torch.testing.assert_close(step.square_sum(gradients), wanted, rtol=1e-5, atol=0)
    gradients[0][0] = math.nan
    assert not counted[0] and step.square_sum(gradients).isnan()


def test_some_squares_are_others_to_count():
    check_counted("cpu")


def check_directions(device: str, gradient: torch.dtype) -> None:
    """Check tensors without second moments, as for Muon. Their momentum keeps the scale of the gradients, and they move
    in the direction that is then written. All other tensors take an AdamW step."""
    case, directed, momentum, scale = Case(device, gradient), (1, 4, 5), 0.9, 64.0
    squares = [None if i in directed else square for i, square in enumerate(case.exp_avg_sqs)]
    case.step = FusedStep(
        case.masters, case.exp_avgs, squares, case.working, count=case.count, betas=BETAS, eps=EPS, block=1024
    )
    case.step.attach(case.averages, constant_decays(case.decays, torch.device(device)), case.updates)
    for number in (1, 2):
        gradients, before = case.gradients(0.1 * scale), [[t.clone() for t in tensors] for tensors in case.want]
        norm = case.run_in_float64(gradients, number, scale=scale, clip=0.5)
        factor = 0.5 / (norm + 1e-6) / scale
        case.step.decide(
            case.step.square_sum([g if g is None else g.clone() for g in gradients]), scale=scale, clip=0.5
        )
        moved = case.step.momentum(momentum)
        (masters, exp_avgs, _, averages), old = case.want, before
        for i, given in enumerate(gradients):
            if i not in directed:
                assert (moved[i] is None) if given is None else torch.equal(moved[i], given)
                continue
            own = factor * given.double()
            exp_avgs[i] = momentum * old[1][i] + (1 - momentum) * own
            nesterov = ((1 - momentum) * own + momentum * exp_avgs[i]) / factor
            rounding = 4e-6 if gradient == FLOAT32 else 2**-7
            torch.testing.assert_close(moved[i].double(), nesterov, rtol=rounding, atol=1e-6 * scale)
            moved[i].copy_(torch.randn(moved[i].shape, generator=case.random))
            masters[i] = old[0][i] * (1 - LR * WEIGHT_DECAY) - LR * moved[i].double()
            averages[i] = case.decays[0] * old[3][i] + (1 - case.decays[0]) * masters[i]
            case.want[2][i] = old[2][i]
        case.step.update(lr=LR, weight_decay=WEIGHT_DECAY)
        case.compare()
    before = case.everything()
    gradients[0][0] = math.nan
    case.step.decide(case.step.square_sum(gradients), scale=scale)
    case.step.momentum(momentum)
    case.step.update(lr=LR, weight_decay=WEIGHT_DECAY)
    assert all(torch.equal(a, b) for a, b in zip(before, case.everything(), strict=True))


@pytest.mark.parametrize("gradient", (BFLOAT16, FLOAT16, FLOAT32), ids=str)
def test_tensors_without_second_moments_go_where_they_are_told(gradient):
    check_directions("cpu", gradient)


def test_momentum_of_larger_gradients_stays_finite_in_fp16():
    gradient, exp_avg = torch.full((4,), 100.0, dtype=FLOAT16), torch.full((4,), 1e6)
    momentum_reference(gradient, exp_avg, 0.9, 1.0)
    assert gradient.isfinite().all() and (gradient > 6e4).all()


def test_what_does_not_fit_is_refused():
    case = Case()
    with pytest.raises(ValueError, match="several dtypes"):
        case.step.square_sum([g if g is None or i else g.double() for i, g in enumerate(case.gradients())])
    with pytest.raises(ValueError, match="2 elements for a master of 1"):
        case.step.square_sum([torch.zeros(2, dtype=BFLOAT16), *case.gradients()[1:]])
    with pytest.raises(ValueError, match="averages: 1 tensors"):
        case.step.attach([case.averages[0][:1]], case.step.decays, case.updates)
    with pytest.raises(ValueError, match="expected torch.float32"):
        case.step.attach([case.working], case.step.decays, case.updates)
    column = torch.zeros(7, 2)[:, 0]
    with pytest.raises(ValueError, match="not contiguous"):
        case.step.attach([[*case.averages[0][:1], column, *case.averages[0][2:]]], case.step.decays, case.updates)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.skipif(interpreting(), reason="already in the interpreter")
def test_the_kernels_in_the_interpreter():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    names = ("adamw_ema", "averages", "eight_bit_moments")
    files = [f"tests/kernels/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout[-2000:]
