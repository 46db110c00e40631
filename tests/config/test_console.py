"""Printing never ends a program, whatever the encoding, with closed streams, broken pipes and full disks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRINTS = """
import sys
from opendit.config.console import prepare_console
prepare_console()
print("caf\\xe9 \\u6f22 \\udce9 \\U0001f469 end")
print("caf\\xe9 \\udce9 error", file=sys.stderr)
for i in range(20000):
    print("line", i)
import logging
logging.getLogger("opendit.room").debug("not shown")
logging.getLogger("opendit.room").info("written \\u6f22")
opened = open(sys.argv[1], "w")
opened.write(f"{opened.fileno()} went on")
opened.close()
sys.exit(3)
"""


def run(tmp_path, before: str = "", after: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Run the program above in a shell, with ``before`` and ``after`` around it. Its exit code is in a file."""
    script, end, code = tmp_path / "prints.py", tmp_path / "end", tmp_path / "code"
    script.write_text(PRINTS)
    command = f"{before} ({sys.executable} {script} {end}; echo $? > {code}) {after}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=env, timeout=100)
    assert code.read_text().strip() == "3", done.stderr.decode(errors="replace")
    number, went_on = end.read_text().split(" ", 1)
    assert int(number) > 2 and went_on == "went on"  # no file took a standard stream's number
    return done


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii:strict"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "cp1252"},
        {},
    ],
)
def test_no_encoding_ends_a_program(environment, tmp_path):
    done = run(tmp_path, **environment)
    first = done.stdout.splitlines()[0]
    utf8 = not environment
    assert first == ("café 漢 \\udce9 👩 end".encode() if utf8 else first) and b"\\udce9" in first
    assert first.endswith(b"end") and (utf8 or b"\\u6f22" in first)
    assert done.stdout.splitlines()[-1] == ("written 漢".encode() if utf8 else b"written \\u6f22")
    assert b"\\udce9 error" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("after", ["| head -n 1", "2>&1 | true", "> /dev/full", "> /dev/full 2>&1", "<&- >&- 2>&-"])
def test_no_stream_ends_a_program(after, tmp_path):
    done = run(tmp_path, after=after)
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    if after == "> /dev/full":
        assert done.stderr.count(b"standard output can't be written (No space left on device)") == 1


def test_a_wrong_flag_in_no_encoding(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    for program in (["train.py"], ["sample.py"], ["preprocess.py"], ["-m", "opendit.export"], ["-m", "opendit.models"]):
        done = subprocess.run([sys.executable, *program, "--caf\udce9", "漢"], cwd=ROOT, env=env, capture_output=True)
        assert done.returncode == 2 and b"Traceback" not in done.stderr, (program, done.stderr)


def test_ctrl_c_during_imports_is_one_line():
    program = "from opendit.config.console import prepare_console; prepare_console(); raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT and done.stderr == "\nerror: interrupted\n"


@pytest.mark.parametrize("program", ("train.py", "sample.py", "preprocess.py", "opendit/__main__.py"))
def test_ctrl_c_during_a_program_s_first_imports_is_one_line(program):
    """The interrupt comes with the first import after the module that handles it."""
    code = f"""
import runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opendit.") and "opendit.config.console" in sys.modules:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
runpy.run_path({program!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT and done.stderr == "\nerror: interrupted\n"


ENDS = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from opendit.config.console import run_program

def compute():  # torch aborts a process whose interpreter is finalised while a thread is inside an operation
    import torch
    x = torch.ones(100)
    started.set()
    while True:
        x + x

def late():
    time.sleep(0.5)
    print("the pool's work is done")

def main(how):
    atexit.register(print, "exit function")
    threading.Thread(target=compute, daemon=True).start()
    started.wait()
    ThreadPoolExecutor(1).submit(late)
    if how == "raise":
        sys.exit(7)
    if how == "message":
        sys.exit("what is wrong")
    return None if how == "none" else 5

started = threading.Event()
run_program(main, sys.argv[1])
"""


@pytest.mark.parametrize(("how", "code"), [("return", 5), ("raise", 7), ("none", 0), ("message", 1)])
def test_a_rank_ends_with_its_code_while_threads_compute(how, code, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, script, how], capture_output=True, text=True, env=env, timeout=100)
    assert (done.returncode, done.stderr) == (code, "what is wrong\n" if how == "message" else "")
    assert "the pool's work is done" in done.stdout and "exit function" in done.stdout
