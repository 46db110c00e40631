"""A dry run's hours are its time of a step by its steps."""

import re

from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.training.summary import dry_run


def test_hours_are_steps_by_seconds(capsys):
    dry_run(parse(TrainConfig, "--recipe digits --max_steps 1000000 --epochs 1000000 --dry_run".split()))
    said = capsys.readouterr().out
    step = float(re.search(r"time +([\d.]+) ms a step", said)[1])
    hours, card = re.search(r"hours +([\d.]+) for 1,000,000 steps, predicted \((\w+)", said).groups()
    assert abs(float(hours) - 1e6 * step / 3.6e6) < 0.02 * float(hours) and card in said
