"""One node's command in a Ray job, as an actor on that node."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from regauge.jobs.targets._secret_files import read_secret_files
from regauge.system.children import convert_return_code, spawn
from regauge.system.errors import ERROR_PREFIX, DataError
from regauge.system.processes import find_free_port

DRAIN_SECONDS = 2.0
"""Wait for an ended command's last lines; its children may hold the output open."""
NOT_FOUND = 127
"""Exit code for a command that cannot start, as in shells."""


class NodeActor:
    """One node's command, as an actor on that node or in the driver."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._code: int | None = None

    def find_address(self) -> tuple[str, int]:
        """Return this node's cluster address, and a free port."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address()), find_free_port()  # type: ignore[no-untyped-call]

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], secrets: Mapping[str, str]
    ) -> None:
        """Start the command; if it cannot start, `poll` returns the reason and a code."""
        try:
            # It does not outlive this actor, which Ray may kill.
            self._process = spawn(
                command,
                variables={**variables, **read_secret_files(secrets)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except DataError as error:
            self._record_failure(f"{error}", DataError.exit_code)
            return
        except OSError as error:
            remedy = "install Regauge there in the same folder, or set working_dir"
            problem = f"{command[0]} cannot start here: {error.strerror}"
            self._record_failure(f"{problem}; {remedy}", NOT_FOUND)
            return
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.daemon = True
        self._reader.start()

    def _record_failure(self, reason: str, code: int) -> None:
        """Record why the command did not start, as the node's last line and exit code."""
        self._lines.put(f"{ERROR_PREFIX}{reason}")
        self._code = code

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._lines.put(line.decode(errors="replace").rstrip("\r\n"))

    def poll(self) -> tuple[list[str], int | None]:
        """Return the command's new lines, and the exit code if it has ended."""
        if self._process is not None and self._code is None:
            self._code = self._process.poll()
            if self._code is not None and self._reader is not None:
                self._reader.join(DRAIN_SECONDS)
        lines = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        code = self._code
        return lines, None if code is None else convert_return_code(code)

    def stop(self, number: int) -> None:
        """Send a signal to the command if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
