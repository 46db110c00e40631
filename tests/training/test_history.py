"""config.json lists every start of a run, even if the old file is damaged or the disk is full."""

import json
import os
from pathlib import Path

import pytest

import train

ARGV = "--model DiT-Ti/2 --image_size 8 --vae none --num_workers 0 --batch_size 4 --sample_every 0".split()


def start(outputs: Path, steps: int, *more: str) -> dict:
    """Start the run once more and return its config.json."""
    train.main([*ARGV, "--outputs", str(outputs), "--max_steps", str(steps), *more])
    return json.loads((outputs / "000-DiT-Ti-2" / "config.json").read_text())


def test_every_start_is_kept(tmp_path, no_ranks):
    first = start(tmp_path, 1)
    assert len(first["starts"]) == 1 and first["flags"]["lr"] == 1e-4
    second = start(tmp_path, 2, "--load", "latest", "--lr", "1e-3", "--num_workers", "1")
    third = start(tmp_path, 3, "--load", str(tmp_path / "000-DiT-Ti-2/checkpoints/step_0000001"))
    assert third["starts"][:2] == second["starts"] and second["starts"][:1] == first["starts"]
    assert [one["flags"]["lr"] for one in third["starts"]] == [1e-4, 1e-3, 1e-4]
    assert [(one["first_step"], one["last_step"]) for one in third["starts"]] == [(0, 1), (1, 2), (1, 3)]
    assert [one["resumed_from"] and Path(one["resumed_from"]).name for one in third["starts"]] == [
        None, "step_0000001", "step_0000001",
    ]  # fmt: skip
    assert [len(one["changes"]) for one in third["starts"]] == [0, 1, 0]
    assert "--lr 0.0001 -> 0.001" in third["starts"][1]["changes"][0]
    # The newest start is also at the top level, as in earlier versions.
    assert second["flags"]["lr"] == 1e-3 and third["flags"]["lr"] == 1e-4 and third["last_step"] == 3
    times = [one["time"] for one in third["starts"]]
    assert times == sorted(times) and all(time.endswith("+00:00") for time in times)


def test_a_config_of_before_is_the_first_start(tmp_path, no_ranks):
    config = start(tmp_path, 1)
    del config["starts"]
    (tmp_path / "000-DiT-Ti-2/config.json").write_text(json.dumps(config))
    starts = start(tmp_path, 2, "--load", "latest")["starts"]
    assert len(starts) == 2 and starts[0]["flags"] == config["flags"] and "time" in starts[0]


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_text('{"starts": [{'),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text('{"starts": 3}'),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
@pytest.mark.timeout(60)
def test_a_config_that_can_not_be_read_is_kept_aside(harm, tmp_path, no_ranks, capsys):
    start(tmp_path, 1)
    path = tmp_path / "000-DiT-Ti-2" / "config.json"
    harm(path)
    assert len(start(tmp_path, 2, "--load", "latest")["starts"]) == 1
    assert "it is kept as config_damaged.json, and config.json begins anew" in capsys.readouterr().out
    assert os.path.lexists(path.with_name("config_damaged.json"))


def test_a_write_that_fails_leaves_the_old_history_and_the_run_goes_on(tmp_path, no_ranks, capsys, monkeypatch):
    before = start(tmp_path, 1)
    fsync = os.fsync

    def full(handle: int) -> None:
        if "config" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as stop:
        start(tmp_path, 2, "--load", "latest")
    assert stop.value.code == 1
    assert "config.json NOT WRITTEN" in capsys.readouterr().out
    run = tmp_path / "000-DiT-Ti-2"
    assert json.loads((run / "config.json").read_text()) == before
    assert {path.name for path in run.iterdir() if "config" in path.name} == {"config.json", "config.yaml"}
    assert os.readlink(run / "checkpoints/latest") == "step_0000002"
