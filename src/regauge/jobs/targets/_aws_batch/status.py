"""Job state from DescribeJobs responses.

Format: https://docs.aws.amazon.com/batch/latest/APIReference/API_JobDetail.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regauge.jobs.targets import Handle, JobEvent, JobFailure, JobState, JobStatus, NodeStatus
from regauge.jobs.targets._aws_batch.documents import HOST_LOSS, TAG_PREFIX
from regauge.jobs.targets._times import format_epoch
from regauge.system.errors import PreemptedError

Detail = dict[str, Any]
FINAL_STATUSES = ("SUCCEEDED", "FAILED")
QUEUED_STATUSES = ("SUBMITTED", "PENDING", "RUNNABLE")
"""Statuses before a job runs on a machine."""
ACTIVE_STATUSES = ("RUNNING", "STARTING", "RUNNABLE", "PENDING", "SUBMITTED")
"""Statuses of an unfinished array, by precedence."""
CANCEL_REASON = "cancelled by regauge job cancel"
TIME_LIMIT_ACTION = "Canceled by JobStateTimeLimit"
"""Status reason prefix for a job that Batch cancels because it cannot start."""
MEMORY_REASON = "OutOfMemory"
"""Appears in the reason for a container that exceeds its memory."""
ATTEMPT_TIMEOUT = "Job attempt duration exceeded timeout"
"""Status reason for a job that exceeds its time limit; it is not retried."""


def find_state(detail: Detail) -> JobState:
    """Return the state of a job or node.

    A queued job with an earlier attempt restarts; it is preempted if that attempt lost its machine.
    """
    status, attempts = _find_status(detail), detail.get("attempts", [])
    if status == "SUCCEEDED":
        return "succeeded"
    if status == "FAILED":
        return "cancelled" if is_cancelled(detail) else "failed"
    if status == "RUNNING":
        return "running"
    if status == "STARTING":
        return "restarting" if attempts else "starting"
    if status not in QUEUED_STATUSES:
        return "unknown"
    if not attempts:
        return "pending"
    return "preempted" if _is_preempted(attempts[-1]) else "restarting"


def _find_status(detail: Detail) -> str:
    """Return the status; an array stays PENDING, so its active jobs' status is used instead."""
    status = str(detail.get("status", ""))
    summary = detail.get("arrayProperties", {}).get("statusSummary", {})
    if status in FINAL_STATUSES or not summary:
        return status
    return next((name for name in ACTIVE_STATUSES if summary.get(name)), status)


def is_final(detail: Detail) -> bool:
    return detail["status"] in FINAL_STATUSES


def find_started(chain: Sequence[Detail]) -> Detail:
    """Return the last pipeline job that has started; the first one if none has."""
    started = [
        item
        for item in chain
        if item.get("attempts") or find_state(item) in ("running", "starting", "succeeded")
    ]
    return started[-1] if started else chain[0]


def is_cancelled(detail: Detail) -> bool:
    """Return whether somebody cancelled a job.

    Batch itself cancels a job that cannot start, and terminates one that exceeds its time.
    """
    reason = str(detail.get("statusReason", ""))
    if reason.startswith((TIME_LIMIT_ACTION, ATTEMPT_TIMEOUT)):
        return False
    is_requested = detail.get("isCancelled") or detail.get("isTerminated")
    return bool(is_requested) or CANCEL_REASON in reason


def _is_preempted(attempt: Detail) -> bool:
    code = attempt.get("container", {}).get("exitCode")
    return code == PreemptedError.exit_code or _is_host_lost(attempt.get("statusReason", ""))


def _is_host_lost(reason: str) -> bool:
    return reason.startswith(HOST_LOSS.removesuffix("*"))


def find_exit_code(detail: Detail) -> int | None:
    """Return the last attempt's exit code; None while it runs, or without a container exit code."""
    if _find_status(detail) in ("RUNNING", "STARTING"):
        return None
    attempts = detail.get("attempts", [])
    containers = [detail.get("container", {})]
    containers += [attempt.get("container", {}) for attempt in attempts[-1:]]
    codes = [container["exitCode"] for container in containers if "exitCode" in container]
    return int(codes[-1]) if codes else None


def find_reason(detail: Detail) -> str:
    """Return the scheduler's reason, plus the last attempt's reasons if none runs now."""
    reasons = [detail.get("statusReason", "")]
    if _find_status(detail) not in ("RUNNING", "STARTING"):
        reasons.append(detail.get("container", {}).get("reason", ""))
        attempts = detail.get("attempts", [])[-1:]
        reasons += [reason for attempt in attempts for reason in _list_reasons(attempt)]
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def _list_reasons(attempt: Detail) -> tuple[str, str]:
    return attempt.get("statusReason", ""), attempt.get("container", {}).get("reason", "")


