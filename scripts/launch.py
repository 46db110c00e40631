"""Start the processes of a program on this machine for the shell scripts:

    python scripts/launch.py N [--run_folder_file FILE] PROGRAM [FLAG ...]

torchrun does the same for any number of machines. When it gets a signal, though, it ends its processes after 30 seconds
and prints a traceback. Here the first Ctrl-C, SIGTERM, SIGUSR1 or lost terminal goes to the process that trains, which
saves. A second one ends everything at once, and so does the first while nothing is trained.

The exit code is 75 if training has stopped and can go on, 130 after a Ctrl-C before that, else the one of the first
process that failed.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AGAIN = 75  # as in opendit/training/run_end.py, which can't be imported without torch
LEFT = 30.0  # seconds that the others have to end by themselves once a process has failed


def start(count: int, words: list[str], file: Path) -> list[subprocess.Popen]:
    """Start the processes, each in a session of its own, which signals of the terminal don't reach."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"OMP_NUM_THREADS": "1"} if count > 1 else {}
    common |= {**os.environ, "OPENDIT_RUN_FOLDER_FILE": str(file)}
    started = []
    for rank in range(count):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**common, **{name: str(value) for name, value in place.items()}} if count > 1 else common
        started.append(subprocess.Popen([sys.executable, *words], env=environment, start_new_session=True))
    return started


def wait(processes: list[subprocess.Popen]) -> int:
    """Wait for all processes. Return the exit code of the first that failed; the others end when they notice."""
    failed, since = 0, 0.0
    while running := [each for each in processes if each.poll() is None]:
        failed = failed or next((each.returncode for each in processes if each.returncode), 0)
        since = since or (time.monotonic() if failed else 0.0)
        if since and time.monotonic() - since > LEFT:
            end(running)
        time.sleep(0.1)
    return failed or next((each.returncode for each in processes if each.returncode), 0)


def end(processes: list[subprocess.Popen]) -> None:
    """End the processes, and those that they have started."""
    for each in processes:
        with contextlib.suppress(OSError):
            os.killpg(each.pid, signal.SIGKILL)


def main(words: list[str]) -> int:
    count, words = int(words[0]), words[1:]
    kept = Path(words[1]) if words[0] == "--run_folder_file" else None
    with tempfile.TemporaryDirectory() as folder:
        file = kept or Path(folder) / "run"
        file.write_bytes(b"")
        signals: list[int] = []

        def pass_on(number: int, frame: object) -> None:
            signals.append(number)
            if file.stat().st_size and len(signals) == 1:
                processes[0].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            else:
                end(processes)

        processes: list[subprocess.Popen] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, pass_on)
        processes += start(count, words[2:] if kept else words, file)
        if signals:  # that came before there was anything to end
            end(processes)
        code, run = wait(processes), file.read_text(encoding="utf-8").strip()
        if code < 0 and signals:
            print(f"error: ended by {signal.Signals(signals[-1]).name}; what is saved stays", file=sys.stderr)
            return 130 if signals[0] == signal.SIGINT else AGAIN
        if code == 0 and run:
            with contextlib.suppress(OSError):
                return 0 if json.loads((Path(run) / "ended.json").read_bytes())["done"] else AGAIN
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
