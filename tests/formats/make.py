"""Create the fixtures of file formats with the programs of an earlier commit, and record the values that it reads.

    git worktree add /tmp/then 9378e10
    mkdir /tmp/formats && cd /tmp/formats
    PYTHONPATH=/tmp/then OMP_NUM_THREADS=1 python REPOSITORY/tests/formats/make.py            # all of them
    PYTHONPATH=/tmp/then OMP_NUM_THREADS=1 python REPOSITORY/tests/formats/make.py dit packs  # only these

This program needs diffusers, transformers, PyAV and the digits in the package, but no GPU. The earlier commit's own
programs write all files. The following changes are made afterwards:

- Weights, moments and averages are replaced by the pattern of ``cases.py``, in place. Names, shapes, metadata, indexes
  and states do not change; the manifest gets the new checksums. Fixed position tables do not change either, because
  9378e10 uses the tables in a file and later versions compute them, so both agree only on the correct values. Learned
  positions are parameters and are replaced.
- ``fp16`` is the checkpoint of an fp32 run with an added state of the loss scaler, because fp16 needs a GPU.
- ``sorted`` is a checkpoint without the order of its samples, like checkpoints from before the keyed order.
- In ``dit`` the first checkpoint is the best one.
- ``moviegen_1`` and ``adaln_lora_1`` are written with a patched program that does not write revisions.
- ``job`` and ``evaluation`` have cached parts with replaced numbers, to show that the parts are read, not computed.
"""

import functools
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image

THEN = Path(os.environ["PYTHONPATH"]).resolve()  # the tree of the earlier commit
sys.path.insert(0, str(THEN))
sys.path.append(str(Path(__file__).resolve().parent))

import cases  # noqa: E402
import reading  # noqa: E402

# ------------------------------------------------------------------------------------------ writing the pattern


def header_of(path: Path) -> tuple[int, dict]:
    """Return the offset of the first tensor in a safetensors file, and the file's header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return 8 + length, json.loads(content[8 : 8 + length])


def cut(values: np.ndarray, cuts: list) -> np.ndarray:
    """Return the part of a tensor that the cuts of an index select."""
    for dim, *ends in cuts:
        values, dim = (values.reshape(-1), 0) if dim is None else (values, dim)
        ranges = zip(ends[::2], ends[1::2], strict=True)
        values = np.concatenate([np.take(values, range(a, b), axis=dim) for a, b in ranges], axis=dim)
    return values


def fill_file(path: Path, kind: str, step: int = 0) -> None:
    """Replace the values of a safetensors file, except for fixed tables, by the pattern of set ``kind`` at ``step``."""
    start, header = header_of(path)
    content = bytearray(path.read_bytes())
    said = header.pop("__metadata__", {})
    shards = json.loads(said["cuts"]) if "cuts" in said else {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32", (path, name, entry)
        if name in cases.FIXED_TABLES:
            continue
        of, plain = kind, name
        for moment in ("exp_avg.", "exp_avg_sq."):
            if kind.startswith("optimizer") and name.startswith(moment):
                of, plain = moment[:-1], name.removeprefix(moment)
        shape, cuts = shards.get(name, (entry["shape"], []))
        values = np.ascontiguousarray(cut(cases.pattern(cases.of_step(of, step), plain, tuple(shape)), cuts))
        first, last = entry["data_offsets"]
        assert values.size == np.prod(entry["shape"]) and values.nbytes == last - first, (path, name, cuts)
        content[start + first : start + last] = values.tobytes()
    path.write_bytes(content)


def fill_checkpoint(folder: Path, change: Callable[[dict], None] = lambda state: None) -> None:
    """Fill all tensors of a checkpoint with the pattern of its step, and apply ``change`` to its state.json."""
    from opendit.checkpoint.tensor_set import read_manifest, write_manifest

    version = json.loads((folder / "manifest.json").read_text())["version"]
    files = read_manifest(folder)
    state = json.loads((folder / "state.json").read_text())
    for path in folder.glob("*.safetensors"):
        fill_file(path, path.stem.partition("-shard-")[0], state["step"])
    change(state)
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    for name in files:
        content = (folder / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(folder, version, files)


def fill_run(run: Path, change: Callable[[dict], None] = lambda state: None) -> None:
    for folder in sorted((run / "checkpoints").glob("step_*")):
        if folder.is_dir() and not folder.is_symlink():
            fill_checkpoint(folder, change)
    shutil.rmtree(run / "tensorboard", ignore_errors=True)
    for plot in run.glob("*.png"):
        plot.unlink()


def pack(fixture: str, *names: str) -> None:
    """Write these files and folders of the current folder into the fixture."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime, info.uid, info.gid, info.uname, info.gname = 1_700_000_000, 0, 0, "", ""
        return info

    path = cases.HERE / f"{fixture}.tar.xz"
    with tarfile.open(path, "w:xz", preset=9) as tar:
        for name in names:
            tar.add(name, filter=plain)
    print(f"== {path.name}: {path.stat().st_size:,} bytes", flush=True)


