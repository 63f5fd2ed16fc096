"""Job and pipeline state from cluster objects: conditions, pods and events."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from regauge.jobs.targets import Handle, JobFailure, JobState, JobStatus, NodeStatus
from regauge.jobs.targets._kubernetes.documents import SERVER
from regauge.jobs.targets._kubernetes.kubectl import KubectlNamespace, split_handle
from regauge.jobs.targets._kubernetes.pods import (
    CANCELLED,
    JOB_NAME,
    OUTPUT,
    PRICE,
    PRICE_DATE,
    QUEUE_LABEL,
    STAGE,
)
from regauge.jobs.targets._stage_jobs import join_statuses
from regauge.system.errors import RESTART_CODES, PreemptedError

Object = dict[str, Any]
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""Pod label and annotation in an Indexed Job."""
REPLICA_TYPE = "training.kubeflow.org/replica-type"
REPLICA_INDEX = "training.kubeflow.org/replica-index"
"""Pod labels in a PyTorchJob; workers follow the master."""
SUCCESS_CONDITIONS = ("Succeeded", "Complete", "Completed")
"""Success condition for a PyTorchJob, for a Job and TrainJob, and for a JobSet."""
IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
CONFIGURATION_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
MEMORY_REASON = "OOMKilled"
_QUOTA = re.compile(r"exceeded quota: ([^,]+).*?requested: (.*?), used: (.*?), limited: (.*)")


@dataclass(frozen=True)
class JobObjects:
    job: Object
    pods: Sequence[Object]
    events: Sequence[Object] = ()
    workloads: Sequence[Object] = ()
    """Kueue workloads, if the job is in a queue."""

    @property
    def current_pods(self) -> dict[int, Object]:
        """Node -> newest pod."""
        pods = sorted(self.pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))
        return {find_index(pod): pod for pod in pods}


def describe_job(handle: Handle, objects: JobObjects) -> JobStatus:
    job = objects.job
    annotations = job["metadata"].get("annotations", {})
    status = job.get("status", {})
    state, reason = _find_state(objects)
    price = annotations.get(PRICE)
    failed = _find_failed_pods(objects) if state == "failed" else []
    exit_code = find_exit_code(failed[0]) if failed else None
    return JobStatus(
        handle,
        state,
        reason=reason,
        attempt=_count_attempts(objects),
        nodes=tuple(
            _describe_pod(index, pod, split_handle(handle)[0])
            for index, pod in sorted(objects.current_pods.items())
        ),
        exit_code=0 if state == "succeeded" else exit_code,
        failure=_describe_failure(failed, reason) if state == "failed" else None,
        usd_per_hour=None if price is None else float(price),
        price_date=annotations.get(PRICE_DATE),
        output=annotations.get(OUTPUT, ""),
        submitted_at=job["metadata"].get("creationTimestamp"),
        started_at=status.get("startTime") or _find_first_start(objects.pods),
        finished_at=status.get("completionTime") or _find_end(job),
    )


def find_index(pod: Object) -> int:
    metadata = pod["metadata"]
    values = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    if REPLICA_INDEX in values:
        return int(values[REPLICA_INDEX]) + (values.get(REPLICA_TYPE) == "worker")
    return int(values.get(COMPLETION_INDEX, 0))


def find_exit_code(pod: Object) -> int | None:
    """Return the exit code of the pod's last container that ended, if any."""
    code = _find_terminated(pod).get("exitCode")
    return None if code is None else int(code)


def _find_condition(item: Object, *kinds: str) -> Object:
    """Return an object's first true condition of some kinds; empty without one."""
    conditions = item.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] in kinds and c["status"] == "True"), {})


