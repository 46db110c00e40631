"""Start N processes of a program on this machine, for the shell scripts:

    python scripts/launch.py N [--run_folder_file FILE] PROGRAM [FLAG ...]

torchrun does the same on any number of machines, but it kills its processes 30 seconds after a signal and prints a
traceback. This program sends the first Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP (lost terminal) to the training process of
rank 0, which saves. A second signal ends all processes at once. Before training begins, the first signal does so.

The exit code is 75 if training stopped before its last step and can be resumed, and 130 after a Ctrl-C that ended the
processes. Otherwise it is the exit code of the first process that failed.
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

AGAIN = 75  # same as in opendit/training/interrupt.py, whose import needs torch
LEFT = 30.0  # seconds that the other processes get to end by themselves after a process has failed


def start(count: int, words: list[str], file: Path) -> list[subprocess.Popen]:
    """Start the processes, each in a separate session, so that signals of the terminal do not reach them."""
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
    """Wait for all processes; return the exit code of the first process that failed, or 0.

    After a failure the other processes get ``LEFT`` seconds to end.
    """
    failed, since = 0, 0.0
    while running := [each for each in processes if each.poll() is None]:
        failed = failed or next((each.returncode for each in processes if each.returncode), 0)
        since = since or (time.monotonic() if failed else 0.0)
        if since and time.monotonic() - since > LEFT:
            end(running)
        time.sleep(0.1)
    return failed or next((each.returncode for each in processes if each.returncode), 0)


def end(processes: list[subprocess.Popen]) -> None:
    """Kill the processes and their children."""
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
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup makes processes ignore SIGHUP
                signal.signal(number, pass_on)
        processes += start(count, words[2:] if kept else words, file)
        if signals:  # received before the processes were started
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
