"""The states of Slurm's jobs as states of a launcher, and explanations of pending reasons.

The names follow the squeue manual, sections "JOB STATE CODES" and "JOB REASON CODES".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.jobs.targets import JobState

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


def describe_reason(reason: str) -> str:
    """Return a reason of Slurm with its explanation, such as `Priority: jobs ... are ahead`."""
    if reason in ("", "(null)"):
        return ""
    name = re.split(r"[,\s(]", reason.strip("("))[0].rstrip(")")
    prefixes = (text for prefix, text in REASON_PREFIXES if name.startswith(prefix))
    explanation = REASONS.get(name) or next(prefixes, "")
    return f"{reason}: {explanation}" if explanation else reason
