"""The predicted duration of a run is its number of steps times the step time, in a suitable unit."""

import re

import pytest

import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.training.summary import dry_run


@pytest.mark.parametrize(
    ("steps", "shown", "unit"),
    ((10_000_000, "10,000,000 steps", "hours"), (100_000, "100,000 steps", "min"), (1000, "1,000 steps", "s")),
)
def test_duration_is_steps_by_seconds(steps, shown, unit, capsys):
    dry_run(parse(TrainConfig, f"--recipe digits --max_steps {steps} --epochs 10000000 --dry_run".split()))
    said = capsys.readouterr().out
    step = float(re.search(r"time +([\d.]+) ms a step", said)[1])
    number, card = re.search(rf"duration +about ([\d.]+) {unit} for {shown}, predicted at (\w+) speed", said).groups()
    expected = steps * step / 1000 / {"hours": 3600, "min": 60, "s": 1}[unit]
    assert abs(float(number) - expected) < 0.51 and card in said


def test_steps_left_are_in_seconds_for_a_short_run(tmp_path, no_ranks, caplog):
    caplog.set_level("INFO")
    flags = f"--recipe digits --model DiT-Ti/4 --max_steps 3 --log_every 1 --no_save --outputs {tmp_path}"
    train.main(flags.split())
    assert re.search(r"step 2: 1 step left, about \d+ s at [\d.e-]+ s a step", caplog.text)
