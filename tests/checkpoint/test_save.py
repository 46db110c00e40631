"""A finished checkpoint replaces whatever is in its place; and the buffer that a save copies to."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import torch

from opendit.checkpoint import run_folders
from opendit.checkpoint.save import THREADS, HostBuffer, put_in_place, tidy


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
    monkeypatch.setattr(run_folders.safe_files, "link_to", raises(PermissionError(1, "no links here")))
    (tmp_path / ".step_0000002.incomplete").mkdir()
    assert put_in_place(tmp_path / "step_0000002") is None
    assert (tmp_path / "latest").read_text() == "step_0000002"
    monkeypatch.setattr(run_folders.safe_files, "write_whole", raises(OSError(28, "No space left on device")))
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


def test_many_copies_from_host_memory_are_whole_when_they_were_waited_for(monkeypatch):
    """Copy as for a GPU, without using one; there are more tensors than threads, some empty and some large."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    tensors = [torch.randn(size, 3) for size in (1, 0, 70_000, 5, 100_000, 3) * (THREADS + 1)]
    buffer = HostBuffer(sum(t.numel() for t in tensors), torch.device("cpu"))
    buffer.device = SimpleNamespace(type="cuda")
    for _ in range(2):
        buffer.clear()
        copies = [buffer.copy(tensor) for tensor in tensors]
        buffer.wait()
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
        ends = [copy.data_ptr() for copy in copies if copy.numel()]
        assert ends == sorted(set(ends))
        for tensor in tensors:
            tensor.add_(1)
    assert len(waited) == 2
