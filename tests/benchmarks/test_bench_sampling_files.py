"""benchmarks/bench_sampling_files.py on a CPU: its table, its rows and the number of files."""

import csv
import re

from benchmarks.bench_sampling_files import main


def test_its_table(tmp_path, capsys):
    results = tmp_path / "results.csv"
    small = "--model DiT-Ti/2 --image_size 64 --pictures 5 --batch_size 2 --steps 2 --trials 1 --vae_narrower 16"
    main([*small.split(), "--results", str(results)])
    out = capsys.readouterr().out
    assert "5 pictures of 64 px, batches of 2, 5 files" in out
    assert len(re.findall(r"^ *(latents|in turn|beside) +[\d.]+ img/s  [\d.]+ x latents$", out, re.M)) == 3
    rows = list(csv.DictReader(results.open()))
    assert [row["case"].rpartition(", ")[2] for row in rows] == ["in turn", "beside"]
    assert all(float(row["value"]) > 0 and float(row["baseline_value"]) > 0 for row in rows)
