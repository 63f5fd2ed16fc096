"""Files through which a supervisor and the processes of an attempt communicate.

Written by the supervisor:

    <scratch>/spec.json               the `AttemptSpec`
    <scratch>/evidence-request        requests the last collectives of every process

Written by process <n>:

    <scratch>/heartbeats              the heartbeats (`heartbeat.py`)
    <scratch>/collectives-<n>.json    its answer to the request
    <scratch>/failure-<n>.json        the failure that ended it
    <scratch>/progress-<n>            exists once a step is done, so that a stop saves first
    <scratch>/done-<n>                exists once the process reached the end of the run
    <scratch>/stack-<n>.txt           stacks of all threads

Processes are numbered from 0 on each node. No torch here.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regauge.config.output_files import ATTEMPTS
from regauge.run_folders import folder_lock
from regauge.run_folders.cost_meter import CostMeter, parse_meter
from regauge.supervision.failures import Failure, classify_error, collect_evidence, parse_failure
from regauge.supervision.heartbeat import Heartbeat
from regauge.system import choices, jsonl, processes, stop_signals, timing
from regauge.system.errors import (
    DataError,
    PreemptedError,
    StopSignalError,
    describe_error,
    first_line,
)
from regauge.system.files import write_json
from regauge.system.json_files import find_json, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPEC, HEARTBEATS, EVIDENCE_REQUEST = "spec.json", "heartbeats", "evidence-request"
T = TypeVar("T")
REQUEST_SECONDS = 0.2
"""Polling interval for a supervisor's requests."""
MAX_COLLECTIVES = 8
"""How many recent collectives a process reports."""


@dataclass(frozen=True)
class AttemptSpec:
    """Attempt specification, passed by a supervisor to the processes on its node."""

    scratch: Path
    attempt: int
    started_at: float
    """Start time in seconds since the epoch."""
    start_clock: float
    """Start time on time.monotonic()."""
    needs_preflight: bool
    """Whether the processes check their devices and collectives first."""
    token: str
    """Permission to publish checkpoints."""
    meter: CostMeter
    """The run's cost before the attempt, and the rate since."""
    first_rank: int = 0
    """Rank of this node's first process."""
    fault_plan: str | None = None
    """Fault plan file."""
    devices: tuple[int, ...] = ()
    """Process number -> device index, if some devices are excluded."""

    def write(self) -> None:
        document = asdict(self)
        del document["scratch"]
        (self.scratch / SPEC).write_text(json.dumps(document), encoding="utf-8")


def read_spec() -> AttemptSpec | None:
    """Return the specification from this process's supervisor, or None without a supervisor."""
    scratch = os.environ.get(processes.SUPERVISED_VARIABLE)
    if scratch is None:
        return None
    document = read_json(Path(scratch) / SPEC, "start the command again")
    return AttemptSpec(Path(scratch), **{**document, "meter": parse_meter(document["meter"])})


