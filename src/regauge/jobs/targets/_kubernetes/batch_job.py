"""The Job (batch/v1) of a verb that runs on one node, or of an array of `predict`.

Fields: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.jobs.targets._kubernetes.pods import (
    build_failure_policy,
    build_pod_template,
    check_host_name,
)

if TYPE_CHECKING:
    from regauge.jobs.targets import JobSpec
    from regauge.jobs.targets._kubernetes.settings import PodSettings

CONTAINER = "regauge"
API_VERSION, KIND = "batch/v1", "Job"


def build_batch_job(
    job: JobSpec, pod: PodSettings, metadata: dict[str, Any], ttl_seconds: int | None
) -> dict[str, Any]:
    """Return the Job of one node, or an Indexed Job with a pod per job of an array.

    After the failure of one job of an array, the other jobs continue.
    """
    is_array = job.jobs > 1
    template = build_pod_template(job, pod, CONTAINER, metadata)
    template["spec"]["restartPolicy"] = "Never"
    spec: dict[str, Any] = {
        "podFailurePolicy": build_failure_policy(CONTAINER, "FailIndex" if is_array else "FailJob"),
        "template": template,
    }
    if is_array:
        check_host_name(job, f"-{job.jobs - 1}")
        counts = {"completions": job.jobs, "parallelism": job.jobs}
        limit = {"backoffLimitPerIndex": job.max_attempts - 1}
        spec = {"completionMode": "Indexed", **counts, **limit, **spec}
    else:
        spec = {"backoffLimit": job.max_attempts - 1, **spec}
    if job.limit_seconds is not None:
        spec["activeDeadlineSeconds"] = job.limit_seconds
    if ttl_seconds is not None:
        spec["ttlSecondsAfterFinished"] = ttl_seconds
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
