"""Follow, cancel or clean up a job that `launch` submitted."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from regauge import log, verbs
from regauge.errors import ChildError, TransientError
from regauge.launchers import Handle, JobStatus, LogRequest
from regauge.launching.planning import select_launcher
from regauge.launching.settings import Launch

if TYPE_CHECKING:
    from regauge.launchers import Launcher

Action = Literal["status", "events", "logs", "cancel", "wait", "cleanup"]
POLL_SECONDS = 2.0
FAILED, CANCELLED = 1, 130
"""Exit codes of `wait` for a job whose scheduler reports no exit code."""


def main(  # noqa: PLR0913
    action: Annotated[Action, Parameter(help="What to do with the job.")],
    handle: Annotated[str, Parameter(help="Handle that `launch` printed: target://context/id.")],
    *,
    why: Annotated[
        bool, Parameter(help="With status: also print the reasons that the scheduler reports.")
    ] = False,
    rank: Annotated[
        int | None, Parameter(help="With logs: the rank; by default the leader.")
    ] = None,
    attempt: Annotated[
        int | None, Parameter(help="With logs: the attempt; by default the last one.")
    ] = None,
    follow: Annotated[
        bool, Parameter(help="With logs: wait for new lines until the job ends.")
    ] = False,
    timeout: Annotated[
        float | None, Parameter(help="With wait: maximum seconds; then the exit code is 75.")
    ] = None,
    output_format: Annotated[
        Literal["text", "json"], Parameter(name=("--output", "-o"), help="Format of the output.")
    ] = "text",
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Read the state of a job from its scheduler, wait for it, cancel it, or clean up after it.

    The exit code of `wait` is that of the job.
    """
    as_json = json or output_format == "json"
    address = Handle.parse(handle)
    launcher = select_launcher(Launch(), address.target)
    if action == "logs":
        return _print_log(launcher, address, LogRequest(rank, attempt, follow))
    if action == "events":
        events = [event._asdict() for event in launcher.list_events(address)]
        return verbs.show({"events": events}, as_json=as_json)
    if action == "cancel":
        launcher.cancel(address)
    if action == "cleanup":
        leftovers = [leftover._asdict() for leftover in launcher.clean_up(address)]
        return verbs.show({"leftovers": leftovers}, as_json=as_json)
    if action == "wait":
        status = _wait(launcher, address, timeout)
        answer = verbs.show(describe_status(status, with_reasons=why), as_json=as_json)
        _check_success(status)
        return answer
    status = launcher.find_status(address)
    return verbs.show(describe_status(status, with_reasons=why), as_json=as_json)


def describe_status(status: JobStatus, *, with_reasons: bool) -> dict[str, Any]:
    """Return a status as JSON-ready values; unknown values are left out."""
    document = {key: value for key, value in asdict(status).items() if value not in (None, ())}
    document["handle"] = str(status.handle)
    if not with_reasons and status.state != "pending":
        document.pop("reason", None)
    return {key: value for key, value in document.items() if value != ""}


def _print_log(launcher: Launcher, handle: Handle, request: LogRequest) -> dict[str, Any]:
    for line in launcher.read_log(handle, request):
        log.stdout.print(line, markup=False, highlight=False, soft_wrap=True)
    return {}


def _wait(launcher: Launcher, handle: Handle, timeout: float | None) -> JobStatus:
    """Return the status of a job when it has ended; raises TransientError after the timeout."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not (status := launcher.find_status(handle)).is_final:
        if deadline is not None and time.monotonic() >= deadline:
            problem = f"{handle} is {status.state} after {timeout:g} s"
            raise TransientError(problem, "wait again")
        time.sleep(POLL_SECONDS)
    return status


def _check_success(status: JobStatus) -> None:
    """Raise ChildError with the exit code of a job that did not succeed."""
    if status.state == "succeeded":
        return
    default = CANCELLED if status.state == "cancelled" else FAILED
    message = f"{status.handle} {status.state}"
    if status.failure is not None and status.failure.message:
        message += f": {status.failure.message}"
    remedy = f"read it with: regauge job logs {status.handle}"
    raise ChildError(status.exit_code or default, f"{message}; {remedy}")
