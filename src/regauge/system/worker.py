"""Runs work in child processes that may hang, run out of memory or be killed.

    <folder>/request.json    the request to the workers
    <folder>/lines.jsonl     results so far, each line with the rank that wrote it
    <folder>/<rank>.log      printed output, unless workers share this terminal

`run_worker` starts `python -m <module> <folder>/request.json` for each rank. A worker's lines
survive its death. At the end, workers and their child processes are killed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.system import jsonl, processes, stop_signals, timing
from regauge.system.children import find_exit_code, kill_group, spawn, start_processes
from regauge.system.files import write_atomic
from regauge.system.json_files import read_json
from regauge.system.line_tail import read_last_lines
from regauge.system.processes import RankLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regauge.system.children import Child

Line = dict[str, Any]
REQUEST, LINES = "request.json", "lines.jsonl"
LAST_LINES = 10
VARIABLES = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""Workers have a separate rendezvous, not the store of the run that starts them."""


@dataclass(frozen=True)
class WorkerLimits:
    """Worker time limits, in seconds."""

    total: float = math.inf
    silence: float = math.inf
    """Between two lines from any worker."""
    start: float | None = None
    """Until each worker has written the first line; by default `silence`."""
    after_failure: float = 0.0
    """For the remaining workers after a failure."""


@dataclass(frozen=True)
class WorkerExit:
    """How workers ended."""

    code: int | None
    """Exit code of the first failed rank, negative for a signal; None if they were stopped."""
    problem: str = ""
    """The reason for an early end, as the predicate of a sentence about the worker."""
    last_lines: tuple[str, ...] = ()
    """The last printed lines of the failed rank; empty if it shared this terminal."""


@dataclass(frozen=True)
class WorkerJob:
    """A request, as a worker receives it."""

    request: dict[str, Any]
    rank: int
    lines: Path

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Send a line to the process that started the workers."""
        jsonl.append_line(self.lines, {"rank": self.rank, **line})


def receive_job() -> WorkerJob:
    """Return the job for which `run_worker` started this process.

    From now on stop signals are passed on to the process that started it.
    """
    stop_signals.pass_to_parent()
    path = Path(sys.argv[1])
    request = read_json(path, "start the command again")
    return WorkerJob(request, int(os.environ["RANK"]), path.with_name(LINES))


def run_worker(
    module: str,
    request: Mapping[str, Any],
    folder: Path,
    limits: WorkerLimits,
    *,
    layout: RankLayout | None = None,
    quiet: bool = True,
    on_line: Callable[[Line], object] = lambda _: None,
    on_poll: Callable[[], object] = lambda: None,
) -> WorkerExit:
    """Run a module as worker processes until they end, fail or exceed a limit.

    `request` is written as JSON. `on_line` is called with every line, `on_poll` before each pause.
    Without a layout there is one worker. If not `quiet`, rank 0 shares this terminal. Raises
    StopSignalError after a stop signal.
    """
    stop_signals.check_stop()
    layout = layout or RankLayout(1, processes.find_free_port())
    _write_request(folder, request, layout.world_size)
    command = [sys.executable, "-m", module, str(folder / REQUEST)]
    with start_processes(
        command,
        layout.world_size,
        folder,
        VARIABLES,
        quiet=quiet,
        layout=layout,
        spawn_function=_spawn,
    ) as children:
        monitor = _WorkerMonitor(folder, children, limits, on_line)
        try:
            timing.wait_for(monitor.is_over, limits.total, on_poll=on_poll)
            worker_exit = monitor.describe_exit()
        finally:
            for child in children:
                kill_group(child)
    monitor.read_lines()
    return worker_exit


class _WorkerMonitor:
    """Reads workers' lines and decides when to stop waiting."""

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
        self._max_silence = limits.silence if limits.start is None else limits.start
        self._deadline = time.monotonic() + self._max_silence
        self._is_failed = self._is_silent = False

    def is_over(self) -> bool:
        """Return whether all workers have ended, or exceeded a silence limit."""
        codes = [child.poll() for child in self._children]
        if None not in codes:
            return True
        now = time.monotonic()
        if self.read_lines() and len(self._ranks) == len(codes) and not self._is_failed:
            self._max_silence = self._limits.silence
            self._deadline = now + self._max_silence
        if any(codes) and not self._is_failed:
            self._is_failed = True
            self._deadline = min(self._deadline, now + self._limits.after_failure)
        self._is_silent = now >= self._deadline
        return self._is_silent

    def read_lines(self) -> bool:
        """Pass new lines to `on_line`; return whether there are any."""
        lines = self._tail.read()
        for line in lines:
            self._ranks.add(line["rank"])
            self._on_line(line)
        return bool(lines)

    def describe_exit(self) -> WorkerExit:
        """Return how the workers ended, or which limit they exceeded."""
        code = find_exit_code(self._children)
        codes = [child.poll() for child in self._children]
        rank = codes.index(code) if code else 0
        if code == 0:
            problem = ""
        elif code is not None:
            name = signal.Signals(-code).name if code < 0 else ""
            problem = f"killed by {name}" if name else f"ended with code {code}"
        elif self._is_silent:
            problem = f"wrote nothing for {self._max_silence:g} s"
        else:
            problem = f"did not end within {self._limits.total:g} s"
        log = self._folder / f"{rank}.log"
        return WorkerExit(code, problem, tuple(read_last_lines(log, LAST_LINES)))


def _write_request(folder: Path, request: Mapping[str, Any], size: int) -> None:
    """Write a request to a folder, and remove the lines and logs of earlier workers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (LINES, *(f"{rank}.log" for rank in range(size))):
        (folder / name).unlink(missing_ok=True)
    write_atomic(folder / REQUEST, json.dumps(request), durable=False)


def _spawn(command: list[str], log: Path | None, variables: Mapping[str, str]) -> Child:
    with stop_signals.block_signals():
        return spawn(command, log, variables, new_session=True)
