"""The sampling server under clients that each ask again as soon as they are served, against batches drawn offline.

    python benchmarks/bench_server.py [--clients 16] [--fp8] [--vae] [--results FILE]

Every client asks for 1 to 4 pictures of 20 to 50 steps, drawn from a seed, and for the next ones when it has them. The
server's throughput is counted in steps of samples (one sample, one step) over --seconds after --warmup seconds;
its steps are recorded before. Rows that are computed and belong to nobody don't count. Offline is the sampling engine
with --batch_size pictures of --steps steps, timed before and after in the same process; the mean of both counts.
Latency is from a request to its samples. Weights are random. Without --vae, samples are latents on the device; with it
they are decoded by a VAE of Stable Diffusion's shape, and offline still draws latents only.
"""

import argparse
import random
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run as a file from elsewhere

import torch

from benchmarks.bench_sampling import CHANNELS, CLASSES, SEED, Bench
from benchmarks.bench_sampling_files import make_codec
from benchmarks.results import append
from opendit.encoders.conditioner import LabelConditioner
from opendit.encoders.vae import PixelCodec
from opendit.inference.engine import SamplingEngine
from opendit.inference.pipeline import Pipeline
from opendit.inference.request import SampleRequest, ServerClosedError
from opendit.inference.server import SamplingServer
from opendit.inference.slot_loop import batch_sizes
from opendit.models.weights import Weights


class Clients:
    """Threads that ask a server until it is closed.

    Attributes:
        asked: all requests.
        served: (when, seconds that it took, pictures, steps) of those that are done.
        failed: an error that no end of the server explains.
    """

    def __init__(self, server: SamplingServer, count: int, args):
        self.server, self.args = server, args
        self.asked: list[SampleRequest] = []
        self.served: list[tuple[float, float, int, int]] = []
        self.failed: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        args, draw = self.args, random.Random(number)
        try:
            while True:
                pictures = draw.randint(1, args.most_pictures)
                steps = draw.randint(args.least_steps, args.steps)
                classes = [draw.randrange(CLASSES) for _ in range(pictures)]
                start = time.perf_counter()
                request = self.server.submit(
                    classes, seed=draw.randrange(2**31), steps=steps, guidance=args.cfg_scale, sampler=args.sampler
                )
                self.asked.append(request)
                request.result(600)
                now = time.perf_counter()
                self.served.append((now, now - start, pictures, steps))
        except ServerClosedError:
            pass
        except BaseException as error:
            self.failed = error

    @property
    def steps(self) -> int:
        """Steps of samples that are done."""
        return sum(request.drawn for request in list(self.asked))

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        if self.failed is not None:
            raise self.failed


def offline(bench: Bench, engine: SamplingEngine) -> float:
    """Steps of samples a second."""
    args = bench.args
    y, index = bench.batch(args.batch_size)
    times = []
    for _ in range(args.trials):
        bench.synchronize()
        start = time.perf_counter()
        engine.sample(y, bench.null, index, SEED)
        bench.synchronize()
        times.append(time.perf_counter() - start)
    return args.batch_size * args.steps / statistics.median(times)


def percentile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="DiT-XL/2")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--most_pictures", type=int, default=4, help="of a request")
    parser.add_argument("--least_steps", type=int, default=20, help="of a request")
    parser.add_argument("--steps", type=int, default=50, help="of a request at most, and offline")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--sampler", default="ddim")
    parser.add_argument("--cfg_scale", type=float, default=4.0)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--vae", action="store_true", help="decode to pictures")
    parser.add_argument("--vae_narrower", type=int, default=1, help="divides the VAE's widths, for a CPU")
    parser.add_argument("--warmup", type=float, default=5, help="seconds")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--results", help="a file to append rows to, as results.csv")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")
    bench = Bench(args)
    model = bench.model(args.fp8)
    precision = "fp8" if args.fp8 else str(bench.dtype).removeprefix("torch.")
    engine = SamplingEngine(model, bench.objective, **bench.settings())
    offline(bench, engine)  # records its steps
    rates = [offline(bench, engine)]
    codec = PixelCodec(CHANNELS)
    if args.vae:
        codec = make_codec(args, bench.device)
        codec.name = "ema"  # whose shape it has
    conditioner = LabelConditioner(CLASSES, bench.device)
    pipe = Pipeline(model, bench.objective, codec, conditioner, Weights({}, Path("random"), {}), precision, [])
    with SamplingServer(pipe, batch_size=args.batch_size, decode=None if args.vae else list) as server:
        print(f"{args.model}, {precision}, offline {engine.note}, server {server.note}", flush=True)
        start = time.perf_counter()
        server.submit([0], steps=2, guidance=args.cfg_scale, sampler=args.sampler, record_all=True).result(600)
        ready, sizes = time.perf_counter() - start, len(batch_sizes(args.batch_size))
        print(f"{sizes} batch sizes ready after {ready:.1f} s", flush=True)
        clients = Clients(server, args.clients, args)
        time.sleep(args.warmup)
        start, steps, computed = time.perf_counter(), clients.steps, server.computed
        time.sleep(args.seconds)
        end, steps, computed = time.perf_counter(), clients.steps - steps, server.computed - computed
    clients.join()
    rates.append(offline(bench, engine))
    served = [(took, pictures) for when, took, pictures, _ in clients.served if start <= when <= end]
    if not served:
        raise SystemExit(f"no request was served in {args.seconds:g} seconds; give more")
    rate, baseline = steps / (end - start), statistics.mean(rates)
    latency = {name: percentile([took for took, _ in served], share) for name, share in (("p50", 0.5), ("p95", 0.95))}
    case = f"{args.model} {args.image_size}px {args.clients} clients, 1 to {args.most_pictures} pictures, "
    case += f"{args.least_steps} to {args.steps} {args.sampler} steps guidance {args.cfg_scale:g} {precision}"
    case += ", with VAE" if args.vae else ""
    print(f"\n{case}")
    name = f"offline batch {args.batch_size}"
    print(f"{name:>18} {baseline:9.1f} steps of samples/s (before {rates[0]:.1f}, after {rates[1]:.1f})")
    print(f"{'server':>18} {rate:9.1f} steps of samples/s, {rate / baseline:.3f} x offline")
    print(f"{'':>18} {sum(pictures for _, pictures in served) / (end - start):9.2f} pictures/s")
    print(f"{'rows in use':>18} {steps / max(1, computed):9.3f} of those computed")
    print(f"{'latency':>18} p50 {1000 * latency['p50']:.0f} ms, p95 {1000 * latency['p95']:.0f} ms", flush=True)
    row = {"bench": "server", "case": case, "metric": "sample-steps/s", "value": f"{rate:.1f}"}
    rows = [row | {"baseline": name, "baseline_value": f"{baseline:.1f}"}]
    rows += [row | {"metric": f"latency {key} ms", "value": f"{1000 * value:.0f}"} for key, value in latency.items()]
    if bench.device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    if args.results:
        append(rows, args.results)


if __name__ == "__main__":
    main()
