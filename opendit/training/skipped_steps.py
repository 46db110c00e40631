"""Steps that the optimizer did not take, since their gradients were not finite."""

import logging

from opendit.parallel.engines import Engine, StepResult
from opendit.training.diagnosis import Diagnosis

logger = logging.getLogger(__name__)


class SkippedSteps:
    """Logs once why steps are being skipped, and ends the run when too many are in a row. Use it on every rank.

    Args:
        most: skipped steps in a row that end the run.

    Attributes:
        skipping: True if the last step that was looked at was skipped.
        failing: True if a fault was the cause. fp16 skips a step now and then while its loss scale is above 1, in order
            to lower it.
    """

    def __init__(self, engine: Engine, diagnosis: Diagnosis, most: int):
        self._engine, self._diagnosis, self._most = engine, diagnosis, most
        self.skipping = self.failing = False

    def look(self, done: int, result: StepResult) -> None:
        """Look at the last step, the ``done``-th; the host waits for the device.

        Raises:
            FloatingPointError: too many steps in a row were skipped.
        """
        told = self.failing
        in_a_row = int(self._engine.skipped_in_a_row)
        self.skipping = in_a_row > 0
        self.failing = self.skipping and not float(result.loss_scale) > 1
        if in_a_row >= self._most:
            raise FloatingPointError(
                f"{in_a_row} steps in a row had non-finite gradients (weights and checkpoints are as before them): "
                f"{self._diagnosis.find(gradients=True)}; try a lower --lr, --mixed_precision bf16, or --load an "
                "earlier checkpoint"
            )
        if self.failing and not told and self._diagnosis.harmless:
            cause = self._diagnosis.find(gradients=False)
            if self._engine.mesh.is_main:
                logger.warning(f"step {done}: skipped, its gradients were not finite: {cause}")
