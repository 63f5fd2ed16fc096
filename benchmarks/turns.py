"""Runs programs that alternate: each computes some steps, then waits while the others compute.

The speed of a machine changes from minute to minute; alternating programs are affected equally.
Each program is a separate process that connects to a socket in its folder. After a turn it sends
one line of JSON: the seconds of its steps, and its figures.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from regauge.accelerators import Accelerator
from regauge.monitoring.trackers import RunInfo, Tracker
from regauge.system import choices, jsonl
from regauge.system.children import Child, spawn

SOCKET = "turns"
POLL_SECONDS = 0.5
GO = b"go\n"
NUM_LOG_LINES = 15
"""Lines of the log of a failed program that are printed."""


class Turn:
    """The side of the measured program: its clock runs from `wait` or `start` to `stop`."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(folder / SOCKET))
        self._stream = self._socket.makefile("rwb")
        self._began = 0.0
        self._seconds = 0.0

    def wait(self) -> None:
        """Wait for the next turn; raises SystemExit if there is none."""
        if self._stream.readline() != GO:
            raise SystemExit
        self._began = time.perf_counter()

    def start(self) -> None:
        """Start the clock again, after preparation that does not count."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock when the device has finished; later work does not count."""
        self._accelerator.synchronize()
        self._seconds = time.perf_counter() - self._began

    def end(self, **facts: Any) -> None:
        """Send the figures of this turn, and wait for the next turn."""
        common = {
            "pid": os.getpid(),
            "seconds": self._seconds,
            "peak_bytes": self._accelerator.peak_memory_bytes(),
        }
        self._stream.write(json.dumps(common | facts).encode() + b"\n")
        self._stream.flush()
        self.wait()


class TurnTracker(Tracker):
    """Pauses a Regauge run between its turns."""

    folder: str
    """Folder of the socket."""
    held_out: str = "heldout/loss"
    """Metric of each evaluation that is sent."""
    rows_per_epoch_and_step: tuple[int, int] | None = None
    """Rows of the dataset and of a step, to count rows; None counts real tokens."""
    _turn: Turn | None = PrivateAttr(default=None)
    _ledger: Path = PrivateAttr(default=Path())
    _count: int = PrivateAttr(default=0)
    _loss: float = PrivateAttr(default=0.0)

    def start(self, run: RunInfo) -> None:
        """Connect."""
        self._ledger = run.folder / "ledger.jsonl"
        kind = run.settings["accelerator"]["kind"]
        self._turn = Turn(Path(self.folder), choices.load("accelerators", kind)())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Stop the clock at training metrics, and end the turn after the next evaluation."""
        if self._turn is None:
            return
        if "train/loss" in values:
            self._turn.stop()
            self._loss = values["train/loss"]
        elif step == 0:
            self._turn.wait()
        else:
            before, self._count = self._count, self._count_until(step)
            count = self._count - before
            self._turn.end(step=step, count=count, loss=self._loss, heldout=values[self.held_out])

    def _count_until(self, step: int) -> int:
        """Return the tokens or rows of all steps; the last step of an epoch may have fewer rows."""
        if self.rows_per_epoch_and_step is None:
            return int((jsonl.read_last_line(self._ledger) or {})["tokens"])
        rows, batch = self.rows_per_epoch_and_step
        epochs, steps = divmod(step, -(-rows // batch))
        return epochs * rows + min(steps * batch, rows)


@dataclass
class Program:
    """A program that alternates: a command that connects to the socket in its folder."""

    name: str
    command: list[str]
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    unit: str = "tokens"
    """Unit of its count."""
    goal: float | None = None
    """Speedup that the first program must reach over this one."""
    max_turns: int | None = None
    """A slow program has fewer turns, in the first rounds; None for all."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """The figures that it sent after each turn."""
    start_seconds: float = 0.0
    """From the command to the first turn: imports, data and compilation."""

    def rates(self, first: int = 1) -> list[float]:
        """Return the units per second of each turn after the warm-up, such as tokens/s."""
        return [turn["count"] / turn["seconds"] for turn in self.turns[first:]]

    @property
    def peak_bytes(self) -> int:
        """The peak device memory of all turns."""
        return max(int(turn["peak_bytes"]) for turn in self.turns)

    def summarize_speed(self, first: int = 1) -> dict[str, Any]:
        """Return the median rate of the turns and its range."""
        rates = self.rates(first)
        return {
            f"{self.unit}_per_second": round(statistics.median(rates), 1),
            "range": [round(min(rates), 1), round(max(rates), 1)],
            "repeats": len(rates),
        }

    def summarize(self, first: int = 1) -> dict[str, Any]:
        """Return speed, peak memory, and the seconds of the start and of the first turn."""
        return {
            **self.summarize_speed(first),
            "first_repeat_seconds": round(self.turns[0]["seconds"], 2),
            "start_seconds": round(self.start_seconds, 2),
            "peak_gb": round(self.peak_bytes / 1e9, 3),
        }


def alternate(programs: list[Program], turns: int) -> None:
    """Start the programs one after the other, and give each of them its turns."""
    with ExitStack() as stack:
        streams = []
        for program in programs:
            began = time.perf_counter()
            streams.append(stack.enter_context(_start(program)))
            program.start_seconds = time.perf_counter() - began
        for index in range(turns):
            for program, stream in zip(programs, streams, strict=True):
                if program.max_turns is not None and index >= program.max_turns:
                    continue
                line = b""
                with suppress(BrokenPipeError):
                    stream.write(GO)
                    stream.flush()
                    line = stream.readline()
                if not line:
                    raise _build_exit_error(program)
                program.turns.append(json.loads(line))
                _print_turn(program, index)


def _print_turn(program: Program, index: int) -> None:
    turn = program.turns[-1]
    rate = turn["count"] / turn["seconds"]
    metrics = {name: turn[name] for name in ("step", "loss", "heldout") if name in turn}
    sys.stderr.write(f"{index} {program.name}: {rate:,.0f} {program.unit}/s {metrics}\n")


@contextmanager
def _start(program: Program) -> Iterator[Any]:
    """Start a program and yield its stream after it has connected."""
    program.folder.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(program.folder / SOCKET))
        server.listen()
        server.settimeout(POLL_SECONDS)
        child = spawn(program.command, program.folder / "log", program.variables, new_session=True)
        try:
            with _accept(server, child, program) as connection:
                yield connection.makefile("rwb")
        finally:
            kill_session(child)


def _accept(server: socket.socket, child: Child, program: Program) -> socket.socket:
    while True:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if child.poll() is not None:
                raise _build_exit_error(program) from None
        else:
            connection.settimeout(None)
            return connection


def _build_exit_error(program: Program) -> SystemExit:
    """Return the error of a program that ended too early, with the end of its log."""
    lines = (program.folder / "log").read_text(errors="replace").splitlines()
    return SystemExit("\n".join([f"{program.name} ended:", *lines[-NUM_LOG_LINES:]]))


def kill_session(child: Child) -> None:
    """Kill a child that leads a session, with its process group."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
