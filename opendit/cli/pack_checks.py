"""What does not go with --pack_tokens."""

from typing import TYPE_CHECKING

from opendit.parallel.names import OWN_ATTENTION

if TYPE_CHECKING:
    from opendit.cli.train_flags import TrainConfig


def check_packs(flags: "TrainConfig") -> None:
    """Raises ValueError that names the flags and why they don't go together."""
    if flags.pack_tokens is None:
        return
    kind, ranks, tokens = flags.sequence_parallel_type, flags.sequence_parallel_size, flags.pack_tokens
    clashes = {
        "--compile: every pack has other lengths to attend to": flags.compile,
        "--tensor_parallel_size: its ranks share out the tokens of samples of one size": flags.tensor_parallel_size > 1,
        "--pipeline_parallel_size: its stages are sent samples of one size": flags.pipeline_parallel_size > 1,
        f"--sequence_parallel_type {kind}: it attends to a part of the keys at a time": kind in OWN_ATTENTION,
    }
    for what, clash in clashes.items():
        if clash:
            name, why = what.split(": ")
            raise ValueError(f"--pack_tokens {tokens}: does not work with {name}, as {why}; leave one of them out")
    if tokens * flags.batch_size % ranks:
        raise ValueError(
            f"--pack_tokens {tokens}: {ranks} ranks can't share {tokens * flags.batch_size:,} tokens evenly; take a "
            f"multiple of {ranks}"
        )
