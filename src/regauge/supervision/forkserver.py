"""A server that imports a run's modules once, and is forked into each process of the run.

Run as `python -m regauge.supervision.forkserver MODULE... SOCKET` by `forks.py`, which sends
requests over the socket and receives the exit of each process. The server computes nothing. The
only threads belong to numpy's OpenBLAS and pyarrow's jemalloc; both register fork handlers, so
nothing is lost in a fork. A failed import is ignored here: it fails again, with its message, in the
processes that need the module.

    request  {"command": ["-m", module, argument...], "variables": {...}} and two files for output
    answer   {"pid": n}
    later    {"exited_pid": n, "exit_code": exit code, or minus the number of a signal}
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from regauge.system import children, stop_signals
from regauge.system.garbage import pause_collection

MAX_REQUEST_BYTES = 1 << 17
NUM_FILES = 2
"""Files sent with a request: standard output and standard error."""


def main() -> None:
    """Import the modules, serve requests, and run the requested command in each new process."""
    *modules, descriptor = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    stop_signals.pass_to_parent()
    with pause_collection():
        for name in modules:
            with suppress(Exception):
                importlib.import_module(name)
    gc.freeze()  # keeps the memory of the imports shared: no collection writes to its pages
    request = serve(channel)
    if request is not None:
        _run_module(request)


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork at each request; return the request in the new process, or None at the end."""
    exits, wakeup = os.pipe()
    for end in (exits, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel.fileno(), exits], [], [])
        if exits in ready:
            os.read(exits, 4096)
            _report_exits(channel)
        if channel.fileno() in ready:
            text, files, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, NUM_FILES)
            if not text:
                return None
            server = os.getpid()
            with stop_signals.block_signals():
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for end in (exits, wakeup):
                        os.close(end)
                    channel.close()
                    _reset_process(server, files)
            if pid == 0:
                return dict(json.loads(text))
            for file in files:
                os.close(file)
            channel.send(json.dumps({"pid": pid}).encode())


def _report_exits(channel: socket.socket) -> None:
    """Send the exit code of each ended process."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            channel.send(json.dumps({"exited_pid": pid, "exit_code": code}).encode())


def _reset_process(parent: int, files: list[int]) -> None:
    """Give a forked process the session, files, signals and randomness of a spawned one."""
    children.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    for file, standard in zip(files, (1, 2), strict=True):
        os.dup2(file, standard)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stop_signals.restore_defaults()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python seeds its own generator after a fork


def _run_module(request: dict[str, Any]) -> None:
    """Run a module as `python -m` does."""
    os.environ.update(request["variables"])
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}", encoding="utf-8")
    _, module, *arguments = request["command"]
    sys.argv = ["", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
