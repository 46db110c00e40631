"""Run numbers beyond 999, and those of runs that start at the same moment."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opendit.checkpoint import run_folders as folders
from opendit.checkpoint.run_folders import new_run_folder, newest_run, run_folders


def test_runs_after_999_are_made_found_and_followed(tmp_path):
    for name in ("002-DiT-S-2", "999-DiT-Ti-2", "no-run", "12-DiT-S-2", "1000.tar", ".1005"):
        (tmp_path / name).mkdir()
    assert new_run_folder(tmp_path, "DiT-S/2").name == "1000-DiT-S-2"
    assert new_run_folder(tmp_path, "DiT-S/2").name == "1001-DiT-S-2"
    (tmp_path / "10000-DiT-S-2").mkdir()
    numbers = [path.name.split("-")[0] for path in run_folders(tmp_path)]
    assert numbers == ["002", "999", "1000", "1001", "10000"]
    for number in ("002", "999", "1000"):
        for run in tmp_path.glob(f"{number}-*"):
            (run / "checkpoints" / "step_0000001").mkdir(parents=True)
            (run / "checkpoints" / "step_0000001" / "state.json").touch()
    assert newest_run(str(tmp_path)).name == "1000-DiT-S-2"
    assert newest_run(str(tmp_path), "DiT-Ti/2").name == "999-DiT-Ti-2"
    assert newest_run(str(tmp_path), "DiT-XL/2") is None and newest_run(str(tmp_path / "nowhere")) is None


def test_runs_that_start_together_get_different_numbers(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: new_run_folder(tmp_path, f"DiT-{'SBL'[i % 3]}/2"), range(48)))
    assert len({path.name.split("-")[0] for path in made}) == 48 and set(made) == set(tmp_path.glob("*-*"))
    assert not list(tmp_path.glob(".*"))


def test_a_number_that_is_taken_between_the_look_and_the_claim(tmp_path, monkeypatch):
    true_mkdir, others = Path.mkdir, [tmp_path / "000-DiT-B-2"]

    def mkdir(path, *args, **kwargs):
        if path.name == ".000" and others:
            true_mkdir(others.pop())
        true_mkdir(path, *args, **kwargs)

    monkeypatch.setattr(folders.Path, "mkdir", mkdir)
    assert new_run_folder(tmp_path, "DiT-S/2").name == "001-DiT-S-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000-DiT-B-2", "001-DiT-S-2"]