def _find_state(objects: JobObjects) -> tuple[JobState, str]:
    job = objects.job
    if _find_condition(job, *SUCCESS_CONDITIONS):
        return "succeeded", ""
    if failure := _find_condition(job, "Failed"):
        return "failed", str(failure.get("message") or failure.get("reason", ""))
    if job["metadata"].get("annotations", {}).get(CANCELLED) == "true":
        return "cancelled", "cancelled by a user"
    if job["kind"] == SERVER and objects.pods:
        return _find_server_state(objects)
    if _is_suspended(job):
        return "pending", _explain_suspension(objects)
    if not objects.pods:
        return "pending", _explain_no_pods(objects)
    return _find_active_state(objects)


def _find_server_state(objects: JobObjects) -> tuple[JobState, str]:
    """Return a server's state: it runs while enough replicas answer.

    The reason names replicas that do not start, even if earlier ones answer.
    """
    conditions = objects.job.get("status", {}).get("conditions", [])
    stalled = [c for c in conditions if c["type"] == "Progressing" and c["status"] == "False"]
    reasons = {*map(explain_pending, objects.pods), *(c.get("message", "") for c in stalled)}
    reason = "; ".join(sorted(reasons - {""}))
    if _find_condition(objects.job, "Available"):
        return "running", reason
    if any(map(_has_failed, objects.pods)):
        return "restarting", reason or _explain_exit(objects)
    if stalled:
        return "failed", reason
    return ("pending", reason) if reason else ("starting", "the models are loaded")


def _find_active_state(objects: JobObjects) -> tuple[JobState, str]:
    """Return the state and reason for an unfinished job with pods."""
    current = list(objects.current_pods.values())
    reason = "; ".join(sorted({*map(explain_pending, current)} - {""}))
    phases = Counter(map(_find_phase, current))
    disruption = next(filter(None, map(_find_disruption, objects.pods)), "")
    has_restarts = _find_condition(objects.job, "Restarting") or any(map(_has_failed, objects.pods))
    num_ready = phases["Running"] + phases["Succeeded"]
    if phases["Running"] and num_ready >= _find_min_nodes(objects.job):
        return "running", reason
    if disruption and not phases["Running"]:
        return "preempted", disruption
    if has_restarts:
        return "restarting", reason or disruption or _explain_exit(objects)
    if reason:
        return "pending", reason
    return "starting", "the containers are created"


def explain_pending(pod: Object) -> str:
    """Return why a pod does not run yet, in plain words; empty if it starts or runs."""
    status = pod.get("status", {})
    if _find_phase(pod) != "Pending":
        return ""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"no node has room: {condition.get('message', condition.get('reason', ''))}"
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in IMAGE_REASONS:
            return f"the image {container.get('image', '')} cannot be pulled: {message or reason}"
        if reason in CONFIGURATION_REASONS:
            return f"the container cannot be created: {message or reason}"
    return ""


def _explain_no_pods(objects: JobObjects) -> str:
    """Return why a job lacks pods: a quota, or an operator that does not answer."""
    for event in reversed(objects.events):
        message = event.get("message", "")
        if match := _QUOTA.search(message):
            name, requested, used, limit = match.groups()
            return f"quota {name}: {requested} is requested, {used} of {limit} is in use"
        if event.get("reason", "").startswith("Failed"):
            return str(message)
    kind = objects.job["kind"]
    return f"the cluster has created no pods yet; check that the operator of a {kind} runs"


def _explain_suspension(objects: JobObjects) -> str:
    """Return why a job is suspended: a queue, or a user."""
    queue = objects.job["metadata"].get("labels", {}).get(QUEUE_LABEL)
    if queue is None:
        return "the job is suspended"
    for workload in objects.workloads:
        for condition in workload.get("status", {}).get("conditions", []):
            text = condition.get("message") or condition.get("reason")
            if condition["type"] == "QuotaReserved" and text:
                return f"queue {queue}: {text}"
    return f"the job waits in queue {queue}"


def _explain_exit(objects: JobObjects) -> str:
    """Return the newest failed pod's exit code, as text."""
    codes = [find_exit_code(pod) for pod in objects.pods if _has_failed(pod)]
    return f"exit code {codes[-1]}" if codes and codes[-1] is not None else "a pod was lost"


