"""A training run as one call: the mesh, the checks, the loop, and what the exit code says."""

import sys

from opendit.cli.dry_run import dry_run
from opendit.cli.train_flags import TrainConfig
from opendit.cli.values import one_line
from opendit.data import DataError
from opendit.parallel.mesh import init_mesh
from opendit.parallel.supervisor import Supervisor
from opendit.training.loop import train
from opendit.training.prepare import USER_ERRORS, prepare


def run(flags: TrainConfig) -> None:
    """Trains as the flags say, or for --dry_run says what training would need.

    Ends the program with exit code 1 if a checkpoint, or something else that it writes, could not be written, and as
    ``Supervisor`` says if the run fails.
    """
    if flags.dry_run is not None:
        try:
            return dry_run(flags)
        except USER_ERRORS as error:
            print(one_line(f"error: {error}"), file=sys.stderr, flush=True)
            sys.exit(2)
    with Supervisor(USER_ERRORS) as supervisor:
        mesh = init_mesh(sequence_parallel=flags.sequence_parallel_size)
        job = prepare(flags, mesh)
        supervisor.started((DataError, FloatingPointError))
        with job.lock:
            failed_writes = train(job, supervisor)
    if failed_writes:
        sys.exit(1)
