"""preprocess.py as its users run it: in several processes at once, killed and started again."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import preprocess
import train
from opendit.config.command_line import underscored
from opendit.data import DataError, SampleKey, build_dataset
from opendit.encoders import load_codec

ROOT = Path(__file__).resolve().parents[2]


def start(log, *flags, **environment):
    """Start preprocess.py in a forked process, which starts at once, with its output in the file ``log``."""

    def child():
        os.environ.update(environment)
        torch.set_num_threads(1)
        with open(log, "w") as file, redirect_stdout(file), redirect_stderr(file):
            code = preprocess.main([str(flag) for flag in flags])
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    """Hide the GPU, because forked processes can't use one that this process has used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


FINISHED = "latents-*.tar.index"  # what a finished tar leaves


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return the flags of a job over 60 pictures, without --output, and the folder that it makes."""
    from diffusers import AutoencoderKL

    root = tmp_path_factory.mktemp("job")
    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    AutoencoderKL(block_out_channels=(32, 64), norm_num_groups=8, **kinds).save_pretrained(root / "vae")
    random = np.random.default_rng(0)
    for i in range(60):
        path = root / "pictures" / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 33, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:700])
    flags = ["latents", "--data_path", root / "pictures", "--vae", root / "vae", "--image_size", 32]
    flags = list(map(str, [*flags, "--batch_size", 4, "--num_workers", 0, "--shard_size", "65KB"]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the number of threads may change the last bit
    assert preprocess.main([*flags, "--output", str(root / "latents")]) == 0
    yield flags, root / "latents"
    torch.set_num_threads(threads)


def test_alone_it_prints_its_usage():
    alone = subprocess.run([sys.executable, str(ROOT / "preprocess.py")], capture_output=True, text=True)
    assert alone.returncode == 0 and alone.stderr == ""
    assert "usage: preprocess.py" in alone.stdout and "latents" in alone.stdout and "torchrun" in alone.stdout


def test_the_job_makes_a_data_set(job):
    data = build_dataset(str(job[1]), 32, seed=0)
    assert len(data) == 59 and data.describe().num_classes == 2 and data[SampleKey(0, 0, 0)].x.shape == (8, 16, 16)
    assert len(data.index["skipped"]) == 1 and data.random_flip
    assert Path(data.vae).is_absolute() and load_codec(data.vae, channels=3, device="cpu").downscale == 2


def test_killed_midway_it_goes_on_to_the_same_bytes(job, tmp_path):
    """After kill -9 past the first shard, the same command keeps that shard and ends with the same files."""
    flags, reference = job
    output = tmp_path / "latents"
    process = start(tmp_path / "log", *flags, "--output", output)
    while not list(output.glob(FINISHED)):
        assert process.is_alive(), (tmp_path / "log").read_text()
        time.sleep(0.001)
    process.kill()
    process.join()
    done = list(output.glob(FINISHED))
    assert 0 < len(done) < 10 and not (output / "index.json").exists()
    for end in ("partial", "index.1.partial"):
        (output / f"latents-32-00009-of-00010.tar.{end}").write_bytes(b"half a shard")  # as a later kill leaves
    kept = {path: path.stat().st_mtime_ns for path in done}
    assert preprocess.main([*flags, "--output", str(output)]) == 0
    assert contents(output) == contents(reference)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def start_two(folder, *flags):
    """Start the two processes of one run that writes to folder / "latents". Return them and their log files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    logs = [folder / "log0", folder / "log1"]
    flags = [*flags, "--output", folder / "latents"]
    return [start(log, *flags, RANK=str(rank), **common) for rank, log in enumerate(logs)], logs


def test_two_processes_make_what_one_makes(job, tmp_path):
    flags, reference = job
    output = tmp_path / "latents"
    processes, logs = start_two(tmp_path, *flags)
    for process in processes:
        process.join(timeout=60)
    texts = [log.read_text() for log in logs]
    assert [process.exitcode for process in processes] == [0, 0], texts
    assert contents(output) == contents(reference)
    assert sorted("skipped" in text for text in texts) == [False, True]  # one of them read the broken picture
    assert "59 pictures in 10 shards, 1 unreadable files left out" in texts[0] and "59 pictures" not in texts[1]


