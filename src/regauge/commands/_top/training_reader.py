"""Reads a run snapshot in an output folder, for `train` and every verb but `predict`."""

from __future__ import annotations

import signal
import time
from itertools import islice
from typing import TYPE_CHECKING

from regauge.commands._top.snapshot import Snapshot, TableRow, ViewEvent, ViewProgress
from regauge.config.run_names import name_run
from regauge.monitoring.trackers import TRAIN_LOSS
from regauge.run_folders.checkpoint_files import list_saved
from regauge.run_folders.documents import FailureShape, list_failures, read_document
from regauge.run_folders.formatting import duration
from regauge.run_folders.node_status import NodeProcesses, ProcessStatus, read_node_statuses
from regauge.run_folders.run_tail import FRESH_SECONDS, RunTail, read_run_tail
from regauge.system.errors import DataError
from regauge.system.units import SECONDS_PER_HOUR
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from regauge.commands._top.snapshot import Value
    from regauge.run_folders.documents import Document
    from regauge.run_folders.run_tail import RunState

MAX_ATTEMPTS = 20
"""Last attempts whose events are read."""
MAX_CHECKPOINTS = 3
"""Newest checkpoints shown as events."""


class TrainingReader:
    poll_seconds = 0.5

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Snapshot:
        """Return the present state; raises DataError if the folder has vanished."""
        if not self._folder.is_dir():
            raise DataError("the folder does not exist any more", "name another run")
        now = time.time()
        tail, nodes = read_run_tail(self._folder), read_node_statuses(self._folder)
        state, failures = tail.find_state(now), list_failures(self._folder)
        saved = list(islice(list_saved(self._folder), MAX_CHECKPOINTS))
        events = [
            *(ViewEvent(saved_at, f"checkpoint of step {step:,}") for step, saved_at in saved),
            *_list_attempts(tail, failures[-MAX_ATTEMPTS:]),
        ]
        return Snapshot(
            name=name_run(self._folder),
            verb=tail.verb or "run",
            state=state,
            read_at=now,
            groups={
                "rates": _list_rates(tail),
                "cost": _list_costs(tail, now, is_running=state == "running"),
                "health": {
                    **_describe_checkpoint(saved, now),
                    **_describe_memory(tail, nodes),
                    "failures": len(failures),
                    **_describe_score(tail),
                },
            },
            table="ranks",
            rows=tuple(_build_rows(nodes, tail, state, now)),
            reason=_explain(tail, state),
            facts=tuple(_list_facts(tail, state, nodes, now)),
            progress=_measure_progress(tail, nodes, state),
            events=tuple(sorted(events, key=lambda event: event.at)),
        )


def _explain(tail: RunTail, state: RunState) -> str:
    outcome = str(tail.last_launch.get("outcome") or "")
    if state == "unknown" and tail.last_seen_at is not None:
        return "no end was recorded: the run was killed, or its machine was lost"
    if state == "stopped":
        return "a signal has stopped a process; `kill -CONT` continues it"
    if state == "running" and outcome:
        return f"attempt {tail.attempt} ended ({outcome}); the next one starts"
    if state in ("finished", "failed", "preempted"):
        return tail.stop_reason or outcome
    return ""


def _list_facts(
    tail: RunTail, state: RunState, nodes: Sequence[NodeProcesses], now: float
) -> Iterator[str]:
    if tail.attempt:
        yield f"attempt {tail.attempt}"
    if tail.began_at is not None:
        end = now if state in ("running", "stopped") else tail.ended_at or tail.last_seen_at or now
        yield duration(max(0.0, end - tail.began_at))
    hosts = {node.host for node in nodes} or {tail.lock_owner} - {""}
    if hosts:
        yield min(hosts) if len(hosts) == 1 else format_count(len(hosts), "host")


def _measure_progress(
    tail: RunTail, nodes: Sequence[NodeProcesses], state: RunState
) -> ViewProgress | None:
    """Return the completed steps; heartbeats know them before the next log line."""
    is_running = state == "running"
    beats = [process.step for node in nodes for process in node.processes if is_running]
    progress = tail.find_progress(first_step=min(beats, default=0), is_finished=state == "finished")
    if progress is None:
        return None
    step, total, eta = progress
    return ViewProgress("steps", step, total, eta if is_running or state == "finished" else None)


def _list_rates(tail: RunTail) -> dict[str, Value]:
    find, accounts = tail.find_value, tail.ledger.get("seconds", {})
    total = sum(accounts.values())
    return {
        "loss": find(TRAIN_LOSS),
        "tokens_per_second": find("train/tokens_per_second"),
        "step_seconds": tail.measure_step_seconds(),
        "mfu_ratio": find("train/mfu"),
        "padding_ratio": find("train/padding_fraction"),
        "data_wait_ratio": accounts.get("data_wait", 0.0) / total if total else None,
        "learning_rate": find("train/learning_rate"),
        "gradient_norm": find("train/grad_norm"),
    }


