"""Writing below an untrusted folder follows no symbolic link, even if the link appears at the last moment."""

import errno
import os
import pickle
from pathlib import Path

import pytest

from opendit.common import safe_files
from opendit.common.safe_files import (
    LinkRefused,
    creating,
    link_or_copy,
    make_folder,
    move_into,
    open_to_append,
    open_to_write,
    refuse_links,
    remove,
    remove_folder,
    remove_tree,
    rename,
    replacing,
    sync_folder,
    touch,
    write_whole,
)


def append(path: Path, root: Path | None) -> None:
    os.close(open_to_append(path, root=root))


def lock(path: Path, root: Path | None) -> None:
    os.close(open_to_write(path, os.O_RDWR | os.O_CREAT, root=root))


def create(path: Path, root: Path | None) -> None:
    with creating(path, root=root) as file:
        file.write(b"new")


def write(path: Path, root: Path | None) -> None:
    write_whole(path, b"new", root=root)


def make(path: Path, root: Path | None) -> None:
    make_folder(path, root=root if root is not None else path.parent)


WRITERS = [append, lock, create, write, make]


@pytest.mark.parametrize("target", ["file", "deep", "nothing", "/dev/zero", "deep/nothing"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_in_the_place_of_a_file_is_refused(writer, target, tmp_path, outside):
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "name"
    link.symlink_to(outside / target)
    with pytest.raises(LinkRefused) as refused:
        writer(link, None)
    assert str(refused.value) == (
        f"{link} is a symbolic link (to {outside / target}), and nothing is written through one; remove it"
    )
    assert os.readlink(link) == str(outside / target) and os.listdir(tmp_path / "run") == ["name"]


def test_a_link_is_refused_before_anything_is_written(tmp_path, outside):
    (tmp_path / "link").symlink_to(outside / "file")
    with pytest.raises(LinkRefused), replacing(tmp_path / "link"):
        pytest.fail("begun")
    assert not (tmp_path / "not there").exists()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("writer", [*WRITERS, lambda path, root: sync_folder(path.parent, root=root)])
def test_a_link_on_the_way_is_refused_wherever_it_is(writer, depth, tmp_path, outside):
    names = ["a", "b", "c"]
    way = tmp_path.joinpath("run", *names[: depth - 1])
    way.mkdir(parents=True)
    link = way / names[depth - 1]
    link.symlink_to(outside / "deep")
    with pytest.raises(LinkRefused, match=f"^{link} is a symbolic link"):
        writer(tmp_path.joinpath("run", *names, "name"), tmp_path / "run")


def test_links_above_the_root_are_the_users_own(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    (tmp_path / "mine").symlink_to(tmp_path / "outputs" / "run")
    root = tmp_path / "mine"
    for writer in WRITERS:
        writer(root / writer.__name__, root)
    assert len(os.listdir(tmp_path / "disk" / "run")) == len(WRITERS)


def test_deleting_and_renaming_take_the_link_and_not_what_it_leads_to(tmp_path, outside):
    run = tmp_path / "run"
    run.mkdir()
    for name, target in (("a", "file"), ("b", "deep"), ("c", "nothing")):
        for delete in (remove, remove_tree):
            (run / name).symlink_to(outside / target)
            delete(run / name)
            assert not os.path.lexists(run / name)
        (run / name).symlink_to(outside / target)
        touch(run / name)
        rename(run / name, run / "other")
        with pytest.raises(LinkRefused):  # the link would be lost
            rename(run / "other", run / "other")
        with pytest.raises(OSError):
            remove_folder(run / "other")
        remove(run / "other")
    (run / "kept").mkdir()
    (run / "kept" / "link").symlink_to(outside)
    remove_tree(run / "kept")
    (run / "linked").symlink_to(outside)
    remove_tree(run / "linked" / "deep", root=run)  # what can't be deleted stays
    for delete in (remove, remove_folder):
        with pytest.raises(LinkRefused):
            delete(run / "linked" / "file", root=run)
    with pytest.raises(LinkRefused):
        rename(run / "linked" / "file", run / "linked" / "moved", root=run)


def test_what_is_left_under_the_new_files_name_is_no_way_out(tmp_path, outside):
    new = tmp_path / f".log.{os.getpid()}.jsonl"
    new.symlink_to(outside / "file")
    with pytest.raises(LinkRefused, match=new.name):
        write(tmp_path / "log.jsonl", None)
    assert new.is_symlink()  # it is not ours
    new.unlink()
    os.link(outside / "file", new)  # a hard link is removed, and a new file is made
    os.utime(outside / "file", ns=(10**18, 10**18))
    write(tmp_path / "log.jsonl", None)
    assert (tmp_path / "log.jsonl").read_bytes() == b"new" and not new.exists()


def test_a_hard_link_out_of_the_folder_gets_a_copy_of_its_own(tmp_path, outside):
    run = tmp_path / "run"
    run.mkdir()
    for writer in (append, create, write):
        os.link(outside / "file", run / writer.__name__)
        writer(run / writer.__name__, None)
        with open(run / writer.__name__, "a") as file:
            file.write(" grown")
    assert (run / "append").read_text() == "precious grown" and (run / "write").read_text() == "new grown"


@pytest.mark.parametrize("writer", [append, lock])
def test_a_pipe_is_refused_at_once(writer, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file.*pipe"):
        writer(tmp_path / "pipe", None)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("swapped", ["sub", "sub/name"])
def test_a_link_that_is_put_there_at_the_last_moment_is_refused(writer, swapped, tmp_path, outside, monkeypatch):
    """Right before each system call in turn, its file or folder is swapped for a link."""
    for moment in range(12):
        run = tmp_path / f"run{moment}"
        (run / "sub").mkdir(parents=True)
        (run / "sub" / "name").write_text("old") if writer is not make else None
        calls = [0]

        def swap(run=run):
            os.rename(run / swapped, run / "aside") if os.path.lexists(run / swapped) else None
            (run / swapped).symlink_to(outside / ("deep" if swapped == "sub" else "file"))

        with monkeypatch.context() as patch:
            for name in ("open", "replace", "unlink", "mkdir", "readlink"):
                true = getattr(os, name)

                def first(*arguments, true=true, calls=calls, moment=moment, swap=swap, **options):
                    calls[0] += 1
                    if calls[0] == moment + 1:
                        swap()
                    return true(*arguments, **options)

                patch.setattr(safe_files.os, name, first)
            try:
                writer(run / "sub" / "name", run)
            except (LinkRefused, FileNotFoundError, NotADirectoryError):
                pass
    assert (outside / "file").read_text() == "precious"  # the fixture checks the rest


def test_messages_are_one_line_whatever_the_names(tmp_path):
    link = tmp_path / "a\nb\x1b[2J\udcff"
    link.symlink_to("x\ny" + "z" * 300)
    with pytest.raises(LinkRefused) as refused:
        write(link, None)
    text = str(refused.value)
    assert text.isprintable() and "a\\nb\\x1b[2J\\xff" in text and len(text) < 500
    assert str(pickle.loads(pickle.dumps(refused.value))) == text


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(OSError) as failed, replacing(path) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "full")
    assert failed.value.filename == str(path) and os.listdir(tmp_path) == []
    write_whole(path, b"old")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half")
        file.flush()
        assert Path(file.name).read_bytes() == b"half" and Path(safe_files.path_of(file)).read_bytes() == b"half"
        raise KeyError
    assert os.listdir(tmp_path) == ["x.json"] and path.read_bytes() == b"old"
    with pytest.raises(IsADirectoryError) as failed:
        (tmp_path / "folder").mkdir()
        write_whole(tmp_path / "folder", b"x")
    assert failed.value.filename == str(tmp_path / "folder") and sorted(os.listdir(tmp_path)) == ["folder", "x.json"]
    write_whole(tmp_path / "a" / "b" / "c", b"x", make=True)
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o666 & ~umask()
    with pytest.raises(ValueError, match="leads out of"):
        write_whole(tmp_path / "a" / ".." / ".." / "c", b"x", root=tmp_path / "a")


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_files_of_a_library_are_moved_past_links(tmp_path, outside):
    made, to = tmp_path / "made", tmp_path / "to"
    (made / "transformer").mkdir(parents=True)
    (made / "transformer" / "config.json").write_text("new")
    (made / "index.json").write_text("new")
    move_into(made, to)
    assert (to / "transformer/config.json").read_text() == (to / "index.json").read_text() == "new"
    for link, target in (("transformer", "deep"), ("index.json", "file")):
        remove_tree(to)
        (made / "transformer").mkdir(exist_ok=True)
        (made / "transformer" / "config.json").write_text("new")
        (made / "index.json").write_text("new")
        to.mkdir()
        (to / link).symlink_to(outside / target)
        with pytest.raises(LinkRefused, match=f"^{to / link} is"):
            move_into(made, to)


def test_names_are_looked_at_before_work_starts(tmp_path, outside):
    refuse_links(tmp_path / "not there", ["x"])
    (tmp_path / "mine").symlink_to(outside)
    refuse_links(tmp_path, ["x", "y"])
    with pytest.raises(LinkRefused, match="mine is a symbolic link"):
        refuse_links(tmp_path, ["x", "mine"])


def test_a_second_name_or_a_copy_is_made_and_nothing_is_replaced_or_followed(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_text("content")
    (tmp_path / "to_source").symlink_to(source)
    (tmp_path / "out").mkdir()
    link_or_copy(tmp_path / "to_source", tmp_path / "out" / "deep" / "file", root=tmp_path / "out", make=True)
    made = tmp_path / "out" / "deep" / "file"
    assert made.samefile(source) and not made.is_symlink()
    with pytest.raises(FileExistsError, match="deep/file"):
        link_or_copy(source, made)
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    for path in (tmp_path / "out" / "link", tmp_path / "out" / "link" / "file"):
        with pytest.raises(LinkRefused):
            link_or_copy(source, path, root=tmp_path / "out")

    def refused(*args, **options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refused)
    link_or_copy(tmp_path / "to_source", tmp_path / "out" / "copy")
    assert (tmp_path / "out" / "copy").read_text() == "content"
    assert not (tmp_path / "out" / "copy").samefile(source)
    with pytest.raises(LinkRefused):
        link_or_copy(source, tmp_path / "out" / "link")
