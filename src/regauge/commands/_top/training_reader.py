"""Reads the snapshot of a run in an output folder, of `train` and of every verb but `predict`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.commands._top.snapshot import (
    Column,
    Figure,
    FigureGroup,
    Snapshot,
    TableRow,
    ViewEvent,
    ViewProgress,
    ViewTable,
)
from regauge.jobs.job_progress import FailureDocument
from regauge.monitoring.trackers import TRAIN_LOSS
from regauge.run_folders.checkpoint_files import CHECKPOINTS, MANIFEST, checkpoint_name, list_steps
from regauge.run_folders.formatting import duration
from regauge.run_folders.node_status import NodeProcesses, ProcessStatus, read_node_statuses
from regauge.run_folders.run_tail import FRESH_SECONDS, RunTail, read_run_tail
from regauge.supervision.attempt import FAILURES
from regauge.system.errors import DataError
from regauge.system.json_files import find_json, find_mismatch
from regauge.system.units import SECONDS_PER_HOUR
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.commands._top.snapshot import Value
    from regauge.run_folders.run_tail import RunState

MAX_ATTEMPTS = 20
"""Number of last attempts whose events are read."""
MAX_CHECKPOINTS = 3
"""Number of newest checkpoints that are events."""
SPEED_LINES = 20
"""Number of last metric lines over which the speed of a run is measured."""
COLUMNS = (
    Column("rank", "RANK", "number"),
    Column("state", "STATE", "text"),
    Column("phase", "PHASE", "text"),
    Column("step", "STEP", "number"),
    Column("beat_age_seconds", "BEAT AGE", "seconds"),
    Column("resident_bytes", "MEMORY", "bytes"),
    Column("host", "HOST", "text"),
)


class TrainingReader:
    """Reads one output folder."""

    poll_seconds = 0.5

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Snapshot:
        """Return the present state; raises DataError if the folder has vanished."""
        if not self._folder.is_dir():
            raise DataError("the folder does not exist any more", "name another run")
        now = time.time()
        tail = read_run_tail(self._folder)
        nodes = read_node_statuses(self._folder)
        state = tail.find_state(now)
        rows = tuple(_build_rows(nodes, tail, state, now))
        hosts = sorted({node.host for node in nodes} or {tail.lock_owner} - {""})
        return Snapshot(
            name=self._folder.resolve().name,
            verb=tail.verb or "run",
            state=state,
            read_at=now,
            reason=_explain(tail, state),
            facts=tuple(_list_facts(tail, state, hosts, now)),
            progress=_read_progress(tail, nodes, state),
            groups=(
                FigureGroup("Rates", _list_rates(tail)),
                FigureGroup("Cost", _list_costs(tail, now, is_running=state == "running")),
                FigureGroup("Health", _list_health(self._folder, tail, nodes, now)),
            ),
            table=ViewTable("Ranks", COLUMNS, rows),
            events=tuple(sorted(_list_events(self._folder, tail), key=lambda event: event.at)),
        )


def _explain(tail: RunTail, state: RunState) -> str:
    if state == "unknown" and tail.last_seen_at is not None:
        return "no end was recorded: the run was killed, or its machine was lost"
    if state == "running" and tail.launches and tail.launches[-1].get("outcome"):
        return f"attempt {tail.attempt} ended ({tail.launches[-1]['outcome']}); the next one starts"
    if state in ("finished", "failed", "preempted"):
        return tail.stop_reason or str((tail.launches or ({},))[-1].get("outcome") or "")
    return ""


def _list_facts(tail: RunTail, state: str, hosts: list[str], now: float) -> Iterator[str]:
    if tail.attempt:
        yield f"attempt {tail.attempt}"
    if tail.began_at is not None:
        end = now if state == "running" else tail.ended_at or tail.last_seen_at or now
        yield duration(max(0.0, end - tail.began_at))
    if hosts:
        yield hosts[0] if len(hosts) == 1 else format_count(len(hosts), "host")


def _read_progress(
    tail: RunTail, nodes: tuple[NodeProcesses, ...], state: RunState
) -> ViewProgress | None:
    """Return the steps that are done; heartbeats know them before the next log line."""
    beats = [process.step for node in nodes for process in node.processes]
    logged = tail.step or 0
    step = max(logged, min(beats, default=0)) if state == "running" else logged
    total = tail.compute_total_steps()
    if not step and total is None:
        return None
    if state == "finished":
        return ViewProgress("steps", step, step, 0.0)
    seconds = _measure_step_seconds(tail)
    is_known = state == "running" and total is not None and seconds is not None
    eta = max(0, (total or 0) - step) * (seconds or 0.0) if is_known else None
    return ViewProgress("steps", step, total, eta)


def _measure_step_seconds(tail: RunTail) -> float | None:
    """Return the seconds per step over the last lines of the last attempt, pauses included."""
    lines = [line for line in tail.metrics if line.get("seconds") is not None]
    recent = [line for line in lines if line["attempt"] == lines[-1]["attempt"]][-SPEED_LINES:]
    num_steps = recent[-1]["step"] - recent[0]["step"] if recent else 0
    if num_steps <= 0:
        return None
    seconds: float = recent[-1]["seconds"] - recent[0]["seconds"]
    return seconds / num_steps


def _list_rates(tail: RunTail) -> tuple[Figure, ...]:
    find = tail.find_value
    return (
        Figure("loss", "loss", find(TRAIN_LOSS)),
        Figure("tokens_per_second", "tokens/s", find("train/tokens_per_second"), "count"),
        Figure("step_seconds", "s per step", _measure_step_seconds(tail)),
        Figure("mfu_ratio", "MFU", find("train/mfu"), "percent"),
        Figure("padding_ratio", "padding", find("train/padding_fraction"), "percent"),
        Figure("data_wait_ratio", "data wait", _share_account(tail, "data_wait"), "percent"),
        Figure("learning_rate", "learn. rate", find("train/learning_rate")),
        Figure("gradient_norm", "grad. norm", find("train/grad_norm")),
    )


def _share_account(tail: RunTail, account: str) -> float | None:
    """Return the share of an account in all booked time."""
    seconds: dict[str, float] = tail.ledger.get("seconds", {})
    total = sum(seconds.values())
    return seconds.get(account, 0.0) / total if total else None


def _list_costs(tail: RunTail, now: float, *, is_running: bool) -> tuple[Figure, ...]:
    usd, last = tail.compute_usd(now), (tail.launches or ({},))[-1]
    rate = last.get("usd_per_hour")
    rate = rate * last.get("nodes", 1) if rate is not None else None
    budget = (tail.settings.get("stop") or {}).get("usd")
    goodput = tail.compute_goodput(now)
    hours = (budget - usd) / rate if budget and usd is not None and rate else None
    left = max(0.0, hours * SECONDS_PER_HOUR) if hours is not None and is_running else None
    share = None if goodput is None else goodput.fraction
    lost = None if goodput is None else goodput.seconds.get("lost", 0.0)
    return (
        Figure("usd", "spent", usd, "dollars"),
        Figure("usd_per_hour", "per hour", rate, "dollars"),
        Figure("budget_usd", "budget", budget, "dollars"),
        Figure("budget_left_seconds", "lasts for", left, "seconds"),
        Figure("goodput_ratio", "goodput", share, "percent"),
        Figure("lost_seconds", "lost work", lost, "seconds"),
    )


def _list_health(
    folder: Path, tail: RunTail, nodes: tuple[NodeProcesses, ...], now: float
) -> tuple[Figure, ...]:
    step, saved_at = _find_checkpoint(folder)
    age = None if saved_at is None else max(0.0, now - saved_at)
    metric = tail.find_main_metric()
    has_score = metric is not None and metric != TRAIN_LOSS
    score = [Figure(metric, metric, tail.find_value(metric))] if metric and has_score else []
    resident = [process.resident_bytes or 0 for node in nodes for process in node.processes]
    peak = (tail.ledger.get("memory_bytes") or {}).get("peak")
    failures = len(list((folder / FAILURES).glob("*.json")))
    return (
        Figure("checkpoint_step", "checkpoint", step),
        Figure("checkpoint_age_seconds", "its age", age, "seconds"),
        Figure("peak_memory_bytes", "peak memory", peak, "bytes"),
        Figure("resident_bytes", "all ranks", sum(resident) or None, "bytes"),
        Figure("failures", "failures", failures),
        *score,
    )


def _find_checkpoint(folder: Path) -> tuple[int | None, float | None]:
    """Return the step of the newest checkpoint and its time, in seconds since the epoch."""
    for step, saved_at in _list_checkpoints(folder):
        return step, saved_at
    return None, None


def _list_checkpoints(folder: Path) -> Iterator[tuple[int, float]]:
    """Yield the steps and times of the checkpoints, newest first."""
    root = folder / CHECKPOINTS
    for step in list_steps(root):
        try:
            yield step, (root / checkpoint_name(step) / MANIFEST).stat().st_mtime
        except OSError:  # it has just been removed
            continue


def _build_rows(
    nodes: tuple[NodeProcesses, ...], tail: RunTail, state: RunState, now: float
) -> Iterator[TableRow]:
    supervision = (tail.settings.get("execution") or {}).get("supervision") or {}
    limit = supervision.get("hang_timeout_seconds")
    straggler = (tail.ledger.get("straggler") or {}).get("rank")
    for node in nodes:
        is_current = not node.is_final and now - node.written_at < FRESH_SECONDS
        for process in node.processes:
            age = max(0.0, now - process.beat_at)
            word, is_problem = _describe_state(process, is_current=is_current)
            if word == "alive" and isinstance(limit, int | float) and age > limit:
                word, is_problem = "silent", True
            if word == "alive" and process.rank == straggler:
                word, is_problem = "slow", True
            values: dict[str, Value] = {
                "rank": process.rank,
                "state": word,
                "phase": process.phase,
                "step": process.step,
                "beat_age_seconds": age if is_current else None,
                "resident_bytes": process.resident_bytes,
                "host": node.host,
            }
            yield TableRow(values, is_problem=is_problem and state != "finished")


def _describe_state(process: ProcessStatus, *, is_current: bool) -> tuple[str, bool]:
    """Return the state of a process as a word, and whether it is a problem."""
    code = process.exit_code
    if code is not None and code < 0:
        return f"killed ({_name_signal(-code)})", True
    if code:
        return f"exit code {code}", True
    if code == 0:
        return "ended", False
    if not is_current:
        return "ended", False
    words = {"running": ("alive", False), "waiting": ("waiting", False), "ended": ("dead", True)}
    return words.get(process.state, (process.state, True))


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _list_events(folder: Path, tail: RunTail) -> Iterator[ViewEvent]:
    for step, saved_at in list(_list_checkpoints(folder))[:MAX_CHECKPOINTS]:
        yield ViewEvent(saved_at, f"checkpoint of step {step:,}")
    problems = _read_problems(folder)
    for line in tail.launches[-2 * MAX_ATTEMPTS :]:
        number, outcome = line.get("attempt"), line.get("outcome")
        started_at, ended_at = line.get("started_at"), line.get("ended_at")
        if ended_at is None:
            if started_at is not None:
                processes = format_count(int(line.get("processes", 1)), "process")
                yield ViewEvent(started_at, f"attempt {number} started: {processes}")
        elif outcome == "finished":
            yield ViewEvent(ended_at, f"attempt {number} finished")
        else:
            yield _describe_failure(line, problems)


def _describe_failure(line: dict[str, Any], problems: dict[int, str]) -> ViewEvent:
    """Return the event of an attempt that did not finish."""
    number, outcome, step = line["attempt"], line.get("outcome"), line.get("step")
    verb = "preempted" if outcome == "preempted" else f"failed ({outcome})"
    text = f"attempt {number} {verb}"
    text += f" after step {step:,}" if isinstance(step, int) else ""
    problem = problems.get(number)
    text = f"{text}: {problem}" if problem else text
    return ViewEvent(line["ended_at"], text, is_problem=True)


def _read_problems(folder: Path) -> dict[int, str]:
    """Return the problems of the last failed attempts, by attempt."""
    problems: dict[int, str] = {}
    for path in sorted((folder / FAILURES).glob("attempt-*.json"))[-MAX_ATTEMPTS:]:
        try:
            document = find_json(path, "remove it")
        except (DataError, OSError):
            continue
        if document is not None and not find_mismatch(document, FailureDocument):
            number = document.get("attempt")
            if isinstance(number, int):
                problems[number] = document["problem"]
    return problems
