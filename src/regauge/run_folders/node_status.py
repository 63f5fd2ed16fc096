"""State of a run's processes, in its output folder, for `regauge top`.

    ranks/status-4.json    processes on the node whose first rank is 4, in the newest attempt

A run's heartbeats are in each node's memory. The node's supervisor copies them once a second to
this file, so that other machines can read them through a shared file system. This module does not
import torch.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from regauge.config.output_files import RANKS, SAVED_RUN
from regauge.system.errors import DataError
from regauge.system.files import write_atomic
from regauge.system.json_files import DocumentShape, find_json, format_compact
from regauge.system.jsonl import Count
from regauge.system.processes import NO_PROCESS, inspect_process

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regauge.system.children import Child

STATUS_FILES = "status-*.json"
ProcessState = Literal["running", "stopped", "waiting", "ended"]
"""Process state: stopped by a signal, or in an uninterruptible wait such as for a disk."""
STATES: dict[str, ProcessState] = {"T": "stopped", "t": "stopped", "D": "waiting", "Z": "ended"}
"""Kernel state letter -> state; any other letter is a process that runs or sleeps."""


class ProcessStatus(DocumentShape):
    rank: Count
    pid: int
    phase: str
    """Last heartbeat phase."""
    step: Count
    beat_at: float
    """Last heartbeat time in seconds since the epoch."""
    state: ProcessState
    exit_code: int | None = None
    """Exit code, or the negative signal number that ended it; None while it exists."""
    resident_bytes: Count | None = None


class NodeProcesses(DocumentShape):
    """The processes on one node, as written by its supervisor."""

    attempt: Count
    first_rank: Count
    host: str
    written_at: float
    """Seconds since the epoch, by that node's clock."""
    is_final: bool
    """Whether the attempt has ended on this node."""
    processes: list[ProcessStatus]


@dataclass(frozen=True)
class Beat:
    count: int
    step: int
    phase: str
    """Ledger account to which the time is booked, such as `step`."""
    at: float
    """Beat time, in seconds on the monotonic clock."""
    max_gaps: tuple[float, ...]
    """Maximum seconds from a beat in each phase to the next beat; 0 for a phase never entered."""
    step_at: float
    """When the step last changed, in seconds on the monotonic clock; 0 before that."""
    device_memory_bytes: int
    """The process's peak device memory; 0 if unknown."""


def write_node_status(
    folder: Path,
    first_rank: int,
    children: Sequence[Child],
    beats: Sequence[Beat],
    *,
    attempt: int,
    is_final: bool = False,
) -> None:
    """Write the state of the processes that this node started for an attempt.

    An unwritable folder is ignored, because the run does not need the file.
    """
    pairs = enumerate(zip(children, beats, strict=True), first_rank)
    document = {
        "attempt": attempt,
        "first_rank": first_rank,
        "host": socket.gethostname(),
        "written_at": round(time.time(), 3),
        "is_final": is_final,
        "processes": [_describe_process(rank, child, beat) for rank, (child, beat) in pairs],
    }
    with suppress(OSError):
        path = folder / RANKS / f"status-{first_rank}.json"
        if (folder / SAVED_RUN).exists():  # a refused run leaves no folder
            path.parent.mkdir(exist_ok=True)  # a single process writes no log there
        write_atomic(path, format_compact(document), durable=False)


def _describe_process(rank: int, child: Child, beat: Beat) -> dict[str, Any]:
    code = child.poll()
    facts = inspect_process(child.pid) if code is None else NO_PROCESS
    return {
        "rank": rank,
        "pid": child.pid,
        "phase": beat.phase,
        "step": beat.step,
        "beat_at": round(time.time() - (time.monotonic() - beat.at), 3),
        "state": STATES.get(facts.state, "running") if facts.state else "ended",
        "exit_code": code,
        "resident_bytes": facts.resident_bytes if facts.state else None,
    }


def read_node_statuses(folder: Path) -> tuple[NodeProcesses, ...]:
    """Return the nodes in a run's newest attempt, by first rank.

    Missing or damaged files are left out.
    """
    paths: Iterable[Path] = sorted((folder / RANKS).glob(STATUS_FILES))
    nodes = [node for path in paths if (node := _read_node(path)) is not None]
    newest = max((node.attempt for node in nodes), default=0)
    newest_nodes = [node for node in nodes if node.attempt == newest]
    return tuple(sorted(newest_nodes, key=lambda node: node.first_rank))


def has_stopped_rank(folder: Path, since: float) -> bool:
    """Return whether a signal has stopped a process, in a status written after a time."""
    nodes = [node for node in read_node_statuses(folder) if not node.is_final]
    current = [node for node in nodes if node.written_at > since]
    return any(process.state == "stopped" for node in current for process in node.processes)


def _read_node(path: Path) -> NodeProcesses | None:
    try:
        document = find_json(path, "remove it")
        return None if document is None else NodeProcesses.model_validate(document)
    except (DataError, OSError, ValidationError):
        return None
