"""Which process this is and of how many, and whether they can be divided as the flags say. Needs no torch.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without RANK there is one process. Everything
that can be wrong with them is a ValueError of one line.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A process among those of its run: rank of world_size, local_rank of those of its machine, and where rank 0 is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0


def find_place() -> Place:
    """This process's place, by its environment. Raises ValueError that names the variable and the fix."""
    world = environment_world_size()
    if "RANK" not in os.environ:
        if world > 1:
            raise ValueError(
                f"WORLD_SIZE={world} is set but RANK is not: start {world} processes with torchrun, or unset WORLD_SIZE"
            )
        return Place()
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("RANK is set but WORLD_SIZE is not: start the program with torchrun, or unset RANK")
    rank, local = _number("RANK", 0, world - 1, f"with WORLD_SIZE={world}"), _number("LOCAL_RANK", 0, None, default=0)
    if world == 1:
        return Place(rank, world, local)
    address = os.environ.get("MASTER_ADDR", "")
    if not address:
        raise ValueError(f"MASTER_ADDR is not set: {world} processes need the name of rank 0's machine; use torchrun")
    return Place(rank, world, local, address, _number("MASTER_PORT", 1, 65535))


def environment_world_size() -> int:
    """Number of processes, before anything is initialised. Raises ValueError if WORLD_SIZE is no such number."""
    return _number("WORLD_SIZE", 1, None, default=1)


def _number(name: str, low: int, high: int | None, where: str = "", default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    wanted = f"a whole number {f'from {low} to {high}' if high is not None else f'of at least {low}'}"
    hint = "it is set by torchrun or by hand; correct or unset it"
    if text is None:
        raise ValueError(f"{name} is not set: it must be {wanted}; start the program with torchrun")
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}={text} in the environment must be {wanted}: {hint}") from None
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={text} in the environment must be {wanted}{f' {where}' if where else ''}: {hint}")
    return value


def check_sequence_parallel(size: int, world_size: int) -> None:
    """Raises ValueError unless ``world_size`` processes can be cut into sequence groups of ``size``."""
    if size < 1:
        raise ValueError(f"--sequence_parallel_size {size}: must be above 0")
    if size > 1 and world_size == 1:
        raise ValueError(
            f"--sequence_parallel_size {size} needs {size} processes and there is one: start it with "
            f"torchrun --standalone --nproc_per_node={size}, or leave the flag out"
        )
    if world_size % size:
        raise ValueError(
            f"--sequence_parallel_size {size} does not divide the {world_size} processes; change it or torchrun's "
            "--nproc_per_node"
        )


def check_cfg_parallel(sequence_parallel: int, world_size: int) -> None:
    """Raises ValueError unless ``world_size`` processes can be cut into pairs of sequence groups."""
    ranks = 2 * sequence_parallel
    if world_size % ranks:
        size = f" with --sequence_parallel_size {sequence_parallel}" if sequence_parallel > 1 else ""
        raise ValueError(
            f"--cfg_parallel{size} needs a multiple of {ranks} processes and there {'are' if world_size > 1 else 'is'} "
            f"{world_size}: start it with torchrun --standalone --nproc_per_node={ranks}, or leave --cfg_parallel out"
        )
