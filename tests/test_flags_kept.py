"""No flag of a released version is lost or changes its meaning, unless a table here says why.

``tests/nets/help/*.txt`` has the output of ``--help all`` from an earlier commit (tests/nets/make.py). More flags and
choices are allowed."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.nets.make import PROGRAMS, help_of, tasks_of

ROOT = Path(__file__).resolve().parents[1]
NETS = ROOT / "tests" / "nets"

# (program, flag): why the flag is gone, or its new name.
LOST_OR_RENAMED: dict[tuple[str, str], str] = {}
# (program, flag, "default", "choices" or "values"): why this changed.
CHANGED: dict[tuple[str, str, str], str] = {
    ("sample", "--image_size", "values"): "one side, or height and width; one is as before",
    ("sample", "--lora", "values"): "several, each with a weight; one path is as before",
    ("evaluation", "--lora", "values"): "as of sample.py",
    ("train", "--ema_warmup", "default"): "new runs warm the average up; --no_ema_warmup is as before",
    ("sample", "--class_labels", "values"): "takes names of classes, too; labels out of range are still refused",
    ("evaluation", "--class_labels", "values"): "as of sample.py",
    ("sample", "--sampler", "default"): "a further objective has one; the others' are as before",
    ("evaluation", "--sampler", "default"): "as of sample.py",
    ("page", "--outputs", "default"): "below the folder of --allow_train, where that is given; otherwise as before",
    ("train", "--max_text_tokens", "default"): "the bytes encoder of a new run takes a length that fits the data",
}
# A task in the README's table at that commit: its text now, or why it is gone.
TASKS_CHANGED: dict[str, str] = {
    "no VAE": "training on pixels, without a VAE",
    "NaN, a full disk, slow reading, other curves": "help with NaN, a full disk, slow reading, runs that differ",
    "to go on after a stop": "to resume after a stop",
    "to start from weights": "to start from trained weights",
    "a setting that is known": "a preset of known settings",
    "FID and its kin while training": "FID and other metrics while training",
    "curves elsewhere than in TensorBoard": "curves in Weights & Biases or MLflow",
    "the fastest product of these": "the fastest combination of the following",
    "plots of runs laid over each other": "one plot of several runs",
    "diffusers' or Meta's format": "weights in diffusers' or Meta's format",
    "the page": "runs and samples in a browser",
}

# ------------------------------------------------------------------------------------------ reading help


@dataclass(frozen=True)
class Shown:
    """A flag as help shows it.

    Attributes:
        default: in brackets, or in words after "default:"; "required"; or empty.
        choices: the words that it takes.
        values: the range of its numbers, and whether it takes several values or an optional one.
    """

    default: str
    choices: frozenset[str]
    values: str


NAME = re.compile(r"--(?:\[no_\])?\w+")
WORDS = re.compile(r"[\w.+-]+(?:, [\w.+-]+)*")
NUMBERS = re.compile(r"at least|at most|above|below|\d to \d")


def rows_of(text: str) -> dict[str, tuple[str, str]]:
    """Return name -> (left column, description) of every flag, argument and command in a help text."""
    found: dict[str, tuple[str, str]] = {}
    names: list[str] = []
    for line in text.partition("\nExamples:")[0].splitlines():
        if row := re.fullmatch(r"  (\S.*?)(?:  +(\S.*))?", line):
            left, described = row[1], row[2] or ""
            names = NAME.findall(left) or left.strip("[]").split()[:1]
            found |= dict.fromkeys(names, (left, described))
        elif line.startswith("      ") and names:
            left, described = found[names[0]]
            found |= dict.fromkeys(names, (left, f"{described} {line.strip()}".strip()))
        else:
            names = []
    return found


def flags_of(text: str) -> dict[str, Shown]:
    """Return name -> default, choices and values of every flag, argument and command in a help text."""
    found = {}
    for name, (left, described) in rows_of(text).items():
        bracket = re.search(r" \[([^\]]*)\]$", described)
        rest = described[: bracket.start()] if bracket else described
        in_words = re.search(r"\((default[^()]*|bytes: [^()]*|required)\)", rest)
        default = bracket[1] if bracket else in_words[1] if in_words else ""
        last = re.search(r"\(([^()]*)\)$", rest)
        group = last[1] if last and not last[1].startswith("default") and last[1] != "required" else ""
        numbers = bool(NUMBERS.search(group))
        listed = not numbers and WORDS.fullmatch(group) and left.split()[-1] in ("WORD", "...", "FORMAT")
        several = " ".join(word for word in ("...", "[") if word in left.removeprefix("--[no_]"))
        found[name.replace("[no_]", "")] = Shown(
            default, frozenset(group.split(", ")) if listed else frozenset(), f"{group if numbers else ''}{several}"
        )
    return found


def differences(program: str, then: str, now: str) -> list[str]:
    """Return a line for everything that ``then`` has, ``now`` lacks, and no table explains."""
    old, new, found = flags_of(then), flags_of(now), []
    for name, was in old.items():
        if (program, name) in LOST_OR_RENAMED:
            continue
        if name not in new:
            found.append(f"{program}: {name} is lost")
            continue
        shown = new[name]
        if lost := was.choices - shown.choices:
            found.append((name, "choices", ", ".join(sorted(was.choices)), f"{', '.join(sorted(lost))} is lost"))
        for what in ("default", "values"):
            if getattr(was, what) != getattr(shown, what):
                found.append((name, what, getattr(was, what), getattr(shown, what)))
    lines = []
    for each in found:
        if isinstance(each, str):
            lines.append(each)
        elif (program, *each[:2]) not in CHANGED:
            name, what, before, after = each
            lines.append(f"{program}: {name}: {what}: {before or 'none'} then, {after or 'none'} now")
    return lines


# ------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """Return the current help text of every program."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PROGRAMS, pool.map(lambda words: help_of(ROOT, words), PROGRAMS.values()), strict=True))


