"""Compare our implementations of public models with diffusers' in forward passes, latents and training steps.

    python benchmarks/bench_public.py [--models flux wan-1.3b z-image] [--train] [--lora 16] [--results FILE]
    python benchmarks/bench_public.py --tiny

The networks have the published sizes and share random weights, which are rounded to bf16. diffusers' network has the
dtypes from ``from_pretrained(torch_dtype=torch.bfloat16)``. It runs eagerly, and with compiled blocks as in
``compile_repeated_blocks()``. It uses cuDNN's attention, the fastest one here. In training it uses torch's flash
attention, because cuDNN's gradients are wrong under torch.compile. Our network runs eagerly, and as a CUDA graph.

All variants of the forward pass take turns in one process, for --rounds rounds. A turn is calls back to back for about
--seconds_a_turn seconds. The median over the rounds is reported. "Floor" is a CUDA graph of only the forward pass's
matrix products and attention. It is timed in the same rounds, because a GPU slows down when it reaches its power limit.
"Modulated beforehand" excludes the embeddings of time and captions, as in sampling.

With --lora RANK, our forward and backward pass with LoRA takes turns with its floor, with all activations kept and with
recomputed blocks. This floor has the forward pass's products and attention, the products of the inputs' gradients, and
attention's backward pass, but no gradients of weights. Recomputation adds the forward pass once more.

Differences of outputs and latents are relative to the RMS of diffusers' eager results. To show the effect of rounding
alone, diffusers' two variants are also compared with each other, and with diffusers' network in fp32 with TF32
products. Latents are drawn in fp32, without a second pass for guidance. In bf16, diffusers' FLUX.1 also rounds the
time; "rounded times" are our latents with the same rounding.

Each part prints its line and appends its rows as soon as it is done. A part that fails prints one line, and the other
parts still run. After --seconds no new part begins."""

import argparse
import contextlib
import gc
import importlib
import json
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from benchmarks.results import add_flags, record
from opendit.checkpoint.matched import check_matched
from opendit.config.components import SpeedFlags
from opendit.diffusion.objectives.base import sample_latents
from opendit.diffusion.objectives.flow import FlowObjective, empirical_shift, published_schedule
from opendit.diffusion.random import initial_noise
from opendit.kernels.fp8 import keep_weights
from opendit.kernels.recording import GraphRecorder
from opendit.kernels.select import select_kernels
from opendit.models.blocks import MLPS, BlockSpec
from opendit.models.conditioning import TextCondition
from opendit.models.families import FAMILIES
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.models.finetuning import Lora, add_lora
from opendit.sampling.sampling_engine import SamplingEngine

if TYPE_CHECKING:
    from diffusers import ModelMixin

SEED, TIME, GUIDANCE = 0, 500.0, 4.0  # TIME, and GUIDANCE times 1000, are exact in bf16
COMPILE_SECONDS = 45  # compiling starts only if this much time is left
OURS, RECORDED, PLAIN = "ours", "ours recorded", "ours without kernels"
BEFOREHAND, FLOAT8 = "ours modulated beforehand", "ours in FP8 modulated beforehand"
ENGINE, ENGINE_FLOAT8 = "sampling engine", "sampling engine in FP8"
FLOOR = "products and attention alone"
EAGER, COMPILED = "diffusers eager", "diffusers compiled"
INFERENCE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
TRAINING = INFERENCE[1:]
Network = Callable[[Tensor, Tensor], Tensor]  # (latents (B, C, ...), times in [0, 1000]) -> noise - data

# ------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Subject:
    """A public model, and the sizes at which it is measured.

    Attributes:
        values: the contents of config.json.
        size: sides of the latents.
        tokens: the caption's tokens.
        scheduler: diffusers' scheduler, as (class, settings); None: no latents are drawn.
        rounds_times: True if diffusers' network rounds times in bf16.
        trains: True if --train measures the model.
        pixels: pixels per latent along a side.
    """

    title: str
    family: str
    values: dict[str, Any]
    size: tuple[int, ...]
    tokens: int
    scheduler: tuple[str, dict[str, Any]] | None = None
    steps: int = 0
    rounds_times: bool = False
    trains: bool = False
    pixels: int = 8

    @property
    def where(self) -> str:
        sides = "x".join(str(self.pixels * side) for side in self.size[-2:])
        if self.family == "z_image":  # its captions are not padded to a fixed length
            return f"{sides}, {self.tokens} tokens"
        return f"{4 * (self.size[0] - 1) + 1} frames {sides}" if len(self.size) == 3 else sides


