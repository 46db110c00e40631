"""Conditions from batches and captions, and the null condition of guidance."""

from types import SimpleNamespace

import pytest
import torch

from opendit.data import DataError
from opendit.encoders.conditioner import CaptionConditioner, LabelConditioner, preview_labels
from opendit.models.conditioning import TextCondition, TextConfig, encode_bytes

CPU = torch.device("cpu")


def test_labels_are_dropped_to_the_class_after_the_last():
    conditioner = LabelConditioner(7, CPU)
    y = conditioner.of_batch(SimpleNamespace(y=torch.tensor([0, 6, 3]), text=None))
    assert conditioner.drop(y, torch.tensor([True, False, True])).tolist() == [7, 6, 7]


def test_bytes_are_ids_and_dropped_to_the_empty_caption():
    conditioner = CaptionConditioner(TextConfig("bytes", 32, 12), CPU)
    y = conditioner.of_batch(SimpleNamespace(y=None, embedding=None, text=("a cat", "ein Hund läuft")))
    assert torch.equal(y, encode_bytes(["a cat", "ein Hund läuft"], 12))
    dropped = conditioner.drop(y, torch.tensor([False, True]))
    assert torch.equal(dropped, encode_bytes(["a cat", ""], 12)) and (dropped[1] != 0).any()


class FakeEncoder:
    """Counts its calls. The tokens of a caption are the codes of its characters."""

    calls = 0

    def encode(self, captions):
        self.calls += 1
        tokens = torch.zeros(len(captions), 4, 3)
        mask = torch.zeros(len(captions), 4, dtype=torch.bool)
        for i, caption in enumerate(captions):
            mask[i, : len(caption) + 1] = True
            for j, letter in enumerate(caption):
                tokens[i, j] = ord(letter)
        return TextCondition(tokens, mask, tokens.mean(dim=1))


def test_a_frozen_encoder_encodes_the_empty_caption_once():
    encoder = FakeEncoder()
    conditioner = CaptionConditioner(TextConfig("clip", 3, 4), CPU, encoder)
    y = conditioner.of_batch(SimpleNamespace(y=None, embedding=None, text=("ab", "c")))
    for _ in range(3):
        dropped = conditioner.drop(y, torch.tensor([True, False]))
    assert encoder.calls == 2
    assert dropped.tokens[0].eq(0).all() and dropped.mask[0].tolist() == [True, False, False, False]
    assert torch.equal(dropped.tokens[1], y.tokens[1]) and torch.equal(dropped.pooled[1], y.pooled[1])


def test_a_data_set_without_captions_is_named():
    conditioner = CaptionConditioner(TextConfig("bytes", 32, 12), CPU)
    with pytest.raises(DataError, match="has no captions"):
        conditioner.of_batch(SimpleNamespace(y=torch.zeros(2), embedding=None, text=None))


def test_preview_labels_are_spread_over_the_classes():
    assert preview_labels(10, 20).tolist() == [*range(10), *range(10)]
    assert preview_labels(1000, 4).tolist() == [0, 250, 500, 750]
