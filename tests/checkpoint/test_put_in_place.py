"""A checkpoint takes its place whole, beside whatever damage is there."""

import errno
import os
from pathlib import Path

from opendit.checkpoint import run_folders
from opendit.checkpoint.save import put_in_place, tidy


def test_a_checkpoint_takes_the_place_of_whatever_is_there(tmp_path):
    def complete(name: str) -> Path:
        (tmp_path / f".{name}.incomplete").mkdir()
        (tmp_path / f".{name}.incomplete" / "new").touch()
        return tmp_path / name

    def file(path: Path) -> None:
        path.touch()

    for number, leave in enumerate([Path.mkdir, file, lambda path: path.symlink_to("/nowhere")]):
        final = complete(f"step_{number:07d}")
        leave(final)
        leave(tmp_path / f".{final.name}.replaced")
        assert put_in_place(final) is None
        assert [path.name for path in final.iterdir()] == ["new"] and os.readlink(tmp_path / "latest") == final.name
    assert not list(tmp_path.glob(".*"))


def raises(error: OSError):
    def function(*_, **__):
        raise error

    return function


def test_latest_that_can_not_be_moved_takes_nothing_from_the_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "latest").symlink_to("step_0000001")
    monkeypatch.setattr(run_folders, "link_to", raises(PermissionError(1, "no links here")))
    (tmp_path / ".step_0000002.incomplete").mkdir()
    assert put_in_place(tmp_path / "step_0000002") is None
    assert (tmp_path / "latest").read_text() == "step_0000002"
    monkeypatch.setattr(run_folders, "write_whole", raises(OSError(28, "No space left on device")))
    (tmp_path / ".step_0000003.incomplete").mkdir()
    assert put_in_place(tmp_path / "step_0000003").errno == errno.ENOSPC
    assert (tmp_path / "step_0000003").is_dir() and not (tmp_path / "latest").exists()


def test_tidy_keeps_the_one_in_use_and_a_cut_off_deletion_ends(tmp_path):
    for name in (".step_0000002.replaced", "step_0000002", ".step_0000001.deleted", ".step_0000003.incomplete"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name.strip(".")).touch()
    assert tidy(tmp_path, tmp_path / ".step_0000002.replaced") == tmp_path / "step_0000002"
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000002"]
    assert [path.name for path in (tmp_path / "step_0000002").iterdir()] == ["step_0000002.replaced"]
