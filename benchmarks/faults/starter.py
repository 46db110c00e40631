"""A process that has imported the programs' modules, and forks to run them.

A new interpreter imports torch and Colossal-AI for 5 s, and most faults need two or three programs. A fork takes
milliseconds. The fork leaves the loop below before it runs the script, so it ends like any interpreter: threads joined,
``atexit``, exit code.

    python -m benchmarks.faults.starter FD

FD is a stream socket. The starter reads a line of JSON (see ``become``) and answers with a process id. It writes the
exit status, as in subprocess (-9 for SIGKILL), into the file that the request names.
"""

import contextlib
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
from pathlib import Path

IMPORTED = (
    "opendit.training.build opendit.sampling.sample_output opendit.export opendit.data.make_latents "
    "opendit.data.captioned_media opendit.data.digits sklearn.datasets "
    "torchvision torch.utils.tensorboard PIL.ImageFont safetensors.torch"
).split()


def serve(connection: socket.socket) -> dict:
    """Fork at every request until the other side hangs up. Return the request in each fork, but never in the server."""
    codes: dict[int, Path] = {}  # process id -> file for the exit status
    stream = connection.makefile("rw")
    stream.write("ready\n")
    stream.flush()
    while True:
        if select.select([connection], [], [], 0.01)[0]:
            line = stream.readline()
            if not line:
                for pid in codes:  # each process leads a separate group
                    os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                connection.detach()
                return request
            codes[pid] = Path(request["code"])
            stream.write(f"{pid}\n")
            stream.flush()
        while codes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            path = codes.pop(pid)
            partial = path.with_name(path.name + ".partial")
            with contextlib.suppress(FileNotFoundError):  # nobody waits, the folder is gone
                partial.write_text(str(os.waitstatus_to_exitcode(status)))
                partial.rename(path)


def become(request: dict) -> None:
    """Run a script as if ``python`` had been started with it.

    request: argv, environment, folder (to run in), stdout, stderr (files), file_limit (RLIMIT_FSIZE in bytes or None),
    prelude (Python code that runs before the script, for faults that can only be caused from within)."""
    os.setsid()
    os.chdir(request["folder"])
    for number, (name, mode) in enumerate(
        (("/dev/null", os.O_RDONLY), (request["stdout"], os.O_WRONLY), (request["stderr"], os.O_WRONLY))
    ):
        handle = os.open(name, mode | (os.O_CREAT | os.O_APPEND if mode else 0))
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["file_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], resource.RLIM_INFINITY))
    sys.argv = request["argv"]
    exec(request["prelude"], {})
    module = sys.argv[0]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
