"""A configuration by component: every flag in one of them, each with the value it had."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from opendit.cli.components import Components
from opendit.config.components import CaptionFlags, ParallelFlags
from opendit.config.flags import flags_of, parse, to_dict
from opendit.config.train import TrainConfig

ARGV = "--model DiT-Ti/2 --lr 0.5 --fp8 --text_encoder clip --sequence_parallel_size 4 --outputs there".split()


def test_every_flag_is_in_one_component_with_its_value():
    flags = parse(TrainConfig, ARGV)
    parts = vars(Components(flags)).values()
    found = [(item.name, getattr(part, item.name)) for part in parts for item in flags_of(type(part))]
    assert len(found) == len(flags_of(TrainConfig)) and dict(found) == to_dict(flags)
    assert all(part.given == flags.given for part in parts)


def test_a_component_is_its_own_flags_and_is_frozen():
    part = parse(TrainConfig, ARGV).part(ParallelFlags)
    assert type(part) is ParallelFlags and part.sequence_parallel_size == 4
    assert {item.name for item in fields(part)} == {item.name for item in fields(ParallelFlags)}
    with pytest.raises(FrozenInstanceError):
        part.sequence_parallel_size = 2


def test_a_changed_component_takes_the_place_of_the_configurations_own():
    flags = parse(TrainConfig, ARGV)
    captions = replace(flags.part(CaptionFlags), text_encoder="bytes", max_text_tokens=7)
    changed = flags.with_part(captions)
    assert type(changed) is TrainConfig and flags.text_encoder == "clip"
    assert to_dict(changed) == {**to_dict(flags), "text_encoder": "bytes", "max_text_tokens": 7}
    assert changed.given == flags.given
