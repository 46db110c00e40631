"""The cost model's hardware models: files, cards by name, and measurements."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from opendit.parallel import hardware
from opendit.parallel.hardware import CARDS, GIB, H200, HardwareModel, find_hardware, load, of_card, save
from opendit.parallel.hardware_measurement import Sizes, measure_hardware
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_keeps_every_figure(tmp_path):
    model = replace(H200, name="a card", matmul=1.25e14, gather=((2, 1e9), (3, 2.5e9)), multiprocessors=7)
    save(model, tmp_path / "folder" / "file.json")
    assert load(tmp_path / "folder" / "file.json") == model
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"matmul": 0}, {"matmul": "1"}, {"matmul": True}, {"memory": float("nan")}, {"latency": -1}, {"name": 3},
        {"gather": []}, {"gather": [[2, -1]]}, {"gather": 5}, {"gather": [[2]]}, {"no_such": 1}, {"format": "another"},
        {"direct": 1},
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_named(tmp_path, wrong):
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"format": hardware.FORMAT, **asdict(H200), **wrong}))
    with pytest.raises(ValueError, match=f"{path} is no file of python -m opendit.cli.links .*measure again"):
        load(path)
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="is no file of"):
        load(path)


def test_cards_are_known_by_name_and_scaled_by_their_data_sheets():
    assert of_card("NVIDIA H200") == H200 and of_card("NVIDIA Quadro") is None
    for name in CARDS:
        assert of_card(f"NVIDIA {name} 80GB").name == name
    a100 = of_card("NVIDIA A100-SXM4-80GB")
    assert a100.matmul == pytest.approx(640e12 * 312 / 989) and a100.memory == pytest.approx(3.6e12 * 2.04 / 4.8)
    assert a100.gather_rate(8) == pytest.approx(327 * GIB * 300 / 450) and "not measured" in a100.origin
    assert of_card("h100").capacity < 80 * GIB and of_card("h100").matmul == H200.matmul


def test_whose_figures_are_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_hardware(None, None)[0] == H200
    unknown, words = find_hardware(None, "NVIDIA Unknown")
    assert unknown == H200 and "NVIDIA Unknown is unknown" in words
    mine = replace(H200, name="NVIDIA Unknown", matmul=1e12)
    save(mine, hardware.default_path())
    assert find_hardware(None, "NVIDIA Unknown")[0] == mine
    assert find_hardware(None, "NVIDIA A100")[0].name == "A100"  # the file is for another card
    assert find_hardware(None, None)[0] == H200  # without a GPU, the file must be named
    assert find_hardware(str(hardware.default_path()), None)[0] == mine
    with pytest.raises(ValueError, match="--hardware V100: neither a file .* or one of H200, H100"):
        find_hardware("V100", None)


def test_rates_by_size():
    assert [H200.gather_rate(ranks) / GIB for ranks in (2, 3, 4, 6, 8, 64)] == [240, 240, 305, 305, 327, 327]
    forward, backward = H200.attention_rates(128, 10**9)
    assert forward == pytest.approx(128 * 5.1e12, rel=1e-5) and backward == pytest.approx(128 * 4.35e12, rel=1e-5)
    assert H200.attention_rates(128, 115)[0] == pytest.approx(forward / 2 * 115 / 128, rel=1e-5)  # in tiles of 128
    assert H200.attention_rates(256, 10**9)[0] == pytest.approx(forward, rel=1e-5)  # the rate does not grow beyond 128
    assert H200.attention_rates(72, 10**9)[0] == pytest.approx(forward * 72 / 128, rel=1e-5)


def measured(mesh) -> list[HardwareModel]:
    small = Sizes(product=64, copied=1 << 16, shard=1 << 12, tokens=32, heads=1)
    return [measure_hardware(mesh, node, small, trials=1) for node in (4, 2)]


def test_ranks_measure_the_same():
    found = run_ranks(4, measured)
    assert found[1:] == found[:1] * 3
    whole, halves = found[0]
    assert [ranks for ranks, _ in whole.gather] == [2, 4] and [ranks for ranks, _ in halves.gather] == [2]
    assert whole.node_link == H200.node_link != halves.node_link  # one node can't measure links between nodes
    assert "node_link" in halves.origin and "node_link" not in whole.origin
    assert all(value > 0 for model in found[0] for value in asdict(model).values() if type(value) is float)


def test_one_process_measures_its_card(tmp_path):
    """Run the command without torchrun and read the file that it writes."""
    words = [sys.executable, "-m", "opendit.cli.links", "--out", str(tmp_path / "here.json")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    model = load(tmp_path / "here.json")
    assert model.name == "CPU" and model.gather == H200.gather and model.matmul != H200.matmul
    assert f"kept in {tmp_path / 'here.json'}" in done.stdout