@contextmanager
def elsewhere(name: str, fixture: str | None = None) -> Iterator[Path]:
    """Work in a new subfolder of the current folder, with a fixture unpacked in it if one is named."""
    before = Path.cwd()
    folder = before / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    try:
        if fixture is not None:
            reading.unpack(fixture)
        yield folder
    finally:
        os.chdir(before)


# ------------------------------------------------------------------------------------------ sources


def picture(path: Path, seed: int, width: int, height: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path


def pictures(root: str = "pictures", count: int = 8) -> None:
    """Write a folder of small pictures with several sizes and two classes."""
    for i in range(count):
        picture(Path(root, "ab"[i % 2], f"{i:02d}.png"), i, (16, 20, 32, 8)[i % 4], (16, 18, 16, 24)[i // 2 % 4])


def captions() -> None:
    """Write a CSV of clips and pictures with preprocess.py."""
    program("preprocess.py", "demo", "--clips", "4", "--size", "16", "--output", "clips")
    pictures("stills", 6)
    for i, path in enumerate(sorted(Path("stills").rglob("*.png"))):
        path.with_suffix(".txt").write_text(f"picture number {i}")
    program("preprocess.py", "folder", "stills", "--output", "stills.csv")
    first, *rows = Path("clips/demo.csv").read_text().splitlines()
    more = Path("stills.csv").read_text().splitlines()[1:]
    Path("all.csv").write_text("\n".join([first, *(f"clips/{row}" for row in rows), *more]) + "\n")


def vae(folder: str = "vae", blocks: int = 2) -> None:
    """Write a small picture autoencoder, with 2 ** (blocks - 1) pixels per latent and the pattern as its weights."""
    from diffusers import AutoencoderKL

    kinds = {
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
    }
    torch.manual_seed(0)
    made = AutoencoderKL(block_out_channels=(8,) * blocks, norm_num_groups=4, scaling_factor=0.5, **kinds)
    made.save_pretrained(folder)
    fill_file(Path(folder, "diffusion_pytorch_model.safetensors"), "vae")


def program(name: str, *argv: str) -> None:
    subprocess.run([sys.executable, THEN / name, *map(str, argv)], check=True)


# ------------------------------------------------------------------------------------------ runs


def train_run(name: str) -> None:
    import train

    flags = cases.training_flags(name)
    if name in cases.RANKS:
        ranks = ["--standalone", "--nproc_per_node", str(cases.RANKS[name])]
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *ranks, THEN / "train.py", *flags], check=True)
        return
    with ExitStack() as stack:
        if name.endswith("_1"):  # the same patch as in that commit's tests/models/test_revisions.py
            from opendit.models.configuration import DiTConfig
            from opendit.models.zoo import model_config

            to_dict = DiTConfig.to_dict
            old = functools.partial(model_config, revision=1)
            new_keys = ("revision", "null_class")
            stack.enter_context(mock.patch("opendit.training.model_plan.model_config", old))
            stack.enter_context(
                mock.patch.object(
                    DiTConfig, "to_dict", lambda c: {k: v for k, v in to_dict(c).items() if k not in new_keys}
                )
            )
        train.main(flags)


def with_scaler(state: dict) -> None:
    state["scaler"] = {"scale": 32768.0, "growth": 17, "hysteresis": 2}
    state["fingerprint"]["mixed_precision"] = "fp16"


def without_order(state: dict) -> None:
    del state["fingerprint"]["order"]


def other_losses(state: dict) -> None:
    state["val_loss"] = state["step"] / 4


CHANGES = {"dit": other_losses, "fp16": with_scaler, "sorted": without_order}


def best_is_first(run: Path) -> None:
    """Point ``best`` to the first checkpoint, which is not the newest."""
    link = run / "checkpoints/best"
    link.unlink()
    link.symlink_to("step_0000001")


def make_run(name: str, recorded: dict) -> None:
    with elsewhere(f"make/{name}"):
        more = []
        if name == "packs":
            pictures(count=40)
            more.append("pictures")
        if name == "lora":
            with elsewhere("base"):
                train_run("fp16")
                reading.exported(reading.run_of())
                fill_file(Path("exported.safetensors"), "base")
            shutil.copy("base/exported.safetensors", "base.safetensors")
            more.append("base.safetensors")
        if name == "vdit":
            more.append(str(picture(Path("given.png"), 5, 8, 8)))
        train_run(name)
        run = reading.run_of()
        fill_run(run, CHANGES.get(name, lambda state: None))
        if name == "dit":
            best_is_first(run)
        state = json.loads((run / "checkpoints/latest/state.json").read_text())
        assert name != "packs" or state["packs"]["carry"], state["packs"]
        assert name != "evaluated" or "evaluation" in state
        pack(name, "runs", *more)
    with elsewhere(f"read/{name}", name), ExitStack() as stack:
        if name == "packs":  # that commit fails to estimate the padding after the first window
            fill = mock.PropertyMock(return_value=1.0)
            stack.enter_context(mock.patch("opendit.data.packs.PackSchedule.fill", fill))
        found = {"log": reading.trained(cases.resuming_flags(name))}
        if name != "lora":
            found["projection"] = reading.projection(reading.exported(reading.run_of()))
    if name in cases.SAMPLES:
        with elsewhere(f"read/{name}", name):
            found["latents"] = reading.latents_of(name)
    recorded[name] = found


# ------------------------------------------------------------------------------------------ data


def encoder(kind: str) -> None:
    from tests.encoders import test_text

    (test_text.save_clip if kind == "clip" else test_text.save_t5)(kind)


def latents(table: str, *more: object) -> None:
    flags = ["--vae", "vae", "--num_workers", 0, "--batch_size", 2, "--output", "latents", "--mixed_precision", "fp32"]
    program("preprocess.py", "latents", "--data_path", table, *flags, *more)


def make_latents(name: str) -> list[str]:
    vae()
    if name == "latents_files":
        pictures()
        latents("pictures", "--image_size", 16, "--shard_size", 3)
    elif name == "latents_tars_classes":
        pictures()
        latents("pictures", "--image_size", 16, "--shard_size", "20KB")
    elif name == "latents_tars":
        captions()
        encoder("clip")
        for size in (16, 8):
            latents("stills.csv", "--image_size", size, "--shard_size", "20KB", "--text_encoder", "clip", "--no_flip")
    else:
        captions()
        encoder("t5")
        size = 3 if name == "latents_files_clips" else "20KB"
        clips = ["--use_video", "--num_frames", 4, "--text_encoder", "t5", "--max_text_tokens", 12]
        latents("all.csv", "--image_size", 16, "--shard_size", size, *clips)
    return ["latents"]


def make_foreign() -> list[str]:
    from tests.data.shards.tars import write_tar

    vae()
    Path("latents").mkdir()
    for tar in range(2):
        members = []
        for i in range(4 * tar, 4 * tar + 4):
            random, file = np.random.default_rng(i), io.BytesIO()
            arrays = {key: random.normal(size=(8, 8, 8)).astype(np.float16) for key in ("moments", "moments_flip")}
            np.savez(file, **arrays)
            members += [(f"{i:03d}.npz", file.getvalue()), (f"{i:03d}.cls", b"%d" % (i % 3))]
        write_tar(Path("latents", f"part-{tar}.tar"), members)
    program("preprocess.py", "index", "latents", "--latents", "mean_logvar", "--vae", "vae", "--image_size", "16")
    return ["latents"]


def make_tars(name: str) -> list[str]:
    if name == "tars":
        pictures()
        program("preprocess.py", "shards", "--data_path", "pictures", "--output", "tars", "--shard_size", "8KB")
    elif name == "tars_clips":
        captions()
        program("preprocess.py", "shards", "--data_path", "all.csv", "--output", "tars", "--shard_size", "10KB")
    else:
        from tests.data.shards.tars import captioned, write_tar

        Path("tars").mkdir()
        for tar in range(2):
            write_tar(Path("tars", f"{tar}.tar"), captioned(3, 3 * tar))
        program("preprocess.py", "index", "tars")
    return ["tars"]


def make_energon() -> list[str]:
    shutil.copytree(THEN / "tests/data/energon/prepared/classes", "prepared")
    program("preprocess.py", "index", "prepared")
    return ["prepared"]


def make_table() -> list[str]:
    captions()
    program("preprocess.py", "check", "all.csv", "--output", "checked.csv", "--num_frames", "4", "--num_workers", "1")
    return ["all.csv", "checked.csv", "clips", "stills"]


def make_blend() -> list[str]:
    captions()
    program("preprocess.py", "shards", "--data_path", "stills.csv", "--output", "tars")
    Path("blend.yaml").write_text(
        "sources:\n  - {path: stills.csv, weight: 0.5}\n  - {path: tars, name: packed, weight: 0.5}\n"
        "changes:\n  - {step: 1, weights: {stills.csv: 0.2, packed: 0.8}}\n"
    )
    return ["blend.yaml", "stills.csv", "stills", "tars"]


MAKERS = {"foreign_latents": make_foreign, "energon": make_energon, "table": make_table, "blend": make_blend}


def make_data(name: str, recorded: dict) -> None:
    """Write the data of a fixture and of all cases in it, with initial weights for each case."""
    inside = [key for key in cases.DATA if cases.IN.get(key, key) == name]
    with elsewhere(f"make/{name}"):
        if name in MAKERS:
            names = MAKERS[name]()
        else:
            names = (make_latents if name.startswith("latents") else make_tars)(name)
        for key in inside:
            import train

            flags = cases.data_flags(key)
            where = flags.index("--pretrained")
            train.main([*flags[:where], *flags[where + 2 :]])
            (run,) = Path("runs").iterdir()
            shutil.copy(run / "checkpoints/latest/ema.safetensors", f"{key}.safetensors")
            fill_file(Path(f"{key}.safetensors"), key)
            shutil.rmtree("runs")
            names.append(f"{key}.safetensors")
        pack(name, *names)
    for key in inside:
        with elsewhere(f"read/{key}", name):
            recorded[key] = {"log": reading.trained(cases.data_flags(key))}


# ------------------------------------------------------------------------------------------ everything else


def weights_of(name: str, path: str) -> None:
    """Write the averages of a fixture's run into one file."""
    with elsewhere(f"weights/{name}", name) as folder:
        reading.exported(reading.run_of())
    shutil.copy(folder / "exported.safetensors", path)


def make_exported(recorded: dict) -> None:
    import train

    with elsewhere("make/exported"):
        vae("vae", 4)
        flags = "--model DiT-Ti/2 --data_path mock --image_size 64 --num_classes 10 --batch_size 2 --max_steps 1"
        train.main(f"{flags} {cases.COMMON.replace('--vae none', '--vae vae')}".split())
        run = reading.run_of()
        fill_run(run)
        export = functools.partial(reading.module, "opendit.export")
        export("diffusers", "--ckpt", str(run), "--output", "exported/pipeline", "--vae", "vae")
        export("meta", "--ckpt", str(run), "--output", "exported/meta.pt")
        export("opendit", "--ckpt", str(run), "--output", "exported/one.safetensors")
        several = ["--output", "exported/several/model.safetensors", "--max_shard_size", "2MB"]
        Path("exported/several").mkdir()
        export("opendit", "--ckpt", str(run), *several)
        pack("exported", "exported")
    found = {}
    for name, (ckpt, *more) in cases.EXPORTED.items():
        with elsewhere("read/exported", "exported"):
            pixels = reading.drawn(["--ckpt", ckpt, *more, *cases.DRAW.split()])
            found[name] = {"shape": list(pixels.shape), "pixels": pixels[:, ::8, ::8].tobytes().hex()}
    recorded["exported"] = found


def make_job(recorded: dict) -> None:
    from opendit.sampling.sample_cache import SampleCache, SamplingJob, find_unfinished_job

    with elsewhere("make/job"):
        weights_of("dit", "dit.safetensors")
        process = subprocess.Popen([sys.executable, THEN / "sample.py", *cases.JOB.split()])
        while len(list(Path("samples/.parts").glob("[0-9]*.npy"))) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        there = find_unfinished_job(Path("samples"))
        assert there is not None and there.cached < there.count
        parts = SampleCache(
            Path("samples"), SamplingJob(there.settings, there.count, there.count, (8, 8, 3), there.samples_a_part)
        )
        for part in range(there.cached):
            assert parts.is_intact(part)
            parts.write(part, np.full((1, 8, 8, 3), 100 + part, np.uint8))
        shutil.rmtree(Path("samples/.lock"), ignore_errors=True)
        pack("job", "dit.safetensors", "samples")
    with elsewhere("read/job", "job"):
        pixels = reading.drawn(cases.JOB.split())
        assert [int(p.min()) for p in pixels[: there.cached]] == list(range(100, 100 + there.cached))
    recorded["job"] = {"there": there.cached, "shape": list(pixels.shape), "pixels": pixels.tobytes().hex()}


def make_evaluation(recorded: dict) -> None:
    from opendit.sampling.sample_cache import SampleCache, SamplingJob, find_unfinished_job
    from tests.evaluation import small

    with elsewhere("make/evaluation"):
        small.pictures(Path("net.pt"))
        for seed, name in enumerate(("samples", "real")):
            pixels = np.random.default_rng(seed).integers(0, 256, (24, 8, 8, 3), np.uint8)
            np.savez(f"{name}.npz", arr_0=pixels)
        reading.evaluated("real.npz", "samples.npz", save_features="reference.npz")
        shutil.rmtree("evaluation")
        reading.evaluated("samples.npz", "reference.npz")
        for folder in Path("evaluation/features").iterdir():
            there = find_unfinished_job(folder)
            print("==", folder, there, sorted(folder.rglob("*"))[:5])
            if there is None:
                continue
            first = np.load(folder / ".parts/00000000.npy")
            job = SamplingJob(there.settings, there.count, there.count, first.shape[1:], there.samples_a_part, "<f4")
            parts = SampleCache(folder, job)
            for part in range(parts.count):
                assert parts.is_intact(part)
                rows = np.load(parts.path(part)) + np.float32(0.25) * (part % 2)
                parts.write(part, rows)
        statistics = {key: np.load("reference.npz")[key] for key in ("mu", "sigma")}
        np.savez("statistics.npz", **statistics)
        pack("evaluation", "net.pt", "samples.npz", "reference.npz", "statistics.npz", "evaluation")
    found = {}
    for name in ("reference.npz", "statistics.npz"):
        with elsewhere("read/evaluation", "evaluation"):
            found[name] = reading.evaluated("samples.npz", name)
    recorded["evaluation"] = found


def make_hardware(recorded: dict) -> None:
    with elsewhere("make/hardware"):
        reading.module("opendit.cli.links", "--out", "hardware.json")
        pack("hardware", "hardware.json")
        flags = cases.DRY_RUN.split()
        said = subprocess.run([sys.executable, THEN / "train.py", *flags], check=True, capture_output=True, text=True)
        time_line = next(line for line in said.stdout.splitlines() if line.startswith("  time "))
    recorded["hardware"] = {"ms": float(time_line.split()[1].replace(",", ""))}


OTHERS = {"exported": make_exported, "job": make_job, "evaluation": make_evaluation, "hardware": make_hardware}


def main(only: list[str]) -> None:
    commit = subprocess.run(["git", "-C", THEN, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    recorded = json.loads(cases.RECORDED.read_text()) if cases.RECORDED.exists() else {}
    from tests.recorded_runs import machine

    recorded |= {"commit": commit.stdout.strip(), "machine": machine()}
    data = [name for name in cases.DATA if name not in cases.IN]
    for name in only or [*cases.RUNS, *data, *OTHERS]:
        if name in OTHERS:
            OTHERS[name](recorded)
        else:
            (make_run if name in cases.RUNS else make_data)(name, recorded)
        cases.RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
