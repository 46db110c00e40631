"""Write the complete help of an earlier commit's programs, and its README's table of tasks, as text files.

git worktree add /tmp/then 9378e10
python tests/nets/make.py /tmp/then
"""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = ("demo", "ucf101", "folder", "check", "look", "latents", "shards", "index")
# file -> the command's words before --help all
PROGRAMS = {
    "train": ["train.py"],
    "sample": ["sample.py"],
    "preprocess": ["preprocess.py"],
    **{f"preprocess_{command}": ["preprocess.py", command] for command in COMMANDS},
    "evaluation": ["-m", "opendit.evaluation"],
    "evaluation_plot": ["-m", "opendit.evaluation", "plot"],
    "export": ["-m", "opendit.export"],
    "page": ["-m", "opendit", "page"],
    "models": ["-m", "opendit.models"],
    "links": ["-m", "opendit", "links"],
}


def help_of(tree: Path, words: list[str]) -> str:
    """Return a program's output for ``--help all`` in a working tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "120"}
    argv = [sys.executable, *words, "--help", "all"]
    return subprocess.run(argv, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout


def tasks_of(readme: str) -> list[str]:
    """Return the rows of README's table of tasks, without the header."""
    table = re.search(r"^\| you want \| run \|\n\|[-| ]+\n((?:\|.*\n)+)", readme, re.MULTILINE)
    assert table is not None
    return table[1].splitlines()


if __name__ == "__main__":
    tree = Path(sys.argv[1]).resolve()
    (HERE / "help").mkdir(exist_ok=True)
    for name, words in PROGRAMS.items():
        (HERE / "help" / f"{name}.txt").write_text(help_of(tree, words))
    (HERE / "readme_tasks.md").write_text("\n".join(tasks_of((tree / "README.md").read_text())) + "\n")
