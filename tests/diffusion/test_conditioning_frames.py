"""Conditioning frames in training: keyed by (seed, step, index), with the frequencies that were asked for."""

import torch

from opendit.diffusion.random import WITHOUT, Stream, conditioning_lengths, draw_conditioning_frames, uniform


def lengths(given):
    return given[:, 0, :, 0, 0].sum(1).long()


def test_lengths_at_given_numbers():
    u = torch.tensor([0.0, 0.05, 0.1, 0.24999, 0.25, 0.5, 0.99999, 1.0], dtype=torch.float64)
    assert conditioning_lengths("random", 4, u).tolist() == [0, 0, 0, 0, 1, 2, 3, 3]
    assert conditioning_lengths("first", 4, u).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert conditioning_lengths("prefix:3", 4, u).tolist() == [0, 0, 3, 3, 3, 3, 3, 3]
    assert conditioning_lengths("prefix:3", 1, u).tolist() == [0] * 8  # a picture
    assert conditioning_lengths("random", 1, u).tolist() == [0] * 8


def test_lengths_are_as_frequent_as_is_said():
    index = torch.arange(20_000)
    latents = torch.zeros(20_000, 1, 5, 1, 1)
    counts = lengths(draw_conditioning_frames("random", latents, 7, 3, index)).bincount(minlength=6)
    assert counts[5] == 0 and (counts[:5] / 20_000 - 0.2).abs().max() < 0.01
    none = (lengths(draw_conditioning_frames("prefix:2", latents, 7, 3, index)) == 0).double().mean()
    assert abs(none - WITHOUT) < 0.01


def test_they_depend_on_seed_step_and_index_alone():
    index = torch.tensor([5, 11, 2, 900])
    latents = torch.randn(4, 2, 6, 3, 2)
    whole = draw_conditioning_frames("random", latents, 1, 9, index)
    for i in range(4):
        assert torch.equal(
            draw_conditioning_frames("random", latents[i : i + 1], 1, 9, index[i : i + 1]), whole[i : i + 1]
        )
    many, clips = torch.arange(64), torch.ones(64, 1, 32, 1, 1)
    first = lengths(draw_conditioning_frames("random", clips, 1, 9, many))
    for other in ((2, 9, many), (1, 10, many), (1, 9, many + 64)):
        assert (lengths(draw_conditioning_frames("random", clips, *other)) != first).any()
    times = (uniform(1, 9, many, Stream.TIMESTEP) * 32).long()  # not another stream's numbers
    assert (first != times).any() and draw_conditioning_frames(None, clips, 1, 9, many) is None
