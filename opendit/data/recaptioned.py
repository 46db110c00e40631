"""A data set with changed captions: a prefix, and tags that are shuffled or dropped during training."""

from dataclasses import replace

import numpy as np

from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, Description, Fingerprint, Item, MediaDataset, View
from opendit.data.held_out import SomeRows
from opendit.data.row_arrays import Complement


class Recaptioned(SomeRows):
    """All rows of another data set, with ``prefix`` and a blank before each caption.

    Tags are the parts of a caption between commas. ``View.tags`` keys the random choices of each use; without this key
    a caption keeps its tags. The prefix is never shuffled or dropped.

    Args:
        shuffle: shuffle the tags again at each use in training.
        drop: fraction of the tags that each use drops at random. At least one tag is kept.
    """

    def __init__(self, whole: MediaDataset, prefix: str, *, shuffle: bool = False, drop: float = 0.0):
        super().__init__(whole, Complement(len(whole), np.zeros(0, np.int64)), "")
        self.prefix, self.shuffle, self.drop = prefix, shuffle, drop

    def caption(self, row: int) -> str | None:
        return self._changed(self.whole.caption(row), None)

    def read(self, row: int, view: View = PLAIN) -> Item:
        item = self.whole.read(row, view)
        return item._replace(text=self._changed(item.text, view.tags))

    def _changed(self, text: str | None, key: int | None) -> str | None:
        if text is None:
            return None
        if key is not None and (self.shuffle or self.drop):
            text = change_tags(text, key, shuffle=self.shuffle, drop=self.drop)
        return f"{self.prefix} {text}".strip() if self.prefix else text

    def fingerprint(self) -> Fingerprint:
        found = self.whole.fingerprint()
        if not self.prefix:
            return found
        return Fingerprint(
            lambda: hash_parts("prefix", self.prefix, found.identity), lambda: found.contents, found.checksums
        )

    def describe(self) -> Description:
        about = self.whole.describe()
        parts = [f"captions after {self.prefix!r}"] * bool(self.prefix) + ["shuffled tags"] * self.shuffle
        parts += [f"{self.drop:.0%} of the tags dropped"] * (self.drop > 0)
        random_tags = self.shuffle or self.drop > 0
        return replace(about, text=f"{about.text}, {', '.join(parts)}", random_tags=random_tags)


def change_tags(text: str, key: int, *, shuffle: bool, drop: float) -> str:
    """Return a caption whose tags are shuffled and dropped at random, keyed by ``key``."""
    tags = [tag for part in text.split(",") if (tag := part.strip())]
    if len(tags) < 2:
        return text
    # Use numpy's generator, because opendit.diffusion.random is made for batches and takes a millisecond.
    numbers = np.random.Philox(key=key).random_raw(2 * len(tags)).reshape(2, -1) / 2**64
    order = numbers[0].argsort() if shuffle else np.arange(len(tags))
    kept = numbers[1] >= min(drop, numbers[1].max())
    return ", ".join(tags[place] for place in order[kept[order]])
