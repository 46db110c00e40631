"""Steps that the optimizer did not take, since their gradients were not finite."""

from collections.abc import Callable

from opendit.parallel.engines import Engine, StepResult
from opendit.training.diagnosis import Diagnosis


class SkippedSteps:
    """Says once why steps are being skipped, and ends the run when too many are in a row. Use it on every rank.

    Args:
        most: skipped steps in a row that end the run.
        say: shows a line to people.

    Attributes:
        skipping: whether the step that was looked at last was skipped.
        failing: whether it was by a fault: fp16 skips a step now and then while its loss scale is above 1, to lower it.
    """

    def __init__(self, engine: Engine, diagnosis: Diagnosis, most: int, say: Callable[[str], None]):
        self._engine, self._diagnosis, self._most, self._say = engine, diagnosis, most, say
        self.skipping = self.failing = False

    def look(self, done: int, result: StepResult) -> None:
        """Looks at the step that has just been made, the ``done``-th; the host waits for the device.

        Raises FloatingPointError after too many skipped steps.
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
            self._say(f"step {done}: skipped, its gradients were not finite: {cause}")
