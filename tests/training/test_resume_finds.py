"""Resuming finds the right checkpoint, reports damaged ones, and reads only the checkpoint's own files."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
import train
from opendit.checkpoint.load import find_checkpoint
from opendit.checkpoint.pretrained import find_weights, read_newest
from opendit.checkpoint.run_folders import checkpoints_in, newest_checkpoint
from opendit.checkpoint.save import prune, put_in_place
from opendit.checkpoint.tensor_set import damage, read_manifest, write_manifest
from opendit.parallel.mesh import Mesh
from tests.ranks import run_ranks

ARGV = (
    "--model DiT-Ti/2 --image_size 8 --vae none --num_workers 0 --log_every 1 --sample_every 0 --batch_size 4".split()
)
ARGV += "--mixed_precision fp32 --ckpt_every 1".split()
ALONE = Mesh(0, 1, 0, torch.device("cpu"))


def train_to(steps: int, outputs: Path, *more: str) -> None:
    train.main([*ARGV, "--max_steps", str(steps), "--outputs", str(outputs), *more])


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """Return the outputs of a run that saved a checkpoint after each of three steps."""
    outputs, before = tmp_path_factory.mktemp("run"), dict(os.environ)
    train_to(3, outputs)
    os.environ.clear()
    os.environ.update(before)
    return outputs


@pytest.fixture
def run(three_steps, tmp_path):
    """Return a copy of that run, to be damaged."""
    shutil.copytree(three_steps, tmp_path / "outputs", symlinks=True)
    return tmp_path / "outputs" / "000-DiT-Ti-2"


def found(load: str | Path, run: Path):
    return find_checkpoint(str(load), str(run.parent), "DiT-Ti/2", ALONE)


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step_{number:07d}"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path: Path, make) -> None:
    """Replace a file with something else."""
    path.unlink()
    make(path)


def list_anew(folder: Path, **files: str) -> None:
    """Write a correct manifest for the current files in a checkpoint folder."""
    import hashlib

    (folder / "manifest.json").unlink()
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
    }
    write_manifest(folder, 2, entries)


DAMAGES = {
    "flipped": ("model.safetensors", flip),
    "cut off": ("optimizer_000.safetensors", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "empty": ("ema.safetensors", lambda path: path.write_bytes(b"")),
    "no state": ("state.json", Path.unlink),
    "state cut off": ("state.json", lambda path: os.truncate(path, 20)),
    "state of a list": ("state.json", lambda path: path.write_text("[2]")),
    "no manifest": ("manifest.json", Path.unlink),
    "manifest of nothing": ("manifest.json", lambda path: path.write_text("null")),
    "a FIFO": ("ema.safetensors", lambda path: swap(path, os.mkfifo)),
    "a FIFO for a manifest": ("manifest.json", lambda path: swap(path, os.mkfifo)),
    "a folder": ("model.safetensors", lambda path: swap(path, Path.mkdir)),
    "a device": ("state.json", lambda path: swap(path, lambda p: p.symlink_to("/dev/zero"))),
    "nothing left": ("manifest.json", lambda path: [left.unlink() for left in path.parent.iterdir()]),
}


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.timeout(60)
def test_latest_and_a_run_folder_go_on_from_the_newest_intact_one(what, run):
    name, harm = DAMAGES[what]
    assert found("latest", run).folder == found(run, run).folder == step(run, 3).resolve()
    harm(step(run, 3) / name)
    for load in ("latest", run):
        checkpoint = found(load, run)
        assert checkpoint.folder == step(run, 2) and checkpoint.state["step"] == 2
        (problem,) = checkpoint.damaged
        assert str(step(run, 3) / name) in problem, problem
    for load in (step(run, 3), run / "checkpoints" / "latest"):
        with pytest.raises(ValueError, match="--load: ") as refused:
            found(load, run)
        assert str(step(run, 3) / name) in str(refused.value)
        assert f"intact is --load {step(run, 2)}" in str(refused.value)
    harm(step(run, 2) / name)
    assert found("latest", run).folder == step(run, 1) and len(found("latest", run).damaged) == 2
    harm(step(run, 1) / name)
    with pytest.raises(ValueError, match="has no intact checkpoint") as refused:
        found("latest", run)
    assert all(str(step(run, number) / name) in str(refused.value) for number in (1, 2, 3))


def test_a_run_that_lost_its_newest_is_the_run_that_never_had_it(run, three_steps, tmp_path, no_ranks, capsys):
    train_to(4, tmp_path / "whole")
    flip(step(run, 3) / "ema.safetensors")
    (step(run, 2) / "state.json").unlink()
    train_to(4, run.parent, "--load", "latest")
    said = capsys.readouterr().out
    assert f"{step(run, 3) / 'ema.safetensors'} is damaged" in said and f"{step(run, 2)}/state.json is missing" in said
    assert f"going on from {step(run, 1)}, the newest that is intact" in said
    assert [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    for number in (1, 2, 3, 4):  # the damaged ones were written again
        assert damage(step(run, number)) is None
        for file in ("model.safetensors", "ema.safetensors", "optimizer_000.safetensors"):
            ours, whole = (load_file(step(folder, number) / file) for folder in (run, tmp_path / "whole/000-DiT-Ti-2"))
            assert all(torch.equal(ours[key], whole[key]) for key in whole), (number, file)
    assert os.readlink(run / "checkpoints/latest") == "step_0000004" and not list((run / "checkpoints").glob(".*"))


def _find_on_ranks(mesh, load: str, outputs: str) -> tuple[str, tuple[str, ...]]:
    try:
        checkpoint = find_checkpoint(load, outputs, "DiT-Ti/2", mesh)
        return str(checkpoint.folder), checkpoint.damaged
    except ValueError as error:
        return "refused", (str(error),)


def _find_all_on_ranks(mesh, cases: list[tuple[str, str]]) -> list:
    return [_find_on_ranks(mesh, *case) for case in cases]


@pytest.mark.timeout(120)
def test_ranks_agree_on_what_only_one_of_them_saw(run, three_steps, tmp_path):
    cases = []
    for number, name in enumerate(sorted(path.name for path in step(run, 3).iterdir())):
        outputs = tmp_path / str(number)
        shutil.copytree(three_steps, outputs, symlinks=True)
        harmed = outputs / "000-DiT-Ti-2"
        flip(step(harmed, 3) / name)
        cases += [("latest", str(outputs)), (str(step(harmed, 3)), str(outputs))]
    zero, one = run_ranks(2, _find_all_on_ranks, cases)
    assert zero == one and len(zero) == 10
    for (load, outputs), (folder, problems) in zip(cases, zero, strict=True):
        if load == "latest":
            assert folder == str(step(Path(outputs) / "000-DiT-Ti-2", 2)) and len(problems) == 1
        else:
            assert folder == "refused" and "intact is --load" in problems[0]


# ------------------------------------------------------------------------------------------ which one is the newest


def test_latest_is_followed_rather_than_an_abandoned_later_step(run):
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to("step_0000002")
    assert [path.name[-1] for path in checkpoints_in(run)] == ["2", "1", "3"]
    latest.unlink()
    assert [path.name[-1] for path in checkpoints_in(run)] == ["3", "2", "1"]
    latest.write_text("step_0000001")  # where there are no symbolic links
    assert found("latest", run).folder == step(run, 1)
    latest.unlink()
    shutil.copytree(step(run, 3), latest)  # a copy that replaced links with folders
    assert found("latest", run).state["step"] == 3


def test_a_step_of_more_digits_is_the_newest(run):
    step(run, 3).rename(run / "checkpoints/step_9999999")
    shutil.copytree(step(run, 2), run / "checkpoints/step_10000000")
    (run / "checkpoints/latest").unlink()
    assert found("latest", run).folder.name == "step_10000000"
    prune(run / "checkpoints", 1, run / "checkpoints/step_10000000", ())
    assert [path.name for path in checkpoints_in(run)] == ["step_10000000"]


def test_latest_that_leads_nowhere_or_elsewhere_is_told(run, tmp_path):
    latest = run / "checkpoints" / "latest"
    shutil.rmtree(step(run, 3))
    assert found("latest", run).folder == step(run, 2)
    assert "latest" in found("latest", run).damaged[0] and "step_0000003) is missing" in found("latest", run).damaged[0]
    latest.unlink()
    shutil.move(step(run, 1), tmp_path / "elsewhere")
    latest.symlink_to(tmp_path / "elsewhere")
    checkpoint = found("latest", run)
    assert checkpoint.folder == step(run, 2)
    assert checkpoint.damaged[0] == (
        f"{latest} names {tmp_path / 'elsewhere'}, which is no checkpoint beside it, and is not followed; remove it"
    )


def test_a_link_out_of_the_run_is_not_followed(run, tmp_path):
    shutil.move(step(run, 3), tmp_path / "step_0000003")
    step(run, 3).symlink_to(tmp_path / "step_0000003")
    assert "leads out of the run's folder" in found("latest", run).damaged[0]
    with pytest.raises(ValueError, match="leads out of the run's folder"):
        found(step(run, 3), run)
    model = step(run, 2) / "model.safetensors"
    shutil.move(model, tmp_path / "model.safetensors")
    model.symlink_to(tmp_path / "model.safetensors")  # its checksum is right
    checkpoint = found("latest", run)
    assert checkpoint.folder == step(run, 1) and f"{model} is a symbolic link out of {run}" in checkpoint.damaged[1]
    with pytest.raises(ValueError, match="symbolic link out of"):
        read_newest(step(run, 2), "model")


@pytest.mark.parametrize(
    ("name", "text", "a_link"),
    [
        ("latest", "../../other/checkpoints/step_0000003", True),
        ("latest", "../../other/checkpoints/step_0000003", False),
        ("best", "../../other/checkpoints/step_0000003", True),
        ("latest", "/other/step_0000003", True),
        ("best", ".", True),
        ("latest", "./step_0000003", True),
        ("latest", "step_3\n/x", False),
    ],
)
def test_latest_and_best_are_names_and_no_way_elsewhere(name, text, a_link, run):
    """Several of these lead to an intact checkpoint of another run."""
    other = shutil.copytree(run, run.parent / "other", symlinks=True)
    link = run / "checkpoints" / name
    link.unlink(missing_ok=True)
    text = str(other / "checkpoints" / "step_0000003") if text.startswith("/") else text
    link.symlink_to(text) if a_link else link.write_text(text)
    shutil.rmtree(step(run, 3))
    if name == "best":
        (run / "checkpoints" / "latest").unlink()
    with pytest.raises(ValueError, match="is no checkpoint beside it, and is not followed") as refused:
        found(link, run)
    assert str(refused.value).isprintable() and str(link) in str(refused.value)
    for read in (find_weights, read_newest):
        with pytest.raises(ValueError, match="is not followed"):
            read(link)
    notes = []
    assert find_weights(run) == step(run, 2) / "ema.safetensors"
    assert read_newest(run, notes=notes).path.parent == step(run, 2) == newest_checkpoint(run)
    assert found("latest", run).folder == step(run, 2)
    assert name == "best" or ("is not followed" in notes[0] and len(found("latest", run).damaged) == 1)


def test_checkpoints_on_another_disk_are_read_and_not_written(run, tmp_path, no_ranks, capsys):
    shutil.move(run / "checkpoints", tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "disk").rglob("*"))
    for ckpt in (run, step(run, 3), run / "checkpoints" / "latest"):
        assert read_newest(ckpt, notes=[]).path.resolve() == tmp_path / "disk" / "step_0000003" / "ema.safetensors"
    checkpoint = found(run, run)
    assert checkpoint.folder == tmp_path / "disk" / "step_0000003" and checkpoint.run is None
    train_to(4, run.parent, "--load", str(run))
    assert "so the run goes on in" in capsys.readouterr().out
    assert damage(step(run.parent / "001-DiT-Ti-2", 4)) is None
    model = tmp_path / "disk" / "step_0000002" / "ema.safetensors"
    with pytest.raises(OSError, match=f"{run}/checkpoints is a symbolic link"):
        put_in_place(step(run, 5))
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "disk").rglob("*")) == before
    shutil.move(model, tmp_path / "ema.safetensors")
    model.symlink_to(tmp_path / "ema.safetensors")  # a second link that leads out of the first link's target
    with pytest.raises(ValueError, match="symbolic link out of"):
        read_newest(step(run, 2))


def test_a_run_reached_over_a_link_is_the_run(run, tmp_path):
    (tmp_path / "link").symlink_to(run.parent)
    checkpoint = find_checkpoint("latest", str(tmp_path / "link"), "DiT-Ti/2", ALONE)
    assert checkpoint.folder == step(run, 3) and checkpoint.run == run
    (tmp_path / "mine").symlink_to(step(run, 2))
    assert found(tmp_path / "mine", run).folder == step(run, 2)


def test_a_checkpoint_outside_a_run_goes_on_in_a_new_one(run, tmp_path, no_ranks, capsys):
    shutil.copytree(step(run, 2), tmp_path / "saved" / "step_0000002")
    train_to(3, tmp_path / "outputs", "--load", str(tmp_path / "saved/step_0000002"))
    assert "so the run goes on in" in capsys.readouterr().out
    new = tmp_path / "outputs" / "001-DiT-Ti-2"
    assert damage(step(new, 3)) is None
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step_0000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs", "saved"]


@pytest.mark.parametrize("there", ["nowhere", "empty", "file", "weights", "checkpoints", "a" * 300])
def test_a_path_without_a_checkpoint_is_named(there, run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    paths = {"weights": step(run, 3) / "model.safetensors", "checkpoints": run / "checkpoints"}
    path = paths.get(there, tmp_path / there)
    with pytest.raises(ValueError, match=f"--load {path}: no checkpoint there"):
        found(path, run)


# ------------------------------------------------------------------------------------------ what is read of it


@pytest.mark.parametrize(
    "name", ["../step_0000002/model.safetensors", "/etc/passwd", "..", "", "sub/x", "a\\b", "manifest.json", "x" * 256]
)
def test_a_manifest_lists_files_of_its_folder_only(name, run):
    folder = step(run, 3)
    files = read_manifest(folder)
    write_manifest(folder, 2, {**files, name: files["model.safetensors"]})
    (problem,) = found("latest", run).damaged
    assert problem.startswith(f"{folder / 'manifest.json'} is ") and "damaged" in problem and len(problem) < 600


@pytest.mark.parametrize(
    "entry", [None, [], {}, {"bytes": -1, "sha256": "0" * 64}, {"bytes": 1.0, "sha256": "0" * 64}, {"bytes": 3},
              {"bytes": True, "sha256": "0" * 64}, {"bytes": 3, "sha256": "G" * 64}, {"bytes": 3, "sha256": 7}],
)  # fmt: skip
def test_an_entry_of_a_manifest_is_a_size_and_a_checksum(entry, run):
    folder = step(run, 3)
    write_manifest(folder, 2, {**read_manifest(folder), "model.safetensors": entry})
    assert "is missing or damaged" in found("latest", run).damaged[0]


def test_what_a_resume_needs_is_listed(run):
    folder = step(run, 3)
    files = read_manifest(folder)
    for name in ("state.json", "model.safetensors", "ema.safetensors"):
        write_manifest(folder, 2, {other: entry for other, entry in files.items() if other != name})
        assert f"does not list '{name}'" in found("latest", run).damaged[0]
    state = json.loads((folder / "state.json").read_text())
    for stranger in ("../step_0000002/ema.safetensors", "ema_0.5.safetensors"):
        state["ema"]["files"] = {"ema.safetensors": 0.9999, stranger: 0.5}
        (folder / "state.json").write_text(json.dumps(state))
        list_anew(folder)
        (problem,) = found("latest", run).damaged
        assert str(folder) in problem and repr(stranger) in problem, problem


def test_files_that_are_not_listed_are_not_read(run, three_steps, no_ranks):
    for number in (1, 2, 3):
        moments = load_file(step(run, number) / "optimizer_000.safetensors")
        save_file({name: torch.full_like(t, 9.0) for name, t in moments.items()},
                  step(run, number) / "optimizer_001.safetensors")  # fmt: skip
        (step(run, number) / "optimizer_002.safetensors").symlink_to("/dev/zero")
    train_to(4, run.parent, "--load", "latest")
    train_to(4, three_steps.parent / "again")
    for file in ("model.safetensors", "optimizer_000.safetensors"):
        ours, whole = (load_file(step(folder, 4) / file) for folder in (run, three_steps.parent / "again/000-DiT-Ti-2"))
        assert all(torch.equal(ours[key], whole[key]) for key in whole)


def test_what_does_not_fit_is_named_before_anything_is_changed(run, no_ranks, capsys, monkeypatch):
    folder, name = step(run, 3), "exp_avg.blocks.0.attn.qkv.weight"
    first = folder / "optimizer_000.safetensors"
    whole = load_file(first)
    assert name in whole
    monkeypatch.setattr("opendit.parallel.engines.Engine.set_moments", lambda *_: pytest.fail("moments were loaded"))

    def refused() -> str:
        list_anew(folder)
        capsys.readouterr()
        with pytest.raises((SystemExit, ValueError)) as stop:
            train_to(4, run.parent, "--load", str(folder))
        return f"{stop.value} {capsys.readouterr().err}"

    save_file({name: whole[name]}, folder / "optimizer_001.safetensors")
    assert f"two of its files hold {name}" in refused()
    (folder / "optimizer_001.safetensors").unlink()
    save_file({key: tensor for key, tensor in whole.items() if key != name}, first)
    assert f"it has no {name}" in refused()
    save_file({**whole, name: whole[name][1:].clone()}, first)
    assert f"{name} is (383, 128) there and (384, 128) here" in refused()
    first.unlink()
    assert "does not fit this model, it has no exp_avg." in refused()


# ------------------------------------------------------------------------------------------ weights, as --load


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: os.truncate(path, 100)])
def test_sampling_and_first_weights_take_the_newest_intact_one_of_a_run(harm, run, tmp_path, no_ranks, capsys):
    harm(step(run, 3) / "ema.safetensors")
    drawn = "--num_samples 1 --num_sampling_steps 1 --cfg_scale 1".split()
    for ckpt in (["--ckpt", str(run)], ["--ckpt", "latest", "--outputs", str(run.parent)]):
        sample.main([*drawn, *ckpt, "--output", str(tmp_path / "drawn")])
        said = capsys.readouterr().out
        assert f"{step(run, 3) / 'ema.safetensors'} is " in said and f"taken is {step(run, 2)}, the newest" in said
    train_to(1, tmp_path / "new", "--pretrained", str(run))
    assert f"taken is {step(run, 2)}, the newest that is intact" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"take {step(run, 2)}, whose weights are intact"):
        read_newest(step(run, 3))
    with pytest.raises(ValueError, match=f"take {step(run, 2)}, whose weights are intact"):
        read_newest(run)  # without notes, no other checkpoint is used
    for number in (1, 2):
        harm(step(run, number) / "ema.safetensors")
    with pytest.raises(ValueError, match="no intact checkpoint: .*step_0000003.*step_0000002.*step_0000001"):
        read_newest(run, notes=[])
