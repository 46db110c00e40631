"""Tiny networks of public families for tests of the sampling engine.

The sizes fit the kernels, and two ranks can divide them. The captions of a batch have different lengths.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opendit.config.components import SpeedFlags
from opendit.diffusion.objectives import FlowObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextCondition
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.parallel.collectives import SharedBatch
from opendit.parallel.mesh import Mesh, init_mesh, make_replicas
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.tensor import divide, tensor_group
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.families.oracles import COSMOS2, FLUX2, LTX, LUMINA2, QWEN_IMAGE, SD3, captions, randomise

VALUES: dict[str, dict[str, Any]] = {
    "flux": dict(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=[8, 12, 12],
    ),
    "z_image": dict(
        in_channels=4, dim=96, n_layers=2, n_refiner_layers=2, n_heads=6, n_kv_heads=6, cap_feat_dim=24,
        axes_dims=[4, 6, 6], axes_lens=[256, 32, 32],
    ),
    "wan": dict(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=24,
        freq_dim=32, ffn_dim=128, num_layers=2, rope_max_seq_len=32,
    ),
    "qwen_image": QWEN_IMAGE | dict(attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    "flux2": FLUX2 | dict(attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8)),
    "lumina2": LUMINA2 | dict(hidden_size=128, axes_dim_rope=(8, 12, 12), axes_lens=(256, 16, 16), multiple_of=32),
    "ltx": LTX | dict(attention_head_dim=32, cross_attention_dim=64),
    "sd3": SD3 | dict(attention_head_dim=32, caption_projection_dim=64),
    "cosmos2": COSMOS2 | dict(attention_head_dim=32),
}  # fmt: skip
SIZES = {
    "flux": (10, 14),
    "z_image": (10, 14),
    "wan": (3, 10, 14),
    "qwen_image": (10, 14),
    "flux2": (5, 7),
    "lumina2": (10, 14),
    "ltx": (3, 5, 7),
    "sd3": (10, 14),
    "cosmos2": (10, 14),
}  # fmt: skip  (35 tokens of a picture, 105 of a clip)
# Caption lengths in batches of three: unequal, equal, and unequal with other lengths.
LENGTHS = [(40, 5, 20), (70, 70, 70), (40, 33, 20)]
NULL = 9  # number of tokens in the empty caption
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A family, its sampler and its guidance scale. FLUX.1's network gets its guidance as an input instead."""

    family: str
    sampler: str
    scale: float = 3.0

    @property
    def objective(self) -> FlowObjective:
        return FlowObjective(3.0, discrete_times=self.sampler == "unipc")

    @property
    def settings(self) -> dict[str, Any]:
        return dict(steps=STEPS, sampler=self.sampler, cfg_scale=self.scale)


# Wan is also sampled with Euler steps, which are fused on a GPU.
CASES = [Case("flux", "euler", 1.0), Case("z_image", "euler"), Case("wan", "unipc"), Case("wan", "euler")]
MORE = [
    Case("flux2", "euler", 1.0),
    *(Case(name, "euler") for name in ("qwen_image", "lumina2", "ltx", "sd3", "cosmos2")),
]


def network(family: str) -> PublicDiT:
    """Return a family's network in fp32 on the CPU."""
    torch.manual_seed(0)
    model = PublicDiT(public_config(family, VALUES[family], SIZES[family]))
    randomise(model, std=0.05 if family == "z_image" else 0.1)  # captions matter, and rounding does not
    return model.eval().requires_grad_(False)


def batch(family: str, number: int) -> tuple[TextCondition, TextCondition, Tensor, int]:
    """Return a batch's captions, the empty caption, the samples' numbers and the seed."""
    torch.manual_seed(number)
    lengths = LENGTHS[number]
    both = captions(family, VALUES[family], [*lengths, NULL], torch.float32)
    y = replace(both[:3], tokens=both.tokens[:3], shortest=min(lengths))
    return y, replace(both[3:], shortest=NULL), torch.arange(3) + 3 * number, number


@functools.cache
def exact(case: Case, number: int) -> Tensor:
    """Return a batch's latents, drawn in fp32 on the CPU."""
    y, null, index, seed = batch(case.family, number)
    model = network(case.family)
    return sample_latents(model, y, null, index, objective=case.objective, seed=seed, **case.settings)


def placed(model: PublicDiT, device: torch.device, dtype: torch.dtype, sequence: Any = None) -> PublicDiT:
    """Move a model and give it the sampling kernels, or the training kernels if its layers are divided."""
    config, speed = model.config, SpeedFlags(True, True, True)
    whole = sequence is None or not hasattr(sequence, "sequence")
    kernels = select_kernels(speed, device, dtype, config.head_dim, config.tokens, inference=whole)
    model.place(device, dtype).use(ops=kernels.ops, attend=kernels.attend, sequence=sequence)
    return model


def drawn(
    engine: SamplingEngine, family: str, device: torch.device | str = "cpu", numbers: tuple[int, ...] = (0, 1, 2)
) -> list[Tensor]:
    """Draw batches one after the other; return their latents on the CPU."""
    found = []
    for number in numbers:
        y, null, index, seed = batch(family, number)
        found.append(engine.sample(y.to(device), null.to(device), index, seed).cpu())
    return found


WAYS = ("cfg_parallel", "tensor", "sequence")


def shared(
    case: Case, way: str, mesh: Mesh, dtype: torch.dtype
) -> tuple[PublicDiT, Callable[[Any], SharedBatch] | None]:
    """Return this rank's model when two ranks share samples by ``way``, and the engine's wrapper for it or None."""
    model, around, sequence = network(case.family), None, None
    if way == "cfg_parallel":
        halves = make_replicas(mesh, True).halves
        assert halves is not None
        around = lambda forward: SharedBatch(forward, halves)  # noqa: E731
    elif way == "tensor":
        group = tensor_group(init_mesh(tensor_parallel=2))
        assert group is not None
        sequence = divide(model, group)
    else:
        config = model.config
        shape = Shape(config.tokens, config.hidden_size, config.num_heads, 6, types=("ulysses",), plain=False)
        sequence = sequence_parallel(init_mesh(sequence_parallel=2), "auto", shape)
    return placed(model, mesh.device, dtype, sequence), around
