"""The pod template of a job, the same for every kind of job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets import is_local_folder
from regauge.jobs.targets._kubernetes.devices import EFA_RESOURCE, find_device_resource
from regauge.jobs.targets._kubernetes.volumes import build_volumes, find_run_file
from regauge.system.errors import RESTART_CODES, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.jobs.targets import JobSpec
    from regauge.jobs.targets._kubernetes.settings import PodSettings, Toleration

PREFIX = "regauge/"
"""Prefix of the annotations and labels of Regauge."""
PRICE, PRICE_DATE = f"{PREFIX}usd-per-hour", f"{PREFIX}price-date"
OUTPUT, VERB, CANCELLED = f"{PREFIX}output", f"{PREFIX}verb", f"{PREFIX}cancelled"
PROCESSES = f"{PREFIX}processes-per-node"
JOB_LABEL = f"{PREFIX}job"
STAGE = f"{PREFIX}stage"
"""Annotation of the Job of a stage with the name of the stage."""
JOB_NAME = "batch.kubernetes.io/job-name"
"""Label of pods with the name of their Job."""
MANAGER_LABEL = "app.kubernetes.io/managed-by"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label by which Kueue admits a job, https://kueue.sigs.k8s.io/docs/tasks/run/jobs."""
INSTANCE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
HUGE_PAGES = {"hugepages-2Mi": "5120Mi"}
"""Huge pages of a pod with EFA, https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html."""
NODE_SHARE = 0.9
"""Share of a machine's processors and memory that a pod requests; the system has the rest."""
MAX_HOST_NAME = 63
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)


def build_metadata(job: JobSpec, namespace: str, queue: str | None) -> dict[str, Any]:
    """Return the metadata of the documents of a job, with its price when it was planned."""
    for key, value in job.labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            problem = f"launch.labels: '{key} = {value}' is not a label of Kubernetes"
            raise SettingsError(problem, "use at most 63 letters, digits, '-', '_' and '.'")
    labels = {**job.labels, MANAGER_LABEL: "regauge", JOB_LABEL: job.name}
    if queue is not None:
        labels[QUEUE_LABEL] = queue
    annotations = {VERB: job.verb, PROCESSES: str(job.processes_per_node or "auto")}
    if job.output:
        folder = find_run_file(job).parent / job.output
        annotations[OUTPUT] = str(folder) if is_local_folder(job.output) else job.output
    if job.usd_per_hour is not None:
        annotations[PRICE] = f"{job.usd_per_hour:.4f}"
    if job.machine is not None and job.machine.price_date:
        annotations[PRICE_DATE] = job.machine.price_date
    return {
        "name": job.name,
        "namespace": namespace,
        "labels": labels,
        "annotations": annotations,
    }


def build_pod_template(
    job: JobSpec, settings: PodSettings, container_name: str, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the pod template of a node, with one container that runs the command of the job."""
    labels = {key: value for key, value in metadata["labels"].items() if key != QUEUE_LABEL}
    volumes, mounts = build_volumes(job)
    container = {
        "name": container_name,
        "image": require_image(job),
        "imagePullPolicy": "IfNotPresent",
        "command": list(job.command),
        "workingDir": str(find_run_file(job).parent),
        "env": build_environment(job),
        "resources": build_resources(job),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec = {
        **build_scheduling(job, settings),
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }
    return {"metadata": {"labels": labels}, "spec": spec}


def build_scheduling(job: JobSpec, settings: PodSettings) -> dict[str, Any]:
    """Return the fields of a pod that select its nodes, its identity and its priority."""
    selector = dict(settings.node_selector)
    if job.machine is not None:
        selector[INSTANCE_LABEL] = job.machine.name
    if settings.zone is not None:
        selector[ZONE_LABEL] = settings.zone
    if job.spot:
        selector.update(settings.spot_labels)
    fields = {
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "nodeSelector": selector,
        "tolerations": _build_tolerations(job, settings.tolerations),
        "priorityClassName": settings.priority_class,
    }
    return {key: value for key, value in fields.items() if value}


def build_environment(job: JobSpec) -> list[dict[str, Any]]:
    """Return the environment of the container; secrets are references only."""
    environment: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in sorted(job.environment.items())
    ]
    for name, reference in sorted(job.secrets.items()):
        secret, slash, key = reference.partition("/")
        if not (secret and slash and key) or "/" in key:
            problem = f"launch.secrets.{name} is not a reference to a secret of Kubernetes"
            raise SettingsError(problem, "write NAME/KEY, such as tracking/token")
        source = {"secretKeyRef": {"name": secret, "key": key}}
        environment.append({"name": name, "valueFrom": source})
    return environment


def build_resources(job: JobSpec) -> dict[str, Any]:
    """Return the resources of a node: its accelerators, EFA, and most of its processors."""
    machine = job.machine
    if machine is None:
        return {}
    requests: dict[str, Any] = {}
    if machine.vcpus is not None:
        requests["cpu"] = str(max(1, int(machine.vcpus * NODE_SHARE)))
    if machine.memory_gib is not None:
        requests["memory"] = f"{max(1, int(machine.memory_gib * NODE_SHARE))}Gi"
    devices: dict[str, Any] = {}
    if machine.chips:
        devices[find_device_resource(machine.vendor)] = machine.chips
    if job.uses_efa:
        devices[EFA_RESOURCE] = machine.efa_interfaces
        devices.update(HUGE_PAGES)
    resources = {"requests": {**requests, **devices}, "limits": devices}
    return {key: value for key, value in resources.items() if value}


def require_image(job: JobSpec) -> str:
    """Return the image of a job; raises SettingsError if none is set."""
    if job.image is None:
        problem = "launch.image is not set, and target 'kubernetes' runs an image"
        raise SettingsError(problem, "set it to an image with Regauge, with a tag or digest")
    return job.image


def check_host_name(job: JobSpec, suffix: str) -> None:
    """Raise SettingsError if the host names of pods, name and suffix, would be too long."""
    maximum = MAX_HOST_NAME - len(suffix)
    if len(job.name) > maximum:
        problem = f"launch.name = '{job.name}' has more than {maximum} characters"
        raise SettingsError(problem, f"shorten it: pods are named {job.name}{suffix}")


def build_failure_policy(container: str, action: str) -> dict[str, Any]:
    """Return the podFailurePolicy of a Job: the exit code decides, and lost nodes do not count.

    `action` is taken for every exit code that is not in RESTART_CODES. Source:
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy.
    """
    codes = {"containerName": container, "operator": "NotIn", "values": list(RESTART_CODES)}
    disruption = {"type": "DisruptionTarget", "status": "True"}
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [disruption]},
            {"action": action, "onExitCodes": codes},
        ]
    }


def _build_tolerations(job: JobSpec, tolerations: tuple[Toleration, ...]) -> list[dict[str, Any]]:
    """Return the tolerations of a pod; nodes with accelerators are tainted by resource name."""
    documents = [
        {key: value for key, value in toleration.model_dump().items() if value is not None}
        for toleration in tolerations
    ]
    resources = build_resources(job).get("limits", {})
    documents += [
        {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
        for resource in resources
        if resource not in HUGE_PAGES and resource not in [item.get("key") for item in documents]
    ]
    return documents
