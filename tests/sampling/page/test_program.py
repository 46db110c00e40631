"""The command: its flags, the address that it prints, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from opendit.sampling.page import __main__ as program
from tests.config.test_light import ROOT

START = """
import sys
sys.modules["colossalai"] = None
from opendit.cli.command import main
sys.exit(main(sys.argv[1:]))
"""


def flags(*words: str) -> dict:
    options, _ = program.build_parser().read(words)
    return options


def test_a_password_where_others_can_come(tmp_path, monkeypatch):
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: name)
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        options = flags("--outputs", str(tmp_path), "--host", host)
        program.check(options)
        assert options["password"] is None
    made = set()
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org", "127.evil.example"):
        options = flags("--outputs", str(tmp_path), "--host", host)
        program.check(options)
        made.add(options["password"])
        assert len(options["password"]) >= 16
    assert len(made) == 5
    options = flags("--outputs", str(tmp_path), "--password", "twelve chars")
    program.check(options)
    assert options["password"] == "twelve chars"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--outputs nowhere", "--outputs nowhere: no such folder"),
        ("--ckpt nowhere", "--ckpt nowhere"),
        ("--vae nowhere", "--vae"),
        ("--password short", "at least 8 characters"),
        ("--port 65536", "--port 65536: out of range; give a whole number from 0 to 65,535"),
        ("--host 300.1.1.1 --password long-enough", "--host 300.1.1.1 --port 7860"),
        ("--most_samples 0", "--most_samples"),
        ("--allow_train nowhere", "--allow_train nowhere: no such folder"),
        (
            "--allow_train . --host 0.0.0.0",
            "--allow_train .: with --host 0.0.0.0 others could start programs here; give",
        ),
        ("--allow_train . --outputs ..", "--outputs ..: is not below --allow_train ."),
        ("--allow_train . --outputs link", "--outputs link: is not below --allow_train ."),
    ],
)
def test_mistakes(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "link").symlink_to("/tmp")
    monkeypatch.chdir(tmp_path)
    words = words.split() if "--outputs" in words else ["--outputs", ".", *words.split()]
    with pytest.raises(SystemExit) as stop:
        program.main(words)
    told = capsys.readouterr().err
    assert stop.value.code == 2 and said in told and told.count("\n") == 1


def test_training_with_a_password_or_on_this_machine(tmp_path, monkeypatch):
    """Runs are written below the folder; their outputs folder is made."""
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: name)
    for words in ("", "--host 0.0.0.0 --password long-enough"):
        options = flags("--allow_train", str(tmp_path), *words.split())
        program.check(options)
        assert options["outputs"] == str(tmp_path / "outputs") and (tmp_path / "outputs").is_dir()


def test_without_gradio(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        program.main(["--outputs", str(tmp_path)])
    assert "pip install 'opendit[page]'" in capsys.readouterr().err


def test_a_port_that_is_taken():
    listening = program.listen("127.0.0.1", 0)
    with listening, pytest.raises(ValueError, match="try --port 0"):
        program.listen("127.0.0.1", listening.getsockname()[1])


@pytest.mark.parametrize("name, code", [("SIGINT", 0), ("SIGTERM", 143), ("SIGHUP", 143)])
def test_from_start_to_end(tmp_path, name, code):
    """The page runs with a password until a signal, without importing Colossal-AI, and leaves no files."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'opendit[page]'")
    words = ["page", "--outputs", str(tmp_path), "--port", "0", "--password", "a long one"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    running = subprocess.Popen(
        [sys.executable, "-c", START, *words],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        address = re.fullmatch(r"(http://127\.0\.0\.1:\d+)  .*\n", running.stdout.readline())[1]
        assert "a long one" in running.stdout.readline()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address, timeout=20)
    finally:
        running.send_signal(getattr(signal, name))
        out, errors = running.communicate(timeout=60)
    assert (running.returncode, out, errors) == (code, "", "") and not list(tmp_path.glob("opendit-page-*"))
