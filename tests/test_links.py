"""A symbolic link at the place of a file that is written is refused in one line that names it, and the link's target
stays unchanged."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import preprocess
import sample
import train
from opendit.checkpoint.run_folders import WRITTEN as WRITTEN_RUN
from opendit.checkpoint.run_folders import FolderLock, lock_folder, point_to, step_folder
from opendit.checkpoint.save import incomplete, prune, put_in_place, tidy
from opendit.checkpoint.tensor_set import write_manifest, write_weights
from opendit.common.safe_files import LinkRefused, RecordFile, WriteFailures, make_folder
from opendit.common.tensor_files import write_file, write_tensors
from opendit.data.captioned_media import TableRow, write_csv
from opendit.data.digits import make_demo
from opendit.data.files import file_locked
from opendit.data.latents import CachedSample, write_shard
from opendit.data.latents_index import LOCK
from opendit.data.latents_index import write_index as write_latents_index
from opendit.data.row_arrays import kept_array
from opendit.data.shards.program import index_tars, make_shards
from opendit.data.shards.store import FileCache
from opendit.encoders.pictures import save_animation, save_contact_sheet, save_grid
from opendit.evaluation.extract import Features
from opendit.evaluation.results import Measurement, append_results, write_sweep
from opendit.evaluation.samples import save_features
from opendit.parallel import hardware
from opendit.parallel.mesh import Mesh
from opendit.sampling.output_files import OutputFolder, VideoClip, save_one, write_npz
from opendit.sampling.sample_cache import SampleCache, SamplingJob
from opendit.sampling.sampling_run import WRITTEN as WRITTEN_SAMPLES
from opendit.training.monitor import Board, keep_up_to
from opendit.training.profiling import STEPS, WARMUP, StepProfiler
from opendit.training.validation import LossHistory, draw_losses
from tests.data.shards.tars import captioned, write_tar
from tests.sampling.small import write as write_weights_of_a_model

ALONE = Mesh(0, 1, 0, torch.device("cpu"))
PIXELS = np.zeros((2, 8, 8, 3), np.uint8)
CLIP = np.zeros((2, 8, 8, 3), np.uint8)
LATENTS = [CachedSample(0, {"moments": torch.zeros(1, 2, 1, 1).half()}, label=0)]
FIGURE = Measurement("fid", 1.0, 2, "8 x 8", "x", "0" * 64)
JOB = SamplingJob({"--seed": "0"}, 2, 2, (8, 8, 3), 1)
PID = os.getpid()


@dataclass(frozen=True)
class Case:
    """A writer of files into a folder. The test replaces each of ``names`` by a link. ``there`` makes files that must
    exist before; those in ``names`` are moved outside and linked to."""

    write: Callable[[Path], object]
    names: tuple[str, ...]
    there: Callable[[Path], object] = lambda folder: None


def checkpoint(run: Path) -> None:
    """Write a checkpoint file by file, as a save does."""
    final = step_folder(run / "checkpoints", 4)
    make_folder(incomplete(final), root=run)
    write_tensors(incomplete(final) / "ema.safetensors", {"x": torch.zeros(1)}, {}, root=run)
    write_file(incomplete(final) / "state.json", iter([b"{}"]), root=run)
    write_manifest(incomplete(final), 2, {}, root=run)
    if (problem := put_in_place(final)) is not None:
        raise problem


def profile(run: Path) -> None:
    profiler = StepProfiler(True, run / "profile", torch.device("cpu"), 100, Raises())
    for _ in range(WARMUP + STEPS):
        torch.ones(2) + 1
        profiler.step()
    profiler.close()


class Raises(WriteFailures):
    """WriteFailures that raises errors at once."""

    def survive(self, what, step=None):
        return contextlib.nullcontext()


def index_lock(folder: Path) -> None:
    with file_locked(folder / LOCK):
        pass


def plotted(folder: Path) -> None:
    history = LossHistory([0.5, 2.0])
    history.add({"step": 1, "val_loss": 1.0, "val_loss_by_noise": [1.0, 1.0], "val_noise": [0.5, 2.0]})
    draw_losses(history, folder / "validation.png", "a run")


def parts(folder: Path) -> None:
    made = SampleCache(folder, JOB)
    made.begin()
    made.write(0, PIXELS[:1])


def packed(folder: Path) -> None:
    data = folder.parent / "pictures" / "class"
    data.mkdir(parents=True, exist_ok=True)
    save_one(data / "a.png", PIXELS[0], 1)
    make_shards(str(data.parent), str(folder), num_workers=1)


def looked(folder: Path) -> None:
    preprocess_run("look", f"digits --output {folder} --samples 4 --pictures 2 --num_workers 1")


def preprocess_run(command: str, flags: str) -> None:
    """Run a command of preprocess.py, and raise the error that the program would print."""
    from opendit.config.preprocess import build_parser

    options, _ = build_parser("").read([command, *flags.split()])
    preprocess.run(options.pop("command"), options)


RECORD = b'{"step": 1}\n'
CASES = {
    "log": Case(lambda run: RecordFile(run / "log.jsonl").append(RECORD), ("log.jsonl",)),
    "a log that is shortened": Case(
        lambda run: keep_up_to(run / "log.jsonl", 1),
        ("log.jsonl",),
        lambda run: (run / "log.jsonl").write_bytes(RECORD + b'{"step": 2}\n'),
    ),
    "tensorboard": Case(
        lambda run: Board(run / "tensorboard", 1, root=run).scalars({"loss": 1.0}, 1), ("tensorboard",)
    ),
    "grids": Case(
        lambda run: save_grid(run / "samples" / "1.png", PIXELS, ["a", "b"], root=run),
        ("samples", "samples/1.png", f"samples/.1.{PID}.png"),
    ),
    "sheets": Case(
        lambda run: save_contact_sheet(run / "samples" / "1.png", CLIP[None], ["a"], root=run), ("samples",)
    ),
    "validation": Case(plotted, ("validation.png",)),
    "profile": Case(profile, ("profile", "profile/table.txt", "profile/trace.json.gz")),
    "evaluation": Case(
        lambda run: append_results(run / "evaluation", [FIGURE], root=run), ("evaluation", "evaluation/results.jsonl")
    ),
    "lock": Case(lambda run: FolderLock(run, "--load", "wait"), (".lock",)),
    "checkpoint": Case(
        checkpoint,
        (
            "checkpoints",
            "checkpoints/.step_0000004.incomplete",
            "checkpoints/.step_0000004.incomplete/ema.safetensors",
            "checkpoints/.step_0000004.incomplete/state.json",
            "checkpoints/.step_0000004.incomplete/manifest.json",
        ),
    ),
    "samples": Case(
        lambda folder: [save_one(folder / "0.png", PIXELS[0], 1), save_one(folder / "1.mp4", CLIP, 4)],
        ("0.png", "1.mp4", f".0.{PID}.png", f"1.mp4.{PID}.partial"),
    ),
    "list of samples": Case(lambda folder: OutputFolder(folder, ["0.png"]).begin(), (".samples.json",)),
    "npz": Case(
        lambda folder: write_npz(folder / "s.npz", {"x": ("|u1", (2,), [np.zeros(2, np.uint8)])}, mark="mark"),
        ("s.npz", ".s.mark.npz"),
    ),
    "animation": Case(lambda folder: save_animation(folder / "grid.gif", CLIP[None], ["a"], 4), ("grid.gif",)),
    "a clip's own": Case(lambda folder: VideoClip(CLIP, 4).save(folder / "a.gif"), ("a.gif",)),
    "parts": Case(parts, (".parts", ".parts/manifest.json", ".parts/00000000.npy")),
    "results": Case(lambda folder: append_results(folder, [FIGURE]), ("results.jsonl",)),
    "sweep": Case(lambda folder: write_sweep(folder, [FIGURE]), ("sweep.csv",)),
    "features": Case(
        lambda folder: save_features(folder / "f.npz", Features(1, {"pool": torch.zeros(2, 2)}, 0.0, 1), {}, "cpu"),
        ("f.npz",),
    ),
    "weights": Case(
        lambda folder: write_weights(folder / "w.safetensors", {"x": torch.zeros(4), "y": torch.zeros(4)}, {}, 16),
        ("w-00001-of-00002.safetensors", "w-00002-of-00002.safetensors", "w.safetensors.index.json"),
    ),
    "latents": Case(
        lambda folder: write_shard(folder / "l.tar", LATENTS, {}, []),
        ("l.tar", "l.tar.partial", "l.tar.index"),
    ),
    "index of latents": Case(
        lambda folder: write_latents_index(folder, [{"image_size": 8}]), ("index.json", "index.json.partial")
    ),
    "its lock": Case(index_lock, (".index.lock",)),
    "shards": Case(packed, ("shard-00000-of-00001.tar", "shard-00000-of-00001.tar.index", "class_names.json")),
    "index of a stranger's tar": Case(
        lambda folder: index_tars([folder / "t.tar"], None, "", num_workers=1, force=True),
        ("t.tar.index",),
        lambda folder: write_tar(folder / "t.tar", captioned(2)),
    ),
    "table": Case(
        lambda folder: write_csv(folder / "t.csv", [TableRow(folder / "a.png", "a")]), ("t.csv", "t.csv.partial")
    ),
    "demo": Case(
        partial(make_demo, clips=1, size=16, frames=2), ("clips", "clips/00000-zero-left.mp4", "demo.json", "demo.csv")
    ),
    "look": Case(looked, ("contact_sheet.png", "histograms.png", "look.html")),
    "hardware": Case(lambda folder: hardware.save(hardware.H200, folder / "h.json"), ("h.json",)),
}


# A name may contain the process id, which differs between pytest workers, so test ids use numbers.
NAMES = [(case, name) for case in CASES for name in CASES[case].names]


@pytest.mark.parametrize(("case", "name"), NAMES, ids=[f"{case}-{i}" for i, (case, _) in enumerate(NAMES)])
@pytest.mark.parametrize("target", ["something", "nothing"])
def test_a_link_in_the_place_of_what_is_written(case, name, target, tmp_path, outside, monkeypatch):
    made, folder = CASES[case], tmp_path / "folder"
    folder.mkdir()
    made.there(folder)
    link = folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    there = link.is_file()
    if "clips/" in name and target == "something":
        pytest.skip("a clip that is there is kept")
    if target == "something":
        to = outside / ("deep" if link.suffix in ("", ".incomplete") and "lock" not in name else "file")
    else:
        to = outside / "nothing"
    if there:
        to = link.rename(tmp_path / "moved")
        content = to.read_bytes()
    link.symlink_to(to)
    with pytest.raises((LinkRefused, ValueError)) as refused:
        made.write(folder)
    text = str(refused.value)
    assert text.count("\n") == 0 and f"{link} is a symbolic link" in text and "remove it" in text
    assert os.readlink(link) == str(to) and not os.path.lexists(outside / "nothing")
    assert not there or to.read_bytes() == content


@pytest.mark.parametrize("write", [case for case in CASES if case not in ("index of a stranger's tar", "its lock")])
def test_without_a_link_it_is_written(write, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    CASES[write].there(folder)
    CASES[write].write(folder)
    assert write == "lock" or list(folder.iterdir())


def test_what_a_link_is_deleted_for_stays(tmp_path, outside):
    """Left-over links in a checkpoint folder are deleted or moved, but not their targets."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in (".step_0000001.incomplete", ".step_0000002.deleted", ".step_0000003.replaced", "step_0000003"):
        (checkpoints / name).symlink_to(outside / "deep")
    (checkpoints / ".latest.new").symlink_to(outside / "file")
    (checkpoints / "latest").symlink_to(outside / "deep")
    tidy(checkpoints)
    point_to(checkpoints / "latest", checkpoints / "step_0000004")
    (checkpoints / "step_0000004").mkdir()
    prune(checkpoints, 1, checkpoints / "step_0000004", ())
    assert sorted(os.listdir(checkpoints)) == ["latest", "step_0000004"]


