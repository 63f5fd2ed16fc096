"""The status of a job, from Slurm's records and the job's logs.

`slurm_states.csv` and `slurm_reasons.csv` follow the squeue manual, sections "JOB STATE CODES" and
"JOB REASON CODES".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import cast

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
from regauge.system.files import read_csv_rows

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
"""An array has the first state in this order that occurs among its jobs."""


@cache
def _load_table(name: str) -> dict[str, dict[str, str]]:
    rows = read_csv_rows(Path(__file__).with_name(f"slurm_{name}.csv"))
    return {next(iter(row.values())): row for row in rows}


def describe_reason(reason: str) -> str:
    """Return a Slurm reason with an explanation, such as `Priority: jobs ... are ahead`."""
    if reason in ("", "(null)"):
        return ""
    name = re.split(r"[,\s(]", reason.strip("("))[0].rstrip(")")
    rows = (row for pattern, row in _load_table("reasons").items() if fnmatchcase(name, pattern))
    row = next(rows, None)
    return f"{reason}: {row['explanation']}" if row else reason


def _find_failure_kind(record: SlurmRecord) -> str:
    """Return the failure kind from the state alone; empty if the state does not imply one."""
    return _load_table("states").get(record.state, {}).get("failure", "")


def find_state(record: SlurmRecord) -> JobState:
    """Return a job's state."""
    row = _load_table("states").get(record.state, {})
    state = cast("JobState", row.get("job_state", "unknown"))
    if state == "pending" and record.restarts:
        logs = find_logs(record)
        return "preempted" if logs and logs.is_preempted() else "restarting"
    return state


def find_logs(record: SlurmRecord) -> LogFolder | None:
    """Return a record's logs; None if Regauge did not submit the job."""
    return LogFolder.find(record) if "logs" in record.facts else None


def describe_record(record: SlurmRecord) -> str:
    """Return a state's reason in plain words; empty without anything to explain."""
    if record.state in ("PENDING", "SUSPENDED") or record.state.startswith("REQUEUE"):
        return describe_reason(record.fields.get("Reason", ""))
    if _find_failure_kind(record):
        return f"Slurm ended the job: {record.state}"
    return "Slurm waits for the end of its processes" if record.state == "COMPLETING" else ""


def build_status(handle: Handle, records: Sequence[SlurmRecord], hosts: Sequence[str]) -> JobStatus:
    """Return a job's status from its records, one per array job, and present hosts."""
    states = [find_state(record) for record in records]
    state = min(states, key=STATE_ORDER.index)
    record = records[states.index(state)]
    facts = record.facts
    logs = find_logs(record)
    is_final = state in FINAL_STATES
    ends = [end for entry in records if (end := entry.read_time("EndTime"))]
    starts = [start for entry in records if (start := entry.read_time("StartTime"))]
    has_started = state not in ("pending", "preempted")
    price = facts.get("usd_per_hour")
    output = facts.get("output", "")
    return JobStatus(
        handle,
        state,
        describe_record(record),
        attempt=(logs and logs.count_attempts()) or 1 + record.restarts,
        nodes=_list_nodes(records, states, hosts, logs),
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
    """Make a folder path absolute; an object store address is unchanged."""
    if folder.startswith("/") or not is_local_folder(folder) or not record.work_folder:
        return folder
    return f"{record.work_folder}/{folder}"


def _find_exit_code(record: SlurmRecord, state: JobState) -> int | None:
    """Return the exit code if the job succeeded or failed."""
    if state not in ("succeeded", "failed"):
        return None
    code = record.exit_code
    if state == "failed" and record.state == "PREEMPTED":
        return PreemptedError.exit_code
    return code


def _list_nodes(
    records: Sequence[SlurmRecord],
    states: Sequence[JobState],
    hosts: Sequence[str],
    logs: LogFolder | None,
) -> tuple[NodeStatus, ...]:
    if len(records) > 1 or "ArrayTaskId" in records[0].fields:
        return tuple(
            NodeStatus(
                record.index,
                state,
                record.node_list,
                _find_exit_code(record, state),
                describe_record(record),
                _build_shell_command(record, record.node_list),
            )
            for record, state in zip(records, states, strict=True)
        )
    if states[0] in ("pending", "preempted"):
        return ()
    codes = logs.read_task_ends() if logs and states[0] in FINAL_STATES else {}
    return tuple(
        NodeStatus(
            index,
            states[0],
            host,
            codes.get(host),
            shell_command=_build_shell_command(records[0], host),
        )
        for index, host in enumerate(hosts)
    )


def _build_shell_command(record: SlurmRecord, host: str) -> str:
    """Return a shell command within the job; `--overlap` shares the job's resources.

    Source: https://slurm.schedmd.com/srun.html#OPT_overlap.
    """
    number = record.fields.get("JobId", record.job_id)
    return f"srun --jobid={number} --nodelist={host} --nodes=1 --ntasks=1 --overlap --pty bash"


def _describe_failure(
    record: SlurmRecord, logs: LogFolder | None, hosts: Sequence[str]
) -> JobFailure:
    """Return a job's failure: Slurm's state, the last error line and the failed node."""
    codes = logs.read_task_ends() if logs else {}
    failed = [host for host, code in codes.items() if code == record.exit_code]
    node = hosts.index(failed[0]) if failed and failed[0] in hosts else None
    message = (logs.find_error() if logs else "") or describe_record(record)
    return JobFailure(_find_failure_kind(record) or "unknown", None, node, message)
