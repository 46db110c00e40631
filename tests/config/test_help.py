"""--help of every program: one screen of common flags, all flags by component, and examples that parse."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest

from opendit.cli import completion
from opendit.cli.command import COMMANDS
from opendit.cli.completion import CONFIGS, parser_of
from opendit.config import command_line
from opendit.config.command_line import CommandLine, parse
from opendit.config.flags import Flags, Value, flag, flags_of, headings_of
from opendit.config.train import TrainConfig
from opendit.evaluation import __main__ as evaluation

PARSERS = {name: parser_of(name) for name in COMMANDS}
PARSERS |= {f"preprocess {name}": parser for name, parser in PARSERS["preprocess"].commands.items()}
PARSERS["evaluate plot"] = evaluation.build_plot_parser()


def entries(parser: CommandLine) -> list[command_line.HelpEntry]:
    return [entry for section in parser.sections for entry in section.entries]


@pytest.mark.parametrize("config", CONFIGS.values())
def test_every_flag_stands_in_a_component_with_a_heading(config):
    own = config.__dict__["__annotations__"].keys() & {item.name for item in flags_of(config)}
    assert not own, "a flag belongs into a component, beside those that it goes with"
    for part in config.__bases__:
        title, _, about = part.__dict__.get("group", part.group).partition(": ")
        assert issubclass(part, Flags) and title[0].isupper() and 10 <= len(about) <= 80, part
    titles = [heading.partition(":")[0] for heading in headings_of(config)]
    assert len(set(titles)) == len(titles) and all(": " in heading for heading in headings_of(config))


@pytest.mark.parametrize("name", PARSERS)
def test_every_number_has_a_unit(name):
    bare = [action.dest for action, takes in PARSERS[name].arguments if takes.kind is not str and not takes.unit]
    assert not bare, f'say what they count: flag(..., unit="steps"): {bare}'


def test_a_flag_without_a_heading_is_refused():
    parser = CommandLine("program")
    with pytest.raises(TypeError, match="--lost TEXT has no heading"):
        parser.option("--lost", Value(unit="text"), "nowhere")


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_is_one_screen_and_all_is_everything(name, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    parser = PARSERS[name]
    common, whole = parser.format_help(), parser.format_help("all")
    assert common.count("\n") <= 60, name
    assert "\nExamples:\n" in common or name == "preprocess index" or not parser.examples
    text = [line for line in whole.splitlines() if not line.lstrip().startswith(command_line.STARTS)]
    assert max(map(len, text)) <= int(columns)
    shown = entries(parser)
    assert shown and all(f"  {entry.written}" in whole for entry in shown)
    for entry in shown:
        if any(one.common for one in shown) and not parser.commands:
            assert (f"  {entry.written}" in common) == bool(entry.common), entry.name
        else:
            assert f"  {entry.written}" in common
    for section in parser.sections:
        assert section.heading in whole
    if not parser.commands:
        hidden = len(shown) - sum(bool(entry.common) for entry in shown)
        assert (f"{hidden} more flags" in common) == any(entry.common for entry in shown)


def test_ranges_units_defaults_and_both_directions_are_shown():
    whole = " ".join(parser_of("train").format_help("all").split())
    for text in (
        "--image_size PIXELS side of the training pictures in pixels (1 to 16,384) [256]",
        "--data_timeout SECONDS",
        "(zero2, gemini, ddp, fsdp) [zero2]",
        "--[no_]fp8",
        "--[no_]save write checkpoints; --no_save: none, to time steps [on]",
        "--dry_run [GPUS]",
        "--recipe, --factory NAME",
        "--ema_decay SHARE ...",
    ):
        assert text in whole, text


def test_every_switch_goes_both_ways():
    for name, config in CONFIGS.items():
        switches = [item for item in flags_of(config) if (item.type in (bool, bool | None))]
        assert len(switches) > 3
        for item in switches:
            assert getattr(parse(config, [f"--{item.name}"]), item.name) is True
            assert getattr(parse(config, [f"--no_{item.name}"]), item.name) is False, name
    latents = ["latents", "--data_path", "x", "--output", "y"]
    for words, value in (([], True), (["--no-flip"], False), (["--no_flip", "--flip"], True)):
        assert PARSERS["preprocess"].read([*latents, *words])[0]["flip"] is value


@pytest.mark.parametrize("name", PARSERS)
def test_examples_are_commands_that_parse(name):
    for line in PARSERS[name].examples:
        words = shlex.split(line.partition(" > ")[0], comments=True)
        at = next(i for i, word in enumerate(words) if word.endswith(".py") or word.startswith("opendit"))
        program = words[at].removesuffix(".py").rpartition(".")[2]
        words = words[at + 1 :]
        if program == "opendit":
            program, *words = words
        if words[:1] == ["plot"] or name == "evaluate plot":
            PARSERS["evaluate plot"].read(words[1:])
        elif program in CONFIGS:
            parse(CONFIGS[program], words)
        elif "..." not in words:
            PARSERS[program].read(words)


@pytest.mark.parametrize(
    ("topic", "there", "missing"),
    [
        ("optimizer", "--adam_beta2", "--batch_size"),
        ("batch_and_length", "--epochs", "--lr"),
        ("Start from weights", "--lora_alpha", "--lr"),
        ("no_fp8", "--[no_]fp8", "--compile"),
        ("--lr", "peak learning rate", "--lr_schedule"),
    ],
)
def test_help_of_one_heading_or_flag(topic, there, missing):
    text = PARSERS["train"].format_help(topic)
    assert there in text and missing not in text


def test_a_topic_that_there_is_not(capsys):
    for words, meant in ((["--help", "optimiser"], "optimizer"), (["-h", "lr_scedule"], "lr_schedule")):
        with pytest.raises(SystemExit) as stop:
            parse(TrainConfig, words)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and f"did you mean {meant}?" in said and said.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        PARSERS["preprocess"].read(["--help", "latents"])
    assert stop.value.code == 0 and "--[no_]flip" in capsys.readouterr().out


def test_examples_follow_how_the_program_was_started():
    for written, shown in (
        ("python train.py --lr 1", "opendit train --lr 1"),
        (
            "torchrun --nproc_per_node=8 sample.py --npz a.py",
            "torchrun --nproc_per_node=8 -m opendit sample --npz a.py",
        ),
        ("opendit evaluate plot x", "opendit evaluate plot x"),
    ):
        assert command_line.started_as("opendit x", written) == shown
        assert command_line.started_as("train.py", written) == written


def test_the_short_words_are_for_common_flags_alone():
    """The text of ``common=`` replaces ``help`` in the short --help."""

    class Part(Flags):
        group = "Part: of nothing"

    assert flag(1, "long words", common="short words", unit="x").metadata["common"] == "short words"
    assert "given" in {item.name for item in fields(Part)}
    shown = command_line.entry("--x", Value(int, at_least=1, at_most=2), "long; words", 1, common="short")
    assert shown.in_short().about == "short" and shown.about == "long; words"


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory):
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    path = tmp_path_factory.mktemp("completion") / "opendit"
    path.write_text(completion.script("bash"))
    return path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", ["train"]),
        ("train --plu", ["--plugin"]),
        ("train --plugin f", ["fsdp"]),
        ("train --ckpt_keep 3 --lr_schedule ", ["constant", "cosine"]),
        ("sample --no_sa", ["--no_save_png"]),
        ("preprocess inde", ["index"]),
        ("preprocess latents --short_clips ", ["skip", "interval"]),
        ("export d", ["diffusers"]),
        ("completion z", ["zsh"]),
        ("sample --ckpt opendit/cl", ["opendit/cli"]),
    ],
)
def test_bash_completes(typed, offered, bash_script):
    """Run the completion in a new bash, with the variables that bash sets when a user presses Tab."""
    code = f"""
    source {bash_script}
    words=({typed}); [[ "{typed}" == *" " ]] && words+=("")
    COMP_WORDS=(opendit "${{words[@]}}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    function=$(complete -p opendit | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    $function opendit "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == offered, done.stderr


def test_completion_changes_no_parser(bash_script):
    """The programs' parsers are cached. A flag's choices may be followed by a number."""
    assert bash_script.is_file() and parse(TrainConfig, ["--offload", "blocks:2"]).offload == "blocks:2"


def test_without_shtab_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stop:
        completion.main(["bash"])
    assert stop.value.code == 2 and "pip install 'opendit[completion]'" in capsys.readouterr().err
