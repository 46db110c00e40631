"""Which of a run's checkpoints is the best one, by the held-out loss that its state.json tells."""

from pathlib import Path

from opendit.state.checkpoint import read_state, step_folder
from opendit.state.files import point_to, step_of

BEST_LINK = "best"


class BestCheckpoint:
    """Keeps ``checkpoints/best`` at the checkpoint with the least held-out loss. Use it on one rank.

    Losses are compared only where they are of the same samples. Of a run that went back to an earlier checkpoint, those
    of later steps, which are about to be written anew, are out.

    Args:
        checkpoints: the folder of the run's checkpoints; they need not be there yet.
        samples: says what the loss is of (``fingerprint["validation"]``).
        last: the step that the run goes on from.

    Attributes:
        folder: the best checkpoint; None while none has such a loss.
        loss: its held-out loss.
    """

    def __init__(self, checkpoints: Path, samples: str, last: int):
        self._samples, self.folder, self.loss = samples, None, float("inf")
        for folder in sorted(checkpoints.glob("step_*"), key=step_of):
            if 0 <= step_of(folder) <= last:
                try:
                    self._take(folder, read_state(folder))
                except ValueError:  # damaged, which a --load of it tells
                    continue

    def saved(self, checkpoints: Path, state: dict) -> None:
        """A checkpoint was put in its place, with this state.json. Raises OSError if the link can't be moved."""
        self._take(step_folder(checkpoints, state["step"]), state)
        if self.folder is not None:  # also where it is an old one, and a run that went back left the link at another
            point_to(checkpoints / BEST_LINK, self.folder)

    def _take(self, folder: Path, state: dict) -> None:
        loss = state.get("val_loss")
        same = state.get("fingerprint", {}).get("validation") == self._samples
        if loss is not None and same and loss < self.loss:
            self.folder, self.loss = folder, loss
