"""The steps in docs/architecture.md are enough: the files in tests/added and the lines below add a plugin, an
architecture, an objective, a sampler and a data source to a copy of the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES = (
    (
        "opendit/config/names.py",
        "PLUGINS = {\n",
        '    "example": Plugin("nothing sharded", precisions=("fp32",)),\n',
    ),
    (
        "opendit/config/architectures.py",
        "KINDS = {\n",
        '    "Example": Kind({"Ti": (32, 2, 2, {})}, ("2",), clips=False, settings=(Setting("example_strength", None, '
        '"of Example: of its product", "float", {"above": 0, "at_most": 9, "unit": "strength"}),)),\n',
    ),
    (
        "opendit/models/zoo.py",
        "from opendit.models.dit import DiT\n",
        "from opendit.models.example import OWN_PLAN, Example, ExampleConfig\n",
    ),
    (
        "opendit/models/zoo.py",
        "CLASSES = {\n",
        '    "Example": Classes(ExampleConfig, Example, OWN_PLAN),\n',
    ),
    (
        "opendit/config/names.py",
        "DESCRIPTIONS = {\n",
        '    "example": ObjectiveDescription("the data", "example", {"power": Setting("example_power", 1.0, "of the '
        'example\'s uniform times", bounds={"at_least": 0.5, "at_most": 2, "unit": "power"})}),\n',
    ),
    (
        "opendit/config/names.py",
        "SOURCES = {\n",
        '    "example": SourceDescription("example", "example: stripes"),\n',
    ),
)
SAMPLERS = 'ALL_SAMPLERS = ("ddim", "ddpm", '  # the samplers are all on one line


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    house = tmp_path_factory.mktemp("house")
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "opendit", house / "opendit", ignore=unwanted)
    added = {path.relative_to(ROOT / "tests/added") for path in (ROOT / "tests/added/opendit").rglob("*.py")}
    assert len(added) == 4 and not any((house / path).exists() for path in added)
    shutil.copytree(ROOT / "tests/added", house, ignore=unwanted, dirs_exist_ok=True)
    sampler = (ROOT / "tests/added/sampler.py").read_text().partition("\n\n\n")[2]
    with open(house / "opendit/diffusion/samplers.py", "a") as file:
        file.write(f"\n\n{sampler}")
    for file, after, line in LINES:
        text = (house / file).read_text()
        assert text.count(after) == 1
        (house / file).write_text(text.replace(after, after + line))
    names = house / "opendit/config/names.py"
    names.write_text(names.read_text().replace(SAMPLERS, f'{SAMPLERS}"example", '))
    for program in ("train.py", "sample.py"):
        shutil.copy(ROOT / program, house)
    return house


def run(house: Path, program: str, *argv: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(house), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, program, *argv]
    return subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, timeout=300)


def test_flags_know_what_was_added(house):
    help = " ".join(run(house, "train.py", "--help", "all").stdout.split())
    for words in (
        "(example, zero2,",
        "example: nothing sharded",
        "(example, ddpm, edm, flow, meanflow)",
        "example: the data",
        "--example_power POWER",
        "of the example's uniform times (0.5 to 2) [1.0]",
        "--example_strength STRENGTH",
        "(above 0 and at most 9)",
        "example: stripes",
    ):
        assert words in help, words
    for argv, says in (
        ("--model Example-Ti/2 --plugin example --mixed_precision bf16", "--plugin example: works in fp32 only"),
        ("--example_power 2", "--example_power: belongs to --objective example"),
        ("--objective example --example_power 3", "--example_power 3.0: out of range; give a number from 0.5 to 2"),
        ("--example_strength 2", "--example_strength: does nothing without --model Example-..."),
        ("--model Example-Ti/2 --data_path exampel", "--data_path exampel"),
    ):
        ended = run(house, "train.py", *argv.split())
        assert ended.returncode == 2 and says in ended.stderr, (argv, ended.stderr)


def test_it_trains_and_is_sampled_from(house):
    flags = "--model Example-Ti/2 --example_strength 2 --plugin example --mixed_precision fp32 --objective example "
    flags += "--example_power 2 --data_path example --image_size 8 --vae none --batch_size 4 --num_workers 0 "
    flags += "--max_steps 2 --log_every 1 --sample_every 0"
    trained = run(house, "train.py", *flags.split())
    assert trained.returncode == 0, trained.stdout + trained.stderr
    (folder,) = (house / "outputs").iterdir()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    drawn = run(house, "sample.py", "--num_samples", "2", "--num_sampling_steps", "3", "--sampler", "example")
    assert drawn.returncode == 0, drawn.stdout + drawn.stderr
    assert (house / "samples").is_dir() and "example" in drawn.stdout
    wrong = run(house, "sample.py", "--num_samples", "2", "--sampler", "ddim")
    assert wrong.returncode and "; give example or euler or heun" in wrong.stderr
