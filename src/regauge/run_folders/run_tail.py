"""The present state of a run, read from the ends of its files in a few milliseconds.

`run_folder.py` reads the whole content of a finished run for reports. This module reads runs that
are being written, and many runs at once. A file that is missing, incomplete or damaged leaves its
part empty.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regauge.config import RUN_IDENTITY, SAVED_RUN
from regauge.monitoring.trackers import TRAIN_LOSS, is_evaluation_metric
from regauge.run_folders.cost_meter import (
    ATTEMPTS,
    AttemptLine,
    LedgerLine,
    PaidLine,
    extend_cost,
    read_last_seen,
)
from regauge.run_folders.folder_lock import MAX_OWNER_BYTES
from regauge.run_folders.goodput import Goodput, compute_goodput
from regauge.run_folders.run_folder import MARKER_FILES, MetricsShape, ReportedStage, RunShape
from regauge.system import jsonl
from regauge.system.errors import DataError
from regauge.system.files import LOCK, read_content
from regauge.system.json_files import DocumentShape, find_json, find_mismatch

RunState = Literal["running", "finished", "failed", "preempted", "unknown"]
"""State of a run; it is unknown if the run ended without recording it, as after SIGKILL."""
FRESH_SECONDS = 30.0
"""Time after the last sign of life of a run on another machine for which it counts as running."""
METRICS_BYTES, LEDGER_BYTES = 1 << 14, 1 << 13
"""Bytes that are read at the end of `metrics.jsonl` and of `ledger.jsonl`."""
LOCKS = Path("/proc/locks")
JOBS, JOB = "jobs", "job.json"
"""The folder of the jobs of `predict` in their output folder, and the document of all jobs."""
DONE, RESULT = "done.json", "result.json"
RESULT_FILES = {
    RESULT: None,
    DONE: None,
    "evaluation.json": "evaluate",
    "benchmark.json": "benchmark",
    "manifest.json": "prepare",
}
"""Files that only a finished run has, with the verb that writes them."""
_OWNER = re.compile(r"process \d+ of (\S+)")

Document = dict[str, Any]
FileId = tuple[int, int]
"""Device and inode of a file."""


@dataclass(frozen=True)
class RunTail:
    """The ends of the files of one output folder."""

    folder: Path
    verb: str | None
    settings: Document
    """The tables of `run.json`, without the identity."""
    identity: Document
    metrics: tuple[Document, ...]
    """The last lines of `metrics.jsonl` with values, oldest first."""
    stop_reason: str | None
    """The reason for the end of a finished training run."""
    ledger: Document
    """The last line of `ledger.jsonl`; empty without one."""
    launches: tuple[Document, ...]
    """The lines of `attempts.jsonl`; for `predict` the last line of each job."""
    has_result: bool
    last_seen_at: float | None
    """Time of the last sign of life, in seconds since the epoch."""
    is_locked: bool
    """Whether a process of this machine holds the lock of the folder."""
    lock_owner: str
    """Host of the process that locked the folder last; empty if it is unknown."""

    @property
    def step(self) -> int | None:
        """The last step that the run logged."""
        lines = [line for line in (*self.metrics[-1:], self.ledger) if line]
        return max((int(line["step"]) for line in lines), default=None)

    @property
    def attempt(self) -> int | None:
        """The number of the last attempt."""
        return max((line["attempt"] for line in self.launches if "attempt" in line), default=None)

    @property
    def began_at(self) -> float | None:
        """Time of the first start, in seconds since the epoch."""
        return min(self._list_times("started_at"), default=None)

    @property
    def ended_at(self) -> float | None:
        """Time of the last recorded end, in seconds since the epoch."""
        return max(self._list_times("ended_at"), default=None)

    def _list_times(self, key: str) -> list[float]:
        return [line[key] for line in self.launches if line.get(key) is not None]

    def find_value(self, metric: str) -> float | str | None:
        """Return the last value of a metric; NaN and infinities are texts."""
        values = (line[metric] for line in reversed(self.metrics) if metric in line)
        value: float | str | None = next(values, None)
        return value

    def find_main_metric(self) -> str | None:
        """Return the metric that decides the run: its target, the best one, or its first score."""
        stop, output = self.settings.get("stop") or {}, self.settings.get("output") or {}
        target = stop.get("target") or {}
        chosen = target.get("metric") or (output.get("checkpoint") or {}).get("best_metric")
        if chosen and self.find_value(chosen) is not None:
            return str(chosen)
        names = [name for line in reversed(self.metrics) for name in line]
        scores = filter(is_evaluation_metric, names)
        losses = [name for name in names if name == TRAIN_LOSS]
        return next(iter([*scores, *losses]), None)

    def compute_total_steps(self) -> int | None:
        """Return the number of steps of the whole run; None if it is not known yet."""
        stop = self.settings.get("stop") or {}
        if isinstance(steps := stop.get("steps"), int):
            return steps
        epochs, line = stop.get("epochs"), next(reversed(self.metrics), {})
        epoch = self.find_value("train/epoch")
        if not isinstance(epochs, int | float) or not isinstance(epoch, int | float) or not epoch:
            return None
        lines = [line for line in self.metrics if "train/epoch" in line]
        return max(1, round(lines[-1]["step"] / epoch * epochs)) if line else None

    def find_state(self, now: float) -> RunState:
        """Return the state of the run at a time in seconds since the epoch."""
        last = self.launches[-1] if self.launches else None
        is_fresh = self.last_seen_at is not None and now - self.last_seen_at < FRESH_SECONDS
        has_open_attempt = last is None or any(
            line.get("ended_at") is None for line in self._last_lines()
        )
        if self.is_locked and not (self.has_result and not has_open_attempt):
            return "running"
        if has_open_attempt and is_fresh and not self.has_result:
            return "running"
        if self.has_result:
            return "finished"
        outcomes = () if has_open_attempt else (line.get("outcome") for line in self._last_lines())
        outcome = next(filter(None, outcomes), None)
        if outcome in (None, "finished", "preempted"):
            return outcome or "unknown"
        return "failed"

    def _last_lines(self) -> tuple[Document, ...]:
        """Return the last line of the run, or of each job."""
        return self.launches if self.verb == "predict" else self.launches[-1:]

    def compute_usd(self, now: float) -> float | None:
        """Return the dollars so far; None if no price is known."""
        prices = (price_line(line, now, self.last_seen_at) for line in self._last_lines())
        amounts = [price for price in prices if price is not None]
        if amounts:
            return sum(amounts)
        usd: float | None = self.ledger.get("usd")
        return usd

    def compute_goodput(self, now: float) -> Goodput | None:
        """Return the goodput so far; None without a recorded attempt and a ledger."""
        if not self.ledger or self.verb == "predict":
            return None
        return compute_goodput(list(self.launches), self.ledger, self._find_end(now))

    def _find_end(self, now: float) -> float | None:
        """Return the time up to which an open attempt is known to have existed."""
        if self.launches and self.launches[-1].get("ended_at") is not None:
            return None
        return now if self.is_locked else self.last_seen_at


def price_line(line: Document, now: float, last_seen_at: float | None) -> float | None:
    """Return the dollars up to a line of `attempts.jsonl`, and since if it has no end."""
    usd: float | None = line.get("usd")
    rate = line.get("usd_per_hour")
    if line.get("ended_at") is not None or rate is None or line.get("started_at") is None:
        return usd
    until = min(now, last_seen_at) if last_seen_at is not None else line["started_at"]
    return extend_cost(line, until).usd


def is_any_run(folder: Path) -> bool:
    """Return whether a folder is the output folder of a run of any verb."""
    names = (*MARKER_FILES, DONE)
    return any((folder / name).is_file() for name in names) or is_predict_folder(folder)


def is_predict_folder(folder: Path) -> bool:
    """Return whether a folder is the output folder of `predict`."""
    return (folder / JOBS).is_dir() and (folder / JOB).is_file()


def read_run_tail(folder: Path, held_locks: frozenset[FileId] | None = None) -> RunTail:
    """Read the ends of the files of an output folder; `held_locks` is from `list_held_locks`."""
    locks = list_held_locks() if held_locks is None else held_locks
    run = _read_document(folder / SAVED_RUN, RunShape)
    done = {} if run else _read_document(folder / DONE, ReportedStage)
    identity = run.pop(RUN_IDENTITY, {})
    lines = jsonl.read_recent_lines(folder / "metrics.jsonl", MetricsShape, METRICS_BYTES)
    ledger = jsonl.read_recent_lines(folder / "ledger.jsonl", LedgerLine, LEDGER_BYTES)
    summaries = [line["summary"] for line in lines if line.get("summary") is not None]
    results = [name for name in RESULT_FILES if (folder / name).is_file()]
    is_predict = is_predict_folder(folder)
    homes = _list_job_folders(folder) if is_predict else [folder]
    verbs = [RESULT_FILES[name] for name in results if RESULT_FILES[name]]
    return RunTail(
        folder=folder,
        verb="predict" if is_predict else _find_verb([identity, done], verbs),
        settings=run or done.get("settings", {}),
        identity=identity,
        metrics=tuple(line for line in lines if "summary" not in line),
        stop_reason=summaries[-1].get("stop_reason", "finished") if summaries else None,
        ledger=ledger[-1] if ledger else {},
        launches=_read_launches(homes, is_predict=is_predict),
        has_result=bool(results),
        last_seen_at=_find_last_seen(homes, folder / "metrics.jsonl"),
        is_locked=any(find_file_id(home / LOCK) in locks for home in homes),
        lock_owner=next(filter(None, (_read_lock_owner(home / LOCK) for home in homes)), ""),
    )


def _list_job_folders(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / JOBS).iterdir() if path.is_dir())


def _find_verb(documents: list[Document], verbs: list[str | None]) -> str | None:
    names = [document["verb"] for document in documents if document.get("verb")]
    return next(iter([*names, *verbs]), None)


def _read_launches(homes: list[Path], *, is_predict: bool) -> tuple[Document, ...]:
    if not is_predict:
        return tuple(jsonl.read_recent_lines(homes[0] / ATTEMPTS, AttemptLine))
    lines = [jsonl.read_recent_lines(home / ATTEMPTS, PaidLine) for home in homes]
    return tuple(job[-1] for job in lines if job)


def _find_last_seen(homes: list[Path], metrics: Path) -> float | None:
    """Return the last sign of life; of a run without a supervisor, its last line of metrics."""
    times = [seen for home in homes if (seen := read_last_seen(home)) is not None]
    if not times and not (metrics.parent / ATTEMPTS).exists():
        times = [metrics.stat().st_mtime] if metrics.is_file() else []
    return max(times, default=None)


def _read_document(path: Path, shape: type[DocumentShape]) -> Document:
    """Return a JSON object; an empty one if the file is missing or damaged."""
    try:
        document = find_json(path, "restore it")
    except (DataError, OSError):
        return {}
    return {} if document is None or find_mismatch(document, shape) else document


def _read_lock_owner(path: Path) -> str:
    """Return the host of the process that a lock file names; empty if it names none."""
    try:
        content = read_content(path, "remove it") or b""
    except (DataError, OSError):
        return ""
    match = _OWNER.match(content[:MAX_OWNER_BYTES].decode(errors="replace"))
    return match[1] if match else ""


def list_held_locks() -> frozenset[FileId]:
    """Return the files that processes of this machine have locked, as Linux lists them.

    A lock is not tried, because that would hold it for a moment. Empty on other systems.
    """
    try:
        lines = LOCKS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(filter(None, map(_parse_lock, lines)))


def _parse_lock(line: str) -> FileId | None:
    """Return the file of a line of /proc/locks, such as `1: FLOCK ADVISORY WRITE 9 08:01:123 …`."""
    fields = line.split()
    if "->" in fields or len(fields) < 6 or fields[5].count(":") != 2:  # noqa: PLR2004  (a waiter)
        return None
    major, minor, inode = fields[5].split(":")
    return os.makedev(int(major, 16), int(minor, 16)), int(inode)


def find_file_id(path: Path) -> FileId | None:
    """Return the device and the inode of a file; None if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def read_state(folder: Path) -> RunState:
    """Return the state of the run in an output folder."""
    return read_run_tail(folder).find_state(time.time())
