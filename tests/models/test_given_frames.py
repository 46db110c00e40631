"""Test given frames in the network: how they are embedded, and loading weights of models without them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as property_of
from hypothesis import strategies as st

from opendit.config.architectures import parse_given
from opendit.models.conditioning import give, with_given
from opendit.models.dit import DiTConfig
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import Weights, build_model, config_from_dict, model_config, plan_of
from tests.first_weights import taken_over
from tests.models.test_dit import randomised

CLIP = VDiTConfig((6, 4, 6), (2, 2, 2), 3, 24, 2, 3, num_classes=5)
GIVEN = replace(CLIP, given_frames="prefix:3")


def made(config, seed=0):
    torch.manual_seed(seed)
    return randomised(build_model(config)).eval()


def inputs(channels=3, frames=6):
    generator = torch.Generator().manual_seed(1)
    x, latents = (torch.randn(2, channels, frames, 4, 6, generator=generator) for _ in range(2))
    return x, give(latents, torch.tensor([3, 1])), latents, torch.tensor([3.0, 700.0]), torch.tensor([1, 5])


def test_the_mask_and_the_given_latents_by_hand():
    _, given, latents, _, _ = inputs()
    assert given.shape == (2, 4, 6, 4, 6)
    for sample, count in ((0, 3), (1, 1)):
        assert (given[sample, 0, :count] == 1).all() and (given[sample, 0, count:] == 0).all()
        assert torch.equal(given[sample, 1:, :count], latents[sample, :, :count])
        assert not given[sample, 1:, count:].any()


def test_patches_are_cut_out_of_noisy_latents_mask_and_given_frames():
    """Compare with a convolution, because a patch embedding is one."""
    model, (x, given, *_) = made(GIVEN), inputs()
    layer = model.x_embedder.proj
    assert layer.weight.shape == (24, 3 + 1 + 3, 2, 2, 2)
    want = F.conv3d(torch.cat([x, given], 1), layer.weight, layer.bias, stride=(2, 2, 2)).flatten(2).mT
    torch.testing.assert_close(model.x_embedder(with_given(x, given)), want)


def test_without_given_frames_they_are_zeros_and_they_matter_with():
    model, (x, given, _, t, y) = made(GIVEN), inputs()
    none = model(x, t, y)
    assert torch.equal(none, model(with_given(x, torch.zeros_like(given)), t, y))
    some = model(with_given(x, given), t, y)
    assert some.shape == none.shape == (2, 6, 6, 4, 6)
    assert (some - none).abs().amax() > 1e-3
    picture = model(x[:, :, :1], t, y)  # a picture among clips
    assert picture.shape == (2, 6, 1, 4, 6)


def test_a_model_without_takes_no_more_channels_and_no_fewer():
    model, (x, given, _, t, y) = made(CLIP), inputs()
    for wrong in (with_given(x, given), x[:, :1]):
        with pytest.raises(RuntimeError):
            model(wrong, t, y)


@pytest.mark.parametrize("name", ["vDiT-Ti/222", "ST-DiT-Ti/122", "MovieGen-Ti/122"])
def test_every_model_of_clips_counts_its_weights_and_draws(name):
    config = model_config(name, input_size=(4, 4), frames=4, in_channels=2, num_classes=3, given_frames="random")
    model = made(config)
    assert config.parameters() == sum(p.numel() for p in model.parameters())
    assert config_from_dict(config.to_dict()) == config
    plain = replace(config, given_frames=None)
    more = plan_of(config).forward_flops(config) - plan_of(plain).forward_flops(plain)
    assert more == 2 * config.tokens * (1 + 2) * torch.tensor(config.patch).prod() * config.hidden_size
    x = torch.randn(2, 2, 4, 4, 4)
    given = give(x, torch.tensor([0, 3]))
    assert model(with_given(x, given), torch.tensor([5.0, 6.0]), torch.tensor([0, 1])).shape[2:] == x.shape[2:]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: DiTConfig((4, 4), 2, 3, 24, 2, 3, num_classes=5, given_frames="first"), "takes pictures"),
        (lambda: replace(GIVEN, given_frames="prefix:6"), "latents have 6 in all"),
        (lambda: replace(CLIP, input_size=(1, 4, 6), given_frames="random"), "latents have 1 in all"),
        (lambda: replace(CLIP, given_frames="last"), "first, prefix:K or random"),
    ],
)
def test_what_can_not_be_is_refused(config, message):
    with pytest.raises(ValueError, match=message) as error:
        config().check()
    assert "--given_frames" in str(error.value)


@property_of(st.integers(1, 99_999))
def test_forms_of_the_flag(count):
    assert parse_given(f"prefix:{count}") == count


def test_other_forms_are_refused():
    assert (parse_given("first"), parse_given("random")) == (1, None)
    for wrong in ("", "prefix", "prefix:", "prefix:0", "prefix:01", "prefix:-1", "prefix:1.5", "first ", "prefix:٣"):
        with pytest.raises(ValueError, match="--given_frames"):
            parse_given(wrong)


def test_a_model_without_becomes_one_with_that_draws_the_same_at_first():
    """The new filters are zero, so the output is the old model's for any given frames."""
    old, new, (x, given, _, t, y) = made(CLIP), made(GIVEN, seed=1), inputs()
    start = taken_over(new, Weights(old.state_dict(), None, {}), CLIP)
    torch.testing.assert_close(new(with_given(x, given), t, y), old(x, t, y))
    assert list(start.resized) == ["x_embedder.proj.weight"] and not start.new and not start.left_out
    assert "x_embedder (of given frames, which begin at zero)" in "\n".join(start.describe())
    assert start.untrained == ["x_embedder.proj.weight"]  # LoRA trains it fully


def test_and_back_and_from_pictures():
    old, new, (x, _, _, t, y) = made(GIVEN), made(CLIP, seed=1), inputs()
    start = taken_over(new, Weights(old.state_dict(), None, {}), GIVEN)
    torch.testing.assert_close(new(x, t, y), old(x, t, y))
    assert "without those of given frames" in "\n".join(start.describe())
    pictures = DiTConfig((4, 6), 2, 3, 24, 2, 3, num_classes=5)
    old, new = made(pictures), made(replace(GIVEN, given_frames="first"), seed=1)
    start = taken_over(new, Weights(old.state_dict(), None, {}), pictures)
    weight, theirs = new.x_embedder.proj.weight, old.x_embedder.proj.weight
    assert torch.equal(weight[:, :3], (theirs / 2).unsqueeze(2).expand(-1, -1, 2, -1, -1)) and not weight[:, 3:].any()
    assert "spread over the frames, of given frames" in "\n".join(start.describe())
    other = made(replace(GIVEN, given_frames="random"), seed=2)
    start = taken_over(other, Weights(made(GIVEN).state_dict(), None, {}), GIVEN)
    assert not start.resized and "x_embedder.proj.weight" in start.reused
