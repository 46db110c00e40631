"""A sample.py that was killed or had a full disk continues from its parts and writes the same bytes."""

import contextlib
import errno
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import sample
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from opendit.sampling import sample_cache as cache_module
from opendit.sampling import sample_output
from opendit.sampling.sample_cache import FOLDER, SampleCache
from opendit.sampling.sample_output import SampleOutput
from tests.models.test_dit import randomised
from tests.ranks import context, run_ranks

COUNT, BATCH = 22, 4


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ckpt")
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=5)
    for seed in range(2):
        torch.manual_seed(seed)
        info = {"model": "DiT-Ti/2", "config": config.to_dict(), "vae": "none", "image_size": 8}
        state = randomised(DiT(config)).state_dict()
        save_file(state, folder / f"{seed}.safetensors", metadata={METADATA_KEY: json.dumps(info)})
    return folder / "0.safetensors"


def argv(ckpt: Path, folder: Path, *more: str) -> list[str]:
    return (
        f"--ckpt {ckpt} --num_samples {COUNT} --batch_size {BATCH} --num_sampling_steps 2 --cfg_scale 2 --seed 5 \
        --output {folder} --npz {folder}.npz".split()
        + [*more]
    )


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_after(function, calls: int, half=lambda *args, **options: None):
    """Wrap ``function`` to kill the process after ``calls`` calls, after calling ``half``."""
    done, one = [], threading.Lock()

    def call(*args, **options):
        with one:  # ``calls`` calls have ended, and no other is running
            if len(done) == calls:
                half(*args, **options)
                kill()
            result = function(*args, **options)
            done.append(0)
            return result

    return call


def half_a_part(parts: SampleCache, part: int, pixels: np.ndarray) -> None:
    (parts.folder / f".{part:08d}.{os.getpid()}.npy").write_bytes(b"half")


def half_an_npz(path: Path, arrays: dict, mark: str) -> None:
    next(iter(arrays["arr_0"][2]))
    path.with_name(f".{path.stem}.{mark}.npz").write_bytes(b"half")


def kill_at(moment: str) -> None:
    if moment == "first part":
        SampleCache.write = killed_after(SampleCache.write, 0, half_a_part)
    elif moment == "third part":
        SampleCache.write = killed_after(SampleCache.write, 2, half_a_part)
    elif moment == "seventh picture":
        half = lambda self, file, *args, **options: os.write(file.fileno(), b"half")  # noqa: E731
        Image.Image.save = killed_after(Image.Image.save, 6, half)
    elif moment == "npz":
        sample_output.write_npz = killed_after(sample_output.write_npz, 0, half_an_npz)
    elif moment == "after the npz":
        SampleCache.remove = killed_after(SampleCache.remove, 1)
    elif moment == "amid the removal":
        SampleCache.remove = killed_after(
            SampleCache.remove, 1, lambda parts: (parts.folder / "manifest.json").unlink()
        )


def start(mesh, argv: list[str], fine: int, moment: str = "") -> list[int]:
    """Run sample.py with parts of one batch above ``fine`` samples; return the samples that this rank drew."""
    cache_module.FINE = fine
    numbers, draw = [], sample.draw_batch

    def watched(sampling, batch):
        numbers.extend(batch)
        return draw(sampling, batch)

    sample.draw_batch = watched
    kill_at(moment)
    sample.main(argv)
    return numbers


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, ckpt) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "o"
    (numbers,) = run_ranks(1, start, argv(ckpt, folder), 1024)
    assert numbers == list(range(COUNT)) and np.load(f"{folder}.npz")["arr_0"].std() > 1
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(folder: Path, reference: Path) -> None:
    ours, theirs = np.load(f"{folder}.npz"), np.load(f"{reference}.npz")
    assert all(np.array_equal(ours[name], theirs[name]) for name in ("arr_0", "arr_1"))
    assert content(folder) == content(reference)
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("moment", "fine", "worlds", "there"),
    [
        ("first part", 0, (1, 2), 0),
        ("third part", 0, (1, 3), 8),
        ("third part", 1024, (1, 2), 2),
        ("seventh picture", 0, (2, 1), None),
        ("npz", 0, (2, 3), COUNT),
        ("after the npz", 1024, (3, 1), COUNT),
        ("amid the removal", 0, (1, 2), 0),
    ],
)
def test_killed_and_started_again(moment, fine, worlds, there, tmp_path, ckpt, uninterrupted, capfd):
    folder = tmp_path / "o"
    with pytest.raises(Exception, match="SIGKILL"):
        run_ranks(worlds[0], start, argv(ckpt, folder), fine, moment)
    whole = {path: path.stat().st_mtime_ns for path in folder.glob("0*.png")}
    finished = len(list((folder / FOLDER).glob("0*.npy"))) if moment != "amid the removal" else 0
    capfd.readouterr()
    drawn = sorted(sum(run_ranks(worlds[1], start, argv(ckpt, folder), fine), []))
    same(folder, uninterrupted)
    out = capfd.readouterr().out
    if there is not None:
        assert (f"{there} of {COUNT} samples are there from an earlier start" in out) == (there > 0)
        # Threads write in any order, so any two samples may be there if parts are smaller than a batch.
        begin = there if there == COUNT or fine == 0 else 0
        assert drawn == list(range(begin, COUNT))
    assert ("from an earlier start" in out) == (finished > 0)
    if fine == 0 and there:
        kept = [path for path, changed in whole.items() if path.stat().st_mtime_ns == changed]
        assert len(kept) >= there


