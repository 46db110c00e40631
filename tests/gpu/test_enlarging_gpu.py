"""Test that enlarging clips on a GPU gives the same bits as on a CPU."""

import pytest
import torch
from torch.nn.functional import interpolate

from opendit.data import BatchSchedule, build_loader
from opendit.data.base import PLAIN, Description, Fingerprint, Item, MediaDataset, Small
from opendit.data.clips import enlarge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("height, width, whole", [(240, 240, (256, 256)), (113, 97, (211, 199)), (31, 64, (33, 64))])
def test_bits_are_those_of_a_cpu(height, width, whole):
    clips = torch.randint(0, 256, (5, 4, height, width, 3), dtype=torch.uint8)
    clips[1] = (clips[1] > 127).to(torch.uint8) * 255
    x = torch.zeros(5, 4, *whole, 3, dtype=torch.uint8)
    x[:, :, :height, :width] = clips
    small = [Small(height, width, number % 2 == 1) for number in range(5)]
    found = enlarge(x.cuda().movedim(-1, 1), small).cpu()
    for number, clip in enumerate(clips):
        wanted = interpolate(clip.permute(0, 3, 1, 2), whole, mode="bicubic", antialias=True).transpose(0, 1)
        assert torch.equal(found[number], wanted.flip(-1) if number % 2 else wanted)


class Clips(MediaDataset):
    """A data set of clips, some of 64 pixels and some smaller, as read from files."""

    def __len__(self):
        return 6

    def read(self, row, view=PLAIN):
        size = (40 + 8 * min(row, 3), 48 + 8 * min(row, 2))
        clip = torch.randint(0, 256, (4, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(row))
        if view.enlarge:
            clip = interpolate(clip, (64, 64), mode="bicubic", antialias=True)
        clip = clip.transpose(0, 1)
        if clip.shape[-2:] == (64, 64):
            return Item(clip.flip(-1) if view.flip else clip)
        return Item(clip, small=Small(clip.shape[-2], clip.shape[-1], view.flip), whole=(64, 64))

    def fingerprint(self):
        return Fingerprint(lambda: "clips")

    def describe(self):
        return Description(text="clips", sample_shape=(3, 4, 64, 64), class_names=["one"], random_flip=True)


def test_pinned_batches_of_workers_are_enlarged_alike():
    """Read clips as a run does: through workers, pinned memory and the device."""
    data, schedule = Clips(), BatchSchedule(6, 3, 1)
    how = dict(dp_rank=0, dp_size=1, batch_size=3, num_workers=2, as_bytes=True, end_step=12, pin_memory=True)
    with build_loader(data, schedule, **how) as loader:
        early = [batch.x for batch in loader]
    left = []
    with build_loader(data, schedule, **how, enlarge=False) as loader:
        for wanted, batch in zip(early, loader, strict=True):
            assert batch.x.is_pinned() and batch.shared is None
            left += batch.small or ()
            assert torch.equal(enlarge(batch.x.cuda(non_blocking=True), batch.small).cpu(), wanted)
    assert any(left) and not all(left)
