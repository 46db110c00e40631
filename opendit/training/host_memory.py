"""Measure the machine's memory, and check that a run's state in it fits, before anything is allocated."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

from opendit.models import DiTConfig
from opendit.training.memory import GIB, Setup, estimate

# Of it, for page-locked state and the buffers of saves: loaders, libraries and the page cache need the rest.
USABLE_OF_A_HOST = 0.8


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of memory of this machine, or of the container (control group) that this process is in, if that may use
    less. root: of the file system."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # no such file, or not as Linux writes it
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, name = root / "sys/fs/cgroup", "memory.max"
            elif "memory" in controllers.split(","):
                base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            else:
                continue
            inside = PurePosixPath(path.lstrip("/"))
            for folder in (inside, *inside.parents):  # a container may see its own group as the root
                with contextlib.suppress(OSError, ValueError):  # no such file; "max"
                    found.append(int((base / folder / name).read_text()))
    return min(found)


def check_host(config: DiTConfig, setup: Setup, batch: int, ranks: int) -> None:
    """Raises ValueError if ``ranks`` processes that train on this machine's CPUs need more than all of its memory:
    Linux would end them without a word."""
    needs = estimate(config, setup, batch)
    needed, there = ranks * (needs.total + needs.host_total), host_memory()
    if needed > there:
        raise ValueError(
            f"training needs about {needed / GIB:,.0f} GiB and this machine has {there / GIB:,.0f}; lower "
            "--image_size, --num_frames, --batch_size or --num_classes, or take a smaller --model"
        )


def save_buffers(config: DiTConfig, setup: Setup) -> float:
    """Bytes of a rank's buffer of saves: the ranks share masters, averages and moments evenly."""
    trained = config.parameters() if setup.trained is None else setup.trained
    return 4 * trained * (3 + setup.averages) / setup.world


def check_offload(config: DiTConfig, setup: Setup, batch: int, ranks: int, saves: bool) -> None:
    """Raises ValueError if what --offload keeps in host memory, and the buffers of saves, do not fit this machine.

    Args:
        ranks: processes on this machine. saves: whether the run writes checkpoints.
    """
    state = estimate(config, setup, batch).host_total
    buffers = save_buffers(config, setup) if saves else 0
    needed, there = ranks * (state + buffers), host_memory()
    if not state or needed <= USABLE_OF_A_HOST * there:
        return
    fixes = [f"--offload {less}" for less in ("average", "none") if _host_total(config, setup, batch, less) < state]
    fixes += ["--no_save"] * (saves and ranks * state <= USABLE_OF_A_HOST * there) + ["more machines"]
    raise ValueError(
        f"--offload {setup.offload}: keeps {ranks * state / GIB:,.1f} GiB in host memory"
        + (f", saves take {ranks * buffers / GIB:,.1f} more," if saves else "")
        + f" and of the {there / GIB:,.1f} GiB of this machine {USABLE_OF_A_HOST:.0%} can be used; take "
        + " or ".join(fixes)
    )


def _host_total(config: DiTConfig, setup: Setup, batch: int, offload: str) -> float:
    return estimate(config, replace(setup, offload=offload), batch).host_total