def slowly(argv: list[str]) -> None:
    draw = sample.draw_batch

    def slow(sampling, batch):
        time.sleep(0.03)
        return draw(sampling, batch)

    sample.draw_batch = slow
    cache_module.FINE = 0
    sample.main(argv)


def test_five_kills_from_outside(tmp_path, ckpt, uninterrupted):
    folder, killed = tmp_path / "o", 0
    for wanted in (1, 2, 3, 4, 5):
        process = context().Process(target=slowly, args=(argv(ckpt, folder),))
        process.start()
        while process.is_alive() and len(list((folder / FOLDER).glob("0*.npy"))) < wanted:
            time.sleep(0.002)
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed == 5
    run_ranks(2, start, argv(ckpt, folder), 0)
    same(folder, uninterrupted)


def late(mesh, argv: list[str]) -> list[int]:
    """Like ``start``, but rank 0's first batch ends only when the other ranks have written all other samples."""
    draw, folder = sample.draw_batch, Path(argv[argv.index("--output") + 1])

    def waits(sampling, batch):
        end = time.monotonic() + 60
        while mesh.rank == 0 and len(list(folder.glob("0*.png"))) < COUNT - len(batch):
            assert time.monotonic() < end, "nobody else draws what is left"
            time.sleep(0.01)
        return draw(sampling, batch)

    sample.draw_batch = waits
    return start(mesh, argv, 1024)


def test_a_process_that_is_late_leaves_the_rest_to_the_others(tmp_path, ckpt, uninterrupted):
    folder = tmp_path / "o"
    drawn = run_ranks(3, late, argv(ckpt, folder))
    assert sorted(sum(drawn, [])) == list(range(COUNT)) and len(drawn[0]) <= BATCH
    same(folder, uninterrupted)


