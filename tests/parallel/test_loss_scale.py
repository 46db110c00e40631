"""The loss scale on the device is compared with Colossal-AI's scaler, which zero2 and gemini use."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.parallel import optimizer
from opendit.parallel.engines import state_of_scaler
from opendit.parallel.optimizer import LossScale


@pytest.fixture
def their_scaler():
    from opendit.parallel.colossal import load

    load()
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    def build(**settings):
        scaler = DynamicGradScaler(min_scale=1, max_scale=2**32, **settings)
        for name in ("_scale", "_min_scale", "_max_scale"):  # DynamicGradScaler puts them on a GPU if there is one
            setattr(scaler, name, getattr(scaler, name).cpu())
        return scaler

    return build


def test_the_scale_is_that_of_colossal_ai_s_scaler(their_scaler, monkeypatch):
    monkeypatch.setattr(optimizer, "INTERVAL", 3)

    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.booleans(), max_size=40), st.sampled_from([1.0, 2.0, 2.0**16, 2.0**31, 2.0**32]))
    def compare(finite_steps, initial):
        ours, theirs = LossScale(torch.device("cpu")), their_scaler(initial_scale=initial, growth_interval=3)
        ours.load(dict(scale=initial, growth=0))
        memory = ours.scale.data_ptr()
        for finite in finite_steps:
            ours.update(torch.tensor(finite))
            theirs.update(not finite)
            assert ours.state() == state_of_scaler(theirs)
        assert ours.scale.data_ptr() == memory

    compare()


def test_it_begins_as_theirs(their_scaler):
    theirs = their_scaler()
    assert LossScale(torch.device("cpu")).state()["scale"] == theirs.scale.item() == optimizer.INITIAL
    for finite, steps, factor in ((True, optimizer.INTERVAL, 2), (False, optimizer.HYSTERESIS, 0.5)):
        before = theirs.scale.item()
        for step in range(1, steps + 1):
            theirs.update(not finite)
            assert theirs.scale.item() == (factor * before if step == steps else before)


def test_its_state_can_be_another_plugin_s():
    scale = LossScale(torch.device("cpu"))
    scale.load(dict(scale=1024.0, growth=7))  # ddp saves no hysteresis
    assert scale.state() == dict(scale=1024.0, growth=7, hysteresis=0)
    scale.load(dict(scale=512.0, growth=0, hysteresis=1))
    scale.update(torch.tensor(False))
    assert scale.state() == dict(scale=256.0, growth=0, hysteresis=2)
