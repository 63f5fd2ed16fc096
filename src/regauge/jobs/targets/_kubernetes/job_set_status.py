"""Pipeline state from a JobSet and the stages' Jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets import JobStatus
from regauge.jobs.targets._kubernetes.job_status import JobObjects, describe_job
from regauge.jobs.targets._kubernetes.pods import JOB_NAME, STAGE
from regauge.jobs.targets._stage_jobs import join_statuses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.jobs.targets import Handle

Object = dict[str, Any]


def describe_job_set(handle: Handle, objects: JobObjects, jobs: Sequence[Object]) -> JobStatus:
    """Return a pipeline's state. `jobs` are the stage Jobs created so far."""
    by_name = {job["metadata"]["name"]: job for job in jobs}
    whole = describe_job(handle, objects)
    stages: list[tuple[str, JobStatus]] = []
    for entry in objects.job["spec"]["replicatedJobs"]:
        name = f"{objects.job['metadata']['name']}-{entry['name']}-0"
        parts = handle.job_id.rsplit("/", 2)
        stage_handle = handle._replace(job_id="/".join((*parts[:-2], "job", name)))
        title = entry["template"]["metadata"]["annotations"][STAGE]
        if name in by_name:
            pods = [pod for pod in objects.pods if pod["metadata"]["labels"].get(JOB_NAME) == name]
            status = describe_job(stage_handle, JobObjects(by_name[name], pods, objects.events))
        else:
            status = _describe_missing(stage_handle, whole, stages)
        if whole.state == "cancelled" and not status.is_final:
            status = replace(status, state="cancelled", reason=whole.reason)
        stages.append((title, status))
    status = join_statuses(handle, stages)
    return replace(
        status,
        usd_per_hour=whole.usd_per_hour,
        price_date=whole.price_date,
        output=whole.output,
        submitted_at=whole.submitted_at,
    )


def _describe_missing(
    handle: Handle, whole: JobStatus, earlier: Sequence[tuple[str, JobStatus]]
) -> JobStatus:
    """Return a stage's state before its Job has been created."""
    if not earlier:
        return JobStatus(handle, "cancelled" if whole.is_final else "pending", whole.reason)
    name, previous = earlier[-1]
    if whole.is_final or previous.state in ("failed", "cancelled"):
        return JobStatus(handle, "cancelled", f"stage '{name}' has not succeeded")
    return JobStatus(handle, "pending", f"it waits for stage '{name}'")
