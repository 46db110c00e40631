"""Run the commands of README.md and docs/*.md as a new user would.

The commands of a page are run from top to bottom in a fresh clone of the repository, on a CPU, at small sizes
(scripts/docs_settings.py). The page's Python blocks are then run as one session.

    python -m scripts.run_docs                                    # all pages
    python -m scripts.run_docs --pages README.md docs/training.md
    python -m scripts.run_docs --keep FOLDER                      # keeps the clones, and what each command prints

The program prints a line for each command: ok, dry (a dry run), failed with the last line of the command's error, or
not run with the reason. The exit code is 1 if a command failed. Clones do not contain uncommitted changes.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts import docs_settings as settings
from scripts.docs_commands import check, commands, files, program, python_blocks
from scripts.docs_stand_ins import StandIns, save_encoders

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {"run": "ok", "dry": "dry run", "failed": "failed", "not run": "not run"}
NPROC = re.compile(r"--nproc[_-]per[_-]node[= ](\d+)")


class StandInError(Exception):
    """A stand-in for a reader's file could not be made."""


@dataclass(frozen=True)
class Attempt:
    """The plan for a command.

    Attributes:
        kind: "run", "dry" or "not run".
        words: the command to run.
        reason: the reason why the command is not run.
    """

    kind: str
    words: list[str]
    reason: str = ""


def read_page(page: str) -> str:
    return (ROOT / page).read_text()


def prepared(words: list[str], slow: bool = False) -> Attempt:
    """Return the plan for a command, with the sizes of the settings."""
    text = shlex.join(words)
    if reason := not_run(text, slow):
        return Attempt("not run", words, reason)
    name, arguments = program(words) or ("", [])
    name = name.removesuffix(".py")
    processes = int(found[1]) if (found := NPROC.search(text)) else 1
    if name == "train" and "--dry_run" not in words and any(not word.startswith("--help") for word in arguments[:1]):
        if processes > settings.PROCESSES or any(re.search(pattern, text) for pattern, _ in settings.DRY):
            words = ["python", "train.py", *arguments, "--dry_run", str(processes)]
            return Attempt("dry", shlex.split(substituted(shlex.join(words), settings.OF_DRY_RUNS)))
    text = NPROC.sub(lambda nproc: nproc[0].replace(nproc[1], str(min(processes, settings.PROCESSES))), text)
    text = substituted(text)
    if "--dry_run" in words:
        return Attempt("dry", shlex.split(substituted(shlex.join(words), settings.OF_DRY_RUNS)))
    words = shlex.split(text)
    if name in settings.LIMITS and "--recipe list" not in text and (name != "evaluate" or "--ckpt" in words):
        words = limited(words, settings.LIMITS[name], settings.LOWERED[name])
        for flag, added in settings.BESIDE.items():
            words += added if flag in words and added[0] not in words else []
        given, added = settings.UNLESS.get(name, ((), []))
        words += added if not set(given) & set(words) else []
    return Attempt("run", words)


def not_run(text: str, slow: bool = False) -> str:
    """Return the reason why a command or block is not run; empty if it is run."""
    reasons = settings.NOT_RUN if slow else settings.SLOW + settings.NOT_RUN
    return next((reason for pattern, reason in reasons if re.search(pattern, text)), "")


def substituted(text: str, table: Sequence[tuple[str, str]] = tuple(settings.SUBSTITUTIONS)) -> str:
    for pattern, replacement in table:
        text = re.sub(pattern, replacement, text)
    return text


def limited(words: list[str], limits: dict[str, int], lowered: dict[str, int]) -> list[str]:
    """Return ``words`` with the values of flags lowered to those of ``limits`` and ``lowered``.

    Flags of ``limits`` that ``words`` do not have are added.
    """
    words = list(words)
    for flag, most in (limits | lowered).items():
        if flag in words:
            place = words.index(flag) + 1
            if words[place].isdigit():
                words[place] = str(min(int(words[place]), most))
        elif flag in limits:
            words += [flag, str(most)]
    return words


