"""A wrong command line prints one line, from one process, that names the fix."""

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import train
from opendit.config.command_line import _OURS, build_parser, counterpart, parse, read_flags
from opendit.config.console import one_line
from opendit.config.evaluate import EvaluateConfig
from opendit.config.flags import Value
from opendit.config.sample import SampleConfig
from opendit.config.train import TrainConfig

ROOT = Path(__file__).resolve().parents[2]


def refused(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        read_flags(TrainConfig, argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plugin", "zero3"], "--plugin zero3: not known; give one of zero2, gemini, ddp, fsdp; did you mean zero2?"),
        (["--batch_size"], "--batch_size: no value; give"),
        (["--outputs", "--load", "latest"], "--outputs: no value; give"),
        (["--fp8=true"], "--fp8: takes no value; write --fp8, or --no_fp8"),
        (["--fp8", "true"], "--fp8 true: takes no value; write --fp8, or --no_fp8"),
        (["--lr", "-1e-3"], "--lr -0.001: out of range; give a number above 0"),
        (["--batch_size", "64", "--batch_size", "0"], "--batch_size 0"),  # the last value counts
        (["--image_size", "1000000"], "--image_size 1000000: out of range; give a whole number from 1 to 16,384"),
        (["--global_seed", str(2**70)], "give a whole number from 0 to 9,223,372,036,854,775,807"),
        (["--sample_steps", "5000"], "--sample_steps 5000: out of range; give a whole number from 1 to 1,000"),
        (["--num_workers", "250"], "--num_workers 250: this machine has"),
        (["--pretrained", "nowhere"], "--pretrained nowhere: doesn't exist"),
        (["--data_path", "~nobody/at/all"], "--data_path ~nobody/at/all"),
        (["--model", "DiT-\nXL/2"], "--model DiT-\\nXL/2: no such model"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(argv, message, capsys):
    said = refused(argv, capsys)
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "note", "lr"),
    [
        (
            "--lr 1e-4 --model DiT-B/2 --lr=2e-4",
            "--lr 1e-4: --lr 2e-4 comes later on the command line, and counts",
            2e-4,
        ),
        ("--save --no_save", "--save: --no_save comes later on the command line, and counts", 1e-4),
        ("--log-to wandb mlflow --log_to wandb", "--log_to wandb mlflow: --log_to wandb comes later", 1e-4),
        ("--lr 3e-4 --lr 3e-4 --save", None, 3e-4),  # a script and its user agree
    ],
)
def test_a_flag_that_is_given_twice_is_told(argv, note, lr, capsys):
    assert parse(TrainConfig, argv.split()).lr == lr
    said = capsys.readouterr().out
    assert said.startswith(f"note: {note}") and said.count("\n") == 1 if note else said == ""


def test_flags_of_other_programs_lead_to_flags_that_there_are():
    programs = [{f"--{name}" for name in build_parser(cls).defaults} for cls in (TrainConfig, SampleConfig)]
    for ours, theirs in _OURS.items():
        assert all(any(name in flags for flags in programs) for name in ours.split()), ours
        assert all(any(counterpart(name, flags) for flags in programs) for name in theirs.split())
    assert counterpart("seed", programs[0]) == "here it is --global_seed"
    assert counterpart("steps", programs[0]) == "here it is --max_steps"
    assert counterpart("steps", programs[1]) == "here it is --num_sampling_steps"
    assert counterpart("output_dir", programs[1]) == "here it is --output"
    assert counterpart("lora_path", programs[1]) == "here it is --lora"
    assert counterpart("trigger_word", programs[0]) == "here it is --caption_prefix"
    assert counterpart("target_modules", programs[0]) == "here it is --lora_targets"
    assert counterpart("use_8bit_adam", programs[0]) == "--optimizer adamw8bit keeps the moments in 8 bits"
    assert "a blend" in str(counterpart("class_data_dir", programs[0]))


@pytest.mark.parametrize(
    ("config", "keyword", "advice"),
    (
        (TrainConfig, "learning_rate", "here it is --lr"),
        (TrainConfig, "seed", "here it is --global_seed"),
        (TrainConfig, "cache_latents", "preprocess.py latents encodes once"),
        (TrainConfig, "modle", "did you mean --model?"),
        (EvaluateConfig, "num_inference_steps", "here it is --num_sampling_steps"),
        (EvaluateConfig, "foo", "python -m opendit.evaluation --help all shows all"),
    ),
)
def test_unknown_keywords_in_python_get_the_same_advice(config, keyword, advice):
    with pytest.raises(TypeError) as error:
        config(**{keyword: 1})
    assert str(error.value) == f"{config.__name__}: {keyword}: no such flag; {advice}"
    assert set(inspect.signature(config).parameters) == {item.name for item in fields(config)}


def test_only_the_first_rank_prints(capsys, monkeypatch):
    for rank, local in (("1", "1"), ("8", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert refused(["--lr", "nan"], capsys) == ""
        # The first process of each machine also prints errors that other machines may not have.
        assert bool(refused(["--load", "nowhere"], capsys)) == (local == "0")
    monkeypatch.setenv("RANK", "0")
    assert "--lr nan" in refused(["--lr", "nan"], capsys)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_under_torchrun_the_silent_rank_waits_for_the_one_that_prints(rank, monkeypatch, capsys):
    """torchrun ends all processes once one has ended."""
    waits = []
    monkeypatch.setattr("opendit.config.command_line.time.sleep", waits.append)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", "x")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        train.main(["--lr", "inf"])
    said = "--lr inf: out of range; give a number above 0" in capsys.readouterr().err
    assert stop.value.code == 2 and said == (not waits) == (rank == "0")


def test_two_processes_say_it_once():
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*start, "train.py", "--lr", "inf"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and done.stderr.count("--lr inf: out of range; give a number above 0") == 1
    assert "Traceback" not in done.stderr.partition("--lr inf")[0]


@given(st.integers() | st.floats() | st.text(max_size=20))
def test_what_is_read_is_in_its_range(value):
    for takes in (Value(int, at_least=1, at_most=100), Value(float, above=0, below=1)):
        try:
            found = takes.convert(str(value))
        except Exception as error:
            assert type(error).__name__ == "ArgumentTypeError" and takes.describe() in str(error)
            continue
        assert isinstance(found, takes.kind) and repr(found + 0) == repr(takes.kind(str(value)) + 0)
        low, high = (1, 100) if takes.kind is int else (0, 1)
        assert (takes.problem(found) is None) == (low <= found <= high and (takes.kind is int or low < found < high))


@given(st.text(st.characters(codec=None), max_size=2000))
def test_a_message_is_one_short_line(text):
    line = one_line(text)
    assert len(line) <= 420 and len(line.splitlines()) <= 1
    assert one_line("plain ünïcödé 文") == "plain ünïcödé 文"