EULER = (
    "FlowMatchEulerDiscreteScheduler",
    dict(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256,
         max_image_seq_len=4096),
)  # fmt: skip
UNIPC = ("UniPCMultistepScheduler", dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0))
SUBJECTS = {
    "flux": Subject(
        "FLUX.1", "flux",
        dict(in_channels=64, num_layers=19, num_single_layers=38, attention_head_dim=128, num_attention_heads=24,
             joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True, axes_dims_rope=(16, 56, 56)),
        (128, 128), 512, EULER, 28, rounds_times=True,
    ),
    "wan-1.3b": Subject(
        "Wan-1.3B", "wan",
        dict(patch_size=(1, 2, 2), num_attention_heads=12, attention_head_dim=128, in_channels=16, out_channels=16,
             text_dim=4096, freq_dim=256, ffn_dim=8960, num_layers=30, rope_max_seq_len=1024),
        (21, 60, 104), 512, UNIPC, 10, trains=True,
    ),
    "z-image": Subject(
        "Z-Image", "z_image",
        dict(in_channels=16, dim=3840, n_layers=30, n_refiner_layers=2, n_heads=30, n_kv_heads=30, cap_feat_dim=2560,
             axes_dims=[32, 48, 48], axes_lens=[1024, 512, 512]),
        (128, 128), 512,
    ),
    "qwen-image": Subject(
        "Qwen-Image", "qwen_image",
        dict(in_channels=64, out_channels=16, num_layers=60, attention_head_dim=128, num_attention_heads=24,
             joint_attention_dim=3584, axes_dims_rope=(16, 56, 56)),
        (128, 128), 512,
    ),
    "klein-4b": Subject(
        "FLUX.2 klein 4B", "flux2",
        dict(in_channels=128, num_layers=5, num_single_layers=20, attention_head_dim=128, num_attention_heads=24,
             joint_attention_dim=7680, axes_dims_rope=(32, 32, 32, 32), guidance_embeds=False),
        (64, 64), 512, EULER, 4, rounds_times=True, pixels=16,
    ),
    "ti2v-5b": Subject(
        "Wan-TI2V-5B", "wan",
        dict(patch_size=(1, 2, 2), num_attention_heads=24, attention_head_dim=128, in_channels=48, out_channels=48,
             text_dim=4096, freq_dim=256, ffn_dim=14336, num_layers=30, rope_max_seq_len=1024),
        (31, 44, 80), 512, ("UniPCMultistepScheduler", UNIPC[1] | dict(flow_shift=5.0)), 10, pixels=16,
    ),
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "flux": dict(
        values=dict(in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
                    joint_attention_dim=14, pooled_projection_dim=10, axes_dims_rope=(4, 6, 6)),
        size=(8, 12), tokens=7, steps=6,
    ),
    "wan-1.3b": dict(
        values=dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=10,
                    freq_dim=16, ffn_dim=36, num_layers=2, rope_max_seq_len=16),
        size=(3, 6, 10), tokens=8, steps=4,
    ),
    "z-image": dict(
        values=dict(in_channels=4, dim=48, n_layers=2, n_refiner_layers=2, n_heads=3, n_kv_heads=3, cap_feat_dim=14,
                    axes_dims=[4, 6, 6], axes_lens=[128, 16, 16]),
        size=(6, 10), tokens=40,
    ),
    "qwen-image": dict(
        values=dict(in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
                    joint_attention_dim=14, axes_dims_rope=(4, 6, 6)),
        size=(8, 12), tokens=7,
    ),
    "klein-4b": dict(
        values=dict(in_channels=8, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
                    joint_attention_dim=15, axes_dims_rope=(4, 4, 4, 4)),
        size=(4, 6), tokens=7, steps=4,
    ),
    "ti2v-5b": dict(
        values=dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=10,
                    freq_dim=16, ffn_dim=36, num_layers=2, rope_max_seq_len=16),
        size=(3, 6, 10), tokens=8, steps=4,
    ),
}  # fmt: skip


def tiny(name: str) -> Subject:
    """Return a subject with the same layout and small sizes."""
    sizes = dict(TINY[name])
    values = SUBJECTS[name].values | sizes.pop("values")
    return replace(SUBJECTS[name], title=f"tiny {SUBJECTS[name].title}", values=values, **sizes)


