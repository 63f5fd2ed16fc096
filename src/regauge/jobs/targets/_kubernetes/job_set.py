"""The JobSet (jobset.x-k8s.io/v1alpha2) of a pipeline: one Job per stage, each after another.

`dependsOn` with the status Complete creates the Job of a stage after the success of the stage
before it. If a Job fails, the JobSet fails, and no later Job is created. The pods need no
permission for this; an init container that waits for another Job would need one. It needs JobSet
0.8, which the Kubeflow trainer 2.0 includes. Source:
https://jobset.sigs.k8s.io/docs/tasks/depends_on.

Training on several nodes is an Indexed Job. Pod 0 serves the rendezvous at its host name in the
Service of the JobSet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets._kubernetes.batch_job import build_batch_job
from regauge.jobs.targets._kubernetes.pods import MAX_HOST_NAME, STAGE
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.jobs.targets import JobSpec
    from regauge.jobs.targets._kubernetes.settings import PodSettings

API_VERSION, KIND = "jobset.x-k8s.io/v1alpha2", "JobSet"
PORT = 29400


def build_job_set(
    job: JobSpec, pod: PodSettings, metadata: dict[str, Any], ttl_seconds: int | None
) -> dict[str, Any]:
    """Return the JobSet of a pipeline; raises SettingsError for a stage with elastic nodes."""
    replicated: list[dict[str, Any]] = []
    for stage in job.stages:
        entry = {"name": name_stage(job, stage), "replicas": 1}
        entry["template"] = {
            "metadata": {"annotations": {STAGE: stage.stage}},
            "spec": _build_stage(job, stage, pod, metadata),
        }
        if replicated:
            entry["dependsOn"] = [{"name": replicated[-1]["name"], "status": "Complete"}]
        replicated.append(entry)
    spec: dict[str, Any] = {"replicatedJobs": replicated}
    if ttl_seconds is not None:
        spec["ttlSecondsAfterFinished"] = ttl_seconds
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def name_stage(job: JobSpec, stage: JobSpec) -> str:
    """Return the name of the replicated job of a stage."""
    return stage.name.removeprefix(f"{job.name}-")


def find_leader(job: JobSpec, stage: JobSpec) -> str:
    """Return the host and port of the c10d rendezvous: pod 0 in the Service of the JobSet."""
    return f"{stage.name}-0-0.{job.name}:{PORT}"


def _build_stage(
    job: JobSpec, stage: JobSpec, pod: PodSettings, metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return the specification of the Job of a stage; its pods share the volumes of the job."""
    host = f"{stage.name}-0-{stage.max_nodes - 1}"
    if len(host) > MAX_HOST_NAME:
        problem = f"the host name '{host}' of stage '{stage.stage}' is too long"
        raise SettingsError(problem, "shorten launch.name, or the name of the stage")
    document = build_batch_job(replace(stage, name=job.name), pod, metadata, None)
    spec: dict[str, Any] = document["spec"]
    if stage.max_nodes == 1:
        return spec
    if stage.is_elastic:
        problem = f"stage '{stage.stage}' has {stage.node_range} nodes, and a JobSet is not elastic"
        raise SettingsError(problem, "set execution.nodes.count to one number")
    count = stage.max_nodes
    container = spec["template"]["spec"]["containers"][0]
    container["env"] = [*container.get("env", []), *_build_rendezvous(job, stage)]
    return {
        **spec,
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": (stage.max_attempts - 1) * count,  # all nodes of an attempt fail together
    }


def _build_rendezvous(job: JobSpec, stage: JobSpec) -> list[dict[str, str]]:
    """Return torchrun's variables of a node; the Job sets its index."""
    variables = {"PET_NNODES": str(stage.max_nodes)}
    if stage.processes_per_node is not None:
        variables["PET_NPROC_PER_NODE"] = str(stage.processes_per_node)
    if stage.rendezvous == "c10d":
        variables["PET_RDZV_ENDPOINT"] = find_leader(job, stage)
    return [{"name": name, "value": value} for name, value in variables.items()]
