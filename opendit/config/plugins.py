"""The names of plugins, precisions and sequence parallelism. Needs no torch, so that flags can be checked without it.

:data:`PLUGINS` is the registry of training engines: to add one, write ``opendit/parallel/engines/NAME.py`` with a
subclass of ``Engine`` named by ``ENGINE``, and a line here. ``--plugin``, its help and its refusals, and
``build_engine`` follow from that line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PRECISIONS = ("fp16", "bf16", "fp32")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a number
SEQUENCE_TYPES = ("auto", "fastseq", "ulysses", "ring", "usp")
RESHARD = ("auto", "after_forward", "never")
REDUCE_DTYPES = ("fp32", "bf16")
OFFLOAD = ("none", "average", "state")
AXIAL = "axial"  # the only way of a model that has no attention to all tokens (opendit/parallel/sequence/axial.py)
PIPELINE_SCHEDULES = ("1f1b", "interleaved")
OWN_ATTENTION = ("ring", "usp")  # that attend to a part of the keys at a time, by a kernel of their own


@dataclass(frozen=True)
class Plugin:
    """The facts about a plugin that are needed before its engine is imported.

    summary: what ranks share, for --help. precisions: those that it works in. refuses: flags that are an error with it.
    ignores: flags that do nothing with it, which a run says -> why. sharded_checkpoints: what --checkpoint_format auto
    means with it.
    """

    summary: str
    precisions: tuple[str, ...] = PRECISIONS
    refuses: frozenset[str] = frozenset()
    ignores: Mapping[str, str] = field(default_factory=dict)
    sharded_checkpoints: bool = False


PLUGINS = {
    "zero2": Plugin("gradients and state sharded"),
    "gemini": Plugin(
        "weights too",
        precisions=("bf16", "fp16"),
        refuses=frozenset({"fp8", "lora", "tensor_parallel_size", "pipeline_parallel_size"}),
        ignores={
            "compile": "Gemini fetches weights in __torch_function__ and frees them after use, which compile can't "
            "follow",
            "recompute": "--plugin gemini has freed the weights by then",
        },
    ),
    "ddp": Plugin("nothing sharded"),
    "fsdp": Plugin("weights too, by torch's FSDP2", sharded_checkpoints=True),
}


def plugin_help() -> str:
    """One line of what every plugin shards."""
    return "Colossal-AI plugin; " + "; ".join(f"{name}: {plugin.summary}" for name, plugin in PLUGINS.items())


def check_precision(plugin: str, precision: str) -> None:
    """Raises ValueError, which names the flags and the fix, for a plugin that does not work in ``precision``."""
    works = PLUGINS[plugin].precisions
    if precision not in works:
        other = next(name for name, line in PLUGINS.items() if precision in line.precisions)
        raise ValueError(
            f"--plugin {plugin}: works in {' and '.join(works)} only; use --mixed_precision {works[0]}, or --plugin "
            f"{other} for {precision}"
        )
