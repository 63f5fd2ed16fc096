"""Child processes on this machine: how they start, answer, end, and die with this process.

`spawn` starts a command. `connect` also gives it a socket to this process, and `start_function`
runs a Python function in a new process, which exchanges messages with this one through a pipe.
`run_tool` waits for a command and returns its output. `start_processes` starts a run's ranks.
Workers that write lines of JSON are in `worker`.

No torch here: a parent process only starts its children, waits for them, and stops them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from regauge.system import choices, stop_signals, timing
from regauge.system.errors import FIRST_SIGNAL_CODE
from regauge.system.files import open_in_place
from regauge.system.processes import (
    DEVICE_VARIABLE,
    NO_VARIABLES,
    SUPERVISED_VARIABLE,
    RankLayout,
    find_free_port,
)
from regauge.system.timing import POLL_SECONDS

PR_SET_PDEATHSIG = 1
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Loaded at import, because libraries cannot be loaded between fork and exec."""
GRACE_SECONDS = 10.0
KILL_SECONDS = 2.0
"""Maximum wait for a killed process to end, which the kernel may be unable to achieve."""
FUNCTION_CODE = (
    "import sys; sys.path[:] = sys.argv[2:-1]\n"
    "from regauge.system import children\n"
    "children.run_function(sys.argv[1], int(sys.argv[-1]))"
)
"""multiprocessing's spawn is not used, because it would run the user's script again."""


class Child(Protocol):
    """A child process with the methods of subprocess.Popen."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


SpawnFunction = Callable[[list[str], Path | None, Mapping[str, str]], Child]
"""Starts a command, with a log file (None: this terminal) and additional variables."""


def spawn(
    command: Sequence[str],
    log: Path | None = None,
    variables: Mapping[str, str] = NO_VARIABLES,
    *,
    new_session: bool = False,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a command, with a log file (None: this terminal) and additional variables.

    With `new_session`, terminal signals do not reach the command, and it leads a process group with
    its children. `options` replace those of subprocess.Popen.
    """
    with open(log, "ab", opener=open_in_place) if log else nullcontext() as file:
        return subprocess.Popen(
            command,
            # Only the child can request this. It takes no lock that a parent thread may hold.
            preexec_fn=die_with_parent,  # noqa: PLW1509
            start_new_session=new_session or SUPERVISED_VARIABLE in variables,
            **{
                "env": {**os.environ, **choices.module_folders_environment(), **variables},
                "stdout": file,
                "stderr": file,
                **options,
            },
        )