def test_nothing_is_deleted_in_another_runs_checkpoints(tmp_path):
    """``checkpoints`` is a link to that folder. A run that is resumed is refused before that."""
    run, other = tmp_path / "run", tmp_path / "other" / "checkpoints"
    run.mkdir()
    (run / "checkpoints").symlink_to(other)
    names = [".step_0000001.incomplete", ".step_0000002.deleted", "step_0000003", "step_0000004"]
    for name in names:
        (other / name).mkdir(parents=True)
    tidy(run / "checkpoints")
    prune(run / "checkpoints", 1, run / "checkpoints" / "step_0000004", ())
    with pytest.raises(LinkRefused, match="run/checkpoints is a symbolic link"):
        point_to(run / "checkpoints" / "latest", run / "checkpoints" / "step_0000003")
    assert sorted(os.listdir(other)) == names


def test_a_lock_that_is_a_hard_link_out_of_the_folder(tmp_path, outside):
    os.link(outside / "file", tmp_path / ".lock")
    with FolderLock(tmp_path, "--load", "wait") as lock:
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == PID and lock.note is None
    os.utime(outside / "file", ns=(10**18, 10**18))


def test_a_cache_with_links_keeps_nothing(tmp_path, outside, monkeypatch, capsys):
    cache = FileCache(tmp_path / "cache", 1000)
    place = cache.path("x").parent
    place.parent.mkdir()
    place.symlink_to(outside / "deep")
    cache.put("x", b"content")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{place} is a symbolic link" in said and cache.get("x") is None
    monkeypatch.setenv("OPENDIT_SIZE_CACHE", str(tmp_path))
    (tmp_path / "x.lock").symlink_to(outside / "file")
    assert kept_array(1, lambda: "x", lambda: np.ones(1), least=0) == 1 and not (tmp_path / "x.arrays").exists()


