"""Hashes of file contents."""

import os

from opendit.data import files
from opendit.data.files import hash_files


def test_contents_are_noticed_wherever_they_change(tmp_path):
    path = tmp_path / "weights"
    content = bytearray(os.urandom(3 << 20))
    path.write_bytes(content)
    first = hash_files([str(path)])
    assert hash_files([str(path)]) == first
    for place in (0, 1 << 20, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert hash_files([str(path)]) != first
    path.write_bytes(content + b"x")
    assert hash_files([str(path)]) != first


def test_large_files_and_many_files_are_sampled(tmp_path, monkeypatch):
    paths = []
    for i in range(40):
        (tmp_path / str(i)).write_bytes(os.urandom(50_000))
        paths.append(str(tmp_path / str(i)))
    monkeypatch.setattr(files, "MOST_FILES", 11)
    monkeypatch.setattr(files, "MOST_BYTES", 100_000)
    first = hash_files(paths)
    assert hash_files(paths) == first
    for i in (0, 39):
        content = (tmp_path / str(i)).read_bytes()
        for changed in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], bytes([content[0] ^ 1]) + content[1:]):
            (tmp_path / str(i)).write_bytes(changed)
            assert hash_files(paths) != first
        (tmp_path / str(i)).write_bytes(content)
    os.mkfifo(tmp_path / "fifo")
    assert hash_files([str(tmp_path / "fifo")]) == hash_files([str(tmp_path / "nothing")])
    assert hash_files([]) != hash_files(paths[:1])
