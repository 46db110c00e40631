"""Find the best of a run's checkpoints, by a figure in its state.json."""

import math
from pathlib import Path
from typing import Any

from opendit.checkpoint.checkpoint import read_state, step_folder
from opendit.checkpoint.files import BEST_LINK, point_to, step_of
from opendit.config.checkpoints import BEST


class BestCheckpoint:
    """Keeps ``checkpoints/best`` at the checkpoint with the best figure. Use it on one rank.

    Figures are compared only where they are of the same samples, drawn and measured alike. Of a run that went back to
    an earlier checkpoint, those of later steps, which are about to be written anew, are out.

    Args:
        checkpoints: the folder of the run's checkpoints; they need not be there yet.
        name: of ``BEST``.
        of: says what the figure is of: of the held-out loss ``fingerprint["validation"]`` of a checkpoint, of others
            its ``evaluation["of"]``.
        last: the step that the run goes on from.

    Attributes:
        folder: the best checkpoint; None while none has such a figure.
        figure: its figure.
    """

    def __init__(self, checkpoints: Path, name: str, of: str, last: int):
        self._of, self._less, self._of_samples = of, BEST[name], name != "val_loss"
        self._name = name
        self.folder, self.figure = None, math.inf if self._less else -math.inf
        for folder in sorted(checkpoints.glob("step_*"), key=step_of):
            if 0 <= step_of(folder) <= last:
                try:
                    self.take(folder, read_state(folder))
                except ValueError:  # damaged, which a --load of it tells
                    continue

    def saved(self, checkpoints: Path, state: dict[str, Any]) -> None:
        """A checkpoint was put in its place, with this state.json. Raises OSError if the link can't be moved."""
        self.take(step_folder(checkpoints, state["step"]), state)
        if self.folder is not None:  # also where it is an old one, and a run that went back left the link at another
            point_to(checkpoints / BEST_LINK, self.folder)

    def take(self, folder: Path, state: dict[str, Any]) -> None:
        """Make a checkpoint the best one if its figure is better. folder, state: the checkpoint's."""
        if self._of_samples:
            evaluation = state.get("evaluation", {"of": None, "figures": {}})
            figure, of = evaluation["figures"].get(self._name), evaluation["of"]
        else:
            figure, of = state.get(self._name), state.get("fingerprint", {}).get("validation")
        if figure is None or of != self._of:
            return
        if figure < self.figure if self._less else figure > self.figure:
            self.folder, self.figure = folder, figure
