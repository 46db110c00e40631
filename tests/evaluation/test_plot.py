"""Plots of several runs: what is drawn from which lines, what is left out, and the PNG."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opendit.cli import command
from opendit.evaluation.results import Measurement, append_results, panels, plot, read_run

ONE = Measurement("fid", 9.0, 100, "8 x 8", "000-A/step_0000100", "ab", reference_sha256="cd", sampler="ddim", steps=20,
                  guidance=1.5, seed=0, interval=(8.0, 10.0))  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def figures(folder: str, *rows: Measurement) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    append_results(Path(folder), rows)
    return Path(folder)


def log(folder: str, *lines: dict) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    return Path(folder)


def drawn(*paths: Path, chosen=()) -> dict[str, dict[str, list]]:
    """Return title -> name of the line -> points."""
    found, _ = panels([read_run(path) for path in paths], chosen)
    return {panel.title: {line.name: line.points for line in panel.lines} for panel in found}


def test_figures_over_training_steps_and_guidance():
    rows = [
        replace(ONE, samples=f"000-A/step_{step:07d}", steps=steps, guidance=scale, value=step + steps + scale)
        for step in (200, 100)
        for steps in (50, 20)
        for scale in (1.5, 1.0)
    ]
    other = replace(ONE, samples="001-B/step_0000100", value=3.0, interval=None, seed=7)
    found = drawn(figures("a", *rows), figures("b", other))
    assert list(found) == ["fid over training", "fid over sampling steps", "fid over guidance"]
    training = found["fid over training"]
    assert training["000-A, ddim 20, guidance 1"] == [(100, 121, 8, 10), (200, 221, 8, 10)]
    assert training["001-B, ddim 20, guidance 1.5, seed 7"] == [(100, 3, None, None)] and len(training) == 5
    assert found["fid over sampling steps"]["000-A, step 100, ddim, guidance 1.5"] == [
        (20, 121.5, 8, 10),
        (50, 151.5, 8, 10),
    ]
    assert [x for x, *_ in found["fid over guidance"]["000-A, step 200, ddim 50"]] == [1.0, 1.5]
    again = figures("a", replace(rows[0], value=1.0))  # the later of two evaluations counts
    assert drawn(again)["fid over guidance"]["000-A, step 200, ddim 50"][1][1] == 1.0


def test_precision_against_recall_goes_through_guidance():
    rows = [
        replace(ONE, metric=metric, guidance=scale, value=value)
        for scale, recall, precision in ((2.0, 0.3, 0.9), (1.0, 0.6, 0.5), (1.5, 0.5, 0.8))
        for metric, value in (("precision", precision), ("recall", recall))
    ]
    rows.append(replace(ONE, metric="precision", guidance=4.0))  # without its recall
    folder = figures("a", *rows)
    (points,) = drawn(folder)["precision against recall"].values()
    assert [(x, y) for x, y, *_ in points] == [(0.6, 0.5), (0.5, 0.8), (0.3, 0.9)]
    found, _ = panels([read_run(folder)])
    assert [panel.lines[0].words for panel in found if panel.lines[0].words] == [("1", "1.5", "2")]
    assert "precision against recall" not in drawn(figures("a", ONE, replace(ONE, guidance=2.0)), chosen=["fid"])


def test_what_can_not_be_compared_is_left_out_and_said():
    rows = [replace(ONE, guidance=scale) for scale in (1.0, 1.5)]
    folder = figures("a", replace(ONE, count=50), replace(ONE, count=50, guidance=2.0), *rows)
    found, notes = panels([read_run(folder)])
    assert [x for x, *_ in found[0].lines[0].points] == [1.0, 1.5]
    assert notes == ["2 left out, which can't be compared: fid: samples 50 against 100"]


def test_losses_of_logs():
    held = {"val_loss": 0.5, "val_noise": [0.0, 0.1, 1.0, 9.0], "val_loss_by_noise": [3.0, 0.9, None, 0.1]}
    a = log("a", *({"step": step, "loss": float(step)} for step in range(1, 101)), {"step": 101, "loss": None})
    b = log("b", {"step": 1, "loss": 2.0, **held, "val_loss": 0.7}, {"step": 2, "loss": 1.0, **held})
    found = drawn(a, b)
    assert found["training loss"]["a"][0][:2] == (1.5, 1.5) and len(found["training loss"]["a"]) == 50
    assert found["held-out loss"] == {"b": [(1, 0.7, None, None), (2, 0.5, None, None)]}
    assert found["held-out loss by noise level, last validation"] == {
        "b": [(0.1, 0.9, None, None), (9.0, 0.1, None, None)]
    }


def test_a_png_of_runs(capsys):
    rows = [replace(ONE, guidance=scale, value=scale, interval=None if scale == 2 else (0, 3)) for scale in (1, 1.5, 2)]
    figures("runs/000-A/evaluation", *rows)
    log("runs/000-A", {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0})
    figures("other/000-A", *(replace(row, value=row.value + 1, samples="001-B/step_0000100") for row in rows))
    assert command.main(["evaluate", "plot", "runs/000-A", "other/000-A", "--output", "new"]) == 0
    assert "new.png: 2 runs" in capsys.readouterr().out
    pixels = np.asarray(Image.open("new.png").convert("RGB")).reshape(-1, 3)
    for colour in ((31, 119, 180), (255, 127, 14)):  # matplotlib's first two colours, one per run
        assert (pixels == colour).all(axis=1).sum() > 50
    plot(["other/000-A/results.jsonl"], Path("one.png"), ["fid"])
    assert Image.open("one.png").size[0] < Image.open("new.png").size[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("nowhere", "RUN nowhere: doesn't exist"),
        ("empty", "empty holds neither results.jsonl with figures nor log.jsonl of a run"),
        ("single", "there is nothing to draw"),
        ("single --metrics kid", "--metrics kid: not measured; these runs have fid"),
        ("single --output no/x.png", "--output no/x.png: its folder does not exist"),
        ("single --metric fid", "did you mean --metrics?"),
    ],
)
def test_mistakes_are_one_line(argv, said, capsys):
    Path("empty").mkdir()
    figures("single", ONE)
    with pytest.raises(SystemExit) as stop:
        command.main(["evaluate", "plot", *argv.split()])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.startswith("error: ") and told.count("\n") == 1
    assert said in told
