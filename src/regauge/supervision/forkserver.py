"""One process that imports what the processes of a run import, and is forked into each of them.

Run as `python -m regauge.supervision.forkserver SOCKET MODULE...` by `forks.py`, whose end of the
socket says what to start and hears of each end. It computes nothing, and has no threads but those
of numpy's OpenBLAS and pyarrow's jemalloc, which both register what a fork has to do; so nothing is
lost in one. Where a module cannot be imported, the processes that need it say so.

    request  {"command": ["-m", module, argument...], "variables": {...}} and two files for output
    answer   {"pid": n}
    later    {"ended": n, "code": exit code, or minus the signal's number}
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

from regauge import processes

LARGEST_REQUEST = 1 << 17
"""Bytes of one message."""
FILES = 2


def main() -> None:
    """Import the modules, serve, and go on as the command of a request in each process."""
    channel, modules = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # whoever tells all processes means the run's
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # for good: what is imported stays, and is shared for as long as nobody looks at it
    request = serve(channel)
    if request is not None:
        _become(request)


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork at each request; return it in the new process, and None when there will be no more."""
    ends, ended = os.pipe()
    for end in (ends, ended):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(ended)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel.fileno(), ends], [], [])
        if ends in ready:
            os.read(ends, 4096)
            _tell_ended(channel)
        if channel.fileno() in ready:
            text, files, _, _ = socket.recv_fds(channel, LARGEST_REQUEST, FILES)
            if not text:
                return None
            here = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for end in (ends, ended):
                    os.close(end)
                channel.close()
                _settle(here, files)
                return dict(json.loads(text))
            for file in files:
                os.close(file)
            channel.send(json.dumps({"pid": pid}).encode())


def _tell_ended(channel: socket.socket) -> None:
    """Say of every process that has ended how it did."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            channel.send(json.dumps({"ended": pid, "code": code}).encode())


def _settle(parent: int, files: list[int]) -> None:
    """Be as a process that was started, and not forked: its own session, files and randomness."""
    processes.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    for file, own in zip(files, (1, 2), strict=True):
        os.dup2(file, own)
        os.close(file)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator does so by itself


def _become(request: dict[str, Any]) -> None:
    """Run a module as `python -m` does."""
    os.environ.update(request["variables"])
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    _, module, *arguments = request["command"]
    sys.argv = ["", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