@pytest.fixture
def unfinished(tmp_path, ckpt, no_ranks, monkeypatch, capsys) -> Path:
    """Return the folder of a job that has drawn all samples but could not write its .npz."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "s.npz")

    monkeypatch.setattr(cache_module, "FINE", 0)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sample_output, "write_npz", full)
        sample.main(argv(ckpt, tmp_path / "o"))
    assert len(list((tmp_path / "o" / FOLDER).glob("0*.npy"))) == 6
    capsys.readouterr()
    return tmp_path / "o"


def test_damaged_parts_and_lost_pictures_are_drawn_again(unfinished, ckpt, uninterrupted, monkeypatch, capsys):
    parts = unfinished / FOLDER
    damaged = parts / "00000001.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (parts / "00000005.npy").unlink()
    lost = sorted(unfinished.glob("0*.png"))[13]
    lost.unlink()
    drawn, draw = [], sample.draw_batch
    monkeypatch.setattr(sample, "draw_batch", lambda run, batch: drawn.append(list(batch)) or draw(run, batch))
    sample.main(argv(ckpt, unfinished))
    same(unfinished, uninterrupted)
    out = capsys.readouterr().out
    assert drawn == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21]]
    assert f"note: {damaged} is damaged: its samples are drawn again" in out
    assert "sample 13 has lost its file: it is drawn again" in out and "12 of 22 samples are there" in out


def test_another_batch_size_goes_on(unfinished, ckpt, uninterrupted, capsys):
    for number in (2, 3):
        (unfinished / FOLDER / f"0000000{number}.npy").unlink()
    sample.main(argv(ckpt, unfinished, "--batch_size", "3"))
    assert "14 of 22 samples are there" in capsys.readouterr().out
    ours, theirs = (np.load(f"{folder}.npz")["arr_0"].astype(int) for folder in (unfinished, uninterrupted))
    assert np.abs(ours - theirs).max() <= 1


@pytest.mark.parametrize(
    ("flags", "differences"),
    [
        ("--seed 6", "--seed 5 there, 6 here"),
        ("--cfg_scale 3 --num_sampling_steps 3", "--num_sampling_steps 2 there, 3 here, --cfg_scale 2 there, 3 here"),
        ("--num_samples 23", "--num_samples 22 there, 23 here"),
        ("--class_labels 1", "classes or prompts "),
        ("--no_save_png", "--save_png on there, off here"),
        ("--mixed_precision bf16", "weights "),
        ("--ckpt {ckpt}/1.safetensors", "weights "),
    ],
)
def test_other_flags_are_told_and_lose_nothing(flags, differences, unfinished, ckpt, capsys):
    before = content(unfinished / FOLDER) | {path.name: b"" for path in unfinished.glob("*.png")}
    with pytest.raises(SystemExit) as stop:
        sample.main(argv(ckpt, unfinished, *flags.format(ckpt=ckpt.parent).split()))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and differences in line and "add --overwrite to drop what is there" in line
    assert line.startswith(f"error: --output {unfinished}: holds 22 of 22 samples of a job that did not end")
    assert content(unfinished / FOLDER) | {path.name: b"" for path in unfinished.glob("*.png")} == before


def test_overwrite_draws_anew(unfinished, ckpt, capsys):
    sample.main(argv(ckpt, unfinished, "--overwrite", "--seed", "6", "--num_samples", "3", "--no_save_png"))
    assert np.load(f"{unfinished}.npz")["arr_0"].shape == (3, 8, 8, 3)
    assert sorted(path.name for path in unfinished.iterdir()) == [".samples.json", "grid.png"]


def test_a_disk_that_is_full_in_a_part(tmp_path, ckpt, no_ranks, uninterrupted, monkeypatch, capsys):
    monkeypatch.setattr(cache_module, "FINE", 0)
    folder, calls, true_replacing = tmp_path / "o", [], cache_module.replacing

    @contextlib.contextmanager
    def fails(path, **options):
        with true_replacing(path, **options) as file:
            calls.append(path)
            if len(calls) > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield file

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(cache_module, "replacing", fails)
        sample.main(argv(ckpt, folder, "--no_save_png"))
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 1 and line.startswith("error: [Errno 28] No space left on device: ")
    assert (
        f"{folder}/{FOLDER}/0000000" in line and "12 of 22 samples are in" in line and "it goes on from there" in line
    )
    assert len(list((folder / FOLDER).glob("*.npy"))) == 3 and not list((folder / FOLDER).glob(".*"))
    sample.main(argv(ckpt, folder, "--no_save_png"))
    assert "12 of 22 samples are there from an earlier start" in capsys.readouterr().out
    assert np.array_equal(np.load(f"{folder}.npz")["arr_0"], np.load(f"{uninterrupted}.npz")["arr_0"])


def test_a_part_that_is_damaged_before_the_npz_is_told(tmp_path, ckpt, no_ranks, monkeypatch, capsys):
    true_collect = SampleOutput.collect

    def damage(output):
        output.cache.path(3).write_bytes(b"")
        return true_collect(output)

    monkeypatch.setattr(SampleOutput, "collect", damage)
    with pytest.raises(SystemExit) as stop:
        sample.main(argv(ckpt, tmp_path / "o"))
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 1 and "00000003.npy" in line and "what is damaged is drawn anew" in line
    assert "make room" not in line and not list(tmp_path.glob("*.npz")) and not list(tmp_path.glob(".o*"))
