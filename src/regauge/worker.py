"""Work in processes of its own, which may hang, run out of memory or be killed.

    <folder>/request.json    what the workers do
    <folder>/lines.jsonl     what they have found so far, each line with the rank that wrote it
    <folder>/<rank>.log      what they printed, unless they share this terminal

`run_worker` starts `python -m <module> <folder>/request.json` for each rank. Lines stay when the
worker that wrote them dies. Workers and the processes that they started are killed in the end.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import jsonl, processes, timing
from regauge.processes import Seats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regauge.processes import Child

Line = dict[str, Any]
REQUEST, LINES = "request.json", "lines.jsonl"
POLL_SECONDS = 0.05
LAST_LINES = 10
VARIABLES = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""Workers meet by themselves, and not at the store of the run that starts them."""


@dataclass(frozen=True)
class WorkerLimits:
    """How long workers may take, in seconds."""

    total: float = math.inf
    silence: float = math.inf
    """Between two lines, of whichever worker."""
    start: float | None = None
    """Until each worker has written a line; `silence` if it is None."""
    after_failure: float = 0.0
    """For the others, once a worker has failed."""


@dataclass(frozen=True)
class WorkerExit:
    """How workers ended."""

    code: int | None
    """Of the first rank that failed, negative for a signal; None if they were stopped."""
    problem: str = ""
    """What ended them too early, as the end of a sentence about the worker."""
    last_lines: tuple[str, ...] = ()
    """What the rank that failed printed last; empty if it shared this terminal."""


@dataclass(frozen=True)
class WorkerJob:
    """A request, as the worker sees it."""

    request: dict[str, Any]
    rank: int
    lines: Path

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Hand a line to the process that started the workers."""
        jsonl.append(self.lines, {"rank": self.rank, **line})


def receive_job() -> WorkerJob:
    """Return what this process was started for by `run_worker`."""
    path = Path(sys.argv[1])
    return WorkerJob(json.loads(path.read_text()), int(os.environ["RANK"]), path.with_name(LINES))


def run_worker(
    module: str,
    request: Mapping[str, Any],
    folder: Path,
    limits: WorkerLimits,
    *,
    seats: Seats | None = None,
    quiet: bool = True,
    on_line: Callable[[Line], object] = lambda _: None,
    on_poll: Callable[[], object] = lambda: None,
) -> WorkerExit:
    """Run a module as workers in a folder until they end, fail or exceed a limit.

    `request` is written as JSON, `on_line` is called with every line, `on_poll` at each look. There
    is one worker unless `seats` say otherwise; one that is not quiet shares this terminal.
    """
    seats = seats or Seats(1, processes.free_port())
    _write_request(folder, request, seats.size)
    command = [sys.executable, "-m", module, str(folder / REQUEST)]
    with processes.started(
        command, seats.size, folder, VARIABLES, quiet=quiet, seats=seats, start=_spawn
    ) as children:
        watch = _Watch(folder, children, limits, on_line)
        try:
            timing.wait_for(watch.is_over, limits.total, poll_seconds=POLL_SECONDS, on_poll=on_poll)
            ended = watch.exit()
        finally:
            for child in children:
                _kill_group(child)
    watch.read_lines()
    return ended


class _Watch:
    """Reads what workers write, and tells when they are over."""

    def __init__(
        self,
        folder: Path,
        children: list[Child],
        limits: WorkerLimits,
        on_line: Callable[[Line], object],
    ) -> None:
        self._folder = folder
        self._children = children
        self._limits = limits
        self._on_line = on_line
        self._tail = jsonl.Tail(folder / LINES)
        self._ranks: set[int] = set()
        self._patience = limits.silence if limits.start is None else limits.start
        self._until = time.monotonic() + self._patience
        self._is_failed = self._is_silent = False

    def is_over(self) -> bool:
        """Return whether all have ended, or the others need not be waited for."""
        codes = [child.poll() for child in self._children]
        if None not in codes:
            return True
        now = time.monotonic()
        if self.read_lines() and len(self._ranks) == len(codes) and not self._is_failed:
            self._patience = self._limits.silence
            self._until = now + self._patience
        if any(codes) and not self._is_failed:
            self._is_failed = True
            self._until = min(self._until, now + self._limits.after_failure)
        self._is_silent = now >= self._until
        return self._is_silent

    def read_lines(self) -> bool:
        """Hand on the new lines; return whether there are any."""
        lines = self._tail.read()
        for line in lines:
            self._ranks.add(line["rank"])
            self._on_line(line)
        return bool(lines)

    def exit(self) -> WorkerExit:
        """Return how the workers ended, or that they have not."""
        code = processes.exit_code(self._children)
        codes = [child.poll() for child in self._children]
        rank = codes.index(code) if code else 0
        if code == 0:
            problem = ""
        elif code is not None:
            name = signal.Signals(-code).name if code < 0 else ""
            problem = f"killed by {name}" if name else f"ended with code {code}"
        elif self._is_silent:
            problem = f"wrote nothing for {self._patience:g} s"
        else:
            problem = f"did not end within {self._limits.total:g} s"
        return WorkerExit(code, problem, _last_lines(self._folder / f"{rank}.log"))


def _write_request(folder: Path, request: Mapping[str, Any], size: int) -> None:
    """Write a request into a folder, without what earlier workers left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (LINES, *(f"{rank}.log" for rank in range(size))):
        (folder / name).unlink(missing_ok=True)
    (folder / REQUEST).write_text(json.dumps(request))


def _spawn(command: list[str], log: Path | None, variables: Mapping[str, str]) -> Child:
    return processes.spawn(command, log, variables, own_session=True)


def _kill_group(child: Child) -> None:
    """Kill a worker and the processes that it started: it leads their group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _last_lines(log: Path) -> tuple[str, ...]:
    text = log.read_text(errors="replace") if log.exists() else ""
    return tuple(text.strip().splitlines()[-LAST_LINES:])
