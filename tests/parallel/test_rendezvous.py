"""Processes that can't find each other stop with one line that says why."""

import os

import pytest

import train
from tests.checkpoint.test_checkpoint import ARGV
from tests.ranks import free_port

# ------------------------------------------------------------------------------------------ the environment


@pytest.mark.parametrize(
    "environment, said",
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc in the environment must be a whole number of at least 1"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0 in the environment must be"),
        ({"WORLD_SIZE": "4"}, "RANK is not: start 4 processes with torchrun"),
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment must be a whole number from 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 in the environment must be"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
            "MASTER_PORT=x in the environment must be",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "b"}, "LOCAL_RANK=b in the environment must be"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500"},
            "rank 1 looked for rank 0 at MASTER_ADDR=no.such.host.invalid",
        ),
    ],
)
def test_an_environment_that_is_wrong_is_one_line(no_ranks, monkeypatch, capsys, environment, said):
    monkeypatch.setattr("opendit.parallel.mesh.TELL", 1.0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    with pytest.raises(SystemExit) as stop:
        train.main([*ARGV, "--max_steps", "1"])
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert "error: " in line and said in line


def test_a_used_port_is_one_line(no_ranks, capfd):
    import socket

    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(SystemExit) as stop:
            train.main([*ARGV, "--max_steps", "1"])
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: MASTER_PORT={port} is used by another program")


def test_processes_that_do_not_come_are_named(no_ranks, monkeypatch, capsys):
    monkeypatch.setattr("opendit.parallel.mesh.TELL", 0.5)
    monkeypatch.setattr("opendit.parallel.mesh.PATIENCE", 1.0)
    os.environ.update(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with pytest.raises(SystemExit):
        train.main([*ARGV, "--max_steps", "1"])
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: rank 1, 2 of the 3 processes did not come within 1 s")
