"""benchmarks/plot.py: how it reads results.csv, and that the docs show all its plots."""

import re
from pathlib import Path

import pytest

from benchmarks.plot import IMAGES, PLOTS, TARGETS, TOKENS, approximation_errors, layer_shares, main, read_rows

DOCS = IMAGES.parent


def test_docs_show_every_plot_and_no_other_picture():
    shown = set()
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        shown |= set(re.findall(r"images/([\w-]+)\.png", page.read_text(encoding="utf-8")))
    made = {path.stem for path in IMAGES.glob("*.png")}
    assert shown == made, "docs/images holds what the pages show"
    assert set(PLOTS) <= made, "python benchmarks/plot.py, and commit what it made"


def test_a_share_is_the_time_without_communication_over_the_time():
    row = {"commit": "c", "bench": "sequence", "metric": "ms", "baseline": "compute only", "baseline_value": "2.0"}
    rows = [
        row | {"case": "layer 1152/16 N 8192 P 2 ulysses x 1", "value": "4.0"},
        row | {"case": "layer 1152/16 N 8192 P 2 ulysses x 2", "value": "2.5"},
        row | {"case": "layer 1152/16 N 8192 P 2 auto", "value": "8.0", "commit": "another"},
        row | {"case": "layer 1152/16 N 8192 P 2 compute only", "value": "2.0", "baseline": "plain"},
        row | {"case": "vDiT-XL/222 64k P 2", "value": "8.0"},
    ]
    assert layer_shares(rows, "c") == {(2, 1152, 8192, "ulysses"): 0.8}


def test_shares_are_the_ratios_of_results_csv():
    rows = [row for row in read_rows() if row["commit"] == "8e1d470" and row["case"].endswith(" auto")]
    shares = layer_shares(read_rows())
    assert len(rows) == len(TARGETS) * len(TOKENS)
    for row in rows:
        width, tokens, gpus = map(int, re.findall(r"layer (\d+)/\d+ N (\d+) P (\d+)", row["case"])[0])
        assert shares[gpus, width, tokens, "auto"] == pytest.approx(float(row["ratio"]), abs=6e-4)


def test_errors_of_approximations_are_those_of_results_csv():
    case = {"bench": "approximations", "case": "DiT, 10,000 samples in batches of 500, taylor:3"}
    rows = [
        case | {"metric": "fewer block evaluations", "value": "2.94"},
        case | {"metric": "relative error of latents", "value": "0.005"},
        case | {"case": case["case"].replace("taylor:3", "exact"), "metric": "accuracy", "value": "0.9"},
        case | {"bench": "sampling", "metric": "img/s", "value": "3"},
    ]
    assert approximation_errors(rows) == {"DiT, 10,000 samples in batches of 500": {"taylor:3": (2.94, 0.005)}}
    kinds = [title.split(",")[0] for title in approximation_errors(read_rows()) if "10,000 samples" in title]
    assert sorted(kinds) == ["DiT-Ti/2", "vDiT-Ti/822"]


def test_a_plot_is_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["sequence_layer", "--output", str(tmp_path)])
    picture = tmp_path / "sequence_layer.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and str(picture) in capsys.readouterr().out


def test_an_unknown_plot_names_those_there_are(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["layers"])
    assert "sequence_layer" in capsys.readouterr().err
