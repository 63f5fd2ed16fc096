"""The jobs that this user launched from this machine, in the state folder."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regauge.jobs.job_progress import add_progress
from regauge.jobs.planning import select_launcher
from regauge.jobs.settings import Launch
from regauge.jobs.targets import Handle, JobSpec
from regauge.jobs.targets._times import format_time
from regauge.system import jsonl
from regauge.system.errors import RegaugeError, SettingsError
from regauge.system.files import find_state_folder
from regauge.system.json_files import DocumentShape
from regauge.system.log import logger


class JobLine(DocumentShape):
    handle: str
    verb: str
    submitted_at: str


def _find_file() -> Path:
    return find_state_folder() / "launched_jobs.jsonl"


def record_job(handle: Handle, job: JobSpec) -> None:
    """Record a submitted job; an unwritable state folder is a warning."""
    submitted_at = format_time(dt.datetime.now(dt.UTC))
    line = {"handle": str(handle), "verb": job.verb, "submitted_at": submitted_at}
    try:
        _find_file().parent.mkdir(parents=True, exist_ok=True)
        jsonl.append_line(_find_file(), line)
    except OSError as error:
        logger.warning("`regauge job list` will not show %s: %s", handle, error.strerror)


def list_jobs() -> Iterator[dict[str, Any]]:
    """Yield the launched jobs with their states, newest first.

    Jobs that their scheduler has forgotten are left out. An unreachable scheduler is a reason.
    """
    for line in reversed(jsonl.read_lines(_find_file(), JobLine)):
        handle = Handle.parse(line["handle"])
        row: dict[str, Any] = {"handle": line["handle"], "verb": line["verb"]}
        try:
            status = add_progress(select_launcher(Launch(), handle.target).find_status(handle))
            step = status.progress.step if status.progress else None
            row |= {"state": status.state, "attempt": status.attempt, "step": step}
        except SettingsError:
            continue
        except RegaugeError as error:
            row |= {"state": "unknown", "reason": error.problem}
        row = {key: value for key, value in row.items() if value is not None}
        yield row | {"submitted_at": line["submitted_at"]}
