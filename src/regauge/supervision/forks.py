"""Starts a run's processes as forks of a server that has imported torch; see `forkserver.py`.

Importing torch, its compiler and transformers takes seconds of processor time. The server does it
once for all processes on a machine, all attempts of a run, and all runs of a pipeline.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from regauge.system import children, choices, stop_signals
from regauge.system.errors import StopSignalError
from regauge.system.files import open_in_place
from regauge.system.log import logger
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SERVER = "regauge.supervision.forkserver"
MODULES = (
    "regauge.training.run",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""Modules imported by the processes of every run, whatever the model."""
MAX_MESSAGE_BYTES = 4096
EXIT_SECONDS = 1.0
"""Maximum wait for an exit message."""
KILL_SECONDS = 10.0
"""Maximum wait for a killed process to exit; then the server is killed as well."""


class ForkServerError(Exception):
    """The fork server does not answer."""


class ForkedProcess:
    """A forked process with the methods of subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self._deadline = math.inf
        """When the process counts as gone, even if the server has not reported an exit."""

    def poll(self) -> int | None:
        """Return the exit code, or minus a signal number; None while the process runs."""
        self._server.receive(0)
        return self._server.exit_codes[self.pid]

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raises subprocess.TimeoutExpired."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            now = time.monotonic()
            if now >= self._deadline:
                self._server.close()
            elif now >= until:
                raise subprocess.TimeoutExpired(SERVER, timeout or 0)
            else:
                self._server.receive(min(EXIT_SECONDS, until - now))
        return code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        self._deadline = min(self._deadline, time.monotonic() + KILL_SECONDS)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """Starts processes as forks of a server, which is itself started on first use."""

    def __init__(self) -> None:
        self.exit_codes: dict[int, int | None] = {}
        """Process id -> exit code, or None while it runs."""
        self._server: _ServerProcess | None = None

    def start_server(self) -> None:
        """Start the server ahead of the first process, so that its imports overlap other work."""
        self._server = self._server or _ServerProcess()

    def start(
        self,
        command: list[str],
        log: Path | None,
        variables: Mapping[str, str],
        timeout_seconds: float,
    ) -> children.Child:
        """Start a `python -m` command with extra environment variables, like `children.spawn`.

        The process is spawned if the server does not answer within `timeout_seconds`. Raises
        StopSignalError after a stop signal.
        """
        try:
            return ForkedProcess(self, self._fork(command[1:], log, variables, timeout_seconds))
        except StopSignalError:
            self.close()  # it may still answer
            raise
        except (ForkServerError, OSError) as error:
            logger.warning("starting a process without the fork server: %s", error)
            self.close()
            return children.spawn(command, log, variables)

    def receive(self, seconds: float) -> int | None:
        """Process the server's messages for some seconds; return a new process id, or None."""
        while self._server is not None:
            message = self._server.receive(seconds)
            if message is None:
                return None
            if not message:
                self.close()
            if "exited_pid" in message:
                self.exit_codes[message["exited_pid"]] = message["exit_code"]
            if "pid" in message:
                return int(message["pid"])
            seconds = 0
        return None

    def close(self) -> None:
        """Kill the server and all processes forked from it."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for pid in self._running_pids():
            self.exit_codes[pid] = -signal.SIGKILL

    def _fork(
        self,
        command: list[str],
        log: Path | None,
        variables: Mapping[str, str],
        timeout_seconds: float,
    ) -> int:
        """Return a new process id; raises ForkServerError."""
        has_changed = self._server and self._server.environment != dict(os.environ)
        if has_changed and not self._running_pids():
            self.close()  # imported modules may have read the environment
        self._server = self._server or _ServerProcess()
        variables = {**choices.module_folders_environment(), **variables}
        self._server.send_request({"command": command, "variables": variables}, log)
        until = time.monotonic() + timeout_seconds
        while (pid := self.receive(POLL_SECONDS)) is None:
            stop_signals.check_stop()
            if self._server is None:
                raise ForkServerError("the fork server has ended")
            if time.monotonic() >= until:
                raise ForkServerError(f"the fork server was not ready within {timeout_seconds:g} s")
        self.exit_codes[pid] = None
        return pid

    def _running_pids(self) -> list[int]:
        return [pid for pid, code in self.exit_codes.items() if code is None]


class _ServerProcess:
    """The server process, and this end of the socket."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        with stop_signals.block_signals():
            command = [sys.executable, "-m", SERVER, *MODULES]
            self._process, self._channel = children.connect(
                command, socket.SOCK_SEQPACKET, new_session=True, stdin=None
            )

    def send_request(self, request: dict[str, Any], log: Path | None) -> None:
        """Request a process; its output goes to a log, or to this terminal."""
        with open(log, "ab", opener=open_in_place) if log else nullcontext() as file:
            files = [file.fileno()] * 2 if file else [1, 2]
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return a message received within some seconds, or None; {} if the server ended."""
        if not select.select([self._channel], [], [], seconds)[0]:
            return None
        try:
            text = self._channel.recv(MAX_MESSAGE_BYTES)
        except ConnectionError:
            text = b""
        return dict(json.loads(text)) if text else {}

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


_open_servers: list[ForkServer] = []


@contextmanager
def open_fork_server() -> Iterator[ForkServer]:
    """Yield a fork server; nested blocks share the outer one."""
    if _open_servers:
        yield _open_servers[0]
        return
    _open_servers.append(ForkServer())
    try:
        yield _open_servers[0]
    finally:
        _open_servers.pop().close()
