"""The metrics by name, for the command line: nothing here imports torch."""

import re
from typing import NamedTuple


class Needs(NamedTuple):
    """features: the name of those that it takes. reference: "statistics" of theirs, "features", or None."""

    features: str
    reference: str | None
    about: str


METRICS = {
    "fid": Needs("pool", "statistics", "Fréchet distance of Inception's features (of clips: of their frames)"),
    "sfid": Needs("spatial", "statistics", "the same of spatial features, as ADM's"),
    "is": Needs("logits", None, "Inception score"),
    "pr": Needs("pool", "features", "precision and recall"),
    "kid": Needs("pool", "features", "kernel distance"),
    "fvd": Needs("clip", "statistics", "Fréchet distance of I3D's features of clips"),
    "motion": Needs("motion", None, "mean difference between frames"),
    "accuracy": Needs("digit", None, "share of samples that show the digit asked for (--features digits)"),
    "direction": Needs("moved", None, "share of clips that move as asked (--features digits)"),
    "copies": Needs("nearest", None, "share of copies of training digits (--features digits)"),
    "clip_score": Needs("caption", None, "how well samples fit their captions"),
}
DIGITS = "digits"  # the built-in ones, as a reference; and their features
RESIZES = ("tf", "torch", "clean")
PRECISIONS = ("fp32", "tf32")
LABELS = ("balanced", "drawn")


def of_training(message: str) -> str:
    """A message that names flags of ``opendit evaluate``, by the names that they have in train.py."""
    return re.sub(r"--(?=(?:metrics|reference|features|video_features)\b)", "--evaluate_", message)
