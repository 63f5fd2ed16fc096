"""Ending a job: wait after `cancel`, refuse, and report the remaining output folder."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from pathlib import Path

from regauge.jobs.targets import (
    FINAL_STATES,
    Handle,
    JobState,
    JobStatus,
    Leftover,
    is_local_folder,
)
from regauge.system import timing
from regauge.system.errors import SettingsError, TransientError


def cancel_job(
    handle: Handle,
    find_status: Callable[[Handle], JobStatus],
    stop: Callable[[JobStatus], object],
    seconds: float,
    final_states: Collection[JobState] = FINAL_STATES,
) -> None:
    """Stop a job and wait until its processes have ended.

    Raises SettingsError if it has ended already, and TransientError if it runs after some seconds.
    """
    status = find_status(handle)
    if status.state in final_states:
        raise build_ended_error(handle, status.state)
    stop(status)
    has_ended = timing.wait_for(
        lambda: find_status(handle).state in final_states,
        seconds,
        poll_seconds=timing.REMOTE_POLL_SECONDS,
    )
    if not has_ended:
        problem = f"{handle} does not stop within {seconds:g} s"
        raise TransientError(problem, f"cancel it again: regauge job cancel {handle}")


def check_ended(status: JobStatus, final_states: Collection[JobState] = FINAL_STATES) -> None:
    """Raise SettingsError for an unfinished job, which `cleanup` cannot remove."""
    if status.state not in final_states:
        raise build_active_error(status.handle, status.state)


def build_ended_error(handle: Handle, state: JobState) -> SettingsError:
    """Return the `cancel` error for a job that has ended."""
    remedy = f"remove it with: regauge job cleanup {handle}"
    return SettingsError(f"{handle} has ended already ({state})", remedy)


def build_active_error(handle: Handle, state: JobState) -> SettingsError:
    """Return the `cleanup` error for a job that has not ended."""
    return SettingsError(f"{handle} is {state}", f"stop it first: regauge job cancel {handle}")


def list_output_leftovers(output: str) -> list[Leftover]:
    """Return a run's output folder if it exists on this machine's file systems."""
    if not is_local_folder(output) or not Path(output).exists():
        return []
    return [Leftover(output, "output of the run", f"rm -r {shlex.quote(output)}")]
