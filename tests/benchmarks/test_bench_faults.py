"""benchmarks/faults tells lost state from intact state, and hanging programs from ended ones."""

import csv
import re
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.bench_faults import COLUMNS, summary, table, write_csv
from benchmarks.faults import GROUPS
from benchmarks.faults.lab import FAULTS, RUN, Fault, Lab, Shared, judge, newest_step, register_all
from opendit.checkpoint.tensor_set import write_manifest
from opendit.common.tensor_files import write_tensors

ROOT = Path(__file__).resolve().parents[2]
FILES = ("model.safetensors", "ema.safetensors", "optimizer_000.safetensors")


def run_of(outputs: Path, last: float = 1.0, steps: tuple[int, ...] = (4, 8)) -> Path:
    """Write a run folder with checkpoints; ``last`` is a weight in the newest one."""
    for step in steps:
        folder = outputs / RUN / "checkpoints" / f"step_{step:07d}"
        folder.mkdir(parents=True)
        value = last if step == steps[-1] else 0.5
        files = {name: write_tensors(folder / name, {"w": torch.tensor([value, -0.0])}, {}) for name in FILES}
        (folder / "state.json").write_text("{}")
        write_manifest(folder, 2, files)
    return outputs / RUN


class ShellLab(Lab):
    """A Lab whose trainings are shell commands and whose undisturbed run already exists."""

    command = "true"

    def train(self, *_, **__):
        return [self.programs.run("sh", "-c", self.command, OUT=str(self.outputs))]

    def undisturbed(self, world: int = 1, *more: object) -> Path:
        return self.shared.folder / "whole"


@pytest.fixture
def outcome_of(tmp_path, monkeypatch):
    """Return a function that judges a fault made by another function."""
    monkeypatch.setattr("benchmarks.faults.lab.Lab", ShellLab)
    run_of(tmp_path / "whole")
    shared = Shared(None, tmp_path, patience=1.0)
    return lambda make: judge(Fault(f"fault{len(list(tmp_path.iterdir()))}", "endings", "a fault", make), shared)


def test_what_is_lost_is_told(outcome_of):
    def a_resume_that(command: str, last: float = 1.0):
        def make(lab):
            run_of(lab.outputs, last)
            lab.command = command
            lab.loses_nothing()

        return outcome_of(make)

    intact = a_resume_that("true")
    assert intact.as_it_should and intact.lost == "nothing"
    flipped = a_resume_that("true", last=1.0000001)
    assert not flipped.as_it_should and "w is another" in flipped.lost
    failed = a_resume_that("echo 'error: no way' >&2; exit 2")
    assert "a resume ended with [2]: error: no way" in failed.lost
    gone = a_resume_that('rm -r "$OUT"/*/checkpoints/step_0000008')
    assert "step_0000004" in gone.lost
    less = a_resume_that('rm "$OUT"/*/checkpoints/step_0000008/ema.safetensors')
    assert "ema.safetensors" in less.lost


def test_damage_is_told_before_anything_is_resumed(outcome_of):
    def make(lab):
        weights = run_of(lab.outputs) / "checkpoints/step_0000008/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        lab.untouched()

    assert "model.safetensors is damaged" in outcome_of(make).lost

    def nothing(lab):
        shutil.rmtree(lab.outputs, ignore_errors=True)
        lab.loses_nothing()

    assert "no checkpoint" in outcome_of(nothing).lost


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("exit 1", "exit codes [1], not [0]"),
        ("sleep 60", "hung"),
        ("sleep 60 & exit 0", "1 processes left"),
        ("setsid sleep 60 & exit 0", "1 processes left"),
        ("echo other >&2", "did not say 'this'"),
        ("printf 'this\\n%s' 'more' >&2", "did not say 'this'"),
        ("echo 'Traceback (most recent call last):' >&2; echo this >&2", "a traceback"),
        ("kill -9 $$", "exit codes [-9], not [0]"),
    ],
)
def test_an_end_that_is_not_as_it_should_be_is_told(command, problem, outcome_of):
    def make(lab):
        lab.now()
        lab.ends(lab.programs.run("sh", "-c", command), {0}, "this", within=1.0)
        lab.require(not lab.programs.kill_all(), "the lab leaves processes")

    outcome = outcome_of(make)
    assert problem in outcome.verdict and "the lab" not in outcome.verdict
    said = outcome_of(lambda lab: lab.ends(lab.programs.run("sh", "-c", "echo this >&2"), {0}, "this"))
    assert said.as_it_should, said.verdict


def test_a_failure_of_the_benchmark_itself_is_a_problem(outcome_of):
    assert "KeyError" in outcome_of(lambda lab: {}["x"]).verdict


def test_the_faults_are_many_and_the_table_has_them_all(tmp_path):
    register_all()
    assert {fault.group for fault in FAULTS.values()} == set(GROUPS) and len(FAULTS) >= 100
    assert newest_step(run_of(tmp_path)) == 8
    from benchmarks.faults.lab import Outcome

    bad = Outcome(seconds=3.0, codes=[1], message="a | b", lost="all", problems=["lost: all"])
    results = {"sigterm": Outcome(seconds=1.25, codes=[0, 0], message="x" * 500), "link_loop": bad}
    lines = table(results).splitlines()
    assert len(lines) == 6 and max(map(len, lines)) < 400
    assert "| 1.2 s | nothing | 0 |" in lines[3] and "**lost: all**" in lines[5] and "a \\| b" in lines[5]
    assert summary(results, 90) == "2 faults in 1.5 minutes: 1 lost something, 1 did not end as they should"
    write_csv(results, tmp_path / "faults.csv")
    rows = list(csv.DictReader((tmp_path / "faults.csv").read_text().splitlines()))
    assert [row["fault"] for row in rows] == [FAULTS[name].what for name in results] and tuple(rows[0]) == COLUMNS
    assert rows[0]["seconds"] == "1.2" and not rows[0]["verdict"] and len(rows[0]["last_line"]) < 200
    assert rows[1]["last_line"] == "a | b" and "lost: all" in rows[1]["verdict"]


def test_the_page_has_the_counts_of_the_last_full_run():
    with open(ROOT / "benchmarks/faults.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/faults.md").read_text()
    for name in GROUPS:
        ends = [row["end"] for row in rows if row["class"] == name]
        counts = len(ends), ends.count("ends"), ends.count("goes on")
        assert re.search(rf"^\| `{name}`.*\| {counts[0]} \| {counts[1]} \| {counts[2]} \|$", page, flags=re.M), name
    assert sum(row["class"] in GROUPS for row in rows) == len(rows) > 200
    assert all(row["lost"] == "nothing" and not row["verdict"] for row in rows), "the page says that all is well"
