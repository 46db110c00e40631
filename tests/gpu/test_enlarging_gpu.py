"""Clips enlarged on a GPU have the bits of those enlarged on a CPU."""

import pytest
import torch
from torch.nn.functional import interpolate

from opendit.data.enlarging import Small, enlarge

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


def test_pinned_batches_of_a_worker_are_enlarged_alike(tmp_path):
    """Through worker, pinned memory and device, as a run reads."""
    import numpy as np

    from opendit.data import build_dataset, build_loader, build_schedule
    from opendit.data.video_file import write_mp4

    pytest.importorskip("decord")
    random, lines = np.random.default_rng(0), ["path,text"]
    for number in range(6):
        write_mp4(tmp_path / f"{number}.mp4", random.integers(0, 256, (9, 40 + 8 * number, 48, 3), np.uint8), 24)
        lines.append(f"{number}.mp4,clip {number}")
    (tmp_path / "clips.csv").write_text("\n".join(lines))
    data = build_dataset(str(tmp_path / "clips.csv"), 64, seed=1, use_video=True, num_frames=4, frame_interval=2)
    schedule = build_schedule(data, 3, 1, 1)
    how = dict(dp_rank=0, dp_size=1, batch_size=3, num_workers=2, as_bytes=True, end_step=12, pin_memory=True)
    with build_loader(data, schedule, **how) as loader:
        early = [batch.x for batch in loader]
    with build_loader(data, schedule, **how, enlarge=False) as loader:
        for wanted, batch in zip(early, loader, strict=True):
            assert batch.x.is_pinned() and any(batch.small) and batch.shared is None
            assert torch.equal(enlarge(batch.x.cuda(non_blocking=True), batch.small).cpu(), wanted)
