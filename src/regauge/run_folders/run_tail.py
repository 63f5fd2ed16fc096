"""A run's present state, read from the ends of its files in a few milliseconds.

`run_folder.py` reads a finished run's whole content for reports. This module reads runs that are
being written, and many runs at once. A missing, incomplete or damaged file leaves its part empty.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from regauge.config import MANIFEST, RUN_IDENTITY
from regauge.config.output_files import (
    ATTEMPTS,
    BENCHMARK,
    DONE,
    EVALUATION,
    JOB,
    JOBS,
    LEDGER,
    METRICS,
    RESULT,
    SAVED_RUN,
)
from regauge.monitoring.trackers import TRAIN_LOSS, is_evaluation_metric
from regauge.run_folders.cost_meter import extend_cost, read_last_seen
from regauge.run_folders.documents import (
    AttemptLine,
    LedgerLine,
    PaidLine,
    ResultShape,
    RunShape,
    StageRecord,
    StepMetrics,
    read_document,
)
from regauge.run_folders.folder_lock import (
    find_file_id,
    is_owner_stopped,
    list_held_locks,
    read_lock_owner,
)
from regauge.run_folders.goodput import Goodput, compute_goodput
from regauge.run_folders.node_status import has_stopped_rank
from regauge.run_folders.run_folder import MARKER_FILES
from regauge.system import jsonl
from regauge.system.files import LOCK

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.run_folders.documents import Document
    from regauge.run_folders.folder_lock import FileId

RunState = Literal["running", "stopped", "finished", "failed", "preempted", "unknown"]
"""Run state; stopped by SIGSTOP; unknown if no end was recorded, as after SIGKILL."""
FRESH_SECONDS = 30.0
"""A run on another machine counts as running this long after its last sign of life."""
METRICS_BYTES, LEDGER_BYTES = 1 << 14, 1 << 13
"""Bytes to read at the end of `metrics.jsonl` and `ledger.jsonl`."""
SPEED_LINES = 20
"""Last metric lines over which a run's speed is measured."""
RESULT_FILES = {
    RESULT: None,
    DONE: None,
    EVALUATION: "evaluate",
    BENCHMARK: "benchmark",
    MANIFEST: "prepare",
}
"""File that only a finished run has -> verb that writes it."""


class RunProgress(NamedTuple):
    """How many steps of a run are done."""

    step: int
    total_steps: int | None
    eta_seconds: float | None
    """Estimated time until the last step; None if it is unknown."""