class Runner:
    """Runs commands in clones below a folder, with a separate home, separate caches and no network."""

    def __init__(self, folder: Path, limit: float):
        self.folder, self.limit = folder, limit
        hub, torch_home = folder / "hub", folder / "torch"
        if not torch_home.exists():
            save_encoders(hub, torch_home)
        (folder / "home").mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VIRTUAL_ENV": sys.prefix,
            "HOME": str(folder / "home"),
            "HF_HUB_CACHE": str(hub),
            "HF_HUB_OFFLINE": "1",
            "TORCH_HOME": str(torch_home),
            "PIP_NO_INDEX": "1",  # so that pip can't change the environment
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "120",
        }
        self.stand_ins = StandIns(folder / "stand_ins", self.make)

    def make(self, words: list[str]) -> None:
        """Run a program that makes a stand-in, in a separate clone. Raises StandInError with the program's error."""
        clone = self.folder / "stand_ins_clone"
        if not clone.exists():
            subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(clone)], check=True)
        code, told = self.run(words, clone)
        if code:
            raise StandInError(f"{shlex.join(words)}: {last_line(told)}")

    def clone(self, page: str, words: str) -> Path:
        """Make a fresh clone for a page, with the stand-ins and files that the page's commands use.

        Args:
            words: the words of all commands of the page.
        """
        clone = self.folder / page.replace("/", "-").removesuffix(".md")
        shutil.rmtree(clone, ignore_errors=True)
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(clone)], check=True)
        for name, content in files(read_page(page)).items():
            (clone / name).write_text(content)
            words += content
        for name, stand_in in {**settings.GIVEN.get(page, {}), "many.csv": "many"}.items():
            name = substituted(name)
            if name not in words:
                continue
            source, target = self.stand_ins.at(stand_in), clone / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_file():
                shutil.copy(source, target)
            elif not target.exists():  # two models of the page may have become one
                shutil.copytree(source, target)
        return clone

    def run(self, words: list[str], folder: Path) -> tuple[int, str]:
        """Run a command; return its exit code and output. After the time limit, the command and its children are
        killed."""
        environment = {**self.environment, "PYTHONPATH": str(folder)}
        while "=" in words[0]:
            name, _, environment[name] = words[0].partition("=")
            words = words[1:]
        words = [re.sub(r"^~(?=/)", environment["HOME"], word) for word in words]
        redirected = words[words.index(">") + 1 :] if ">" in words else []
        if redirected:
            words = ["bash", "-c", f"{shlex.join(words[: words.index('>')])} > {redirected[0]}"]
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            told, _ = process.communicate()
            return 124, f"{told}\nerror: it took more than {self.limit:.0f} s"
        return process.returncode, told


def last_line(told: str) -> str:
    """Return the line of a failed command's output that states the error."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    told_by_us = [line for line in lines if re.match(r"(?:\S+: )?error: ", line)]  # torchrun adds other lines
    raised = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception|Exit)\b", line)]
    return (told_by_us or raised or lines or ["(nothing printed)"])[-1]


def parsed(words: list[str]) -> str:
    """Return the note for a command that is not run but whose flags were checked."""
    found = program(words)
    return "; parsed" if found is not None and check(*found) else ""


def attempts(page: str, slow: bool = False) -> list[tuple[int, str, Attempt]]:
    """Return (line, text on the page, plan) for each command of a page, then for its Python blocks."""
    text = read_page(page)
    found = [(line, shlex.join(words), prepared(words, slow)) for line, words in commands(text)]
    blocks = python_blocks(text)
    for line, code in blocks:
        if reason := not_run(code):
            found.append((line, "a block of Python", Attempt("not run", [], reason)))
    session = [(line, code) for line, code in blocks if not not_run(code)]
    if session:
        code = "\n".join(substituted(code) for _, code in session)
        name = f"{len(session)} block{'s'[: len(session) > 1]} of Python"
        found.append((session[0][0], name, Attempt("run", ["python", "-c", code])))
    return found


def run_page(runner: Runner, page: str, chosen: list[tuple[int, str, Attempt]], log: Path) -> Counter:
    """Run the ``chosen`` commands of a page and print a line for each; return the number of commands by outcome."""
    counts, clone = Counter(), None
    everything = " ".join(word for _, _, attempt in chosen if attempt.kind != "not run" for word in attempt.words)
    for number, (line, text, attempt) in enumerate(chosen):
        kind, note, start = attempt.kind, "", time.perf_counter()
        if kind == "not run":
            note = f": {attempt.reason}{parsed(attempt.words)}"
        else:
            clone = clone or runner.clone(page, everything)
            code, told = runner.run(attempt.words, clone)
            name = f"{page.replace('/', '-').removesuffix('.md')}-{number:02d}.txt"
            (log / name).write_text(f"{page}:{line}\n{text}\n{shlex.join(attempt.words)}\n\n{told}")
            if code or "Traceback" in told:
                kind, note = "failed", f": {last_line(told)} (exit code {code}, {name})"
        counts[kind] += 1
        seconds = f"{time.perf_counter() - start:5.1f} s" if attempt.kind != "not run" else " " * 7
        print(f"{SHOWN[kind]:<8}{seconds}  {page}:{line}  {text}{note}", flush=True)
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pages = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
    parser.add_argument("--pages", nargs="+", default=pages, metavar="PAGE", help="README.md, docs/training.md, ...")
    parser.add_argument("--only", default="", metavar="PATTERN", help="commands that this regular expression matches")
    parser.add_argument("--slow", action="store_true", help="also those that train for minutes")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep clones, stand-ins and logs there")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of one command [600]")
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    if subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True).stdout:
        print("note: what is not committed is not in the clones")
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="opendit-docs-"))).resolve()
    try:
        log = folder / "logs"
        log.mkdir(parents=True, exist_ok=True)
        runner, counts = Runner(folder, args.limit), Counter()
        for page in args.pages:
            chosen = [found for found in attempts(page, args.slow) if re.search(args.only, found[1])]
            try:
                counts += run_page(runner, page, chosen, log)
            except StandInError as error:
                counts["failed"] += 1
                print(f"{SHOWN['failed']:<8}{page}: {error}", flush=True)
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(", ".join(f"{counts[kind]} {name}" for kind, name in SHOWN.items()))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
