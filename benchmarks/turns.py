"""Programs that train in turns: each computes some steps, then waits until the others had theirs.

The machine changes from minute to minute; programs that alternate meet the same of it. Each is a
process with all that it needs, and connects to a socket in its folder. What it sends after a turn
is one line of JSON: the seconds of its steps, and what it wants to say of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from regauge import choices, jsonl
from regauge.accelerators import Accelerator
from regauge.trackers import RunInfo, Tracker

SOCKET = "turns"
POLL_SECONDS = 0.5
GO = b"go\n"
LAST_WORDS = 15
"""Lines of the log of a program that failed."""


class Turn:
    """The side of a program that is measured: its clock runs from `wait` to `end`."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(folder / SOCKET))
        self._stream = self._socket.makefile("rwb")
        self._began = 0.0
        self._seconds = 0.0

    def wait(self) -> None:
        """Wait for this program's turn; it ends where nobody wants another."""
        if self._stream.readline() != GO:
            raise SystemExit
        self._began = time.perf_counter()

    def start(self) -> None:
        """Let the clock run from here: what was before is no work, but its preparation."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock when the device has done all: what follows is no training."""
        self._accelerator.synchronize()
        self._seconds = time.perf_counter() - self._began

    def end(self, **facts: Any) -> None:
        """Say what was done, and wait for the next turn."""
        own = {
            "pid": os.getpid(),
            "seconds": self._seconds,
            "peak_bytes": self._accelerator.peak_memory_bytes(),
        }
        self._stream.write(json.dumps(own | facts).encode() + b"\n")
        self._stream.flush()
        self.wait()


class Turns(Tracker):
    """Holds a run of Regauge up between its turns."""

    folder: str
    """Where the socket is."""
    held_out: str = "heldout/loss"
    """What is said of each evaluation."""
    counted: tuple[int, int] | None = None
    """Rows of the dataset and of a step, where rows are counted; else real tokens are."""
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
        """Stop the clock at a line of training, and end the turn after the evaluation behind it."""
        if self._turn is None:
            return
        if "train/loss" in values:
            self._turn.stop()
            self._loss = values["train/loss"]
        elif step == 0:
            self._turn.wait()
        else:
            before, self._count = self._count, self._counted(step)
            count = self._count - before
            self._turn.end(step=step, count=count, loss=self._loss, heldout=values[self.held_out])

    def _counted(self, step: int) -> int:
        """Return what all steps so far have counted; the last of an epoch may have fewer rows."""
        if self.counted is None:
            return int((jsonl.read_last_line(self._ledger) or {})["tokens"])
        rows, batch = self.counted
        epochs, inside = divmod(step, -(-rows // batch))
        return epochs * rows + min(inside * batch, rows)


@dataclass
class Program:
    """A program that takes part: a command that will connect to the socket of its folder."""

    name: str
    command: list[str]
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    unit: str = "tokens"
    """What it counts."""
    goal: float | None = None
    """How many times as fast the first program has to be."""
    most_turns: int | None = None
    """A slow one has fewer turns, in the first rounds; None for all."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """What it said, turn by turn."""
    start_seconds: float = 0.0
    """From the command to its first turn: imports, data, and what is compiled."""

    def rates(self, first: int = 1) -> list[float]:
        """Return what it counts (real tokens, …) a second, of each turn after the warm-up."""
        return [turn["count"] / turn["seconds"] for turn in self.turns[first:]]

    @property
    def peak_bytes(self) -> int:
        """The most memory of the device that it has had at a time."""
        return max(int(turn["peak_bytes"]) for turn in self.turns)

    def speed(self, first: int = 1) -> dict[str, Any]:
        """Return the median over its turns and their spread."""
        rates = self.rates(first)
        return {
            f"{self.unit}_per_second": round(statistics.median(rates), 1),
            "spread": [round(min(rates), 1), round(max(rates), 1)],
            "turns": len(rates),
        }

    def facts(self, first: int = 1) -> dict[str, Any]:
        """Return its figures: speed, memory, and what it takes to begin."""
        return {
            **self.speed(first),
            "first_turn_seconds": round(self.turns[0]["seconds"], 2),
            "start_seconds": round(self.start_seconds, 2),
            "peak_gb": round(self.peak_bytes / 1e9, 3),
        }


def alternate(programs: list[Program], turns: int) -> None:
    """Start the programs one after the other, and give each of them its turns."""
    with ExitStack() as stack:
        streams = []
        for program in programs:
            began = time.perf_counter()
            streams.append(stack.enter_context(_started(program)))
            program.start_seconds = time.perf_counter() - began
        for number in range(turns):
            for program, stream in zip(programs, streams, strict=True):
                if program.most_turns is not None and number >= program.most_turns:
                    continue
                said = b""
                with suppress(BrokenPipeError):
                    stream.write(GO)
                    stream.flush()
                    said = stream.readline()
                if not said:
                    raise _ended(program)
                program.turns.append(json.loads(said))
                _show(program, number)


def _show(program: Program, number: int) -> None:
    turn = program.turns[-1]
    rate = turn["count"] / turn["seconds"]
    rest = {name: turn[name] for name in ("step", "loss", "heldout") if name in turn}
    sys.stderr.write(f"{number} {program.name}: {rate:,.0f} {program.unit}/s {rest}\n")


@contextmanager
def _started(program: Program) -> Iterator[Any]:
    """Start a program and yield its stream, once it has connected."""
    program.folder.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server, (program.folder / "log").open("wb") as log:
        server.bind(str(program.folder / SOCKET))
        server.listen()
        server.settimeout(POLL_SECONDS)
        child = subprocess.Popen(
            program.command,
            env=os.environ | program.variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with _accepted(server, child, program) as connection:
                yield connection.makefile("rwb")
        finally:
            _end(child)


def _accepted(
    server: socket.socket, child: subprocess.Popen[bytes], program: Program
) -> socket.socket:
    while True:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if child.poll() is not None:
                raise _ended(program) from None
        else:
            connection.settimeout(None)
            return connection


def _ended(program: Program) -> SystemExit:
    """Return the error of a program that ended too early, with its last words."""
    said = (program.folder / "log").read_text(errors="replace").splitlines()
    return SystemExit("\n".join([f"{program.name} ended:", *said[-LAST_WORDS:]]))


def _end(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