def _list_costs(tail: RunTail, now: float, *, is_running: bool) -> dict[str, Value]:
    usd, goodput = tail.compute_usd(now), tail.compute_goodput(now)
    limit, price = tail.find_setting("stop.usd"), tail.last_launch.get("usd_per_hour")
    budget = limit if isinstance(limit, int | float) else None
    rate = None if price is None else price * tail.last_launch.get("nodes", 1)
    left = None
    if is_running and budget and rate and usd is not None:
        left = max(0.0, (budget - usd) / rate * SECONDS_PER_HOUR)
    return {
        "usd": usd,
        "usd_per_hour": rate,
        "budget_usd": budget,
        "budget_left_seconds": left,
        "goodput_ratio": None if goodput is None else goodput.fraction,
        "lost_seconds": None if goodput is None else goodput.seconds.get("lost", 0.0),
    }


def _describe_checkpoint(saved: Sequence[tuple[int, float]], now: float) -> dict[str, Value]:
    step, saved_at = saved[0] if saved else (None, None)
    age = None if saved_at is None else max(0.0, now - saved_at)
    return {"checkpoint_step": step, "checkpoint_age_seconds": age}


def _describe_memory(tail: RunTail, nodes: Sequence[NodeProcesses]) -> dict[str, Value]:
    peak = (tail.ledger.get("memory_bytes") or {}).get("peak")
    resident = sum(process.resident_bytes or 0 for node in nodes for process in node.processes)
    return {"peak_memory_bytes": peak, "resident_bytes": resident or None}


def _describe_score(tail: RunTail) -> dict[str, Value]:
    metric = tail.find_main_metric()
    return {} if metric in (None, TRAIN_LOSS) else {str(metric): tail.find_score(str(metric))[1]}


def _build_rows(
    nodes: Sequence[NodeProcesses], tail: RunTail, state: RunState, now: float
) -> Iterator[TableRow]:
    limit = tail.find_setting("execution.supervision.hang_timeout_seconds")
    straggler = (tail.ledger.get("straggler") or {}).get("rank")
    for node in nodes:
        is_current = not node.is_final and now - node.written_at < FRESH_SECONDS
        for process in node.processes:
            age = max(0.0, now - process.beat_at)
            word, is_problem = _describe_state(process, is_current=is_current)
            if word == "alive" and isinstance(limit, int | float) and age > limit:
                word, is_problem = "silent", True
            elif word == "alive" and process.rank == straggler:
                word, is_problem = "slow", True
            yield TableRow(
                {
                    "rank": process.rank,
                    "state": word,
                    "phase": process.phase,
                    "step": process.step,
                    "beat_age_seconds": age if is_current else None,
                    "resident_bytes": process.resident_bytes,
                    "host": node.host,
                },
                is_problem=is_problem and state != "finished",
            )


def _describe_state(process: ProcessStatus, *, is_current: bool) -> tuple[str, bool]:
    code = process.exit_code
    if code is not None and code < 0:
        known = -code in signal.Signals.__members__.values()
        name = signal.Signals(-code).name if known else f"signal {-code}"
        return f"killed ({name})", True
    if code:
        return f"exit code {code}", True
    if code == 0 or not is_current:
        return "ended", False
    words = {"running": ("alive", False), "waiting": ("waiting", False), "ended": ("dead", True)}
    return words.get(process.state, (process.state, True))


def _list_attempts(tail: RunTail, failures: Sequence[Path]) -> Iterator[ViewEvent]:
    documents = [read_document(path, FailureShape) for path in failures]
    problems = {document.get("attempt"): document["problem"] for document in documents if document}
    for line in tail.launches[-2 * MAX_ATTEMPTS :]:
        name = f"attempt {line['attempt']}"
        if line.get("ended_at") is not None:
            yield _describe_end(name, line, problems.get(line["attempt"]))
        elif line.get("started_at") is not None:
            processes = format_count(int(line.get("processes", 1)), "process")
            yield ViewEvent(line["started_at"], f"{name} started: {processes}")


def _describe_end(name: str, line: Document, problem: str | None) -> ViewEvent:
    outcome, step = line.get("outcome"), line.get("step")
    if outcome == "finished":
        return ViewEvent(line["ended_at"], f"{name} finished")
    text = f"{name} preempted" if outcome == "preempted" else f"{name} failed ({outcome})"
    text += f" after step {step:,}" if isinstance(step, int) else ""
    return ViewEvent(line["ended_at"], f"{text}: {problem}" if problem else text, is_problem=True)
