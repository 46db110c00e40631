"""The settings that identify samples: digests of weights, and sizes of decoded pictures."""

from types import SimpleNamespace

import pytest
import torch

from opendit.encoders.pictures import to_uint8
from opendit.encoders.vae import PixelCodec, VAECodec
from opendit.encoders.video_vae import FrameCodec, VideoVAECodec
from opendit.sampling import sample_output as module
from opendit.sampling.sample_output import pixel_shape, tensors_digest
from tests.encoders.test_vae import small_vae
from tests.encoders.test_video_vae import small_cogvideox, small_wan

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_tells_tensors_apart(dtype, monkeypatch):
    monkeypatch.setitem(module.WORDS_AT_ONCE, "cpu", 8)  # in several pieces
    values = torch.arange(30).view(5, 6).to(dtype)
    base = {"a": values, "b": torch.zeros(3, dtype=dtype), "c": torch.tensor(1.5), "d": torch.empty(0)}
    digest = tensors_digest(base)
    assert tensors_digest(dict(reversed(base.items()))) == digest and len(digest) == 64
    assert tensors_digest({**base, "a": values.clone().t().contiguous().t()}) == digest  # strides are not content
    bits = values.clone().view(torch.uint8)
    others = [{**base, "a": values.flip(0)}, {**base, "a": values.t()}, {**base, "a": values.view(6, 5)}]
    for place in (0, 13, bits.numel() - 1):
        flipped = bits.clone()
        flipped.view(-1)[place] ^= 1
        others.append({**base, "a": flipped.view(dtype).view(5, 6)})
    swapped = values.flatten().clone()
    swapped[[3, 22]] = swapped[[22, 3]]
    others += [{**base, "a": swapped.view(5, 6)}, {**base, "b": torch.zeros(4, dtype=dtype)}, {**base, "e": values}]
    others += [{**base, "b": torch.zeros(3)}] * (dtype != torch.float32)
    found = {tensors_digest(other) for other in others}
    assert len(found) == len(others) and digest not in found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [14, 1 << 14])
def test_the_sum_of_a_digest_is_that_of_its_formula(dtype, words, monkeypatch):
    monkeypatch.setitem(module.WORDS_AT_ONCE, "cpu", words)
    found = torch.randn(1001).to(dtype).view(module.INTEGERS[dtype.itemsize])
    expected = sum(word * ((place + 1) * module.ODD | 1) for place, word in enumerate(found.tolist()))
    assert module.weighted_sum(found) % 2**64 == expected % 2**64


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        (lambda: VAECodec(small_vae()), (3, 5)),
        (lambda: PixelCodec(1), (3, 5)),
        (lambda: PixelCodec(4), (3, 5)),
        (lambda: VAECodec(small_vae(out_channels=1)), (3, 5)),
        (lambda: FrameCodec(VAECodec(small_vae())), (4, 3, 2)),
        (lambda: VideoVAECodec(small_wan()), (3, 2, 3)),
        (lambda: VideoVAECodec(small_wan(patch_size=2, in_channels=12, out_channels=12)), (2, 2, 3)),
        (lambda: VideoVAECodec(small_cogvideox()), (2, 2, 3)),
    ],
)
def test_the_size_of_what_is_decoded_is_known_before(codec, size):
    codec = codec()
    decoded = codec.decode(torch.zeros(1, codec.latent_channels, *size))
    assert pixel_shape(SimpleNamespace(codec=codec, size=size)) == to_uint8(decoded).shape[1:]
