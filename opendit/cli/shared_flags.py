"""The flags that training and sampling share. A configuration is a dataclass, which
:func:`opendit.cli.command_line.parse` makes of a command line."""

from dataclasses import dataclass
from typing import ClassVar

from opendit.cli.command_line import Flags, flag, settle_idle
from opendit.kernels.names import ATTENTION
from opendit.parallel.names import OWN_ATTENTION, SEQUENCE_TYPES
from opendit.parallel.sizes import check_sequence_parallel, environment_world_size


@dataclass(frozen=True)
class SpeedFlags(Flags):
    """The speed-ups that training and sampling share."""

    group: ClassVar[str] = "Speed: precision, kernels and compilation"

    enable_modulate_kernel: bool = flag(
        False,
        "fused Triton kernels for adaLN's modulation and gated residuals",
        common="fused modulation, gated residuals",
    )
    enable_layernorm_kernel: bool = flag(
        False, "fused LayerNorm; with --enable_modulate_kernel one kernel does both", common="fused LayerNorm"
    )
    enable_flashattn: bool = flag(
        False,
        "never materialise the N x N attention matrix; the fastest kernel for the card",
        common="the fastest attention kernel",
    )
    fp8: bool = flag(
        False,
        "block linears in FP8, with all fused kernels (Hopper and newer)",
        common="blocks in FP8 (Hopper and newer)",
    )
    attention: str = flag("auto", "force an attention kernel; flash_attn: the package, if installed", choices=ATTENTION)


@dataclass(frozen=True)
class ParallelFlags(Flags):
    """How processes share a sample, in training and sampling. Of a configuration that has :class:`SpeedFlags` too."""

    group: ClassVar[str] = "Parallelism: how processes share weights, samples and layers"

    sequence_parallel_size: int = flag(
        1, "processes that share one sample's sequence", at_least=1, at_most=4096, unit="processes"
    )
    sequence_parallel_type: str = flag(
        "auto", "how they do; auto: what suits ranks, tokens and heads", choices=SEQUENCE_TYPES
    )

    def world_size(self) -> int:
        """The processes that there are."""
        return environment_world_size()

    def check_parallel(self, world_size: int) -> None:
        """Raises ValueError for sizes and combinations that can't work."""
        check_sequence_parallel(self.sequence_parallel_size, world_size)
        if self.sequence_parallel_size == 1:
            idle = ("sequence_parallel_type", "keep_gathered")
            settle_idle(self, dict.fromkeys(idle, "does nothing without --sequence_parallel_size above 1"))
        assert isinstance(self, SpeedFlags)
        if self.attention != "auto" and self.sequence_parallel_type in OWN_ATTENTION:
            raise ValueError(
                f"--attention {self.attention}: --sequence_parallel_type {self.sequence_parallel_type} has a kernel of "
                "its own; leave one of them out"
            )

    def sequence_types(self, types: tuple[str, ...], attention: str, lora: bool = False) -> tuple[str, ...]:
        """Of the strategies that a model allows those that these flags, --attention and --lora do."""
        refused = (*(OWN_ATTENTION if attention != "auto" else ()), *(("fastseq",) if lora else ()))
        return tuple(kind for kind in types if kind not in refused)
