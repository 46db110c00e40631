"""benchmarks/bench_server.py on a CPU: its table and its rows."""

import csv

import pytest

from benchmarks.bench_server import main

TINY = "--model DiT-Ti/8 --image_size 64 --clients 3 --least_steps 2 --steps 4 --batch_size 4 --trials 1".split()


@pytest.mark.parametrize("vae", [[], ["--vae", "--vae_narrower", "32"]], ids=["latents", "pictures"])
def test_clients_are_served(tmp_path, capsys, vae):
    main([*TINY, *vae, "--warmup", "0.5", "--seconds", "1.5", "--results", str(tmp_path / "rows.csv")])
    out = capsys.readouterr().out
    assert "x offline" in out and "rows in use" in out and "p95" in out
    throughput, *latency = csv.DictReader((tmp_path / "rows.csv").open())
    assert throughput["metric"] == "sample-steps/s" and throughput["baseline"] == "offline batch 4"
    assert all(float(throughput[name]) > 0 for name in ("value", "baseline_value", "ratio"))
    assert [row["metric"] for row in latency] == ["latency p50 ms", "latency p95 ms"]
    assert 0 < float(latency[0]["value"]) <= float(latency[1]["value"])


def test_nobody_was_served():
    with pytest.raises(SystemExit, match="no request was served"):
        main([*TINY, "--warmup", "0", "--seconds", "0"])
