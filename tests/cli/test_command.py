"""The console command runs the top-level scripts."""

import ast
import subprocess
import sys

import pytest

from opendit import __version__
from opendit.cli import command
from opendit.config.console import name_of
from tests.config.test_light import ROOT


def test_commands_are_the_programs(monkeypatch):
    for name in command.SCRIPTS:
        assert command.module_of(name).__file__ == str(ROOT / f"{name}.py")
        assert command.module_of(name) is command.program(name)
    seen = []
    names = (("train", None), ("preprocess", 2), ("export", None), ("models", None), ("page", None), ("evaluate", 0))
    for name, code in names:
        monkeypatch.setattr(command.module_of(name), "main", lambda argv, code=code: seen.append(argv) or code)
        assert command.main([name, "--x", "y"]) == (code or 0)
    assert seen == [["--x", "y"]] * 6


def test_the_wheel_has_them():
    setup = ast.parse((ROOT / "setup.py").read_text())
    values = {node.targets[0].id: node.value for node in setup.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(values["SCRIPTS"]) == tuple(f"{name}.py" for name in command.SCRIPTS)
    included = (ROOT / "MANIFEST.in").read_text().split()  # files of the sdist, from which the wheel is built
    assert {f"{name}.py" for name in command.SCRIPTS} <= set(included)


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ([], 0, "usage: opendit COMMAND"),
        (["-h"], 0, "sample      draws pictures"),
        (["--version"], 0, f"opendit {__version__}"),
        (["sampel"], 2, "error: sampel: no such command; did you mean sample?"),
        (["look"], 2, "error: look: no such command; here it is preprocess look"),
    ],
)
def test_what_it_says(argv, code, said, capsys):
    assert command.main(argv) == code
    told = capsys.readouterr()
    assert said in (told.err if code else told.out) and not (told.out if code else told.err)


@pytest.mark.parametrize(
    "argv",
    ["train --lr nan", "sample --steps 3", "preprocess latents --no", "preprocess check nowhere --output x", "export",
     "models --world 0", "page --outputs nowhere", "evaluate --metrics x"],
)  # fmt: skip
def test_mistakes_are_one_line(argv, capsys):
    try:
        code = command.main(argv.split())
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert name_of("train.py") == "train.py"  # the original name is restored


def test_python_m_opendit_under_torchrun():
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "opendit"]
    done = subprocess.run([*start, "train", "--lr", "inf"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and done.stderr.count("error: --lr inf") == 1


def test_programs_that_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "a" / "b" / "programs.py"))
    monkeypatch.delitem(sys.modules, "opendit.cli.scripts.sample", raising=False)
    with pytest.raises(ModuleNotFoundError, match="install OpenDiT again"):
        command.program("sample")
    (tmp_path / "a" / "b" / "scripts").mkdir(parents=True)
    (tmp_path / "a" / "b" / "scripts" / "sample.py").write_text("def main(argv):\n    return len(argv)\n")
    assert command.main(["sample", "a", "b"]) == 2  # as in a wheel
    (tmp_path / "a" / "b" / "scripts" / "sample.py").write_text("raise OSError\n")
    monkeypatch.delitem(sys.modules, "opendit.cli.scripts.sample")
    with pytest.raises(OSError):
        command.program("sample")
    assert "opendit.cli.scripts.sample" not in sys.modules
