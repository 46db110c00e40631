"""Curves and starts of runs, read from files that may be incomplete, large or damaged."""

import json
import math
import os

import pytest

from opendit.sampling.page.catalog import Catalog
from opendit.sampling.page.runs_tab import (
    POINTS,
    changed_flags,
    curves,
    log_reader,
    read_results,
    read_starts,
    results_table,
    starts_table,
    thinned,
)
from opendit.sampling.page.views import MOST_ROWS, escaped, table
from tests.sampling.page.runs import BROKEN, CLIPS, CUT, DIGITS, LINKED_FILE, log


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
    found = read_starts(Catalog(outputs), DIGITS)
    assert [start["first_step"] for start in found] == [0, 20]
    assert changed_flags(*found) == ["--lr 0.0001 -> 0.001"]
    assert changed_flags({}, {"flags": {"a": 1}}) == ["--a None -> 1"] and changed_flags({"flags": 3}, {}) == []
    assert read_starts(Catalog(outputs), CLIPS) == [] == read_starts(Catalog(outputs), LINKED_FILE)
    with pytest.raises(ValueError, match="config.json"):
        read_starts(Catalog(outputs), BROKEN)
    early = tmp_path / "000-a"
    early.mkdir()
    (early / "config.json").write_text(json.dumps({"flags": {"lr": 1}}))
    assert read_starts(Catalog(tmp_path), "000-a") == [{"flags": {"lr": 1}}]


def test_figures_of_evaluations(outputs, tmp_path):
    catalog, run = Catalog(outputs), outputs / CLIPS
    row = {"metric": "fid", "value": 3.5, "interval": [3.0, 4.0], "count": 50_000, "steps": 50, "time": "2026-01-02"}
    mine = {**row, "samples": str(run / "checkpoints" / "step_0000005" / "ema.safetensors"), "secret": 1}
    other = {**row, "samples": str(outputs / DIGITS / "x.safetensors")}
    strange = ["{", "[]", '{"metric": 1}', "[" * 10**5, json.dumps({**row, "samples": 3}), json.dumps(row)]
    lines = [json.dumps(mine), json.dumps({**mine, "metric": "is", "time": "2026-01-03"}), json.dumps(other), *strange]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    found = read_results(catalog, CLIPS, tmp_path)
    assert [figure["metric"] for figure in found] == ["is", "fid"] and "secret" not in found[0]
    assert len(read_results(catalog, DIGITS, tmp_path)) == 2 and read_results(catalog, BROKEN, tmp_path) == []
    assert read_results(catalog, CLIPS) == [] == read_results(catalog, CLIPS, tmp_path / "nowhere")
    assert read_results(catalog, LINKED_FILE) == []  # its file is a link to another folder
    own = Catalog(tmp_path)
    (tmp_path / "000-a" / "evaluation").mkdir(parents=True)
    (tmp_path / "000-a" / "evaluation" / "results.jsonl").write_text(json.dumps(row))
    assert [figure["value"] for figure in read_results(own, "000-a")] == [3.5]


def test_a_log_is_read_on_from_where_it_ended(tmp_path):
    catalog, run = Catalog(tmp_path), tmp_path / "000-a"
    run.mkdir()
    path = run / "log.jsonl"

    def found() -> list[tuple[int, float]]:
        return [(step, value) for step, value, _ in curves(catalog, ["000-a"])["loss"]]

    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "lo')
    assert found() == [(1, 1.0)]
    with open(path, "a") as file:
        file.write('ss": 2}\n')
    assert found() == [(1, 1.0), (2, 2.0)]
    read = []
    with open(path, "a") as file:
        file.write('{"step": 3, "loss": 3}\n')
    reader = log_reader(path)
    reader.add = lambda line, add=reader.add: (read.append(line), add(line))
    assert found() == [(1, 1.0), (2, 2.0), (3, 3.0)] and read == [b'{"step": 3, "loss": 3}\n']
    # The log was cut by a resumption, and is longer than before when it is read again.
    path.write_text('{"step": 1, "loss": 1}\n' + "".join(f'{{"step": {n}, "loss": 9}}\n' for n in range(2, 9)))
    assert found() == [(1, 1.0), *((n, 9.0) for n in range(2, 9))]


def test_absurd_numbers_leave_out_their_own_points_and_rows(tmp_path):
    catalog, run, huge = Catalog(tmp_path), tmp_path / "000-a", "9" * 400
    run.mkdir()
    lines = [f'{{"step": 1, "loss": {huge}}}', f'{{"step": {2**63}, "loss": 1}}', '{"step": -1, "loss": 1}']
    (run / "log.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "loss": 2}\n')
    assert curves(catalog, ["000-a"])["loss"] == [(5, 2.0, "000-a")]
    row = {"metric": "fid", "value": int(huge), "interval": [1, int(huge)], "count": 5, "time": "2026-01-02"}
    (run / "results.jsonl").write_text("\n".join(map(json.dumps, [row, {**row, "value": 3.5, "interval": "x"}])))
    table = results_table(read_results(catalog, "000-a"))
    assert table.count("<tr>") == 3 and ">3.5<" in table and f">{huge}<" in table
    strange = [{"changes": 3, "time": [1], "flags": 1}, {"changes": ["resume: a", 7], "first_step": {}}]
    assert starts_table(strange).count("<tr>") == 3 and ">a<" in starts_table(strange)


def test_long_tables_are_cut():
    shown = table([[str(number)] for number in range(MOST_ROWS + 7)], ["n"])
    assert shown.count("<td>") == MOST_ROWS and "and 7 more" in shown


def test_a_run_whose_name_is_not_utf_8_is_told(tmp_path):
    for name in (b"000-a", b"001-\xff"):
        (tmp_path / os.fsdecode(name)).mkdir()
    catalog = Catalog(tmp_path)
    assert catalog.runs() == ["000-a"] and catalog.refused() == [os.fsdecode(b"001-\xff")]
    assert "001-" in escaped(catalog.refused()[0])
