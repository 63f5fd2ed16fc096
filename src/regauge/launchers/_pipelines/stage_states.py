"""The state of a pipeline from the states of the jobs of its stages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from regauge.launchers import FINAL_STATES, StageState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.launchers import Handle, JobStatus


def join_statuses(handle: Handle, stages: Sequence[tuple[str, JobStatus]]) -> JobStatus:
    """Return the status of a pipeline: that of its current stage, with the states of all stages.

    The current stage is the first one that has not ended. If all have ended, it is the first one
    that did not succeed. `stages` has the name and the status of each stage.
    """
    settled = _settle(stages)
    current = next(
        (item for item in settled if not item[1].is_final),
        next((item for item in settled if item[1].state != "succeeded"), settled[-1]),
    )
    name, status = current
    statuses = [status for _, status in settled]
    failure = status.failure
    if failure is not None:
        failure = replace(failure, message=f"stage '{name}': {failure.message}")
    is_final = all(item.is_final for item in statuses)
    starts = [item.started_at for item in statuses if item.started_at]
    ends = [item.finished_at for item in statuses if item.finished_at]
    return replace(
        status,
        handle=handle,
        reason=f"stage '{name}': {status.reason}" if status.reason else f"stage '{name}'",
        failure=failure,
        submitted_at=statuses[0].submitted_at,
        started_at=min(starts, default=None),
        finished_at=max(ends, default=None) if is_final else None,
        stages=tuple(
            StageState(name, item.state, str(item.handle), item.exit_code, item.reason)
            for name, item in settled
        ),
    )


def is_active(stage: StageState) -> bool:
    """Return whether the job of a stage has not ended."""
    return stage.state not in FINAL_STATES


def _settle(stages: Sequence[tuple[str, JobStatus]]) -> list[tuple[str, JobStatus]]:
    """Return the stages; one that failed without an attempt after another one is cancelled."""
    settled: list[tuple[str, JobStatus]] = []
    for name, status in stages:
        is_stopped = any(item.state in ("failed", "cancelled") for _, item in settled)
        is_skipped = is_stopped and status.state == "failed" and status.attempt is None
        cancelled = replace(status, state="cancelled", exit_code=None, failure=None)
        settled.append((name, cancelled if is_skipped else status))
    return settled
