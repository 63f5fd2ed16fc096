"""Run events: what people are notified about, and when.

A failure is sent once the consequence is known: a restart, or the end of the run. A restarted run
has recovered when a process has finished a step.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.config.output_files import ATTEMPTS
from regauge.config.run_names import name_run
from regauge.monitoring.notify.events import EventName, EventSource
from regauge.monitoring.notify.notifier import name_exit, open_notifier, split_remedy
from regauge.run_folders.documents import AttemptLine
from regauge.system import jsonl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.monitoring.notify.notifier import Notifier
    from regauge.monitoring.notify.settings import Notifications
    from regauge.run_folders.cost_meter import CostMeter
    from regauge.supervision.channel import WorkerReports
    from regauge.supervision.failures import Failure
    from regauge.supervision.heartbeat import HeartbeatReader
    from regauge.system.errors import RegaugeError

OBSERVE_SECONDS = 1.0
"""Interval at which an attempt's progress is read."""
FINISHED = "finished"
STUCK_KINDS = {"hang"}
SILENT_KINDS = {"resized"}
"""Kinds that end an attempt without being a failure."""


class RunEvents:
    """Sends a run's events from one node's supervisor."""

    def __init__(
        self,
        notifier: Notifier,
        settings: Notifications,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notifier, self._settings, self._folder = notifier, settings, folder
        self._clock = clock
        self._attempt = 0
        self._meter: CostMeter | None = None
        self._last_outcome = _read_last_outcome(folder)
        """How the last attempt ended, or "" once a later attempt has finished a step."""
        self._observed_at = -OBSERVE_SECONDS
        self._step, self._progress_at = 0, 0.0
        self._is_stuck = False

    def begin_attempt(self, attempt: int, meter: CostMeter) -> None:
        """Begin an attempt; no step is finished yet."""
        self._attempt, self._meter = attempt, meter
        self._step, self._progress_at = 0, self._clock()
        self._is_stuck = False

    def observe(
        self, heartbeats: HeartbeatReader, reports: WorkerReports, *, is_end: bool = False
    ) -> None:
        """Read the attempt's progress, at most once a second, and at the end."""
        now = self._clock()
        if not self._notifier.is_active or (
            not is_end and now - self._observed_at < OBSERVE_SECONDS
        ):
            return
        self._observed_at = now
        self._notifier.poll()
        beats = [heartbeats.read(number) for number in range(heartbeats.size)]
        step = max(beat.step for beat in beats)
        if step != self._step:
            self._step, self._progress_at = step, now
        if (self._last_outcome or self._is_stuck) and reports.has_progress():
            self._send_recovery(now)
        limit = self._settings.no_progress_seconds
        is_reported = is_end or self._is_stuck  # the cause of an end is reported afterwards
        if limit is not None and not is_reported and now - self._progress_at >= limit:
            self._is_stuck = True
            slowest = min(range(len(beats)), key=lambda number: (beats[number].step, number))
            phase = beats[slowest].phase
            problem = f"no step for {limit:g} s; process {slowest} is in phase '{phase}'"
            self._send("stuck", problem=problem, next_action="see the logs in ranks/")

    def report_restart(self, failure: Failure, wait_seconds: float) -> None:
        """Send a failure after which the run restarts, unless it was reported as stuck."""
        if failure.kind in SILENT_KINDS:
            return
        self._last_outcome = failure.kind
        if self._is_stuck and failure.kind in STUCK_KINDS:
            return
        when = f"in {wait_seconds:g} s" if wait_seconds else "now"
        problem, _ = split_remedy(failure.problem)
        self._send(
            "stuck" if failure.kind in STUCK_KINDS else "failed",
            problem=problem,
            failure_kind=failure.kind,
            failed_step=failure.step,
            next_action=f"none: Regauge restarts the run {when}",
        )

    def report_end(self, failure: Failure, error: RegaugeError) -> None:
        """Send a failure after which the run does not restart."""
        name = name_exit(error.exit_code)
        problem, remedy = split_remedy(str(error))
        if name == "failed" and failure.kind in STUCK_KINDS and not self._is_stuck:
            name = "stuck"
        self._send(
            name,
            problem=problem,
            failure_kind=failure.kind,
            failed_step=failure.step,
            next_action=remedy or "run the same command to resume",
            is_final=True,
        )
        self._notifier.has_ended = True

    def report_finish(self, next_command: str | None) -> None:
        self._send("finished", next_action=next_command or "none", is_final=True)
        self._notifier.has_ended = True

    def _send_recovery(self, now: float) -> None:
        """Send the news of progress after a failure."""
        is_waiting = self._is_stuck and now > self._progress_at
        if is_waiting:
            return
        problem = f"the run makes progress again after: {self._last_outcome or 'no progress'}"
        self._last_outcome, self._is_stuck = "", False
        self._send("recovered", problem=problem, next_action="none")

    def _send(
        self,
        name: EventName,
        *,
        problem: str = "",
        failure_kind: str = "",
        failed_step: int = 0,
        next_action: str,
        is_final: bool = False,
    ) -> None:
        self._notifier.send(
            name,
            problem=problem,
            failure_kind=failure_kind,
            step=max(self._step, failed_step),
            attempt=self._attempt,
            usd=self._meter.read().usd if self._meter else None,
            next_action=next_action,
            is_final=is_final,
        )


@contextmanager
def send_run_events(
    settings: Notifications, folder: Path, may_send: Callable[[], bool]
) -> Iterator[RunEvents]:
    """Yield the sender of a run's events; an error in the block is sent, too.

    Events are dropped while `may_send` returns False, so that one node sends them. At the end of
    the block, unsent events delay it by `exit_seconds` at most. Raises SettingsError if a sink's
    secret cannot be read.
    """
    source = EventSource("train", name_run(folder), str(folder.resolve()))
    with open_notifier(settings, source) as notifier:
        notifier.may_send = may_send
        yield RunEvents(notifier, settings, folder)


def _read_last_outcome(folder: Path) -> str:
    """Return how an earlier command's last attempt ended, or "" if it finished or never began."""
    last = jsonl.read_last_line(folder / ATTEMPTS, AttemptLine)
    if last is None:
        return ""
    outcome = last.get("outcome") or "killed"
    return "" if outcome == FINISHED else str(outcome)