def network_of(subject: Subject, device: torch.device, dtype: torch.dtype) -> "ModelMixin":
    """Build diffusers' network with random weights. They are exact in bf16 if ``dtype`` is bf16."""
    import diffusers

    values = subject.values
    with torch.device("meta"):
        module = getattr(diffusers, FAMILIES[subject.family].network)(**values).eval()
    if subject.family == "qwen_image":
        module.pos_embed = type(module.pos_embed)(10000, list(values["axes_dims_rope"]), scale_rope=True)
    if subject.family == "wan":  # Wan's tables are buffers
        table = values["attention_head_dim"], values["patch_size"], values["rope_max_seq_len"]
        with device:
            module.rope = type(module.rope)(*table)
    wide = tuple(module._keep_in_fp32_modules or ()) if dtype != torch.float32 else ()
    generator = torch.Generator(device).manual_seed(SEED)
    for path, part in list(module.named_modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            full = f"{path}.{name}" if path else name
            kept = torch.float32 if set(wide) & set(full.split(".")) else dtype
            values = draw(full, part, torch.empty(parameter.shape, dtype=dtype, device=device), generator)
            setattr(part, name, nn.Parameter(values.to(kept), requires_grad=False))
    left = [name for name, tensor in module.state_dict(keep_vars=True).items() if tensor.is_meta]
    left += [name for name, tensor in module.named_buffers() if tensor.is_meta]
    assert not left, f"without values: {left[:3]}"
    return module


MODULATION = re.compile(r"norm\w*\.linear\.bias|adaLN_modulation\.\d\.bias|time_proj\.bias|scale_shift_table")
QK_NORM = re.compile(r"norm_(added_)?[qk]\.weight")


@torch.no_grad()
def draw(name: str, part: nn.Module, values: Tensor, generator: torch.Generator) -> Tensor:
    """Fill a parameter with random values.

    Every branch must influence the result. So gates are not near 0, and queries and keys are large enough that
    attention is not a plain mean over all tokens."""
    if QK_NORM.search(name):
        return values.normal_(1.5, 0.1, generator=generator)
    if "Norm" in type(part).__name__ and name.endswith("weight"):
        return values.normal_(1.0, 0.05, generator=generator)
    return values.normal_(0.0, 0.3 if MODULATION.search(name) else 0.02, generator=generator)


def by_our_names(model: PublicDiT, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return published weights, or their gradients, by our names. Parts of a larger tensor are views of it, not copies.

    Raises ValueError unless every name on both sides is matched exactly once."""
    table = FAMILIES[model.config.family].names(model.config.spec)
    matches = [(*names, match.dim) for match in table for names in match.names()]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    check_matched([name for ours, _, _ in matches for name in ours], shapes, "of our weights")
    check_matched([name for _, theirs, _ in matches for name in theirs], theirs, "of diffusers' weights")
    found: dict[str, Tensor] = {}
    for ours, published, dim in matches:
        parts = [theirs[name] for name in published]
        joined = parts[0].detach() if len(parts) == 1 else torch.cat([part.detach() for part in parts], dim=dim)
        if len(parts) > 1 and dim == 0 and all(part.dtype == joined.dtype for part in parts):
            for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
                part.data = rows
        if len(ours) == 1:
            found[ours[0]] = joined
            continue
        parts = joined.split([shapes[name][dim] for name in ours], dim=dim)
        found |= {name: part.contiguous() for name, part in zip(ours, parts, strict=True)}
    return found


def with_weights(config: Any, weights: Mapping[str, Tensor]) -> PublicDiT:
    """Build our network with these tensors, without copying them."""
    with torch.device("meta"):
        model = PublicDiT(config)
    model.load_state_dict(dict(weights), assign=True)
    return model.eval().requires_grad_(False)


def caption_of(subject: Subject, config: Any, device: torch.device, dtype: torch.dtype) -> TextCondition:
    """Return a random caption of the maximum length."""
    generator = torch.Generator(device).manual_seed(SEED + 1)
    text = config.spec.text
    tokens, pooled = (
        torch.randn(1, *shape, device=device, generator=generator).to(dtype)
        for shape in ((subject.tokens, text.width), (text.pooled,))
    )
    mask = torch.ones(1, subject.tokens, dtype=torch.bool, device=device)
    return TextCondition(
        tokens,
        mask,
        pooled,
        torch.full((1,), GUIDANCE, device=device) if config.spec.guidance else None,
        shortest=tokens.shape[1],
    )


# ------------------------------------------------------------------- calls of diffusers' networks in our networks' form


def call_flux(module: nn.Module, x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
    (B, C, H, W), (h, w) = x.shape, (x.shape[2] // 2, x.shape[3] // 2)
    packed = x.view(B, C, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, 4 * C)
    ids = torch.zeros(h, w, 3, device=x.device)
    ids[..., 1], ids[..., 2] = torch.arange(h, device=x.device)[:, None], torch.arange(w, device=x.device)[None]
    out = module(
        hidden_states=packed, encoder_hidden_states=y.tokens, pooled_projections=y.pooled, timestep=t / 1000,
        guidance=y.guidance, img_ids=ids.view(-1, 3), txt_ids=ids.new_zeros(y.tokens.shape[1], 3), return_dict=False,
    )[0]  # fmt: skip
    return out.view(B, h, w, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


def call_wan(module: nn.Module, x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
    return module(hidden_states=x, timestep=t, encoder_hidden_states=y.tokens, return_dict=False)[0]


def call_z_image(module: nn.Module, x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
    out = module(x=list(x.unsqueeze(2)), t=1 - t / 1000, cap_feats=list(y.tokens), return_dict=False)[0]
    return -torch.stack(list(out)).squeeze(2)


def call_qwen_image(module: nn.Module, x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
    (B, C, H, W), (h, w) = x.shape, (x.shape[2] // 2, x.shape[3] // 2)
    packed = x.view(B, C, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, 4 * C)
    out = module(
        hidden_states=packed, encoder_hidden_states=y.tokens, encoder_hidden_states_mask=None, timestep=t / 1000,
        img_shapes=[[(1, h, w)]] * B, return_dict=False,
    )[0]  # fmt: skip
    return out.view(B, h, w, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


def call_flux2(module: nn.Module, x: Tensor, t: Tensor, y: TextCondition) -> Tensor:
    one, rows, columns, words = (torch.arange(n, device=x.device) for n in (1, *x.shape[2:], y.tokens.shape[1]))
    out = module(
        hidden_states=x.flatten(2).transpose(1, 2), encoder_hidden_states=y.tokens, timestep=t / 1000,
        img_ids=torch.cartesian_prod(one, rows, columns, one), txt_ids=torch.cartesian_prod(one, one, one, words),
        guidance=None, return_dict=False,
    )[0]  # fmt: skip
    return out.transpose(1, 2).reshape(x.shape)


CALLS = {
    "flux": call_flux, "wan": call_wan, "z_image": call_z_image, "qwen_image": call_qwen_image, "flux2": call_flux2,
}  # fmt: skip

# -------------------------------------------------------------------------------------------------------------- floor


def products_of(config: Any, captions: int) -> tuple[Counter, Counter]:
    """Count a forward pass's matrix products (rows, in, out) and its attentions (queries, keys, heads, head size)."""
    spec, products, attentions = config.spec, Counter(), Counter()
    media = -(-config.tokens // spec.media_multiple) * spec.media_multiple
    text = -(-captions // spec.text.multiple) * spec.text.multiple
    lengths = {"media": media, "text": text}

    def add(block: BlockSpec, count: int, tokens: int) -> None:
        d, hidden = block.width, block.mlp_hidden
        wide = MLPS[block.mlp].branches * hidden
        for rows in [lengths[name] for name in block.streams] or [tokens]:
            if block.parallel:
                found = [(rows, d, 3 * d + wide), (rows, d + hidden, d)]
            else:
                found = [(rows, d, 3 * d), (rows, d, d), (rows, d, wide), (rows, hidden, d)]
            products.update({product: count for product in found})
        attentions[tokens, tokens, block.heads, d // block.heads] += count
        if any(branch.sees == "caption" for branch in block.branches):
            for product in ((tokens, d, d), (tokens, d, d), (text, d, 2 * d)):
                products[product] += count
            attentions[tokens, text, block.heads, d // block.heads] += count

    for stack in spec.stacks:
        add(stack.block, stack.count, sum(lengths[name] for name in spec.order) or media)
    for refiner, tokens in ((spec.media_refiner, media), (spec.text_refiner, text)):
        if refiner is not None:
            add(refiner.block, refiner.count, tokens)
    return products, attentions


class Calls(TorchFunctionMode):
    """Records a network's attentions, and its linear layers with more than one row."""

    def __init__(self):
        self.linears: list[tuple[tuple[int, ...], Tensor] | None] = []  # None: an attention, see ``attentions``
        self.attentions: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear and args[0].numel() > len(args[0]) * args[0].shape[-1]:
            self.linears.append((tuple(args[0].shape), args[1]))
        elif func is F.scaled_dot_product_attention:
            self.linears.append(None)
            self.attentions.append((tuple(args[0].shape), tuple(args[1].shape)))
        return func(*args, **(kwargs or {}))


Work = list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]


@torch.no_grad()
def work_of(forward: Callable[[], Tensor], device: torch.device, dtype: torch.dtype) -> Work:
    """Return the products and attentions of ``forward``, in order, with their weights and random inputs."""
    calls = Calls()
    with calls:
        forward()
    made: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def random(shape: tuple[int, ...], number: int = 0) -> Tensor:
        if (shape, number) not in made:
            made[shape, number] = torch.randn(shape, device=device, dtype=dtype)
        return made[shape, number]

    work: Work = []
    attentions = iter(calls.attentions)
    for linear in calls.linears:
        if linear is not None:
            work.append((F.linear, (random(linear[0]), linear[1])))
        else:
            queries, keys = next(attentions)
            inputs = random(queries, 1), random(keys, 2), random(keys, 3)
            work.append((F.scaled_dot_product_attention, inputs))
    return work


def floor_of(work: Work) -> Callable[[], None]:
    """Return a function that runs only this work."""

    def floor() -> None:
        with sdpa_kernel(INFERENCE, set_priority=True) if work[0][1][0].is_cuda else contextlib.nullcontext():
            for call, inputs in work:
                call(*inputs)

    return floor


def lora_floor_of(work: Work, attend: Callable[..., Tensor], recomputed: bool) -> Callable[[], None]:
    """Return a function that runs this work, and computes its inputs' gradients. ``recomputed``: run the work twice."""
    made: dict[tuple[int, ...], Tensor] = {}
    steps: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]] = []
    for call, inputs in work:
        x, linear = inputs[0], call is F.linear
        shape = (*x.shape[:-1], len(inputs[1])) if linear else tuple(x.shape)
        if shape not in made:
            made[shape] = torch.randn(shape, device=x.device, dtype=x.dtype)
        if not linear:
            inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        steps.append((call if linear else attend, inputs, made[shape]))

    def forward(grad: bool) -> list[Tensor | None]:
        results: list[Tensor | None] = []
        for call, inputs, _ in steps:
            with torch.set_grad_enabled(grad and call is attend):
                result = call(*inputs)
            results.append(result if call is attend else None)  # products of the inputs' gradients don't read it
        return results

    def floor() -> None:
        if recomputed:
            forward(False)
        for (_, inputs, gradient), result in zip(reversed(steps), reversed(forward(True)), strict=True):
            if result is None:
                F.linear(gradient, inputs[1].detach().t())
            else:
                torch.autograd.grad(result, inputs, gradient)

    return floor


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return 1000 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -------------------------------------------------------------------------------------------------------- differences


def difference(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the largest and the RMS difference, relative to the RMS of ``wanted``."""
    found, wanted = found.double(), wanted.double()
    scale, error = wanted.square().mean().sqrt(), (found - wanted).abs()
    return float(error.max() / scale), float(error.square().mean().sqrt() / scale)


def shown(pair: tuple[float, float]) -> str:
    return f"max {pair[0]:.2e}, RMS {pair[1]:.2e}"


# ---------------------------------------------------------------------------------------------------------- the bench


@dataclass
class Bench:
    """The settings of a run, its clock, and the lines of the final table."""

    args: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    start: float = field(default_factory=time.perf_counter)
    table: list[tuple[str, str, str, str, str]] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.args.seconds - (time.perf_counter() - self.start)

    def wants(self, part: str, seconds: float = 0.0) -> bool:
        """Return True if a part should begin. If less than ``seconds`` are left, print a message."""
        if part in self.args.without:
            return False
        if self.left <= seconds:
            self.say(f"no time left for {part}")
            return False
        return True

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.start:5.0f} s] {line}", flush=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Catch an exception in this part and print it in one line."""
        try:
            yield
        except Exception as error:  # any failure of compiling, memory or a kernel
            lines = str(error).splitlines() or [""]
            self.say(f"{name} failed: {type(error).__name__}: {lines[0][:300]}")

    def in_turns(self, ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Run each way for --seconds_a_turn, in turns, for --rounds rounds. Return the medians in ms a call."""
        times: dict[str, list[float]] = {name: [] for name in ways}

        def repeat(work: Callable[[], object], calls: int) -> None:
            for _ in range(calls):
                work()

        for _ in range(self.args.rounds):
            for name, work in ways.items():
                if self.left > 0 or not times[name]:
                    calls = max(1, round(1000 * self.args.seconds_a_turn / milliseconds(work, self.device)))
                    times[name].append(milliseconds(partial(repeat, work, calls), self.device) / calls)
        return {name: statistics.median(found) for name, found in times.items()}

    def rows(self, *rows: dict[str, Any]) -> None:
        found = []
        for row in rows:
            if not float(row.get("baseline_value") or 0):  # a ratio to 0 is undefined
                row = {key: value for key, value in row.items() if not key.startswith("baseline")}
            found.append({"bench": "public", **row})
        record(found, self.args)


class Pair:
    """Our network and diffusers' for a subject, with the same weights, and the ways to run them."""

    def __init__(self, bench: Bench, subject: Subject):
        self.bench, self.subject = bench, subject
        device, dtype = bench.device, bench.dtype
        self.theirs = network_of(subject, device, dtype)
        self.config = public_config(subject.family, subject.values, subject.size, subject.tokens)
        with torch.device("meta"):
            names = PublicDiT(self.config)
        weights = {k: v.to(dtype) for k, v in by_our_names(names, dict(self.theirs.named_parameters())).items()}
        self.y = caption_of(subject, self.config, device, dtype)
        on = device.type == "cuda"
        self.switches = SpeedFlags(on, on, on)
        self.kernels = self.select(inference=True)
        self.model = with_weights(self.config, weights).use(ops=self.kernels.ops, attend=self.kernels.attend)
        self.plain = with_weights(self.config, weights).use()
        self.noise = initial_noise(SEED, torch.arange(1, device=device), (self.config.in_channels, *subject.size))
        self.time = torch.full((1,), TIME, device=device)
        self.compiled = False
        self.recorded_work: list[Callable[[], Any]] = []

    def select(self, inference: bool, switches: SpeedFlags | None = None) -> Any:
        config, bench = self.config, self.bench
        choose = switches or self.switches, bench.device, bench.dtype, config.head_dim, config.tokens
        return select_kernels(*choose, inference=inference)

    # ------------------------------------------------------------------------------------------------- ways to run

    def ours(self, x: Tensor, t: Tensor) -> Tensor:
        return self.model(x, t, self.y)

    def ours_plain(self, x: Tensor, t: Tensor) -> Tensor:
        return self.plain(x, t, self.y)

    def diffusers(self, x: Tensor, t: Tensor) -> Tensor:
        with self.attention(TRAINING if torch.is_grad_enabled() else INFERENCE):
            return CALLS[self.subject.family](self.theirs, x.to(self.y.tokens.dtype), t, self.y)

    def attention(self, backends: list[SDPBackend]) -> contextlib.AbstractContextManager[object]:
        on = self.bench.device.type == "cuda"
        return sdpa_kernel(backends, set_priority=True) if on else contextlib.nullcontext()

    def eager(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return self.diffusers(x, t)

    def compile(self) -> Network:
        if not self.compiled:
            self.theirs.compile_repeated_blocks(dynamic=False)
            self.compiled = True
        return self.diffusers

    def recorded(self) -> Network:
        """Record our forward pass. The next call overwrites its result."""
        x, t = self.noise.clone(), self.time.clone()
        out, replay = GraphRecorder().record(lambda: self.ours(x, t))

        def call(new_x: Tensor, new_t: Tensor) -> Tensor:
            x.copy_(new_x)
            t.copy_(new_t)
            replay()
            return out

        return call

    def beforehand(self, model: PublicDiT) -> Network:
        """Record our forward pass for one time. Modulations and captions are computed beforehand."""
        c, context = model.condition(self.time, self.y)
        ready = list(model.modulations(c))
        return self.always(lambda: model.predict(self.noise, ready, context))

    def in_float8(self) -> Network:
        kernels = self.select(inference=True, switches=replace(self.switches, fp8=True))
        model = with_weights(self.config, dict(self.model.named_parameters()))
        keep_weights(model)
        return self.beforehand(model.use(ops=kernels.ops, attend=kernels.attend))

    def floor(self) -> Network:
        return self.always(floor_of(self.work()))

    def work(self) -> Work:
        """Return the forward pass's products and attentions, without those of one row, such as modulations."""
        self.plain.use(attend=F.scaled_dot_product_attention)
        return work_of(lambda: self.ours_plain(self.noise, self.time), self.noise.device, self.bench.dtype)

    def always(self, work: Callable[[], Any]) -> Network:
        """Record work that needs no inputs, if there is a GPU."""
        if self.bench.device.type != "cuda":
            return lambda x, t: work()
        out, replay = GraphRecorder().record(work)
        self.recorded_work.append(work)  # keep the memory that the recording reads
        return lambda x, t: (replay(), out)[1]

    def ways(self) -> dict[str, Callable[[], Network]]:
        found: dict[str, Callable[[], Network]] = {FLOOR: self.floor, OURS: lambda: self.ours}
        found[BEFOREHAND] = lambda: self.beforehand(self.model)
        if self.bench.device.type == "cuda":
            found |= {RECORDED: self.recorded, FLOAT8: self.in_float8, PLAIN: lambda: self.ours_plain}
        return found | {EAGER: lambda: self.eager, COMPILED: self.compile}

    def close(self) -> None:
        """Release both networks."""
        self.__dict__.clear()
        free()


class Measurement:
    """A pair's measurements, in parts. Later parts use the ways to run that the first part found."""

    def __init__(self, bench: Bench, subject: Subject):
        self.bench, self.subject = bench, subject
        self.case = f"{subject.title} {subject.where} {'fp32' if bench.dtype == torch.float32 else 'bf16'}"
        self.pair = Pair(bench, subject)
        self.networks: dict[str, Network] = {}
        self.outputs: dict[str, Tensor] = {}
        self.latents: dict[str, Tensor] = {}
        parameters = sum(p.numel() for p in self.pair.theirs.parameters()) / 1e9
        kernels, config = self.pair.kernels, self.pair.config
        bench.say(f"{self.case}: {parameters:.3f} B weights, {config.tokens:,} + {subject.tokens} tokens")
        bench.say(f"kernels: {kernels.ops_note}; attention: {kernels.attention_note}")

    def run(self) -> None:
        """Run all parts. A part that fails does not stop the others."""
        bench = self.bench
        for name, part, seconds in (
            ("forward", self.measure_forward, 0.0),
            ("latents", self.draw_latents, 15.0),
            ("train", self.measure_training, COMPILE_SECONDS),
            ("lora", self.measure_lora, 15.0),
            ("reference", self.compare_with_reference, 10.0),
        ):
            asked = {"train": bench.args.train and self.subject.trains, "lora": bench.args.lora}.get(name, True)
            if not asked or not bench.wants(name, seconds):
                continue
            with bench.part(f"{self.subject.title} {name}"):
                part()

    # ----------------------------------------------------------------------------------------------------- forward

    @torch.inference_mode()
    def measure_forward(self) -> None:
        bench, pair, peaks = self.bench, self.pair, {}
        x, t = pair.noise, pair.time
        for name, build in pair.ways().items():
            if not bench.wants(name, COMPILE_SECONDS if name == COMPILED else 0.0):
                continue
            with bench.part(name):
                start = time.perf_counter()
                network = build()
                output = network(x, t)
                synchronize(bench.device)
                first = time.perf_counter() - start
                peak = self.peak(name, lambda network=network: network(x, t))
                if name in (OURS, PLAIN, EAGER, COMPILED):  # graphs reserved their memory earlier
                    peaks[name] = peak
                self.networks[name] = network
                if name != FLOOR:
                    self.outputs[name] = output.clone()
                finite = "" if output is None or output.isfinite().all() else "; THE OUTPUT IS NOT FINITE"
                bench.say(f"{name}: first call {first:.1f} s{finite}")
        self.compare_outputs()
        calls = {name: lambda network=network: network(x, t) for name, network in self.networks.items()}
        self.report(bench.in_turns(calls), peaks, "forward")

    def peak(self, name: str, work: Callable[[], object]) -> float:
        """Return the size of the network's weights and of what a call allocates, in GiB."""
        if self.bench.device.type != "cuda":
            work()
            return 0.0
        network = self.pair.model if name.startswith("ours") else self.pair.theirs
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        synchronize(self.bench.device)
        new = torch.cuda.max_memory_allocated() - before
        return (new + sum(p.nbytes for p in network.parameters())) / 2**30

    def report(self, times: dict[str, float], peaks: dict[str, float], what: str) -> None:
        """Print and append times in ms, with their ratios to diffusers compiled or, without it, eager or the floor."""
        base = next((name for name in (COMPILED, EAGER, FLOOR) if name in times), None)
        for name, value in times.items():
            line = f"{self.case} {what} {name}: {value:.2f} ms"
            row = {"case": f"{self.case} {name}", "metric": f"{what} ms", "value": f"{value:.2f}"}
            ratio = f"{value / times[base]:.3f}" if base else ""
            if base and name != base:
                line += f", {ratio} of {base}"
                row |= {"baseline": base, "baseline_value": f"{times[base]:.2f}"}
            if FLOOR in times and name != FLOOR:
                line += f", floor {times[FLOOR] / value:.3f} of it"
            rows = [row]
            if name in peaks:
                line += f", peak {peaks[name]:.1f} GiB"
                rows.append({"case": row["case"], "metric": f"{what} peak GiB", "value": f"{peaks[name]:.2f}"})
            self.bench.say(line)
            self.bench.table.append((self.case, what, name, f"{value:.1f} ms", ratio))
            self.bench.rows(*rows)

    def compare_outputs(self) -> None:
        """Print and append the differences between outputs. They also show errors in the mapping of weights."""
        if EAGER not in self.outputs:
            return
        found = {name: difference(y, self.outputs[EAGER]) for name, y in self.outputs.items() if name != EAGER}
        self.differences("output", found)

    def differences(self, what: str, found: dict[str, tuple[float, float]], of: str = EAGER) -> None:
        """Print and append differences from ``of``. The baseline is the difference between diffusers' two ways, and for
        our FP8 the difference of our bf16."""
        yard = COMPILED if of == EAGER else EAGER
        for name, pair in found.items():
            beside = {FLOAT8: BEFOREHAND, ENGINE_FLOAT8: ENGINE}.get(name, yard)
            usual = found.get(beside)
            line = f"{self.case} {what}, {name} against {of}: {shown(pair)}"
            row = {"case": f"{self.case} {name} against {of}", "metric": f"{what} RMS difference"}
            row["value"] = f"{pair[1]:.3e}"
            if usual and name != beside:
                row |= {"baseline": beside, "baseline_value": f"{usual[1]:.3e}"}
            rounding = max(usual[1] if usual else 0.0, 4 * torch.finfo(self.bench.dtype).eps)
            if name not in (FLOAT8, ENGINE_FLOAT8) and not pair[1] < 4 * rounding:
                line += " <- MORE THAN ROUNDING"
            self.bench.say(line)
            ratio = f"{pair[1] / usual[1]:.3f}" if usual and usual[1] and name != beside else ""
            self.bench.table.append((self.case, what, f"{name} - {of}", f"{pair[1]:.2e}", ratio))
            self.bench.rows(row)

    # ----------------------------------------------------------------------------------------------------- latents

    @torch.inference_mode()
    def draw_latents(self) -> None:
        """Draw latents from the same noise with our sampler and network, and with diffusers' scheduler and network."""
        if self.subject.scheduler is None:
            return
        bench, seconds = self.bench, {}
        best = RECORDED if RECORDED in self.networks else OURS
        draws: dict[str, Callable[[], Tensor]] = {}
        if best in self.networks:
            draws[OURS] = lambda: self.our_latents(self.networks[best])
            if self.subject.rounds_times and bench.dtype != torch.float32:
                draws[f"{OURS}, rounded times"] = lambda: self.our_latents(self.networks[best], rounded=True)
        for name in (EAGER, COMPILED):
            if name in self.networks:
                draws[name] = lambda name=name: self.their_latents(self.networks[name])
        for name, fp8 in ((ENGINE, False), (ENGINE_FLOAT8, True)):
            if fp8 and bench.device.type != "cuda":
                continue
            with bench.part(name):
                draws[name] = self.engine(fp8)
                draws[name]()  # records the steps
        for name in sorted(draws, key=lambda name: name != EAGER):
            if not bench.wants("latents", 3.0):
                break
            with bench.part(f"latents, {name}"):
                seconds[name] = milliseconds(lambda name=name: self.keep(name, draws[name]()), bench.device) / 1000
                ending = "" if self.latents[name].isfinite().all() else "; THEY ARE NOT FINITE"
                bench.say(f"{self.subject.steps} steps, {name}: {seconds[name]:.2f} s{ending}")
        if EAGER in self.latents:
            found = {name: difference(x, self.latents[EAGER]) for name, x in self.latents.items() if name != EAGER}
            self.differences(f"latents of {self.subject.steps} steps", found)
        for name in [name for name in seconds if name in (OURS, EAGER, COMPILED, ENGINE, ENGINE_FLOAT8)]:
            row = {"case": f"{self.case} {name}", "metric": f"{self.subject.steps} steps s"}
            row["value"] = f"{seconds[name]:.3f}"
            if COMPILED in seconds and name != COMPILED:
                row |= {"baseline": COMPILED, "baseline_value": f"{seconds[COMPILED]:.3f}"}
            bench.rows(row)

    def keep(self, name: str, latents: Tensor) -> None:
        self.latents[name] = latents

    def scheduler(self) -> Any:
        """Return diffusers' scheduler with its times set like in pipelines, and its configuration."""
        assert self.subject.scheduler is not None
        name, settings = self.subject.scheduler
        module = {
            "FlowMatchEulerDiscreteScheduler": "flow_match_euler_discrete",
            "UniPCMultistepScheduler": "unipc_multistep",
        }
        scheduler = getattr(importlib.import_module(f"diffusers.schedulers.scheduling_{module[name]}"), name)(
            **settings
        )
        config, steps = json.loads(scheduler.to_json_string()), self.subject.steps
        if name == UNIPC[0]:
            scheduler.set_timesteps(steps, device=self.bench.device)
            return scheduler, config
        slope = (config["max_shift"] - config["base_shift"]) / (
            config["max_image_seq_len"] - config["base_image_seq_len"]
        )
        mu = self.pair.config.tokens * slope + config["base_shift"] - slope * config["base_image_seq_len"]
        if self.subject.family == "flux2":
            mu = math.log(empirical_shift(self.pair.config.tokens, steps))
        sigmas = [1 - i / steps for i in range(steps)]
        scheduler.set_timesteps(sigmas=sigmas, mu=mu, device=self.bench.device)
        return scheduler, config

    def objective(self) -> tuple[FlowObjective, str]:
        """Return the family's objective and the name of its sampler."""
        schedule = published_schedule(self.scheduler()[1])
        flux2 = self.subject.family == "flux2"
        return FlowObjective(empirical_tokens=0) if flux2 else schedule.objective, schedule.sampler

    def engine(self, fp8: bool) -> Callable[[], Tensor]:
        """Return a function that draws like sample.py, with recorded steps and precomputed modulations."""
        pair, (objective, sampler) = self.pair, self.objective()
        kernels = pair.select(inference=True, switches=replace(pair.switches, fp8=fp8))
        model = with_weights(pair.config, dict(pair.model.named_parameters()))
        model.use(ops=kernels.ops, attend=kernels.attend)
        engine = SamplingEngine(model, objective, steps=self.subject.steps, sampler=sampler, cfg_scale=1.0)
        return lambda: engine.sample(pair.y, pair.y, torch.arange(1, device=self.bench.device), SEED)

    def our_latents(self, network: Network, rounded: bool = False) -> Tensor:
        (objective, sampler), dtype = self.objective(), self.bench.dtype

        def forward(x: Tensor, t: Tensor, y: Any) -> Tensor:
            return network(x, ((t / 1000).to(dtype) * 1000).float() if rounded else t)

        return sample_latents(
            self.pair.model,
            self.pair.y,
            self.pair.y,
            torch.arange(1, device=self.bench.device),
            objective=objective.for_tokens(self.pair.config.tokens),
            seed=SEED,
            steps=self.subject.steps,
            sampler=sampler,
            cfg_scale=1.0,
            forward=forward,
        )

    def their_latents(self, network: Network) -> Tensor:
        scheduler, x = self.scheduler()[0], self.pair.noise
        for t in scheduler.timesteps:
            output = network(x, t.float().expand(1)).float()
            x = scheduler.step(output, t, x, return_dict=False)[0]
        return x

    # --------------------------------------------------------------------------------------------------- reference

    @torch.inference_mode()
    def compare_with_reference(self) -> None:
        """Compare outputs and latents with diffusers' network in fp32. Our network is released to free its memory."""
        bench, pair = self.bench, self.pair
        if bench.dtype == torch.float32 or not self.outputs:
            return
        del pair.model, pair.plain
        self.release()
        pair.theirs.float()
        pair.y = pair.y.to(torch.float32)
        torch.set_float32_matmul_precision("high")
        try:
            start = time.perf_counter()
            wanted = pair.eager(pair.noise, pair.time)
            synchronize(bench.device)
            first = time.perf_counter() - start
            found = {name: difference(y, wanted) for name, y in self.outputs.items()}
            self.differences("output", found, of="fp32")
            seconds = first
            if first < 4:  # the libraries may still be initializing
                seconds = milliseconds(lambda: pair.eager(pair.noise, pair.time), bench.device) / 1000
            bench.say(f"fp32: first call {first:.1f} s, later ones {seconds:.2f} s")
            total = seconds * self.subject.steps
            if self.latents and total < min(bench.args.reference_seconds, bench.left):
                wanted = self.their_latents(pair.eager)
                found = {name: difference(x, wanted) for name, x in self.latents.items()}
                self.differences(f"latents of {self.subject.steps} steps", found, of="fp32")
            elif self.latents:
                bench.say(f"latents in fp32 would take {total:.0f} s: left out")
        finally:
            torch.set_float32_matmul_precision("highest")

    # ---------------------------------------------------------------------------------------------------- training

    def measure_training(self) -> None:
        """Time forward and backward passes of one sample, with recomputed blocks, and weights and gradients in bf16."""
        bench, pair, device = self.bench, self.pair, self.bench.device
        kernels = pair.select(inference=False)
        bench.say(f"training kernels: {kernels.ops_note}; attention: {kernels.attention_note}")
        model = with_weights(pair.config, dict(pair.model.named_parameters())).requires_grad_(True).train()
        model.use(ops=kernels.ops, attend=kernels.attend)
        model.grad_checkpoint = True
        pair.theirs.requires_grad_(True).train()
        pair.theirs.enable_gradient_checkpointing()
        target = torch.randn(pair.noise.shape, device=device, generator=torch.Generator(device).manual_seed(SEED + 2))
        ways: dict[str, tuple[nn.Module, Network]] = {OURS: (model, lambda x, t: model(x, t, pair.y))}
        ways[EAGER] = pair.theirs, pair.eager
        if EAGER in bench.args.without or COMPILED not in bench.args.without:
            ways[COMPILED] = pair.theirs, pair.compile()
        gradients, works = {}, []

        def step(name: str) -> None:
            module, network = ways[name]
            gradients.pop(name, None)
            with contextlib.ExitStack() as settings:  # the settings must also apply to recomputed blocks
                if name != OURS:
                    settings.enter_context(pair.attention(TRAINING))
                if name == EAGER:
                    settings.enter_context(torch.compiler.set_stance("force_eager"))
                F.mse_loss(network(pair.noise, pair.time).float(), target).backward()
            found = {key: cast(Tensor, p.grad) for key, p in module.named_parameters()}
            module.zero_grad(set_to_none=True)
            gradients[name] = found if name == OURS else by_our_names(model, found)

        try:
            for name in ways:
                if not bench.wants(f"training, {name}", COMPILE_SECONDS if name == COMPILED else 5.0):
                    continue
                with bench.part(f"training, {name}"):
                    bench.say(
                        f"training, {name}: first call {milliseconds(lambda n=name: step(n), device) / 1000:.1f} s"
                    )
                    works.append(name)
            if EAGER in gradients:
                self.compare_gradients(gradients)
            peaks = {}
            for name in works:
                gradients.clear()
                peaks[name] = self.peak(name, partial(step, name))
            self.report(bench.in_turns({name: partial(step, name) for name in works}), peaks, "training step")
        finally:
            pair.theirs.requires_grad_(False).eval()
            pair.theirs.disable_gradient_checkpointing()
            pair.theirs.zero_grad(set_to_none=True)

    def measure_lora(self) -> None:
        """Time forward and backward passes of one sample with LoRA, without an update, and their floor."""
        bench, pair = self.bench, self.pair
        self.release()
        kernels = pair.select(inference=False)
        model = with_weights(pair.config, dict(pair.model.named_parameters())).train()
        add_lora(model, Lora(bench.args.lora, bench.args.lora, ""), (), seed=SEED)
        model.to(bench.dtype).use(ops=kernels.ops, attend=kernels.attend)
        for recomputed in (False, True):
            what = f"step of LoRA {bench.args.lora}, {'blocks recomputed' if recomputed else 'all kept'}"
            with bench.part(what):
                self.time_lora(what, model, lora_floor_of(pair.work(), kernels.attend, recomputed), recomputed)
            self.release()

    def time_lora(self, what: str, model: PublicDiT, floor: Callable[[], None], recomputed: bool) -> None:
        pair, trained = self.pair, [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.grad_checkpoint = recomputed

        def step() -> tuple[Tensor, ...]:
            return torch.autograd.grad(model(pair.noise, pair.time, pair.y).square().mean(), trained)

        step()  # compiles the kernels
        peak = self.peak(OURS, step)
        calls: dict[str, Callable[[], object]] = {FLOOR: floor, OURS: step}
        for name, call in list(calls.items()):
            with self.bench.part(f"recording {name}"):  # without a recording, the kernels are launched one by one
                network = pair.always(call)
                calls[name] = lambda network=network: network(pair.noise, pair.time)
        self.report(self.bench.in_turns(calls), {OURS: peak}, what)

    def release(self) -> None:
        """Free the recorded ways to run, and cached memory."""
        self.networks.clear()
        self.pair.recorded_work.clear()
        free()

    def compare_gradients(self, gradients: dict[str, dict[str, Tensor]]) -> None:
        """Print and append the gradients' RMS difference, as the median over parameters."""
        found = {}
        for name in [name for name in gradients if name != EAGER]:
            each = [difference(gradients[name][key], wanted)[1] for key, wanted in gradients[EAGER].items()]
            found[name] = max(each), statistics.median(each)
        self.differences("median parameter's gradient", found)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
    parser.add_argument("--tiny", action="store_true", help="small networks of the same layouts, to try this file")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="by default bf16 on a GPU, else fp32")
    parser.add_argument("--train", action="store_true", help="also a training step of Wan-1.3B")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="also a training step of LoRA, and its floor"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way to run")
    parser.add_argument("--seconds_a_turn", type=float, default=5, help="of calls back to back; 0: one call")
    parser.add_argument(
        "--without", nargs="*", default=[],
        help=f"leave out: forward, latents, train, reference, {', '.join(map(repr, (FLOOR, FLOAT8, BEFOREHAND)))}, "
        f"{EAGER!r}, {COMPILED!r}, {RECORDED!r}, {PLAIN!r}",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1800, help="after which nothing new is begun")
    parser.add_argument("--reference_seconds", type=float, default=40, help="that latents in fp32 may take")
    add_flags(parser)
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = args.precision or ("bf16" if device.type == "cuda" else "fp32")
    bench = Bench(args, device, {"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    for name in args.models:
        subject = tiny(name) if args.tiny else SUBJECTS[name]
        if not bench.wants(subject.title):
            continue
        measurement = None
        with bench.part(subject.title):
            measurement = Measurement(bench, subject)
            measurement.run()
        if measurement is not None:
            measurement.pair.close()
            measurement.__dict__.clear()
        free()
    print(f"\n{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    widths = [max((len(line[i]) for line in bench.table), default=0) for i in range(5)]
    for line in [("case", "what", "way to run", "value", "ratio"), *bench.table]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