def test_mistakes_are_told_in_one_line(job, tmp_path, capsys):
    flags, _ = job
    for change, message in [
        (["--data_path", "/no/such"], "--data_path /no/such: doesn't exist"),
        (["--vae", "none"], "--vae none: has no latents to cache"),
        (["--vae", str(tmp_path)], "--vae PATH"),
        (["--image-size=33"], "--image_size 33: no multiple of 2"),
        (["--mixed_precision", "fp16"], "needs a GPU"),
        (["--data_path", str(job[1])], "holds latents already"),
    ]:
        assert preprocess.main([*flags, "--output", str(tmp_path / "out"), *change]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error, error
    with pytest.raises(SystemExit) as stopped:
        preprocess.main([*flags, "--output", "x", "--batch_size", "0"])
    assert stopped.value.code == 2


def test_a_failed_job_leaves_no_empty_folder(job, tmp_path, capsys, monkeypatch):
    def overflow(*args):
        raise DataError("rows 0 to 3 overflow")

    monkeypatch.setattr("opendit.data.make_latents._Encoding.encode", overflow)
    flags, output = [*job[0], "--output", str(tmp_path / "latents")], tmp_path / "latents"
    for was_there in (False, True):
        assert preprocess.main(flags) == 2 and "error: rows 0 to 3 overflow" in capsys.readouterr().err
        left = [path.name for path in output.glob("*")] if output.exists() else None
        assert left == ([] if was_there else None) or left == [".index.lock"]  # tars are written under a lock
        output.mkdir(exist_ok=True)


@pytest.mark.parametrize("vae", ["none", "ema"])
def test_latents_of_another_vae_are_refused_before_training(vae, job, tmp_path, capsys, no_ranks):
    """--vae none would draw these 4 x 16 x 16 latents as pixels, and --vae ema as pictures of 128 px."""
    argv = ["--model", "DiT-Ti/2", "--data_path", str(job[1]), "--image_size", "32", "--outputs", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        train.main([*argv, "--vae", vae])
    assert stop.value.code == 2 and f"--vae {vae}: a picture of 32 px has" in capsys.readouterr().err


def test_dashes_are_accepted():
    assert underscored("--data-path=a-b") == "--data_path=a-b"
    assert underscored("--no-flip") == "--no_flip"
    assert underscored("some-folder") == "some-folder" and underscored("-h") == "-h"


def test_a_demo_is_made_listed_and_checked(tmp_path, capsys):
    videos, other, checked = tmp_path / "videos", tmp_path / "other.csv", tmp_path / "checked.csv"
    assert preprocess.main(["demo", "--output", str(videos), "--clips", "4", "--size", "16"]) == 0
    assert f"train with --use_video --data_path {videos}/demo.csv" in capsys.readouterr().out
    assert preprocess.main(["folder", str(videos), "--output", str(other)]) == 0
    assert "4 clips with captions (4 from folder names)" in capsys.readouterr().out
    flags = ["check", str(videos / "demo.csv"), "--output", str(checked), "--num-frames", "16"]
    assert preprocess.main([*flags, "--frame-interval=3", "--min-size=16"]) == 0
    out = capsys.readouterr().out
    assert "kept 4 of 4 rows" in out and "duration (s)" in out and len(checked.read_text().splitlines()) == 5
    assert preprocess.main([*flags, "--image-size=17"]) == 0  # training enlarges them
    assert "kept 4 of 4 rows" in (out := capsys.readouterr().out) and "enlarged by training at 17: 4 (" in out
    assert preprocess.main([*flags, "--min-size=17"]) == 2
    assert "too small: 4 (" in capsys.readouterr().out
    assert preprocess.main([*flags, "--frame-interval=4"]) == 2  # needs 61 frames of 48
    output = capsys.readouterr()
    assert "too short: 4 (" in output.out and "error: no row of" in output.err


def test_a_demo_of_the_test_digits(tmp_path, capsys):
    """Clips of the two splits show different digits, and a folder has clips of one split only."""
    clips = {}
    for split in ("train", "test"):
        flags = ["demo", "--output", str(tmp_path / split), "--clips", "2", "--size", "16", "--split", split]
        assert preprocess.main(flags) == 0
        clips[split] = [path.read_bytes() for path in sorted((tmp_path / split / "clips").iterdir())]
    assert "evaluate with --use_video" in capsys.readouterr().out
    assert len(clips["train"]) == len(clips["test"]) == 2 and clips["train"][0] != clips["test"][0]
    assert preprocess.main([*flags, "--split", "train"]) == 2
    assert "split test there, train now" in capsys.readouterr().err


def test_mistakes_with_tables_are_told_in_one_line(tmp_path, capsys):
    output = ["--output", str(tmp_path / "out.csv")]
    for flags, message in [
        (["ucf101", str(tmp_path / "no"), *output], "ROOT "),
        (["ucf101", str(tmp_path), *output], "holds no clips in folders of their classes"),
        (["folder", str(tmp_path), *output], "holds no clips or pictures"),
        (["check", "/no/such.csv", *output], "CSV /no/such.csv: doesn't exist"),
    ]:
        assert preprocess.main(flags) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error, error
    for flags in (["folder", "x"], ["check", "x", *output, "--min_size", "-1"], ["demo", "--clips", "0"]):
        with pytest.raises(SystemExit) as stopped:
            preprocess.main(flags)
        assert stopped.value.code == 2


def test_a_lost_process_ends_the_other(job, tmp_path):
    flags, _ = job
    processes, logs = start_two(tmp_path, *flags)
    while not list((tmp_path / "latents").glob(FINISHED)):
        assert all(process.is_alive() for process in processes), [log.read_text() for log in logs]
        time.sleep(0.001)
    processes[1].kill()
    processes[0].join(timeout=15)
    assert processes[0].exitcode == 3