@dataclass(frozen=True)
class RunTail:
    """The ends of the files in one output folder."""

    folder: Path
    verb: str | None
    settings: Document
    """`run.json` tables, without the identity."""
    identity: Document
    metrics: tuple[Document, ...]
    """Last `metrics.jsonl` lines with values, oldest first."""
    stop_reason: str | None
    """Why a finished training run ended."""
    ledger: Document
    """Last `ledger.jsonl` line; empty without one."""
    launches: tuple[Document, ...]
    """`attempts.jsonl` lines; for `predict` each job's last line."""
    has_result: bool
    result: Document
    """`result.json` of a training run; empty without one."""
    last_seen_at: float | None
    """Last sign of life, in seconds since the epoch."""
    is_locked: bool
    """Whether a local process holds the folder lock."""
    lock_owner: str
    """Host whose process locked the folder last; empty if unknown."""
    is_stopped: bool
    """Whether a signal has stopped one of the run's processes."""

    @property
    def last_launch(self) -> Document:
        """Last `attempts.jsonl` line; empty without one."""
        return self.launches[-1] if self.launches else {}

    @property
    def step(self) -> int | None:
        lines = [line for line in (*self.metrics[-1:], self.ledger) if line]
        return max((int(line["step"]) for line in lines), default=None)

    @property
    def attempt(self) -> int | None:
        return max((line["attempt"] for line in self.launches if "attempt" in line), default=None)

    @property
    def began_at(self) -> float | None:
        """First start, in seconds since the epoch."""
        return min(self._list_times("started_at"), default=None)

    @property
    def ended_at(self) -> float | None:
        """Last recorded end, in seconds since the epoch."""
        return max(self._list_times("ended_at"), default=None)

    def _list_times(self, key: str) -> list[float]:
        return [line[key] for line in self.launches if line.get(key) is not None]

    def find_setting(self, key: str) -> object:
        """Return a setting by dotted key; None if it is not set."""
        value: object = self.settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def find_value(self, metric: str) -> float | str | None:
        """Return a metric's last value."""
        values = (line[metric] for line in reversed(self.metrics) if metric in line)
        value: float | str | None = next(values, None)
        return value

    def find_score(self, metric: str) -> tuple[int | None, float | str | None]:
        """Return a held-out metric of the final model, or else the last one, with its step."""
        metrics, is_final = self.result.get("metrics", {}), self.stop_reason is not None
        if is_final and metric in metrics:
            return self.result.get("model_step"), metrics[metric]
        lines = (line for line in reversed(self.metrics) if metric in line)
        line = next(lines, {})
        return line.get("step"), line.get(metric)

    def find_main_metric(self) -> str | None:
        """Return the metric that decides the run: its target, the best one, or its first score."""
        chosen = self.find_setting("stop.target.metric") or self.find_setting(
            "output.checkpoint.best_metric"
        )
        if chosen and self.find_value(str(chosen)) is not None:
            return str(chosen)
        names = [name for line in reversed(self.metrics) for name in line]
        losses = [name for name in names if name == TRAIN_LOSS]
        return next(iter([*filter(is_evaluation_metric, names), *losses]), None)

    def compute_total_steps(self) -> int | None:
        """Return the run's total steps; None if not known yet."""
        steps, epochs = self.find_setting("stop.steps"), self.find_setting("stop.epochs")
        if isinstance(steps, int):
            return steps
        line = next((line for line in reversed(self.metrics) if "train/epoch" in line), {})
        epoch = line.get("train/epoch")
        if not isinstance(epochs, int | float) or not isinstance(epoch, int | float) or not epoch:
            return None
        return max(1, round(int(line["step"]) / epoch * epochs))

    def measure_step_seconds(self) -> float | None:
        """Return the seconds per step over the last attempt's last lines, pauses included."""
        lines = [line for line in self.metrics if line.get("seconds") is not None]
        recent = [line for line in lines if line["attempt"] == lines[-1]["attempt"]][-SPEED_LINES:]
        num_steps = recent[-1]["step"] - recent[0]["step"] if recent else 0
        if num_steps <= 0:
            return None
        seconds: float = recent[-1]["seconds"] - recent[0]["seconds"]
        return seconds / num_steps

    def find_progress(self, *, first_step: int = 0, is_finished: bool) -> RunProgress | None:
        """Return the completed steps, at least `first_step`; None if nothing is known."""
        step, total = max(self.step or 0, first_step), self.compute_total_steps()
        if not step and total is None:
            return None
        if is_finished:
            return RunProgress(step, step, 0.0)
        seconds = self.measure_step_seconds()
        if total is None or seconds is None:
            return RunProgress(step, total, None)
        return RunProgress(step, total, max(0, total - step) * seconds)

    def find_state(self, now: float) -> RunState:
        """Return the run's state at a time in seconds since the epoch."""
        last_lines = self._last_lines()
        is_fresh = self.last_seen_at is not None and now - self.last_seen_at < FRESH_SECONDS
        is_open = not last_lines or any(line.get("ended_at") is None for line in last_lines)
        is_active = self.is_locked and (is_open or not self.has_result)
        if is_active or (is_open and is_fresh and not self.has_result):
            return "stopped" if self.is_stopped else "running"
        if self.has_result:
            return "finished"
        outcomes = () if is_open else (line.get("outcome") for line in last_lines)
        outcome = next(filter(None, outcomes), None)
        if outcome in (None, "finished", "preempted"):
            return outcome or "unknown"
        return "failed"

    def _last_lines(self) -> tuple[Document, ...]:
        """Return the run's last line, or each job's."""
        return self.launches if self.verb == "predict" else self.launches[-1:]

    def compute_usd(self, now: float) -> float | None:
        """Return the dollars so far; None if the price is unknown."""
        prices = (price_line(line, now, self.last_seen_at) for line in self._last_lines())
        amounts = [price for price in prices if price is not None]
        usd: float | None = self.ledger.get("usd")
        return sum(amounts) if amounts else usd

    def compute_goodput(self, now: float) -> Goodput | None:
        """Return the goodput so far; None without a recorded attempt and a ledger."""
        if not self.ledger or self.verb == "predict":
            return None
        is_ended = self.last_launch.get("ended_at") is not None
        alive_at = now if self.is_locked else self.last_seen_at
        return compute_goodput(self.launches, self.ledger, None if is_ended else alive_at)


