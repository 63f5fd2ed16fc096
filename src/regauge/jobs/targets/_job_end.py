"""The end of a job: the wait of `cancel`, refusals, and the output folder that remains."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.jobs.targets import Leftover, is_local_folder
from regauge.system import timing
from regauge.system.errors import SettingsError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.jobs.targets import Handle, JobState


def build_ended_error(handle: Handle, state: JobState) -> SettingsError:
    """Return the error of `cancel` for a job that has ended."""
    remedy = f"remove it with: regauge job cleanup {handle}"
    return SettingsError(f"{handle} has ended already ({state})", remedy)


def wait_for_end(
    handle: Handle, has_ended: Callable[[], bool], seconds: float, poll_seconds: float
) -> None:
    """Wait until a cancelled job has ended; raises TransientError after some seconds."""
    if not timing.wait_for(has_ended, seconds, poll_seconds=poll_seconds):
        problem = f"{handle} does not stop within {seconds:g} s"
        raise TransientError(problem, f"cancel it again: regauge job cancel {handle}")


def build_active_error(handle: Handle, state: JobState) -> SettingsError:
    """Return the error of `cleanup` for a job that has not ended."""
    return SettingsError(f"{handle} is {state}", f"stop it first: regauge job cancel {handle}")


def list_output_leftovers(output: str) -> list[Leftover]:
    """Return the output folder of a run if it exists on this machine's file systems."""
    if not is_local_folder(output) or not Path(output).exists():
        return []
    return [Leftover(output, "output of the run", f"rm -r {shlex.quote(output)}")]
