"""The end of a job: the refusals of `cancel` and `cleanup`, and the output folder that remains."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.errors import SettingsError
from regauge.launchers import Leftover, is_local_folder

if TYPE_CHECKING:
    from regauge.launchers import Handle, JobState


def build_ended_error(handle: Handle, state: JobState) -> SettingsError:
    """Return the error of `cancel` for a job that has ended."""
    remedy = f"remove it with: regauge job cleanup {handle}"
    return SettingsError(f"{handle} has ended already ({state})", remedy)


def build_active_error(handle: Handle, state: JobState) -> SettingsError:
    """Return the error of `cleanup` for a job that has not ended."""
    return SettingsError(f"{handle} is {state}", f"stop it first: regauge job cancel {handle}")


def list_output_leftovers(output: str) -> list[Leftover]:
    """Return the output folder of a run if it exists on this machine's file systems."""
    if not is_local_folder(output) or not Path(output).exists():
        return []
    return [Leftover(output, "output of the run", f"rm -r {shlex.quote(output)}")]
