"""The loss scale on the device against torch's GradScaler."""

import torch

from opendit.parallel import loss_scale
from opendit.parallel.loss_scale import LossScale


def test_the_scale_is_that_of_torch_s_scaler(monkeypatch):
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    ours, memory = LossScale(torch.device("cpu")), None
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    theirs.scale(torch.ones(()))  # makes its tensors
    memory = ours.scale.data_ptr()
    for step, finite in enumerate([True] * 4 + [False, True, True, False, False, True, True, True, True]):
        ours.update(torch.tensor(finite))
        torch._amp_update_scale_(
            theirs._scale, theirs._growth_tracker, torch.tensor(0.0 if finite else 1.0), 2.0, 0.5, 3
        )
        assert ours.state() == dict(scale=theirs.get_scale(), growth=theirs._growth_tracker.item()), step
    assert ours.scale.data_ptr() == memory and ours.scale < 2.0**16


def test_its_state_can_be_another_plugin_s():
    scale = LossScale(torch.device("cpu"))
    scale.load(dict(scale=1024.0, growth=7, hysteresis=2))
    assert scale.state() == dict(scale=1024.0, growth=7)
