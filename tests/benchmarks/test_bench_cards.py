"""benchmarks/bench_cards.py: the ratio of a step with streamed blocks to one that hides all copies."""

import csv

import pytest

from benchmarks import bench_cards
from benchmarks.bench_cards import BLOCKS, GIB, OVERLAPPED, Case, main
from opendit.parallel.hardware import H200

PLAIN = f"{bench_cards.FLUX} {bench_cards.RECOMPUTED}"
OFFLOADED = f"{PLAIN} --offload blocks:2"


@pytest.mark.parametrize(("blocks", "ratio"), [(5.0, 0.5 / 0.4), (11.0, 0.5 / (2 * 11 * GIB / 50e9)), (None, None)])
def test_the_ratio_is_to_the_larger_of_compute_and_link(blocks, ratio, tmp_path, monkeypatch, capsys):
    """An H200's link carries 50 GB/s in each direction, and blocks travel twice a step."""
    assert H200.host_link == 100e9
    cases = [Case("all kept", "flux", None, bench_cards.FLUX), Case("resident", "flux", None, PLAIN)]
    cases += [Case("streamed", "flux", 9.0, OFFLOADED), Case("other flags", "flux", 9.0, f"{OFFLOADED} --no_save")]
    seconds = {"all kept": 0.3, "resident": 0.4, "streamed": 0.5, "other flags": 0.6}
    more = {} if blocks is None else {BLOCKS: blocks}
    monkeypatch.setattr(bench_cards, "CASES", cases)
    monkeypatch.setattr(bench_cards, "find_hardware", lambda *_: (H200, ""))
    monkeypatch.setattr(bench_cards, "write_folder", lambda *_, **__: None)
    monkeypatch.setattr(
        bench_cards,
        "measure",
        lambda case, *_: {"step s": seconds[case.name]} | (more if "--offload" in case.flags else {}),
    )
    main(["--folders", str(tmp_path), "--results", str(tmp_path / "rows.csv")])
    found = [row for row in csv.DictReader((tmp_path / "rows.csv").open()) if row["metric"] == OVERLAPPED]
    out = capsys.readouterr().out
    if ratio is None:
        assert not found and OVERLAPPED not in out
    else:
        assert [(row["case"], float(row["value"])) for row in found] == [
            ("flux streamed", pytest.approx(ratio, abs=1e-4))
        ]
        assert out.count(f"{OVERLAPPED} {ratio:.3f}") == 1


def test_the_blocks_in_host_memory_are_read_from_the_run(tmp_path):
    """train.py's line on memory names them. The tiny model's blocks take less than 0.005 GiB."""
    bench_cards.write_folder("flux", tmp_path / "flux", tiny=True)
    found = bench_cards.measure(Case("streamed", "flux", None, OFFLOADED), tmp_path / "flux", tiny=True)
    assert found["step s"] > 0 and found[BLOCKS] == 0
