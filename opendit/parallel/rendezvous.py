"""Connect the processes of a run with a shared store, and explain why a connection fails."""

import contextlib
import logging
import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from opendit.config.parallel_sizes import Place

logger = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds that a process waits for the other processes to start
UNREACHABLE = 60.0  # seconds that a process tries to reach a machine that does not answer
TELL = 15.0  # seconds after which a waiting process logs which processes are missing

_met: tuple[Place, dist.Store] | None = None


def meet(place: Place) -> dist.Store:
    """Wait for all processes of the run and return the store that they share. Further calls for the same place return
    the same store. A single process uses no port, and gets a new store at every call.

    Raises:
        ValueError: rank 0 can't be reached, its port is taken, or a process does not arrive.
    """
    global _met
    if place.world_size == 1:
        return dist.HashStore()
    if _met is None or _met[0] != place:  # an earlier run in this process may have ended without calling part()
        _met = place, _meet_others(place)
    return _met[1]


def part() -> None:
    """Forget the store. The next ``meet`` makes a new store."""
    global _met
    _met = None


def _meet_others(place: Place) -> dist.Store:
    with_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the store is in torchrun's agent process
    if place.rank > 0 or with_agent:
        _reach(place)
    try:
        with _quiet():
            patience = timedelta(seconds=PATIENCE)
            if with_agent:
                store, *_ = next(rendezvous("env://", timeout=patience))
            else:  # not rendezvous(), whose error would not name the missing processes
                where, serves = (place.address, place.port), place.rank == 0
                store = dist.TCPStore(*where, None, serves, timeout=patience, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, OSError) as error:
        raise ValueError(_why(error, place)) from error
    store = dist.PrefixStore("opendit", store)
    store.set(f"here/{place.rank}", f"{socket.gethostname()} {os.getpid()}")
    keys = [f"here/{rank}" for rank in range(place.world_size)]
    for patience in (TELL, PATIENCE - TELL):
        with contextlib.suppress(RuntimeError):  # waiting timed out
            store.wait(keys, timedelta(seconds=patience))
            return store
        missing = ", ".join(key.removeprefix("here/") for key in keys if not store.check([key]))
        if place.rank == 0 and missing:
            logger.warning(f"note: rank 0 waits for rank {missing} of {place.world_size} processes")
    raise ValueError(
        f"rank {missing} of the {place.world_size} processes did not come within {PATIENCE:.0f} s: start all of them "
        f"(RANK=0 to {place.world_size - 1}), or correct WORLD_SIZE"
    )


def _reach(place: Place) -> None:
    """Wait until rank 0's port accepts connections. Rank 0 may start later than this rank. Raises ValueError on
    timeout."""
    where = f"MASTER_ADDR={place.address}, MASTER_PORT={place.port}"
    begun, reported = time.monotonic(), False
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=5).close()
            return
        except socket.gaierror as error:
            reason, patience = f"no machine of that name is known here ({error.strerror})", 5.0
            if error.errno == socket.EAI_AGAIN:  # temporary error of the name server, so try again
                patience = TELL
        except ConnectionRefusedError:
            reason, patience = "nothing listens there; is rank 0 running?", PATIENCE
        except OSError as error:
            reason, patience = f"it can't be reached ({error.strerror or error})", UNREACHABLE
        waited = time.monotonic() - begun
        if waited >= patience:
            raise ValueError(f"rank {place.rank} looked for rank 0 at {where} for {waited:.0f} s: {reason}")
        if not reported and waited >= TELL:
            reported = True
            logger.warning(f"note: rank {place.rank} waits for rank 0 at {where}: {reason}")
        time.sleep(0.2)


def _why(error: Exception, place: Place) -> str:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return (
            f"MASTER_PORT={place.port} is used by another program on this machine (another run?); choose another port "
            "(torchrun --master_port), or let torchrun --standalone do it"
        )
    if "EACCES" in text or "permission denied" in text.lower():
        return f"MASTER_PORT={place.port} may not be used by this user; choose one above 1023"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return (
        f"rank {place.rank} could not meet the others at MASTER_ADDR={place.address}, MASTER_PORT={place.port}: {first}"
    )


@contextlib.contextmanager
def _quiet():
    """Silence stderr in this context. torch's C++ code prints a stack trace there if a port is taken."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
