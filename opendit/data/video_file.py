"""Write clips as H.264 MP4 files that browsers and media players can read."""

import os
from fractions import Fraction
from pathlib import Path

import numpy as np

from opendit.common.safe_files import path_of, replacing

CRF = 18  # x264's quality setting; 18 is visually lossless
_BT601, _LIMITED_RANGE = 6, 1  # FFmpeg's AVCOL_SPC_SMPTE170M and AVCOL_RANGE_MPEG


def write_mp4(
    path: str | Path,
    frames: np.ndarray,
    fps: float | Fraction,
    comment: str | None = None,
    root: Path | None = None,
) -> None:
    """Encode RGB ``frames``, (T, H, W, 3) uint8, and replace ``path`` when the file is complete.

    H.264's 4:2:0 colours need even sizes, so the last row or column of an odd height or width is repeated. The same
    frames give the same bytes in any process.

    Args:
        comment: text of the file's ``comment`` tag.
        root: folder below which no link is followed (opendit/common/safe_files.py).

    Raises:
        ValueError: ``frames`` is empty or has another shape or dtype, or ``fps`` is not positive.
        OSError: the file can't be written; the error names ``path``.
    """
    import av  # imported here, because it loads slowly and reading data doesn't need it

    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8:
        raise ValueError(f"a clip is a uint8 array, not {getattr(frames, 'dtype', type(frames).__name__)}")
    if frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ValueError(f"a clip has the shape (frames, height, width, 3), not {frames.shape}")
    rate = Fraction(fps).limit_denominator(1001)  # rates like 29.97 frames per second are 30000/1001
    if rate <= 0:
        raise ValueError(f"fps {fps} must be positive")
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")

    path = Path(path)
    with replacing(path, root=root, make=True, temporary=f"{path.name}.{os.getpid()}.partial") as new:
        # faststart puts the index first, so that a browser can play the clip while it loads.
        with av.open(path_of(new), "w", format="mp4", options={"movflags": "+faststart"}) as file:
            if comment is not None:
                file.metadata["comment"] = comment
            # cpu-independent=1, because x264's fastest routines may encode the same frames differently, even in one
            # thread.
            options = {"crf": str(CRF), "threads": "1", "x264-params": "cpu-independent=1"}
            stream = file.add_stream("libx264", rate=rate, options=options)
            stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
            # Without these fields, players assume BT.709 for clips larger than a DVD, and show wrong colours.
            stream.codec_context.colorspace, stream.codec_context.color_range = _BT601, _LIMITED_RANGE
            for picture in frames:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                frame = frame.reformat(format="yuv420p", dst_colorspace=_BT601, dst_color_range=_LIMITED_RANGE)
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
