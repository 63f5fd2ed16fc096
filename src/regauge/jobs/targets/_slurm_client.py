"""Runs Slurm's commands: the cluster's configuration, its jobs, and their successors."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.jobs.targets._clients import find_client, run_client
from regauge.jobs.targets._slurm_jobs import (
    SACCT_FIELDS,
    SlurmRecord,
    parse_assignments,
    parse_comment,
    parse_entity,
    parse_records,
    parse_table,
)
from regauge.system.errors import SettingsError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE = "slurm-client, or use a login node of the cluster"
HANDLE_REMEDY = "correct the handle of the job"
CONFIG_REMEDY = "correct slurm.conf"
UNKNOWN_JOB = "invalid job id"
"""Part of the message of `scontrol` for a job that it does not know, in lowercase."""


@dataclass(frozen=True)
class ClusterFacts:
    """The settings of a cluster that a submission depends on."""

    name: str
    preempt_type: str
    preempt_mode: str
    """Preemption mode of the partition: `OFF`, `CANCEL`, `REQUEUE` or `SUSPEND`."""
    partition: str
    is_requeue_allowed: bool


def find_program(program: str) -> str:
    """Return the path of a command of Slurm; raises PreflightError if it is not installed."""
    return find_client(program, PACKAGE)


def run_program(program: str, *arguments: str, text: str | None = None, remedy: str) -> str:
    """Run a command of Slurm and return its output; raises the errors of `run_client`."""
    return run_client([find_program(program), *arguments], text=text, remedy=remedy)


def read_cluster_name() -> str:
    """Return the name of the cluster whose clients this machine has."""
    text = run_program("scontrol", "show", "config", remedy=CONFIG_REMEDY)
    return parse_assignments(text).get("ClusterName", "")


def read_cluster(partition: str | None) -> ClusterFacts:
    """Return the facts for a partition, by default the cluster's default one.

    Raises SettingsError if there is no such partition.
    """
    config = parse_assignments(run_program("scontrol", "show", "config", remedy=CONFIG_REMEDY))
    text = run_program("scontrol", "--oneliner", "show", "partition", remedy=CONFIG_REMEDY)
    partitions = {entry["PartitionName"]: entry for entry in map(parse_entity, text.splitlines())}
    names = [partition] if partition else _list_defaults(partitions)
    if not names:
        problem = "the cluster has no default partition"
        raise SettingsError(problem, _build_partition_remedy(partitions))
    for name in names[0].split(","):
        if name not in partitions:
            problem = f"the cluster has no partition '{name}'"
            raise SettingsError(problem, _build_partition_remedy(partitions))
    entry = partitions[names[0].partition(",")[0]]
    mode = entry.get("PreemptMode") or config.get("PreemptMode", "OFF")
    return ClusterFacts(
        name=config.get("ClusterName", ""),
        preempt_type=config.get("PreemptType", "preempt/none"),
        preempt_mode=mode,
        partition=names[0],
        is_requeue_allowed=config.get("JobRequeue", "1") == "1",
    )


def _list_defaults(partitions: dict[str, dict[str, str]]) -> list[str]:
    return [name for name, entry in partitions.items() if entry.get("Default") == "YES"]


def _build_partition_remedy(partitions: dict[str, dict[str, str]]) -> str:
    return f"set partition of the target to one of: {', '.join(sorted(partitions)) or 'none'}"


def read_records(job_id: str) -> list[SlurmRecord]:
    """Return the records of a job, one per job of an array; empty if Slurm does not know it."""
    try:
        text = run_program("scontrol", "--oneliner", "show", "job", job_id, remedy=HANDLE_REMEDY)
    except SettingsError as error:
        if UNKNOWN_JOB not in error.problem.lower():
            raise
        return _read_accounting(job_id)
    return parse_records(text)


def _read_accounting(job_id: str) -> list[SlurmRecord]:
    """Return the records of a job that has left the controller; empty without accounting."""
    if shutil.which("sacct") is None:
        return []
    fields = ",".join(SACCT_FIELDS)
    arguments = ("--allocations", "--parsable2", "--noheader", f"--format={fields}", "--jobs")
    try:
        return parse_table(run_program("sacct", *arguments, job_id, remedy=HANDLE_REMEDY))
    except SettingsError as error:
        logger.debug("%s", error)  # accounting is disabled
        return []


def find_successors(first_job: str) -> list[SlurmRecord]:
    """Return the jobs that continue a job after preemptions, the oldest first.

    `first_job` is the id of the job that `launch` submitted. Jobs of its array are included.
    """
    options = ("--noheader", "--states=all", "--format=%A|%k")
    text = run_program("squeue", *options, remedy=CONFIG_REMEDY)
    rows = [line.partition("|") for line in text.splitlines()]
    successors = [
        int(job_id)
        for job_id, _, comment in rows
        if first_job in ((job := parse_comment(comment).get("first", "")), job.partition("_")[0])
    ]
    return [record for number in sorted(successors) for record in read_records(str(number))]


def list_hosts(node_lists: Sequence[str]) -> list[str]:
    """Return the hosts of node lists in Slurm's notation, in their order."""
    joined = ",".join(text for text in node_lists if text)
    if not joined:
        return []
    return run_program("scontrol", "show", "hostnames", joined, remedy=CONFIG_REMEDY).split()
