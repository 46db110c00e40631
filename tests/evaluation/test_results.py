"""Results as lines and tables, and the reasons why two of them can't be compared."""

from dataclasses import replace

import pytest

from opendit.evaluation.results import Measurement, append_results, read_results, table, why_not_comparable

ONE = Measurement(
    metric="fid",
    value=2.27,
    count=50_000,
    size="256 x 256",
    samples="000-DiT-XL-2/step_0400000",
    samples_sha256="ab" * 8,
    interval=(2.2, 2.34),
    interval_by="jackknife of 10 groups, 95 %",
    reference="VIRTUAL_imagenet256_labeled.npz",
    reference_sha256="cd" * 32,
    reference_count=10_000,
    features="pt_inception",
    features_sha256="ef" * 32,
    resize="tf",
    feature_precision="fp32",
    sampler="ddpm",
    steps=250,
    guidance=1.5,
    guidance_interval=(0.3, 5.0),
    seed=0,
    labels="balanced",
    rounding="round to nearest, clamped",
)


def test_a_line_is_the_figure(tmp_path):
    assert Measurement.from_json(ONE.to_json()) == ONE
    append_results(tmp_path, [ONE])
    path = append_results(tmp_path, [replace(ONE, value=3.0)])
    with open(path, "a") as file:
        file.write('{"metric": "fid", "value": 2.\n[1]\n{"metric": "fid"}\n')
    assert [row.value for row in read_results(path)] == [2.27, 3.0]
    assert read_results(tmp_path / "none.jsonl") == []
    with pytest.raises(ValueError):
        replace(ONE, value=float("nan")).to_json()


def test_what_is_sampled_may_differ_and_how_it_is_measured_may_not():
    for change in (dict(steps=50), dict(guidance=1.0), dict(samples_sha256="12"), dict(value=9.0), dict(seed=1)):
        assert why_not_comparable(ONE, replace(ONE, **change)) == []
    for change, said in (
        (dict(count=10_000), "samples 50,000 against 10,000"),
        (dict(reference_sha256="00" * 32), "reference cdcdcdcdcdcd against 000000000000"),
        (dict(reference_count=None), "samples of the reference 10,000 against not known"),
        (dict(features_sha256="01" * 32), "network of features efefefefefef against 010101010101"),
        (dict(resize="clean"), "resize filter tf against clean"),
        (dict(feature_precision="tf32"), "precision of the features fp32 against tf32"),
        (dict(size="512 x 512"), "size of the samples 256 x 256 against 512 x 512"),
        (dict(labels="drawn"), "labels balanced against drawn"),
        (dict(rounding="down"), "rounding round to nearest, clamped against down"),
        (dict(metric="kid"), "metric fid against kid"),
    ):
        assert why_not_comparable(ONE, replace(ONE, **change)) == [said]
    assert why_not_comparable(ONE, replace(ONE, labels=None, rounding=None)) == []  # unknown for samples from elsewhere


def test_a_table_says_what_can_not_be_compared():
    rows = [
        ONE,
        replace(ONE, count=10_000),
        replace(ONE, metric="kid", value=1e-9, interval=None),
        replace(ONE, steps=50),
    ]
    lines = table(rows).splitlines()
    assert len(lines) == 1 + 4 + 1 and len({line.index("ddpm") for line in lines[1:5]}) == 1
    assert "2.27" in lines[1] and "2.2 to 2.34" in lines[1] and "guidance 1.5 in 0.3..5, seed 0, balanced" in lines[1]
    assert "1.000e-09" in lines[3] and " - " in lines[3]
    assert lines[5] == "can't be compared: 2 with 4: samples 10,000 against 50,000"