def recorded(program: str) -> str:
    return (NETS / "help" / f"{program}.txt").read_text()


def test_every_program_has_its_help_recorded():
    assert {path.stem for path in (NETS / "help").glob("*.txt")} == {*PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_flag_is_lost(program, helps):
    found = differences(program, recorded(program), helps[program])
    assert not found, "\n" + "\n".join([*found, "put it into a table of this file, with the reason, if it is meant"])


def test_help_is_understood():
    """If the parser found nothing, the other tests would always pass."""
    train, sample = flags_of(recorded("train")), flags_of(recorded("sample"))
    assert len(train) == 113 and len(sample) == 45  # 112 flags of train.py and an alias
    assert train["--plugin"] == Shown("zero2", frozenset({"zero2", "gemini", "ddp", "fsdp"}), "")
    assert train["--lr"] == Shown("0.0001", frozenset(), "above 0")
    assert train["--max_text_tokens"] == Shown("bytes: 64", frozenset(), "1 to 16,384")
    assert train["--ema_warmup"].default == "off" and train["--save"].default == "on"
    assert train["--ema_decay"] == Shown("0.9999", frozenset(), "at least 0 and below 1...")
    assert train["--pipeline_parallel_size"] == Shown("1", frozenset(), "1 to 4,096")
    assert train["--recipe"] == train["--factory"] and train["--dry_run"].values == "0 to 1,048,576["
    assert train["--batch_size"].values == "1 to 65,536" and train["--video_reader"].default == "auto"
    assert {"torchcodec", "pyav"} < train["--video_reader"].choices
    assert flags_of(recorded("export"))["--ckpt"].default == "required"
    assert flags_of(recorded("export"))["FORMAT"].choices == {"diffusers", "meta", "opendit"}
    assert {"demo", "latents", "index"} < flags_of(recorded("preprocess")).keys()
    assert {"CSV", "--output"} < flags_of(recorded("preprocess_check")).keys()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  --lr RATE ", "  --rate RATE ", "train: --lr is lost"),
        (" [0.0001]", " [0.0002]", "train: --lr: default: 0.0001 then, 0.0002 now"),
        ("(constant, cosine)", "(constant, linear)", "train: --lr_schedule: choices: constant, cosine then"),
        (
            "share of unreadable files at which the run stops (at least 0 and below 1)",
            "share (at least 0)",
            "--max_bad",
        ),
        ("--ema_decay SHARE ...", "--ema_decay SHARE", "train: --ema_decay: values"),
    ],
)
def test_what_is_lost_is_said(old, new, said):
    then = recorded("train")
    assert old in then
    (line,) = differences("train", then, then.replace(old, new, 1))
    assert said in line


def test_more_flags_and_choices_are_no_loss():
    then = recorded("train")
    more = then.replace("(constant, cosine)", "(constant, cosine, wsd)").replace(
        "  --lr RATE ", "  --new_flag NUMBER           of nothing (at least 0) [3]\n  --lr RATE "
    )
    assert more != then and differences("train", then, more) == []


def test_every_task_of_the_readme_is_there():
    """Each row is found by the task in its first cell, and must keep the flags in its second."""
    now = {row.split("|")[1].strip(): row for row in tasks_of((ROOT / "README.md").read_text())}
    lost = []
    for row in (NETS / "readme_tasks.md").read_text().splitlines():
        task = row.split("|")[1].strip()
        if task in TASKS_CHANGED:
            continue
        flags = set(NAME.findall(row))
        if task not in now or not flags <= set(NAME.findall(now[task])):
            lost.append(row)
    assert not lost, "\n" + "\n".join(lost)
