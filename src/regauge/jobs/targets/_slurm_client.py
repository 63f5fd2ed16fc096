"""Runs Slurm's commands: cluster configuration, jobs and hosts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import NamedTuple

from regauge.jobs.targets._clients import find_client, run_client
from regauge.jobs.targets._slurm_jobs import (
    SACCT_FIELDS,
    SlurmRecord,
    parse_assignments,
    parse_duration,
    parse_fields,
    parse_records,
    parse_table,
)
from regauge.system.errors import SettingsError
from regauge.system.log import logger

PACKAGE = "slurm-client, or use a login node of the cluster"
HANDLE_REMEDY = "correct the handle of the job"
CONFIG_REMEDY = "correct slurm.conf"
UNKNOWN_JOB = "invalid job id"
"""Part of the `scontrol` message for an unknown job, in lowercase."""


class SlurmPartition(NamedTuple):
    """Partition and cluster settings that matter for a submission."""

    name: str
    cluster: str
    preempt_type: str
    preempt_mode: str
    """Partition preemption mode: `OFF`, `CANCEL`, `REQUEUE` or `SUSPEND`."""
    max_seconds: float
    """Longest time limit in any partition; infinite without one."""


def find_program(program: str) -> str:
    """Return a Slurm command's path; raises PreflightError if it is not installed."""
    return find_client(program, PACKAGE)


def run_program(program: str, *arguments: str, text: str | None = None, remedy: str) -> str:
    """Run a Slurm command and return its output; raises like `run_client`."""
    return run_client([find_program(program), *arguments], text=text, remedy=remedy)


def read_config() -> dict[str, str]:
    """Return the cluster configuration, read with this machine's clients."""
    return parse_assignments(run_program("scontrol", "show", "config", remedy=CONFIG_REMEDY))


def find_partition(names: str | None) -> SlurmPartition:
    """Return the first of some partitions; the default is the cluster's default partition.

    Raises SettingsError if there is no such partition.
    """
    config = read_config()
    text = run_program("scontrol", "--oneliner", "show", "partition", remedy=CONFIG_REMEDY)
    partitions = {entry["PartitionName"]: entry for entry in map(parse_fields, text.splitlines())}
    remedy = f"set partition of the target to one of: {', '.join(sorted(partitions)) or 'none'}"
    defaults = (name for name, entry in partitions.items() if entry.get("Default") == "YES")
    names = names or next(defaults, None)
    if names is None:
        raise SettingsError("the cluster has no default partition", remedy)
    for name in names.split(","):
        if name not in partitions:
            raise SettingsError(f"the cluster has no partition '{name}'", remedy)
    entry = partitions[names.partition(",")[0]]
    limits = (partitions[name].get("MaxTime", "") for name in names.split(","))
    return SlurmPartition(
        name=names,
        cluster=config.get("ClusterName", ""),
        preempt_type=config.get("PreemptType", "preempt/none"),
        preempt_mode=entry.get("PreemptMode") or config.get("PreemptMode", "OFF"),
        max_seconds=max(map(parse_duration, limits)),
    )


def read_records(job_id: str) -> list[SlurmRecord]:
    """Return a job's records, one per array job; empty if Slurm does not know it."""
    try:
        text = run_program("scontrol", "--oneliner", "show", "job", job_id, remedy=HANDLE_REMEDY)
    except SettingsError as error:
        if UNKNOWN_JOB not in error.problem.lower():
            raise
        return _read_accounting(job_id)
    return parse_records(text)


def _read_accounting(job_id: str) -> list[SlurmRecord]:
    """Return records for a job that has left the controller; empty without accounting."""
    if shutil.which("sacct") is None:
        return []
    fields = ",".join(SACCT_FIELDS)
    arguments = ("--allocations", "--parsable2", "--noheader", f"--format={fields}", "--jobs")
    try:
        return parse_table(run_program("sacct", *arguments, job_id, remedy=HANDLE_REMEDY))
    except SettingsError as error:
        logger.debug("%s", error)  # accounting is disabled
        return []


def list_hosts(node_lists: Sequence[str]) -> list[str]:
    """Return the hosts in Slurm node lists, in order."""
    joined = ",".join(text for text in node_lists if text)
    if not joined:
        return []
    return run_program("scontrol", "show", "hostnames", joined, remedy=CONFIG_REMEDY).split()