# ------------------------------------------------------------------------------------------ programs


@pytest.mark.parametrize("written", [WRITTEN_RUN, WRITTEN_SAMPLES])
def test_all_names_are_looked_at_before_the_work(written, tmp_path, outside):
    for name in written:
        (tmp_path / name).symlink_to(outside / "file")
        with pytest.raises(LinkRefused, match=f"^--output: .*/{name} is a symbolic link"):
            lock_folder(tmp_path, ALONE, "--output", "wait", written=written)
        (tmp_path / name).unlink()
        assert os.listdir(tmp_path / "") == ["outside"]


TRAIN = "--model DiT-Ti/2 --image_size 8 --vae none --batch_size 4 --mixed_precision fp32 --num_workers 0 --log_every 1"
TRAIN += " --validate_path digits --validate_every 1 --validate_samples 10"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    outputs, before = tmp_path_factory.mktemp("run"), dict(os.environ)
    train.main([*TRAIN.split(), *f"--max_steps 1 --sample_every 1 --outputs {outputs}".split()])
    os.environ.clear()
    os.environ.update(before)
    return outputs


def test_a_run_writes_what_is_looked_at(trained):
    assert {path.name for path in (trained / "000-DiT-Ti-2").iterdir()} <= {".lock", *WRITTEN_RUN}


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "config.json", "samples", "tensorboard"])
def test_a_run_with_a_link_is_refused(name, trained, tmp_path, outside, no_ranks, capsys):
    run = shutil.copytree(trained, tmp_path / "outputs", symlinks=True) / "000-DiT-Ti-2"
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside / ("file" if "." in name else "deep"))
    before = sorted(os.listdir(run))
    with pytest.raises(SystemExit) as ended:
        train.main([*TRAIN.split(), *f"--max_steps 2 --outputs {run.parent} --load latest".split()])
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and line.startswith(f"error: --load latest: {run / name} is a symbolic link (to ")
    assert sorted(os.listdir(run)) == before