class WorkerReporter:
    """Reports this process's progress and exit; does nothing without a supervisor."""

    def __init__(self, spec: AttemptSpec | None, rank: int) -> None:
        self.spec = spec
        self.start_clock = spec.start_clock if spec else time.monotonic()
        """Start of the attempt on time.monotonic()."""
        self._rank = rank
        self._number = rank - spec.first_rank if spec else rank
        self._folder: Path | None = None
        self.heartbeat = Heartbeat(spec.scratch / HEARTBEATS if spec else None, self._number)
        self.step = 0
        self._first_step: int | None = None
        """Step at which this attempt began."""
        self._deferral = ExitStack()
        """Makes a stop wait for a save, from the first step to the exit."""
        self._has_progress = False

    def check_owner(self) -> None:
        """Raise PreemptedError if a newer attempt owns the output folder."""
        if self.spec is not None and self._folder is not None:
            folder_lock.check_token(self._folder, self.spec.token)

    def record_start(self, folder: Path, planned_steps: int, accelerator: str) -> None:
        """Append the start of the attempt to `attempts.jsonl`; the first process calls this.

        `accelerator` is the device kind.
        """
        self._folder = folder
        if self.spec is not None:
            document = {
                "attempt": self.spec.attempt,
                "started_at": round(self.spec.started_at, 3),
                "planned_steps": planned_steps,
                "accelerator": accelerator,
            }
            jsonl.append_line(folder / ATTEMPTS, {**document, **self.spec.meter.start_fields})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report a phase within the block, and `init` after it.

        Raises StopSignalError after a stop signal.
        """
        stop_signals.check_stop()
        self.heartbeat.beat(name)
        yield
        self.heartbeat.beat("init")

    def wait_for(self, find: Callable[[], T], seconds: float) -> T:
        """Poll `find` until it returns a true value or time is up; return the last value."""
        return timing.wait_for(find, seconds, on_poll=self.heartbeat.beat)

    def report_step(self, step: int) -> None:
        """Report the number of finished steps; after the first one a stop waits for a save."""
        self.step = step
        self.heartbeat.beat(step=step)
        if self._first_step is None:
            self._first_step = step
        elif step > self._first_step and not self._has_progress:
            self._has_progress = True
            self._deferral.enter_context(stop_signals.defer_stop(has_limit=False))
            self._write(f"progress-{self._number}", {})

    @contextmanager
    def capture_exit(self) -> Iterator[None]:
        """Report to the supervisor how the block ended: done, or a failure."""
        if self.spec is None:
            with self._deferral:
                yield
            return
        scratch = self.spec.scratch
        stack = (scratch / f"stack-{self._number}.txt").open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        faulthandler.enable(file=stack, all_threads=True)
        threading.Thread(target=self._answer_request, name="recorder", daemon=True).start()
        try:
            with self._deferral, _describe_stop():
                yield
        except BaseException as error:
            self._write(f"failure-{self._number}.json", self._describe_failure(error))
            raise
        finally:
            self.heartbeat.beat("end")
        self._write(f"done-{self._number}", {})

    def _answer_request(self) -> None:
        """Wait for the supervisor's request, then write this process's last collectives."""
        if self.spec is None:
            return
        request = self.spec.scratch / EVIDENCE_REQUEST
        timing.wait_for(request.exists, poll_seconds=REQUEST_SECONDS)
        self._write(f"collectives-{self._number}.json", {"entries": _read_flight_recorder()})

    def _describe_failure(self, error: BaseException) -> dict[str, Any]:
        line, code = describe_error(error)
        kind, frame = classify_error(error), choices.find_custom_frame(error)
        if kind == "code" and frame is not None:
            line = f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {first_line(error)}"
            line += "; correct that file"
        failure = Failure(
            kind=kind,
            rank=self._rank,
            step=self.step,
            problem=line,
            evidence={
                **collect_evidence(error),
                "exit_code": code,
                "collectives": _read_flight_recorder(),
            },
        )
        return {**failure.document(), "reported_at": time.monotonic()}

    def _write(self, name: str, document: dict[str, Any]) -> None:
        if self.spec is not None:
            write_json(self.spec.scratch / name, document)


def _read_flight_recorder() -> list[dict[str, Any]]:
    """Return the last collectives in torch's flight recorder, oldest first."""
    recorder = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    if recorder is None:
        return []
    entries = json.loads(recorder(includeCollectives=True)).get("entries", [])
    fields = ("collective_seq_id", "profiling_name", "state", "input_sizes", "process_group")
    return [{name: entry.get(name) for name in fields} for entry in entries[-MAX_COLLECTIVES:]]


class WorkerReports:
    """Reads files written by an attempt's processes on this node."""

    def __init__(self, scratch: Path, size: int) -> None:
        self._scratch = scratch
        self._size = size

    def request_collectives(self) -> None:
        (self._scratch / EVIDENCE_REQUEST).touch()

    def has_progress(self) -> bool:
        """Return whether any process has finished a step in this attempt."""
        return any((self._scratch / f"progress-{n}").exists() for n in range(self._size))

    def is_done(self, number: int) -> bool:
        return (self._scratch / f"done-{number}").exists()

    def read_failure(self, number: int) -> Failure | None:
        """Return the failure reported by a process, or None."""
        document = self._read_failure_document(number)
        return parse_failure(document) if document else None

    def read_failures(self) -> list[Failure]:
        """Return all reported failures, earliest first."""
        documents = filter(None, map(self._read_failure_document, range(self._size)))
        return [
            parse_failure(document) for document in sorted(documents, key=itemgetter("reported_at"))
        ]

    def _read_failure_document(self, number: int) -> dict[str, Any]:
        return _read_document(self._scratch / f"failure-{number}.json")

    def read_stack(self, number: int) -> list[str]:
        """Return the stacks of a process's threads, written on request or at its death."""
        return read_text(self._scratch / f"stack-{number}.txt").splitlines()

    def read_collectives(self, number: int) -> list[dict[str, Any]]:
        """Return a process's last collectives, oldest first; empty if none were reported."""
        entries: list[dict[str, Any]]
        entries = _read_document(self._scratch / f"collectives-{number}.json").get("entries", [])
        failure = self.read_failure(number)
        return entries or (failure.evidence.get("collectives", []) if failure else [])


def read_text(path: Path) -> str:
    """Return a file's text, or "" if it is unreadable."""
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return ""


def _read_document(path: Path) -> dict[str, Any]:
    try:
        return find_json(path, "start the command again") or {}
    except DataError:
        return {}


@contextmanager
def _describe_stop() -> Iterator[None]:
    """Convert a StopSignalError in the block to an error for the supervisor."""
    try:
        yield
    except StopSignalError as error:
        problem = "stopped by a signal when there was nothing to save"
        raise PreemptedError(problem, "run the same command to resume", error.number) from None