def _describe_pod(index: int, pod: Object, context: str) -> NodeStatus:
    states: dict[str, JobState] = {"Running": "running", "Succeeded": "succeeded"}
    phase, code = _find_phase(pod), find_exit_code(pod)
    state = states.get(phase, "unknown")
    reason = explain_pending(pod) or _find_disruption(pod)
    if phase == "Pending":
        state = "pending" if reason else "starting"
    elif phase == "Failed":
        state = "preempted" if code in {None, PreemptedError.exit_code} else "failed"
        reason = reason or _find_terminated(pod).get("reason", "")
    host = pod.get("spec", {}).get("nodeName", "")
    metadata = pod["metadata"]
    cluster = KubectlNamespace(context, metadata.get("namespace", "default"))
    shell = cluster.command("exec", "-it", metadata["name"], "--", "bash")
    return NodeStatus(index, state, host, code, reason, shell)


def _describe_failure(failed: list[Object], reason: str) -> JobFailure:
    """Return why a job failed, with the node and its last log line if known."""
    if not failed:
        return JobFailure("unknown", message=reason)
    terminated = _find_terminated(failed[0])
    kind = "memory" if terminated.get("reason") == MEMORY_REASON else "unknown"
    lines = str(terminated.get("message", "")).strip().splitlines()
    return JobFailure(kind, node=find_index(failed[0]), message=lines[-1] if lines else reason)


def _find_failed_pods(objects: JobObjects) -> list[Object]:
    """Return the failed pods, first those whose exit code ended the job."""
    pods = [pod for pod in objects.pods if _has_failed(pod)]
    return sorted(pods, key=lambda pod: find_exit_code(pod) in {*RESTART_CODES, None})


def _has_failed(pod: Object) -> bool:
    restarts = [item.get("restartCount", 0) for item in _list_containers(pod)]
    return _find_phase(pod) == "Failed" or any(restarts)


def _find_disruption(pod: Object) -> str:
    """Return why the cluster took a pod away; empty otherwise."""
    condition = _find_condition(pod, "DisruptionTarget")
    return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")


def _find_terminated(pod: Object) -> Object:
    """Return the last termination of a pod's container; empty while it runs."""
    for status in _list_containers(pod):
        for state in ("state", "lastState"):
            terminated = status.get(state, {}).get("terminated")
            if terminated is not None:
                return dict(terminated)
    return {}


def _find_min_nodes(job: Object) -> int:
    spec = job.get("spec", {})
    if job["kind"] == "PyTorchJob":
        return int(spec.get("elasticPolicy", {}).get("minReplicas", 1))
    return int(spec.get("trainer", {}).get("numNodes", 1))


def _is_suspended(job: Object) -> bool:
    spec = job.get("spec", {})
    return bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))


def _count_attempts(objects: JobObjects) -> int | None:
    """Return how often the most restarted node was started.

    None for a PyTorchJob, whose operator deletes a pod before creating the next one.
    """
    if objects.job["kind"] == "PyTorchJob":
        return None
    counts: dict[int, int] = {}
    for pod in objects.pods:
        starts = 1 + sum(item.get("restartCount", 0) for item in _list_containers(pod))
        counts[find_index(pod)] = counts.get(find_index(pod), 0) + starts
    return max(counts.values(), default=None)


def _find_end(job: Object) -> str | None:
    return _find_condition(job, *SUCCESS_CONDITIONS, "Failed").get("lastTransitionTime")


def _find_first_start(pods: Sequence[Object]) -> str | None:
    times = [pod["status"]["startTime"] for pod in pods if pod.get("status", {}).get("startTime")]
    return min(times, default=None)


def _find_phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _list_containers(pod: Object) -> list[Object]:
    return list(pod.get("status", {}).get("containerStatuses", []))


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