def test_a_link_that_a_run_comes_to_later(trained, tmp_path, outside, no_ranks, capsys):
    run = shutil.copytree(trained, tmp_path / "outputs", symlinks=True) / "000-DiT-Ti-2"
    (run / "samples" / "0000002.png").symlink_to(outside / "file")
    with pytest.raises(SystemExit) as ended:
        train.main([*TRAIN.split(), *f"--max_steps 2 --sample_every 1 --outputs {run.parent} --load latest".split()])
    out = capsys.readouterr()
    said = [line for line in (out.out + out.err).splitlines() if "is a symbolic link" in line]
    assert ended.value.code == 1 and len(said) == 1
    assert said[0].startswith(f"step 2: samples NOT WRITTEN, {run}/samples/0000002.png is a symbolic link (to")


@pytest.mark.parametrize("name", [".lock", ".parts", "grid.png", "000001-3.png", "s.npz"])
def test_samples_with_a_link_are_not_begun(name, tmp_path, outside, no_ranks, capsys):
    write_weights_of_a_model(tmp_path / "run.safetensors", num_classes=10)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(outside / ("deep" if name == ".parts" else "file"))
    flags = f"--ckpt {tmp_path}/run.safetensors --num_sampling_steps 1 --cfg_scale 1 --num_samples 3 "
    flags += f"--output {tmp_path}/out --npz {tmp_path}/out/s.npz"
    with pytest.raises(SystemExit) as ended:
        sample.main(flags.split())
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"{tmp_path}/out/{name} is a symbolic link" in line and line.startswith("error: ")
    assert os.listdir(tmp_path / "out") == [name]
