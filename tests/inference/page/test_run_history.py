"""Curves and starts of runs, read from files that may be cut off, large or damaged."""

import json
import math

import pytest

from opendit.inference.page.catalog import Catalog
from opendit.inference.page.run_history import POINTS, changed_flags, curves, starts, thinned
from tests.inference.page.runs import BROKEN, CLIPS, CUT, DIGITS, LINKED_FILE, log


def test_curves_of_several_runs(outputs):
    found = curves(Catalog(outputs), [DIGITS, CLIPS, BROKEN, LINKED_FILE, CUT])
    assert found["loss"] == [(step, 1 / step, DIGITS) for step in range(1, 31)] + [(5, 0.5, CLIPS)]
    assert len(found["grad_norm"]) == 31 and found["samples_per_s"][-1] == (5, 3.0, CLIPS)


def test_a_log_that_grows_and_one_of_nonsense(tmp_path):
    catalog, run = Catalog(tmp_path), tmp_path / "000-a"
    strange = ['{"step": 1}', "[1]", "null", "{", '{"step": "1", "loss": 1}', '{"step": 2, "loss": "x"}', "[" * 10**5,
               '{"step": 3, "loss": Infinity}', '{"step": true, "loss": 1}', '{"step": 4, "loss": 1e400}']  # fmt: skip
    run.mkdir()
    (run / "log.jsonl").write_text("\n".join(strange) + '\n{"step": 5, "loss": 2}\n')
    assert curves(catalog, ["000-a"])["loss"] == [(5, 2.0, "000-a")]
    log(run, [{"step": 6, "loss": 3}])
    assert curves(catalog, ["000-a"])["loss"] == [(6, 3.0, "000-a")]


def test_long_curves_become_means_of_neighbours():
    points = [(step, float(step % 2)) for step in range(1, 10 * POINTS + 8)]
    thin = thinned(points)
    assert len(thin) == POINTS and thin[-1] == points[-1]
    assert all(abs(value - 0.5) < 0.06 for _, value in thin[:-1])
    assert [step for step, _ in thin] == sorted({step for step, _ in thin}) and thin[0][0] < 12
    assert thinned(points[:POINTS]) == points[:POINTS]
    assert math.isclose(sum(value for _, value in thinned([(i, 1.0) for i in range(5)], 3)), 3)


def test_starts(outputs, tmp_path):
    found = starts(Catalog(outputs), DIGITS)
    assert [start["first_step"] for start in found] == [0, 20]
    assert changed_flags(*found) == ["--lr 0.0001 -> 0.001"]
    assert changed_flags({}, {"flags": {"a": 1}}) == ["--a None -> 1"] and changed_flags({"flags": 3}, {}) == []
    assert starts(Catalog(outputs), CLIPS) == [] == starts(Catalog(outputs), LINKED_FILE)
    with pytest.raises(ValueError, match="config.json"):
        starts(Catalog(outputs), BROKEN)
    early = tmp_path / "000-a"
    early.mkdir()
    (early / "config.json").write_text(json.dumps({"flags": {"lr": 1}}))
    assert starts(Catalog(tmp_path), "000-a") == [{"flags": {"lr": 1}}]
