"""Compare how fast decord, PyAV and torchcodec read clips on one thread, and whether they return the same pixels.

    python -m benchmarks.bench_decoders [--rounds 5] [--sizes 64x64 320x240] [--codecs h264 mpeg4 vp9 av1]

Install decord with ``pip install decord2``; torchcodec needs FFmpeg's shared libraries. A decoder that can't be loaded
or crashes is reported and left out. Every decoder runs in a separate process, like a loader's worker. The decoders take
turns, and each round reverses their order. Each one opens the file and reads every third frame, 16 in all, as full-size
RGB. Times are CPU seconds of its process.
"""

import argparse
import hashlib
import importlib
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
from PIL import Image

FRAMES, LENGTH, START, INTERVAL, SEED = 16, 60, 6, 3, 0
SIZES = ("64x64", "320x240", "640x360", "1280x720")
CODECS = {
    "h264": ("libx264", {}),
    "mpeg4": ("mpeg4", {}),
    "vp9": ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    "av1": ("libsvtav1", {"preset": "11"}),
}


def write(path: str, width: int, height: int, codec: str, length: int = LENGTH, seed: int = SEED) -> None:
    """Write a clip of drifting, blurred noise with some grain, which takes about as long to decode as a filmed clip."""
    os.environ.setdefault("SVT_LOG", "1")  # otherwise the AV1 encoder prints a page per file
    import av

    random, (encoder, options) = np.random.default_rng(seed), CODECS[codec]
    coarse = random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    large = (width + 2 * length, height + length)
    scene = np.asarray(Image.fromarray(coarse).resize(large, Image.Resampling.BICUBIC)).astype(np.int16)
    grain = random.integers(-6, 7, (8, height, width, 1), dtype=np.int16)
    with av.open(path, "w") as file:
        stream = file.add_stream(encoder, rate=24, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if codec != "h264":
            stream.bit_rate = 1_000_000 * width * height // (320 * 240)
        stream.codec_context.gop_size = 12 if codec == "mpeg4" else 48
        for i in range(length):
            view = scene[i : i + height, 2 * i : 2 * i + width] + grain[i % 8]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(view.clip(0, 255).astype(np.uint8), format="rgb24")))
        file.mux(stream.encode())


def by_decord(path: str, indices: list[int]) -> np.ndarray:
    import decord  # pyright: ignore[reportMissingImports]  # an optional package

    return decord.VideoReader(path, num_threads=1).get_batch(indices).asnumpy()


def by_av(path: str, indices: list[int]) -> np.ndarray:
    import av

    found = []
    with av.open(path) as file:
        file.streams.video[0].codec_context.thread_count = 1
        for number, frame in enumerate(file.decode(video=0)):
            if number in indices:
                found.append(frame.to_ndarray(format="rgb24"))
            if len(found) == len(indices):
                return np.stack(found)
    raise ValueError(f"{path}: too few frames")


def by_torchcodec(path: str, indices: list[int]) -> np.ndarray:
    from torchcodec.decoders import VideoDecoder  # pyright: ignore[reportMissingImports]  # an optional package

    decoder = VideoDecoder(path, num_ffmpeg_threads=1, dimension_order="NHWC")
    return decoder.get_frames_at(indices).data.numpy()


DECODERS = {"decord": by_decord, "av": by_av, "torchcodec": by_torchcodec}


def serve(name: str, pipe: Connection) -> None:
    """In a decoder's process, answer each path with (processor seconds, hash of the pixels) or an error message."""
    importlib.import_module("torchcodec.decoders" if name == "torchcodec" else name)
    indices = [START + i * INTERVAL for i in range(FRAMES)]
    while True:
        path = pipe.recv()
        try:
            began = time.process_time()
            frames = DECODERS[name](path, indices)
            pipe.send((time.process_time() - began, hashlib.sha256(frames.tobytes()).hexdigest()))
        except Exception as error:  # decoders raise errors of any type
            pipe.send(f"{name}: {str(error).splitlines()[0][:100]}")


class Side:
    """A decoder in its process. speeds: frames per processor second in each round. pixels: hash of the pixels."""

    def __init__(self, name: str):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.name, self.speeds, self.pixels, self.problem = name, [], "", ""

    def read(self, path: str) -> None:
        if self.problem:
            return
        try:
            self.pipe.send(path)
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            answer = f"{self.name}: its process ended ({self.process.exitcode})"
        if isinstance(answer, str):
            self.problem = answer
            return
        seconds, self.pixels = answer
        self.speeds.append(FRAMES / seconds)


def compare(size: str, codec: str, rounds: int, folder: str) -> None:
    width, height = map(int, size.split("x"))
    path = f"{folder}/{size}-{codec}.mp4"
    writer = multiprocessing.get_context("spawn").Process(target=write, args=(path, width, height, codec))
    writer.start()
    writer.join()
    if writer.exitcode:
        print(f"{size:>9} {codec:5}  could not be encoded here")
        return
    sides = [Side(name) for name in DECODERS]
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            side.read(path)
    speeds = [median(side.speeds[1:]) if side.speeds[1:] else float("nan") for side in sides]  # without the warm-up
    same = len({side.pixels for side in sides if side.pixels}) == 1
    shown = "".join(f"{speed:10.0f}" for speed in speeds) + "".join(f"{speed / speeds[0]:8.2f}" for speed in speeds)
    problems = "; ".join(side.problem for side in sides if side.problem)
    print(f"{size:>9} {codec:5}{shown}  {'equal' if same else 'DIFFERENT'} {problems}", flush=True)
    for side in sides:
        side.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = "".join(f"{name:>10}" for name in DECODERS) + "".join(f"{name[:7]:>8}" for name in DECODERS)
    print(f"{'':15}{names}  pixels   (frames a processor second; ratio to decord)")
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            for codec in args.codecs:
                compare(size, codec, args.rounds, folder)


if __name__ == "__main__":
    main()