def connect(
    command: Sequence[str], kind: socket.SocketKind = socket.SOCK_STREAM, **options: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a command; return its process and a socket to it.

    The command's last argument is the file descriptor of its end. `options` are those of `spawn`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs:
        descriptor = theirs.fileno()
        options = {"stdin": subprocess.DEVNULL, "pass_fds": (descriptor,), **options}
        process = spawn([*command, str(descriptor)], **options)
    return process, ours


@dataclass(frozen=True)
class FunctionProcess:
    """A function's process, and the pipe to it."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self.process.poll()

    def receive(self, seconds: float) -> Any:
        """Return the process's next message.

        Raises TimeoutError after some seconds, EOFError if the process has ended or closed its
        pipe, and StopSignalError after a stop signal.
        """
        deadline = time.monotonic() + seconds
        while not self.pipe.poll(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            stop_signals.check_stop()
            if time.monotonic() >= deadline:
                raise TimeoutError
        try:
            return self.pipe.recv()
        except ConnectionError:
            raise EOFError from None

    def wait(self, seconds: float) -> int | None:
        """Wait for the exit code, or return None if the process is still running."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        return self.exit_code

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.wait(KILL_SECONDS)


def start_function(
    path: str, timeout_seconds: float | None = None, **options: Any
) -> FunctionProcess:
    """Call a function, such as `package.module:name`, with its end of a pipe in a new process.

    Messages are pickled. Sending one raises OSError if the process does not receive it within
    `timeout_seconds`. `options` are those of `spawn`.
    """
    process, ours = connect([sys.executable, "-c", FUNCTION_CODE, path, *sys.path], **options)
    if timeout_seconds is not None:
        seconds, fraction = divmod(timeout_seconds, 1)
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return FunctionProcess(process, Connection(ours.detach()))


def run_function(path: str, descriptor: int) -> None:
    """Call a function in the process started by `start_function`."""
    module, _, name = path.partition(":")
    getattr(import_module(module), name)(Connection(descriptor))


def run_tool(
    command: Sequence[str], seconds: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and return exit code and output.

    Raises subprocess.TimeoutExpired after some seconds, and OSError if the command cannot start.
    """
    return subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
        **options,
    )


def run_processes(command: list[str], size: int, logs: Path, *, quiet: bool = False) -> int:
    """Run a command as `size` local processes; return 0 or the first nonzero exit code.

    If one fails, the others receive SIGTERM, and SIGKILL after ten seconds. With `quiet`, rank 0
    also writes to a log file.
    """
    with (
        stop_signals.record_signals(),
        start_processes(command, size, logs, quiet=quiet) as children,
    ):
        return _wait_and_stop(children)


@contextmanager
def start_processes(
    command: list[str],
    size: int,
    logs: Path,
    variables: Mapping[str, str] = NO_VARIABLES,
    *,
    quiet: bool = False,
    layout: RankLayout | None = None,
    spawn_function: SpawnFunction | None = None,
) -> Iterator[list[Child]]:
    """Start a command as `size` local processes; they are killed at the end of the block.

    They also die with this process. Without a layout they form the whole run. Rank 0 prints to this
    terminal unless `quiet`; the other ranks write `<logs>/<rank>.log`. If the variables name a
    supervisor, terminal signals do not reach the processes.
    """
    layout = layout or RankLayout(size, find_free_port())
    if layout.world_size > 1 or quiet:
        logs.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    try:
        for local_rank in range(size):
            rank = layout.first_rank + local_rank
            rank_variables = {**_build_rank_variables(local_rank, size, layout), **variables}
            log = logs / f"{rank}.log" if rank or quiet else None
            children.append((spawn_function or spawn)(command, log, rank_variables))
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def run_commands(commands: list[list[str]], logs: Path, variables: Mapping[str, str]) -> int:
    """Run independent commands at the same time, with additional environment variables.

    Command n, counted from 1, writes to `<logs>/<n>.log`. Returns as `run_processes`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with stop_signals.record_signals():
        return _wait_and_stop(
            [
                spawn(command, logs / f"{number}.log", variables)
                for number, command in enumerate(commands, start=1)
            ]
        )


def _build_rank_variables(local_rank: int, size: int, layout: RankLayout) -> dict[str, str]:
    device = {DEVICE_VARIABLE: str(layout.devices[local_rank])} if layout.devices else {}
    return {
        **device,
        "RANK": str(layout.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": layout.address,
        "MASTER_PORT": str(layout.port),
    }


def _wait_and_stop(children: list[Child]) -> int:
    try:
        timing.wait_for(lambda: find_exit_code(children) is not None)
        return convert_return_code(find_exit_code(children) or 0)
    finally:
        stop_processes(children)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; only Linux can."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def convert_return_code(code: int) -> int:
    """Return a shell exit code: 128 plus the signal number for a negative code."""
    return code if code >= 0 else FIRST_SIGNAL_CODE - code


def find_exit_code(children: Sequence[Child]) -> int | None:
    """Return the first nonzero exit code, 0 if all processes succeeded, or None if some still run.

    A code is negative if a signal ended the process.
    """
    codes = [child.poll() for child in children]
    failed = next((code for code in codes if code), None)
    return 0 if failed is None and None not in codes else failed


def stop_processes(children: list[Child]) -> None:
    """Send SIGTERM to child processes, and SIGKILL to those that still run after ten seconds."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def kill_group(child: Child) -> None:
    """Kill a process and its children, if it leads their process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
