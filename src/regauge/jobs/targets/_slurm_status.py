"""The status of a job from Slurm's records and the logs of the job.

The names of states and reasons follow the squeue manual, sections "JOB STATE CODES" and "JOB REASON
CODES".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from regauge.jobs.targets import (
    FINAL_STATES,
    Handle,
    JobFailure,
    JobState,
    JobStatus,
    NodeStatus,
    is_local_folder,
)
from regauge.jobs.targets._slurm_jobs import SlurmRecord
from regauge.jobs.targets._slurm_logs import LogFolder
from regauge.system.errors import PreemptedError

STATES: dict[str, JobState] = {
    "BOOT_FAIL": "failed",
    "CANCELLED": "cancelled",
    "COMPLETED": "succeeded",
    "COMPLETING": "running",
    "CONFIGURING": "starting",
    "DEADLINE": "failed",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PENDING": "pending",
    "PREEMPTED": "preempted",
    "REQUEUED": "restarting",
    "REQUEUE_FED": "restarting",
    "REQUEUE_HOLD": "restarting",
    "RESIZING": "running",
    "REVOKED": "cancelled",
    "RUNNING": "running",
    "SIGNALING": "running",
    "SPECIAL_EXIT": "restarting",
    "STAGE_OUT": "running",
    "STOPPED": "preempted",
    "SUSPENDED": "preempted",
    "TIMEOUT": "failed",
}
FAILURE_KINDS = {
    "BOOT_FAIL": "node",
    "DEADLINE": "limit",
    "NODE_FAIL": "node",
    "OUT_OF_MEMORY": "memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "limit",
}
"""Kinds of failure by the state of the job, if the run recorded none."""
REASONS = {
    "AssocGrpBillingMinutes": "the account has used its budget",
    "BadConstraints": "no node fulfils the constraints of the job",
    "BeginTime": "the start time of the job is in the future, as after a requeue",
    "Dependency": "it waits for the end of another job",
    "DependencyNeverSatisfied": "the job that it waits for has failed",
    "InvalidAccount": "the account does not exist",
    "InvalidQOS": "the QOS does not exist",
    "JobArrayTaskLimit": "enough jobs of the array run already",
    "JobHeldAdmin": "an administrator holds the job",
    "JobHeldUser": "a user holds the job",
    "JobHoldMaxRequeue": "it was requeued too often",
    "Licenses": "no license is free",
    "NodeDown": "a node of the job is down",
    "None": "the scheduler has not considered the job yet",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionNodeLimit": "the partition does not allow this number of nodes",
    "PartitionTimeLimit": "the time limit of the partition is shorter",
    "Priority": "jobs with a higher priority are ahead",
    "Prolog": "the prolog of the job runs",
    "ReqNodeNotAvail": "requested nodes are down, reserved or in maintenance",
    "Reservation": "the reservation has not begun",
    "Resources": "not enough nodes, processors or devices are free",
}
"""Explanations by reason."""
REASON_PREFIXES = (
    ("QOS", "a limit of the QOS is reached"),
    ("Assoc", "a limit of the account or user is reached"),
    ("Max", "a limit of the account or user is reached"),
)
STATE_ORDER: tuple[JobState, ...] = (
    "running",
    "starting",
    "restarting",
    "preempted",
    "pending",
    "unknown",
    "failed",
    "cancelled",
    "succeeded",
)
"""The state of an array is the first of these that one of its jobs has."""


def describe_reason(reason: str) -> str:
    """Return a reason of Slurm with its explanation, such as `Priority: jobs ... are ahead`."""
    if reason in ("", "(null)"):
        return ""
    name = re.split(r"[,\s(]", reason.strip("("))[0].rstrip(")")
    prefixes = (text for prefix, text in REASON_PREFIXES if name.startswith(prefix))
    explanation = REASONS.get(name) or next(prefixes, "")
    return f"{reason}: {explanation}" if explanation else reason


def select_latest(records: Sequence[SlurmRecord]) -> list[SlurmRecord]:
    """Return the last record per index of an array; successors follow the jobs they replace."""
    latest = {record.index: record for record in records}
    return [latest[index] for index in sorted(latest)]


def find_state(record: SlurmRecord) -> JobState:
    """Return the state of a job that has no successor."""
    state = STATES.get(record.state, "unknown")
    if state == "preempted" and record.state == "PREEMPTED":
        return "failed"
    if state == "pending" and "first" in record.facts:
        return "preempted"
    if state == "pending" and record.restarts:
        logs = find_logs(record)
        return "preempted" if logs and logs.is_preempted() else "restarting"
    return state


def find_logs(record: SlurmRecord) -> LogFolder | None:
    """Return the logs of a record; None if Regauge did not submit the job."""
    return LogFolder.find(record) if "logs" in record.facts else None


def describe_record(record: SlurmRecord) -> str:
    """Return the reason of a state in plain words; empty if there is nothing to explain."""
    if record.state in ("PENDING", "SUSPENDED") or record.state.startswith("REQUEUE"):
        return describe_reason(record.fields.get("Reason", ""))
    if record.state in FAILURE_KINDS:
        return f"Slurm ended the job: {record.state}"
    return "Slurm waits for the end of its processes" if record.state == "COMPLETING" else ""


def build_status(handle: Handle, records: Sequence[SlurmRecord], hosts: Sequence[str]) -> JobStatus:
    """Return the status of a job from its records, the oldest first, and its present hosts."""
    latest = select_latest(records)
    states = [find_state(record) for record in latest]
    state = min(states, key=STATE_ORDER.index)
    record = latest[states.index(state)]
    facts = latest[0].facts
    logs = find_logs(record)
    is_final = state in FINAL_STATES
    ends = [end for entry in latest if (end := entry.read_time("EndTime"))]
    starts = [start for entry in records if (start := entry.read_time("StartTime"))]
    has_started = state not in ("pending", "preempted") or len(records) > len(latest)
    price = facts.get("usd_per_hour")
    output = facts.get("output", "")
    return JobStatus(
        handle,
        state,
        describe_record(record),
        attempt=_count_attempts(records, record, logs),
        nodes=_list_nodes(latest, states, hosts, logs),
        exit_code=_find_exit_code(record, state),
        failure=_describe_failure(record, logs, hosts) if state == "failed" else None,
        usd_per_hour=float(price) if price else None,
        price_date=facts.get("price_date"),
        output=_resolve_folder(record, output),
        submitted_at=records[0].read_time("SubmitTime"),
        started_at=min(starts, default=None) if has_started else None,
        finished_at=max(ends, default=None) if is_final else None,
    )


def _resolve_folder(record: SlurmRecord, folder: str) -> str:
    """Return a folder as an absolute path; an address of an object store is unchanged."""
    if folder.startswith("/") or not is_local_folder(folder) or not record.work_folder:
        return folder
    return f"{record.work_folder}/{folder}"


def _count_attempts(
    records: Sequence[SlurmRecord], record: SlurmRecord, logs: LogFolder | None
) -> int:
    """Return the number of attempts that have begun, or else that Slurm knows."""
    if logs and (count := logs.count_attempts()):
        return count
    same_index = [entry for entry in records if entry.index == record.index]
    return len(same_index) + sum(entry.restarts for entry in same_index)


def _find_exit_code(record: SlurmRecord, state: JobState) -> int | None:
    """Return the exit code of a job that succeeded or failed."""
    if state not in ("succeeded", "failed"):
        return None
    code = record.exit_code
    if state == "failed" and record.state == "PREEMPTED":
        return PreemptedError.exit_code
    return code


def _list_nodes(
    latest: Sequence[SlurmRecord],
    states: Sequence[JobState],
    hosts: Sequence[str],
    logs: LogFolder | None,
) -> tuple[NodeStatus, ...]:
    """Return the jobs of an array, or the nodes of a job."""
    if len(latest) > 1 or "ArrayTaskId" in latest[0].fields:
        return tuple(
            NodeStatus(
                record.index,
                state,
                record.node_list,
                _find_exit_code(record, state),
                describe_record(record),
            )
            for record, state in zip(latest, states, strict=True)
        )
    if states[0] in ("pending", "preempted"):
        return ()
    codes = logs.read_task_ends() if logs and states[0] in FINAL_STATES else {}
    return tuple(
        NodeStatus(index, states[0], host, codes.get(host)) for index, host in enumerate(hosts)
    )


def _describe_failure(
    record: SlurmRecord, logs: LogFolder | None, hosts: Sequence[str]
) -> JobFailure:
    """Return the failure of a job: Slurm's state, the last error line and the node that failed."""
    codes = logs.read_task_ends() if logs else {}
    failed = [host for host, code in codes.items() if code == record.exit_code]
    node = hosts.index(failed[0]) if failed and failed[0] in hosts else None
    message = (logs.find_error() if logs else "") or describe_record(record)
    return JobFailure(FAILURE_KINDS.get(record.state, "unknown"), None, node, message)
