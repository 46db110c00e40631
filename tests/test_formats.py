"""Every format on disk that released versions wrote still loads and gives the recorded results.

``tests/formats/make.py`` tells how the fixtures were made. They are read through the programs and the public names."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import preprocess
from tests.formats import cases, reading
from tests.recorded_runs import machine

RECORDED = json.loads(cases.RECORDED.read_text())
TOLERANCE = 1e-5 if machine() == RECORDED["machine"] else 1e-3  # as in tests/test_recorded_runs.py
# Runs that continue with another order of samples than in the commit that wrote them, and why. Weights, moments and
# counters load as before, but the loss differs.
ANOTHER_ORDER = {
    "packs": "windows of packs end with a pass over the data, and did not",
    "sorted": "each epoch was a sort without its remainder, and is a keyed permutation",
}
SAYS_OF_CURVE = re.compile(r"note: resume: (.*the curve is another.*)")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, no_ranks):
    """Work in an empty folder. It is deleted because fixtures unpack to tens of megabytes."""
    for name in ("OPENDIT_SIZE_CACHE", "OPENDIT_SHARD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield
    os.chdir(tmp_path)
    shutil.rmtree(tmp_path / "work")


def check_pattern(found: dict[str, np.ndarray], kind: str) -> None:
    """Compare weights with the fixture's values bit for bit, and fixed tables with their formula."""
    assert found
    for name, values in found.items():
        assert values.dtype == np.float32
        if name in cases.FIXED_TABLES:
            assert np.abs(values - cases.fixed_table(name, values.shape)).max() < 1e-7, (kind, name)
        else:
            assert np.array_equal(values, cases.pattern(kind, name, values.shape)), (kind, name)


def check_log(found: list[dict], expected: list[dict], *, losses: bool = True) -> None:
    for now, then in zip(found, expected, strict=True):
        assert math.isfinite(now["loss"])
        if losses:
            assert now["loss"] == pytest.approx(then["loss"], rel=TOLERANCE)
            assert now["grad_norm"] == pytest.approx(then["grad_norm"], rel=10 * TOLERANCE)
        assert {key: now[key] for key in ("step", "skipped")} == {key: then[key] for key in ("step", "skipped")}
        assert now["epoch"] == then["epoch"] or not losses


def sets_of(checkpoint: Path) -> dict[str, str]:
    """Return the file or index of every set of weights in a checkpoint, by the set's name."""
    ending = next(end for end in (".safetensors", ".shards.json") if (checkpoint / f"model{end}").exists())
    averages = json.loads((checkpoint / "state.json").read_text())["ema"]["files"]
    return {name.removesuffix(ending): name for name in [f"model{ending}", *averages]}


# ------------------------------------------------------------------------------------------ runs


def test_every_fixture_is_read():
    there = {path.name.removesuffix(".tar.xz") for path in cases.HERE.glob("*.tar.xz")}
    assert there == {*cases.RUNS, *cases.DATA, "exported", "job", "evaluation", "hardware"} - {*cases.IN}
    sizes = [path.stat().st_size for path in cases.HERE.glob("*.tar.xz")]
    assert max(sizes) < 1 << 20 and sum(sizes) < 3 << 19


@pytest.mark.parametrize("name", cases.RUNS)
def test_a_run_goes_on(name, capsys):
    then = RECORDED[name]
    reading.unpack(name)
    run = reading.run_of()
    log, config = (run / "log.jsonl").read_text(), json.loads((run / "config.json").read_text())
    if name != "lora":  # its files hold only additions; the latents in the next test use merged weights
        for kind, file in sets_of(run / "checkpoints/latest").items():
            check_pattern(reading.exported(run / "checkpoints/latest" / file), f"{kind} of step 2")
    capsys.readouterr()
    check_log(reading.trained(cases.resuming_flags(name)), then["log"], losses=name not in ANOTHER_ORDER)
    out = capsys.readouterr().out
    changed = SAYS_OF_CURVE.findall(out)
    assert not changed or name in ANOTHER_ORDER, changed
    if name == "sorted":
        (line,) = changed
        assert line.startswith("the order of samples sorted -> keyed: samples come in another order from this step on")
    assert "is not the computed one" not in out, "files of released versions hold the tables that are computed"
    assert (run / "log.jsonl").read_text().startswith(log), "lines before the checkpoint were kept"
    starts = json.loads((run / "config.json").read_text())["starts"]
    assert len(starts) == 2 and starts[0] == config["starts"][0]
    if name != "lora" and name not in ANOTHER_ORDER:  # the averages, two steps later
        found = reading.projection(reading.exported(run))
        assert found == pytest.approx(then["projection"], rel=10 * TOLERANCE, abs=0.01)


@pytest.mark.parametrize("name", cases.SAMPLES)
def test_a_run_is_drawn_from(name):
    reading.unpack(name)
    found = reading.latents_of(name)
    for now, then in zip(found, RECORDED[name]["latents"], strict=True):
        assert (now["step"], now["shape"]) == (then["step"], then["shape"])
        assert now["norm"] == pytest.approx(then["norm"], rel=10 * TOLERANCE)
        for key in ("first", "projection"):
            assert now[key] == pytest.approx(then[key], rel=10 * TOLERANCE, abs=TOLERANCE * then["norm"])


