"""A run whose data become unreadable ends with its state saved, and a resumed run matches an undisturbed one."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from opendit.data import BatchIterator, DataError
from tests.checkpoint.test_checkpoint import run_to, steps_in
from tests.checkpoint.test_resume import assert_same_bits
from tests.data.shards.test_remote import server  # noqa: F401
from tests.ranks import run_ranks, several_programs

SAVE_LAST = "--ckpt_every", "100"
FOLDER = Path("000-DiT-Ti-2", "checkpoints")


def lose(monkeypatch, step: int, micro: int = 0, really: bool = True) -> None:
    """Make all data from this step's micro-batch on unreadable."""
    read = BatchIterator.__next__

    def next_batch(self):
        batch = read(self)
        if really and (batch.step, batch.micro) >= (step, micro):
            raise DataError("http://store/a.tar can't be read, 5 attempts: gone")
        return batch

    monkeypatch.setattr(BatchIterator, "__next__", next_batch)


def ends(outputs: Path, *more: str) -> str:
    """Return the stderr of a run that ends with exit code 1, or 3 on a rank that another rank ended."""
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(io.StringIO()) as err:
        run_to(outputs, 6, *SAVE_LAST, *more)
    assert stop.value.code in (1, 3), err.getvalue()
    return err.getvalue()


@pytest.mark.parametrize("accumulation, micro", [(1, 0), (2, 1)])
def test_the_state_before_the_step_is_saved(tmp_path, no_ranks, accumulation, micro):
    more = ("--grad_accumulation", str(accumulation), "--log_every", "2")
    whole = run_to(tmp_path / "whole", 6, *SAVE_LAST, *more)
    with pytest.MonkeyPatch.context() as patch:
        lose(patch, 3, micro)
        assert "error: http://store/a.tar can't be read, 5 attempts: gone" in ends(tmp_path / "lost", *more)
    lost = tmp_path / "lost" / FOLDER
    assert steps_in(lost) == [3]
    assert [json.loads(line)["step"] for line in (lost.parent / "log.jsonl").read_text().splitlines()] == [2, 3]
    run_to(tmp_path / "lost", 6, *SAVE_LAST, *more, "--load", "latest")
    assert_same_bits(lost / "step_0000006", whole / "step_0000006")


def test_what_is_saved_already_is_not_saved_again(tmp_path, no_ranks, capsys):
    with pytest.MonkeyPatch.context() as patch:
        lose(patch, 3)
        ends(tmp_path, "--ckpt_every", "1")
    assert capsys.readouterr().out.count("step 3: saved") == 1 and steps_in(tmp_path / FOLDER) == [1, 2, 3]


def test_without_a_step_there_is_nothing_to_save(tmp_path, no_ranks):
    with pytest.MonkeyPatch.context() as patch:
        lose(patch, 0)
        assert "gone" in ends(tmp_path)
    assert not list((tmp_path / FOLDER).glob("step_*"))


def on_ranks(mesh, outputs: str, *more: str) -> list[str]:
    """Run six steps undisturbed, and six in which rank 1 loses its data before a resume. Return the errors."""
    several_programs()
    run_to(Path(outputs, "whole"), 6, *SAVE_LAST, *more)
    with pytest.MonkeyPatch.context() as patch:
        lose(patch, 3, 1, really=mesh.rank == 1)
        said = ends(Path(outputs, "lost"), *more)
    run_to(Path(outputs, "lost"), 6, *SAVE_LAST, *more, "--load", "latest")
    return said


@pytest.mark.parametrize(
    "more",
    [
        ("--plugin", "zero2"),
        ("--plugin", "fsdp"),
        ("--plugin", "gemini", "--mixed_precision", "bf16"),
        ("--pipeline_parallel_size", "2"),
    ],
    ids=lambda more: "-".join(more).strip("-"),
)
def test_one_ranks_data_are_lost(tmp_path, more):
    said = run_ranks(2, on_ranks, str(tmp_path), *more, "--grad_accumulation", "2")
    assert "gone" in said[1] and "Traceback" not in "".join(said)
    assert steps_in(tmp_path / "lost" / FOLDER) == [3, 6]
    assert_same_bits(tmp_path / "lost" / FOLDER / "step_0000006", tmp_path / "whole" / FOLDER / "step_0000006")


def test_a_server_that_goes_down(
    server,  # noqa: F811
    tmp_path,
    no_ranks,
    monkeypatch,
):
    """Read tars over HTTP from a server that fails from the third step on."""
    read = BatchIterator.__next__

    def next_batch(self):
        batch = read(self)
        if batch.step == 1:
            server.faults += ["500"] * 1000
        return batch

    more = ("--data_path", f"{server.address}/t-{{00..01}}.tar", "--text_encoder", "bytes", "--batch_size", "2")
    monkeypatch.setattr(BatchIterator, "__next__", next_batch)
    said = ends(tmp_path / "lost", *more)
    assert "error: http://127.0.0.1" in said and "can't be read, 5 attempts" in said
    assert steps_in(tmp_path / "lost" / FOLDER) == [2]
    monkeypatch.setattr(BatchIterator, "__next__", read)
    server.faults.clear()
    run_to(tmp_path / "lost", 6, *SAVE_LAST, *more, "--load", "latest")
    whole = run_to(tmp_path / "whole", 6, *SAVE_LAST, *more)
    assert_same_bits(tmp_path / "lost" / FOLDER / "step_0000006", whole / "step_0000006")
