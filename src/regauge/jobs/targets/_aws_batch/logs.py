"""CloudWatch Logs streams."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets._aws_batch.documents import TAG_PREFIX
from regauge.jobs.targets._aws_batch.jobs import list_child_names
from regauge.jobs.targets._aws_batch.settings import DEFAULT_LOG_GROUP
from regauge.jobs.targets._aws_batch.status import FINAL_STATUSES
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.jobs.targets._aws_batch.client import AwsClient

PAUSE_SECONDS = 2.0


def select_child(detail: dict[str, Any], rank: int | None) -> str:
    """Return the node that runs a rank, or the array job with this index.

    By default this is the main node, or job 0 in the array. Raises SettingsError for other ranks.
    """
    names = list_child_names(detail)
    if not names:
        return str(detail["jobId"])
    num_processes = int(detail.get("tags", {}).get(f"{TAG_PREFIX}processes", 1))
    is_array = "arrayProperties" in detail
    index = 0 if rank is None else rank // (1 if is_array else num_processes)
    if not 0 <= index < len(names):
        highest = len(names) * (1 if is_array else num_processes) - 1
        problem = f"the job {detail['jobId']} has no rank {rank}"
        raise SettingsError(problem, f"set --rank to 0 to {highest}")
    return names[index]


def find_log_stream(detail: dict[str, Any], attempt: int | None) -> tuple[str, str]:
    """Return an attempt's log group and log stream, by default for the last attempt.

    Raises SettingsError without a log stream.
    """
    container = detail.get("container", {})
    options = container.get("logConfiguration", {}).get("options", {})
    streams = [
        item.get("container", {}).get("logStreamName") for item in detail.get("attempts", [])
    ]
    last = container.get("logStreamName")
    if last is not None and last not in streams:
        streams.append(last)
    number = len(streams) if attempt is None else attempt
    stream = streams[number - 1] if 1 <= number <= len(streams) else None
    if stream is None:
        problem = f"{detail['jobId']} has no log of attempt {number}"
        if not any(streams):
            problem = f"{detail['jobId']} has no log: its status is {detail.get('status')}"
        raise SettingsError(problem, "read its state with 'regauge job status'")
    return str(options.get("awslogs-group", DEFAULT_LOG_GROUP)), str(stream)


def read_stream(
    logs: AwsClient, group: str, stream: str, *, describe: Callable[[], dict[str, Any]] | None
) -> Iterator[str]:
    """Yield a log stream's lines; if `describe` is set, until the job it reads ends."""
    token: str | None = None
    has_ended = describe is None
    while True:
        request: dict[str, Any] = {"logGroupName": group, "logStreamName": stream}
        if token is not None:
            request["nextToken"] = token
        response = logs.call("get_log_events", **request, startFromHead=True)
        for event in response["events"]:
            yield str(event["message"]).rstrip("\n")
        is_last_page = response["nextForwardToken"] == token or not response["events"]
        token = response["nextForwardToken"]
        if not is_last_page:
            continue
        if has_ended:
            return
        has_ended = describe is not None and describe()["status"] in FINAL_STATUSES
        if not has_ended:
            time.sleep(PAUSE_SECONDS)