def test_the_best_and_an_earlier_checkpoint():
    reading.unpack("dit")
    run = reading.run_of()
    check_pattern(reading.exported(run / "checkpoints/best"), "ema of step 1")
    check_pattern(reading.exported(run / "checkpoints/step_0000001"), "ema of step 1")
    lines = (run / "log.jsonl").read_text().splitlines()
    flags = cases.resuming_flags("dit")
    flags[flags.index("--load") + 1] = str(run / "checkpoints/step_0000001")
    found = reading.trained(flags)
    assert [line["step"] for line in found] == [3, 4]
    again = (run / "log.jsonl").read_text().splitlines()
    first, second = json.loads(again[1]), json.loads(lines[1])
    # The weights differ from the original run's, so its second line is written again.
    assert again[0] == lines[0] and first["step"] == second["step"] == 2 and first["loss"] != second["loss"]


# ------------------------------------------------------------------------------------------ data


@pytest.mark.parametrize("name", cases.DATA)
def test_a_form_of_data_is_trained_on(name, capsys):
    reading.unpack(cases.IN.get(name, name))
    if name.startswith("latents_files"):  # a format from before tars; train.py names the command that converts it
        with pytest.raises(SystemExit):
            reading.trained(cases.data_flags(name))
        assert "convert them: python preprocess.py shards --data_path latents --output" in capsys.readouterr().err
        Path("latents").rename("old")
        assert preprocess.main("shards --data_path old --output latents --num_workers 1".split()) == 0
    check_log(reading.trained(cases.data_flags(name)), RECORDED[name]["log"])


# ------------------------------------------------------------------------------------------ exported files


@pytest.mark.parametrize("name", cases.EXPORTED)
def test_an_exported_file_is_read(name):
    reading.unpack("exported")
    ckpt, *more = cases.EXPORTED[name]
    model = ["--model", "DiT-Ti/2"] if name == "meta" else []
    weights = reading.exported(ckpt, *model)
    check_pattern(weights, "ema of step 1")
    found, then = reading.drawn(["--ckpt", ckpt, *more, *cases.DRAW.split()]), RECORDED["exported"][name]
    expected = np.frombuffer(bytes.fromhex(then["pixels"]), np.uint8)
    assert list(found.shape) == then["shape"]
    assert np.abs(found[:, ::8, ::8].astype(int).reshape(-1) - expected).max() <= 1


# ------------------------------------------------------------------------------------------ what was left unfinished


def test_a_job_of_sample_py_goes_on():
    """Each of the parts that exist holds a single grey, which no model draws."""
    then = RECORDED["job"]
    reading.unpack("job")
    before = {path.name: path.stat().st_mtime_ns for path in Path("samples").glob("0*.png")}
    assert len(before) >= then["there"] and Path("samples/.parts/manifest.json").exists()
    pixels = reading.drawn(cases.JOB.split())
    expected = np.frombuffer(bytes.fromhex(then["pixels"]), np.uint8).reshape(then["shape"]).astype(int)
    for number in range(then["there"]):
        assert (pixels[number] == 100 + number).all()
    assert np.abs(pixels[then["there"] :] - expected[then["there"] :]).max() <= 1
    after = {path.name: path.stat().st_mtime_ns for path in Path("samples").glob("0*.png")}
    kept = sorted(before)[: then["there"]]
    assert len(after) == 6 and {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert not Path("samples/.parts").exists()


@pytest.mark.parametrize("reference", ["reference.npz", "statistics.npz"])
def test_an_evaluation_s_files_are_read(reference, capsys):
    """The samples' features are read from the folder. They differ from the features that the network would compute."""
    reading.unpack("evaluation")
    lines = Path("evaluation/results.jsonl").read_text()
    found = reading.evaluated("samples.npz", reference)
    assert found == pytest.approx(RECORDED["evaluation"][reference], rel=10 * TOLERANCE, abs=1e-7)
    out = capsys.readouterr().out
    earlier = json.loads(lines.splitlines()[0])
    assert f"{earlier['value']:.3g}"[:4] in out, "earlier figures are shown beside the new ones"
    assert Path("evaluation/results.jsonl").read_text().startswith(lines)
    shutil.rmtree("evaluation")
    assert reading.evaluated("samples.npz", reference)["frechet_distance"] != pytest.approx(
        found["frechet_distance"], rel=1e-3
    )


def test_a_file_of_measured_hardware_is_read(capsys):
    import train

    reading.unpack("hardware")
    train.main(cases.DRY_RUN.split())
    out = capsys.readouterr().out
    assert "predicted at CPU speed (measured here by 1 ranks" in out
    found = re.search(r"^  time +([\d,.]+) ms a step", out, re.MULTILINE)
    assert found is not None
    assert float(found[1].replace(",", "")) == pytest.approx(RECORDED["hardware"]["ms"], rel=0.01)