def build_node_status(index: int, detail: Detail) -> NodeStatus:
    arn = str(detail.get("container", {}).get("containerInstanceArn", ""))
    shell = _build_shell_command(arn) if arn.count("/") == 2 else ""  # noqa: PLR2004
    code, reason = find_exit_code(detail), find_reason(detail)
    return NodeStatus(index, find_state(detail), arn.rpartition("/")[2], code, reason, shell)


def _build_shell_command(arn: str) -> str:
    """Return the command for a Systems Manager session on a container instance.

    The ARN ends with `container-instance/CLUSTER/ID`.
    """
    region, cluster = arn.split(":")[3], arn.split("/")[1]
    query = f"aws ecs describe-container-instances --region {region} --cluster {cluster}"
    query += f" --container-instances {arn} --output text"
    query += " --query 'containerInstances[0].ec2InstanceId'"
    return f"aws ssm start-session --region {region} --target $({query})"


def build_status(handle: Handle, detail: Detail, children: Sequence[Detail]) -> JobStatus:
    """Return a job's status, with its nodes or array jobs.

    A multi-node parallel job ends when the main node does.
    """
    state, tags = find_state(detail), detail.get("tags", {})
    nodes = tuple(build_node_status(index, child) for index, child in enumerate(children))
    leader = next((child for child in children if _is_main_node(child)), None)
    exit_code = find_exit_code(detail)
    if exit_code is None and leader is not None:
        exit_code = find_exit_code(leader)
    if exit_code is None and "arrayProperties" in detail:
        exit_code = next((node.exit_code for node in nodes if node.exit_code), None)
    num_attempts = len(detail.get("attempts", []))
    is_active = state in ("starting", "running") or detail.get("status") == "STARTING"
    price = tags.get(f"{TAG_PREFIX}usd-per-hour")
    return JobStatus(
        handle,
        state,
        find_reason(detail),
        attempt=num_attempts + is_active or None,
        nodes=nodes,
        exit_code=exit_code if state in ("succeeded", "failed") else None,
        failure=_find_failure(detail, exit_code, nodes) if state == "failed" else None,
        usd_per_hour=None if price is None else float(price),
        price_date=tags.get(f"{TAG_PREFIX}price-date"),
        output=tags.get(f"{TAG_PREFIX}output", ""),
        submitted_at=format_epoch(detail.get("createdAt"), "seconds"),
        started_at=format_epoch(detail.get("startedAt"), "seconds"),
        finished_at=format_epoch(detail.get("stoppedAt"), "seconds"),
    )


def _is_main_node(child: Detail) -> bool:
    return bool(child.get("nodeDetails", {}).get("isMainNode"))


def _find_failure(detail: Detail, exit_code: int | None, nodes: Sequence[NodeStatus]) -> JobFailure:
    """Return why a job failed, as far as Batch knows."""
    reason = find_reason(detail)
    failed = next((node for node in nodes if node.state == "failed"), None)
    message = reason or (failed.reason if failed else "")
    if exit_code is not None:
        message = f"exit code {exit_code}; {message}" if message else f"exit code {exit_code}"
    kind = "unknown"
    if ATTEMPT_TIMEOUT in message:
        kind = "limit"
    elif _is_host_lost(reason):
        kind = "node"
    elif MEMORY_REASON in message:
        kind = "memory"
    elif exit_code == PreemptedError.exit_code:
        kind = "preempted"
    return JobFailure(kind, node=failed.index if failed else None, message=message)


def list_job_events(detail: Detail) -> list[JobEvent]:
    """Return job and attempt times as events, oldest first."""
    events = [(detail.get("createdAt"), f"job {detail['jobName']} submitted to its queue")]
    for number, attempt in enumerate(detail.get("attempts", []), start=1):
        code = attempt.get("container", {}).get("exitCode")
        reason = "; ".join(filter(None, _list_reasons(attempt)))
        end = f"attempt {number} ended" + ("" if code is None else f" with exit code {code}")
        events.append((attempt.get("startedAt"), f"attempt {number} started"))
        events.append((attempt.get("stoppedAt"), f"{end}: {reason}" if reason else end))
    if detail.get("status") == "RUNNING":
        number = len(detail.get("attempts", [])) + 1
        events.append((detail.get("startedAt"), f"attempt {number} started"))
    if detail.get("status") in FINAL_STATUSES:
        reason = find_reason(detail)
        end = f"job {find_state(detail)}"
        events.append((detail.get("stoppedAt"), f"{end}: {reason}" if reason else end))
    timed_events = sorted((time, index, text) for index, (time, text) in enumerate(events) if time)
    return [
        JobEvent(format_epoch(time, "seconds") or "", "aws-batch", text)
        for time, _, text in timed_events
    ]
