"""The benchmarks' clock and power readings, with a fake nvidia-smi."""

import time

from benchmarks.clocks import EVERY, Clocks

# Prints two GPUs' readings every 10 ms; the second GPU's clock is half of the first's.
FAKE = """#!/bin/bash
echo "$@" > asked
while true; do echo "1600, $(cat watts)"; echo "800, $(cat watts)"; sleep 0.01; done
"""


def test_readings_count_for_what_ran_meanwhile(tmp_path, monkeypatch):
    program, watts = tmp_path / "nvidia-smi", tmp_path / "watts"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    watts.write_text("100")
    clocks = Clocks(2)
    for name, power in (("slow", "100"), ("fast", "700"), ("slow", "200")):
        (tmp_path / "next").write_text(power)
        (tmp_path / "next").replace(watts)  # atomically, because the script reads it
        with clocks.during(name):
            time.sleep(6 * EVERY)
    with clocks.during("too short"):
        pass
    clocks.close()
    found = clocks.means()
    assert set(found) == {"slow", "fast"}
    assert abs(found["slow"][0] - 1200) < 40 and found["fast"][1] == 700.0 and 110 < found["slow"][1] < 190
    assert "-i 3,5 " in (tmp_path / "asked").read_text()
