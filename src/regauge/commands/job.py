"""Follow, cancel or clean up a job that `launch` submitted.

For example:

    $ regauge job wait slurm://cluster/42 --timeout 3600
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands
from regauge.jobs.job_progress import add_progress
from regauge.jobs.launched_jobs import list_jobs
from regauge.jobs.planning import select_launcher
from regauge.jobs.settings import Launch
from regauge.jobs.targets import Handle, JobStatus, Launcher, LogRequest
from regauge.system import log, stop_signals
from regauge.system.errors import ChildError, TransientError

Action = Literal["list", "status", "events", "logs", "cancel", "wait", "cleanup"]
STATUS_SECONDS = 2.0
"""Time between two requests for the state of a job."""
UNKNOWN_SECONDS = 30.0
"""Seconds after which `wait` ends for a job whose state is unknown."""
FAILED, CANCELLED = 1, 130
"""Exit codes of `wait` for a job whose scheduler does not report one."""


def main(
    action: Annotated[Action, Parameter(help="Action on the job.")],
    handle: Annotated[
        str, Parameter(help="Handle printed by `launch`: target://context/id; not with list.")
    ] = "",
    *,
    why: Annotated[
        bool, Parameter(help="With status: also print the scheduler's reasons.")
    ] = False,
    rank: Annotated[int | None, Parameter(help="With logs: the rank; default: the leader.")] = None,
    attempt: Annotated[
        int | None, Parameter(help="With logs: the attempt; default: the last one.")
    ] = None,
    follow: Annotated[
        bool, Parameter(help="With logs: wait for new lines until the job ends.")
    ] = False,
    timeout: Annotated[
        float | None, Parameter(help="With wait: maximum seconds; then the exit code is 75.")
    ] = None,
    json: commands.OutputFormat = commands.TEXT,
) -> dict[str, Any]:
    """Read a job's state from its scheduler, wait for it, cancel it, or clean up after it.

    `wait` exits with the job's exit code. `list` shows the jobs launched from this machine.

    For example:

        >>> regauge.job("wait", "slurm://cluster/42", timeout=3600)
    """
    if action == "list":
        return commands.show({"jobs": list(list_jobs())}, as_json=json.is_json)
    address = Handle.parse(handle)
    launcher = select_launcher(Launch(), address.target)
    if action == "logs":
        request = LogRequest(rank, attempt, follow)
        return _print_log(launcher, address, request, as_json=json.is_json)
    if action == "events":
        events = [event._asdict() for event in launcher.list_events(address)]
        return commands.show({"events": events}, as_json=json.is_json)
    if action == "cleanup":
        leftovers = [leftover._asdict() for leftover in launcher.clean_up(address)]
        return commands.show({"leftovers": leftovers}, as_json=json.is_json)
    if action == "cancel":
        launcher.cancel(address)
    if action == "wait":
        status = _wait(launcher, address, timeout)
    else:
        status = add_progress(launcher.find_status(address))
    answer = commands.show(describe_status(status, with_reasons=why), as_json=json.is_json)
    if action == "wait":
        _check_success(status)
    return answer


def describe_status(status: JobStatus, *, with_reasons: bool) -> dict[str, Any]:
    """Return a status as JSON-ready values, without unknown values.

    With `with_reasons`, the reason is also included for a job that starts, runs or has succeeded.
    """
    document = _drop_unknown(asdict(status))
    for key in {"nodes", "stages"} & document.keys():
        document[key] = [_drop_unknown(row | {"shell_command": ""}) for row in document[key]]
    for key in {"failure", "progress"} & document.keys():
        document[key] = _drop_unknown(document[key])
    document["handle"] = str(status.handle)
    document |= _drop_unknown({"shell": status.shell_command})
    if not with_reasons and status.state in ("starting", "running", "succeeded"):
        document.pop("reason", None)
    return document


def _drop_unknown(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if value not in (None, (), "")}


def _print_log(
    launcher: Launcher, handle: Handle, request: LogRequest, *, as_json: bool
) -> dict[str, Any]:
    """Print log lines; Python callers and `--json` get all lines at the end."""
    lines = launcher.read_log(handle, request)
    if as_json or log.is_embedded():
        return commands.show({"lines": list(lines)}, as_json=as_json)
    for line in lines:
        log.stdout.print(line, markup=False, highlight=False, soft_wrap=True)
    return {}


def _wait(launcher: Launcher, handle: Handle, timeout: float | None) -> JobStatus:
    """Return a job's status when it has ended.

    A scheduler that does not answer counts as an unknown state. Raises TransientError after the
    timeout, or if the state remains unknown.
    """
    began_at = known_at = time.monotonic()
    while not (status := _find_status(launcher, handle)).is_final:
        now = time.monotonic()
        if timeout is not None and now - began_at >= timeout:
            raise TransientError(f"{handle} is {status.state} after {timeout:g} s", "wait again")
        if status.state != "unknown":
            known_at = now
        elif now - known_at >= UNKNOWN_SECONDS:
            problem = f"the state of {handle} is unknown: {status.reason}"
            remedy = f"wait again, or remove it with: regauge job cleanup {handle}"
            raise TransientError(problem, remedy)
        stop_signals.check_stop()
        time.sleep(STATUS_SECONDS)
    return add_progress(status)


def _find_status(launcher: Launcher, handle: Handle) -> JobStatus:
    try:
        return launcher.find_status(handle)
    except TransientError as error:
        return JobStatus(handle, "unknown", error.problem)


def _check_success(status: JobStatus) -> None:
    if status.state == "succeeded":
        return
    default = CANCELLED if status.state == "cancelled" else FAILED
    message = f"{status.handle} {status.state}"
    if status.failure is not None and status.failure.message:
        message += f": {status.failure.message}"
    elif status.state == "failed" and status.reason:
        message += f": {status.reason}"
    remedy = f"read it with: regauge job logs {status.handle}"
    raise ChildError(status.exit_code or default, f"{message}; {remedy}")
