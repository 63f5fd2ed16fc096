"""The processes of a run as forks of one that has imported all they need; see `forkserver.py`.

The imports of torch, its compiler and transformers take a processor for seconds. They are done once
for all processes of a machine, all attempts of a run, and all runs of a pipeline.
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

from regauge import choices, processes
from regauge.log import logger

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
"""What the processes of a run import, whatever its model."""
LARGEST_ANSWER = 4096
POLL_SECONDS = 1.0
KILLED_SECONDS = 10.0
"""A process that was killed, and whose end is not told after so long, takes the server with it."""


class LostError(Exception):
    """The process to fork from does not answer."""


class Forked:
    """A process that was forked, as subprocess.Popen has one."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self._until = math.inf
        """When it is gone, whether or not its end was told."""

    def poll(self) -> int | None:
        """Return its exit code, minus the signal's number for one, or None where it runs."""
        self._forks.listen(0)
        return self._forks.codes[self.pid]

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            now = time.monotonic()
            if now >= self._until:
                self._forks.close()
            elif now >= until:
                raise subprocess.TimeoutExpired(SERVER, timeout or 0)
            else:
                self._forks.listen(min(POLL_SECONDS, until - now))
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._send(signal.SIGKILL)
        self._until = min(self._until, time.monotonic() + KILLED_SECONDS)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Forks:
    """Starts processes from one that is made at the first of them."""

    def __init__(self) -> None:
        self.codes: dict[int, int | None] = {}
        """The code of every process that was forked, None while it runs."""
        self._server: _Server | None = None

    def begin(self) -> None:
        """Let the process to fork from import what it has to, for a start that is to come."""
        self._server = self._server or _Server()

    def start(
        self, command: list[str], log: Path | None, variables: Mapping[str, str], limit: float
    ) -> processes.Child:
        """Start `python -m` with more environment variables, as `processes.spawn` does.

        Where the process to fork from does not answer within `limit` seconds, it is spawned.
        """
        try:
            return Forked(self, self._forked(command[1:], log, variables, limit))
        except (LostError, OSError) as error:
            logger.warning("a process is started without being forked: %s", error)
            self.close()
            return processes.spawn(command, log, variables)

    def listen(self, seconds: float) -> int | None:
        """Take in what the server says within so many seconds; return a new process's id."""
        while self._server is not None:
            told = self._server.told(seconds)
            if told is None:
                return None
            if not told:
                self.close()
            if "ended" in told:
                self.codes[told["ended"]] = told["code"]
            if "pid" in told:
                return int(told["pid"])
            seconds = 0
        return None

    def close(self) -> None:
        """End the server, and with it all that were forked from it."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for pid in self._running():
            self.codes[pid] = -signal.SIGKILL

    def _forked(
        self, command: list[str], log: Path | None, variables: Mapping[str, str], limit: float
    ) -> int:
        """Return the id of a new process."""
        if self._server and self._server.environment != dict(os.environ) and not self._running():
            self.close()  # what is imported reads the environment
        self._server = self._server or _Server()
        self._server.ask({"command": command, "variables": {**choices.places(), **variables}}, log)
        until = time.monotonic() + limit
        while (pid := self.listen(max(0.0, until - time.monotonic()))) is None:
            if self._server is None:
                raise LostError("the process to fork from has ended")
            if time.monotonic() >= until:
                raise LostError(f"the process to fork from was not ready within {limit:g} s")
        self.codes[pid] = None
        return pid

    def _running(self) -> list[int]:
        return [pid for pid, code in self.codes.items() if code is None]


class _Server:
    """The process to fork from, and this end of its socket."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(theirs.fileno()), *MODULES],
                pass_fds=(theirs.fileno(),),
                preexec_fn=processes.die_with_parent,  # noqa: PLW1509
                start_new_session=True,
            )

    def ask(self, request: dict[str, Any], log: Path | None) -> None:
        """Ask for a process whose output goes to a log, or to this terminal."""
        with log.open("ab") if log else nullcontext() as file:
            files = [file.fileno()] * 2 if file else [1, 2]
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)

    def told(self, seconds: float) -> dict[str, Any] | None:
        """Return a message of the next seconds, None where there is none; {} is its end."""
        if not select.select([self._channel], [], [], seconds)[0]:
            return None
        try:
            text = self._channel.recv(LARGEST_ANSWER)
        except ConnectionError:
            text = b""
        return dict(json.loads(text)) if text else {}

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


_open: list[Forks] = []


@contextmanager
def forks() -> Iterator[Forks]:
    """Yield what starts processes; the same one within a block that has one already."""
    if _open:
        yield _open[0]
        return
    _open.append(Forks())
    try:
        yield _open[0]
    finally:
        _open.pop().close()
