"""The TrainJob (trainer.kubeflow.org/v1alpha1) of a training with a fixed number of nodes.

By default the documents include a TrainingRuntime, which contains the pods and the restart policy.
With `runtime`, an existing ClusterTrainingRuntime is used, and the TrainJob contains overrides of
its pods. The overrides have another form in each version of the trainer, according to its CRDs:
`podSpecOverrides` in 2.0, `podTemplateOverrides` in 2.1, `runtimePatches` in 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from regauge.jobs.targets._kubernetes.pods import (
    QUEUE_LABEL,
    build_environment,
    build_failure_policy,
    build_pod_template,
    build_resources,
    check_host_name,
    require_image,
)
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.jobs.targets import JobSpec
    from regauge.jobs.targets._kubernetes.settings import PodSettings

TrainerVersion = Literal["2.0", "2.1", "2.2"]
REPLICATED_JOB = CONTAINER = "node"
"""Names that the trainer requires of the job and the container that train."""
API_VERSION, KIND = "trainer.kubeflow.org/v1alpha1", "TrainJob"
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""Label of the replicated job whose pods get the fields of the TrainJob's trainer."""
PORT = 29400
RENDEZVOUS_VARIABLE = "PET_RDZV_ENDPOINT"
"""Not reserved by the trainer, which sets PET_MASTER_ADDR to the same host."""
OVERRIDABLE = ("serviceAccountName", "nodeSelector", "tolerations", "volumes")
"""Fields of a pod that every version of the trainer can override."""


def build_train_job(
    job: JobSpec,
    pod: PodSettings,
    metadata: dict[str, Any],
    version: TrainerVersion,
    runtime: str | None,
) -> dict[str, Any]:
    """Return the TrainJob of a training; raises SettingsError for an elastic one."""
    if job.is_elastic:
        problem = f"a TrainJob has no elastic nodes, and their number is {job.node_range}"
        remedy = "set launch.target.api to 'pytorchjob', or execution.nodes.count to one number"
        raise SettingsError(problem, remedy)
    check_host_name(job, f"-{REPLICATED_JOB}-0-{job.max_nodes - 1}")
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime" if runtime is None else "ClusterTrainingRuntime",
            "name": runtime or job.name,
        },
        "trainer": _build_trainer(job),
    }
    if job.limit_seconds is not None and version == "2.2":
        spec["activeDeadlineSeconds"] = job.limit_seconds
    if runtime is not None:
        spec.update(_build_overrides(job, pod, metadata, version))
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def build_runtime(
    job: JobSpec,
    pod: PodSettings,
    metadata: dict[str, Any],
    version: TrainerVersion,
    ttl_seconds: int | None,
) -> dict[str, Any]:
    """Return the TrainingRuntime of a job: its pods, and when they restart.

    A Job counts every pod that fails. All nodes of an attempt fail together, so the limit is a
    multiple of their number.
    """
    template = build_pod_template(job, pod, CONTAINER, metadata)
    template["spec"]["restartPolicy"] = "Never"
    for field in ("image", "command", "env", "resources"):
        template["spec"]["containers"][0].pop(field, None)  # the TrainJob contains them
    spec: dict[str, Any] = {
        "backoffLimit": (job.max_attempts - 1) * job.max_nodes,
        "podFailurePolicy": build_failure_policy(CONTAINER, "FailJob"),
        "template": template,
    }
    if job.limit_seconds is not None and version != "2.2":
        spec["activeDeadlineSeconds"] = job.limit_seconds
    replicated = {
        "name": REPLICATED_JOB,
        "template": {"metadata": {"labels": ANCESTOR}, "spec": spec},
    }
    job_set: dict[str, Any] = {"replicatedJobs": [replicated]}
    if ttl_seconds is not None:
        job_set["ttlSecondsAfterFinished"] = ttl_seconds
    labels = {key: value for key, value in metadata["labels"].items() if key != QUEUE_LABEL}
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": labels},
        "spec": {
            "mlPolicy": {"numNodes": job.max_nodes, "torch": {}},
            "template": {"spec": job_set},
        },
    }


def find_leader(job: JobSpec) -> str:
    """Return the host and port of the c10d rendezvous: pod 0 in the Service of the JobSet."""
    return f"{job.name}-{REPLICATED_JOB}-0-0.{job.name}:{PORT}"


def _build_trainer(job: JobSpec) -> dict[str, Any]:
    """Return the image, command, environment and resources of a node."""
    environment = build_environment(job)
    if job.max_nodes > 1 and job.rendezvous == "c10d":
        environment.append({"name": RENDEZVOUS_VARIABLE, "value": find_leader(job)})
    trainer = {
        "image": require_image(job),
        "command": list(job.command),
        "numNodes": job.max_nodes,
        "numProcPerNode": job.processes_per_node,
        "env": environment,
        "resourcesPerNode": build_resources(job),
    }
    return {key: value for key, value in trainer.items() if value}


def _build_overrides(
    job: JobSpec, pod: PodSettings, metadata: dict[str, Any], version: TrainerVersion
) -> dict[str, Any]:
    """Return the overrides of the pods of an existing runtime, in the form of the version."""
    template = build_pod_template(job, pod, CONTAINER, metadata)
    fields = {key: template["spec"][key] for key in OVERRIDABLE if key in template["spec"]}
    mounts = template["spec"]["containers"][0]["volumeMounts"]
    fields["containers"] = [{"name": CONTAINER, "volumeMounts": mounts}]
    _check_overridable(pod, version)
    if version == "2.0":
        target = {"targetJobs": [{"name": REPLICATED_JOB}]}
        return {"podSpecOverrides": [{**target, **fields}]}
    if pod.image_pull_secrets:
        fields["imagePullSecrets"] = template["spec"]["imagePullSecrets"]
    if version == "2.1":
        override = {"targetJobs": [{"name": REPLICATED_JOB}], "metadata": template["metadata"]}
        return {"podTemplateOverrides": [{**override, "spec": fields}]}
    replicated = {
        "name": REPLICATED_JOB,
        "template": {"spec": {"template": {"metadata": template["metadata"], "spec": fields}}},
    }
    patch = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    return {"runtimePatches": [{"manager": "regauge/launch", "trainingRuntimeSpec": patch}]}


def _check_overridable(pod: PodSettings, version: TrainerVersion) -> None:
    """Raise SettingsError for a setting that a TrainJob of this version cannot override."""
    name = ""
    if pod.priority_class is not None:
        name = "priority_class"
    elif pod.image_pull_secrets and version == "2.0":
        name = "image_pull_secrets"
    elif "grace_seconds" in pod.model_fields_set:
        name = "grace_seconds"
    if name:
        problem = f"launch.target.pod.{name} cannot change an existing runtime ({version})"
        raise SettingsError(problem, "remove it, or remove launch.target.runtime")