def price_line(line: Document, now: float, last_seen_at: float | None) -> float | None:
    """Return the dollars up to an `attempts.jsonl` line, and since then if it lacks an end."""
    usd: float | None = line.get("usd")
    rate = line.get("usd_per_hour")
    if line.get("ended_at") is not None or rate is None or line.get("started_at") is None:
        return usd
    until = min(now, last_seen_at) if last_seen_at is not None else line["started_at"]
    return extend_cost(line, until).usd


def is_any_run(folder: Path) -> bool:
    """Return whether a folder is the output folder for a run with any verb."""
    names = (*MARKER_FILES, DONE)
    return any((folder / name).is_file() for name in names) or is_predict_folder(folder)


def is_predict_folder(folder: Path) -> bool:
    """Return whether a folder is a `predict` output folder."""
    return (folder / JOBS).is_dir() and (folder / JOB).is_file()


def list_job_folders(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / JOBS).glob("*") if path.is_dir())


def read_run_tail(folder: Path, held_locks: frozenset[FileId] | None = None) -> RunTail:
    """Read an output folder's file ends; `held_locks` is from `list_held_locks`."""
    locks = list_held_locks() if held_locks is None else held_locks
    run = read_document(folder / SAVED_RUN, RunShape)
    done = {} if run else read_document(folder / DONE, StageRecord)
    identity = run.pop(RUN_IDENTITY, {})
    lines = jsonl.read_recent_lines(folder / METRICS, StepMetrics, METRICS_BYTES)
    ledger = jsonl.read_recent_lines(folder / LEDGER, LedgerLine, LEDGER_BYTES)
    summary = lines[-1].get("summary") if lines else None
    is_predict = is_predict_folder(folder)
    homes = list_job_folders(folder) if is_predict else [folder]
    locked_homes = [home for home in homes if find_file_id(home / LOCK) in locks]
    results = [name for name in RESULT_FILES if (folder / name).is_file()]
    verbs = (identity.get("verb"), done.get("verb"), *map(RESULT_FILES.get, results))
    last_seen_at = _find_last_seen(homes, folder / METRICS)
    fresh_since = time.time() - FRESH_SECONDS
    is_active = bool(locked_homes) or (last_seen_at is not None and last_seen_at > fresh_since)
    return RunTail(
        folder=folder,
        verb="predict" if is_predict else next(filter(None, verbs), None),
        settings=run or done.get("settings", {}),
        identity=identity,
        metrics=tuple(line for line in lines if "summary" not in line),
        stop_reason=None if summary is None else summary.get("stop_reason", "finished"),
        ledger=ledger[-1] if ledger else {},
        launches=_read_launches(homes, is_predict=is_predict),
        has_result=bool(results),
        result=read_document(folder / RESULT, ResultShape) if RESULT in results else {},
        last_seen_at=last_seen_at,
        is_locked=bool(locked_homes),
        lock_owner=next(filter(None, map(read_lock_owner, homes)), ""),
        is_stopped=any(map(is_owner_stopped, locked_homes))
        or (is_active and has_stopped_rank(folder, fresh_since)),
    )


def _read_launches(homes: list[Path], *, is_predict: bool) -> tuple[Document, ...]:
    if not is_predict:
        return tuple(jsonl.read_recent_lines(homes[0] / ATTEMPTS, AttemptLine))
    lines = [jsonl.read_recent_lines(home / ATTEMPTS, PaidLine) for home in homes]
    return tuple(job[-1] for job in lines if job)


def _find_last_seen(homes: list[Path], metrics: Path) -> float | None:
    """Return the last sign of life; without a supervisor, the last metrics line."""
    times = [seen for home in homes if (seen := read_last_seen(home)) is not None]
    if not times and not (metrics.parent / ATTEMPTS).exists() and metrics.is_file():
        return metrics.stat().st_mtime
    return max(times, default=None)
