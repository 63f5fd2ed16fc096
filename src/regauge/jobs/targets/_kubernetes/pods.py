"""A job's pod template, the same for every job kind, and metadata for the documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from regauge.jobs.targets import JobSpec, is_local_folder
from regauge.jobs.targets._kubernetes.settings import PodSettings
from regauge.jobs.targets._kubernetes.volumes import build_volumes
from regauge.jobs.targets._templates import render_document
from regauge.system.errors import SettingsError
from regauge.system.files import read_csv_rows

PREFIX = "regauge/"
"""Prefix for Regauge annotations and labels."""
PRICE, PRICE_DATE = f"{PREFIX}usd-per-hour", f"{PREFIX}price-date"
OUTPUT, VERB, CANCELLED = f"{PREFIX}output", f"{PREFIX}verb", f"{PREFIX}cancelled"
PROCESSES = f"{PREFIX}processes-per-node"
JOB_LABEL = f"{PREFIX}job"
STAGE = f"{PREFIX}stage"
"""Stage name annotation on a stage's Job."""
JOB_NAME = "batch.kubernetes.io/job-name"
"""Pod label with the Job name."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label for Kueue to admit a job, https://kueue.sigs.k8s.io/docs/tasks/run/jobs."""
EFA_RESOURCE = "vpc.amazonaws.com/efa"
"""EFA device plugin resource: one per network interface."""
HUGE_PAGES = {"hugepages-2Mi": "5120Mi"}
"""Huge pages for a pod with EFA, https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html."""
NODE_SHARE = 0.9
"""Share of a machine's CPUs and memory that a pod requests; the system has the rest."""
MAX_HOST_NAME = 63
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)


def build_metadata(job: JobSpec, namespace: str, queue: str | None) -> dict[str, Any]:
    """Return metadata for a job's documents, with the price at planning time."""
    for key, value in job.labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            problem = f"launch.labels: '{key} = {value}' is not a Kubernetes label"
            raise SettingsError(problem, "use at most 63 letters, digits, '-', '_' and '.'")
    labels = {**job.labels, "app.kubernetes.io/managed-by": "regauge", JOB_LABEL: job.name}
    if queue is not None:
        labels[QUEUE_LABEL] = queue
    annotations = {VERB: job.verb, PROCESSES: str(job.processes_per_node or "auto")}
    if job.output:
        folder = job.run_file.parent / job.output
        annotations[OUTPUT] = str(folder) if is_local_folder(job.output) else job.output
    if job.usd_per_hour is not None:
        annotations[PRICE] = f"{job.usd_per_hour:.4f}"
    if job.price_date:
        annotations[PRICE_DATE] = job.price_date
    return {
        "name": job.name,
        "namespace": namespace,
        "labels": labels,
        "annotations": annotations,
    }


def escape_references(job: JobSpec) -> JobSpec:
    """Return the job with `$` doubled in commands and variables, as pods expand `$(NAME)`.

    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
    """
    return replace(
        job,
        command=tuple(word.replace("$", "$$") for word in job.command),
        environment={name: text.replace("$", "$$") for name, text in job.environment.items()},
        stages=tuple(map(escape_references, job.stages)),
    )


def build_pod_template(
    job: JobSpec, settings: PodSettings, metadata: Mapping[str, Any], container: str
) -> dict[str, Any]:
    """Return a node's pod template, with one container that runs the job's command.

    Raises SettingsError for a job without an image, and for settings that pods cannot have.
    """
    if job.image is None:
        problem = "launch.image is not set, and target 'kubernetes' runs an image"
        raise SettingsError(problem, "set it to an image with Regauge, with a tag or digest")
    volumes, mounts = build_volumes(job)
    environment, devices = _build_environment(job), _count_devices(job)
    return render_document(
        Path(__file__).parent / "templates" / "pod.yaml.jinja",
        job=job,
        pod=settings,
        container=container,
        labels={key: value for key, value in metadata["labels"].items() if key != QUEUE_LABEL},
        pull_secrets=[{"name": name} for name in settings.image_pull_secrets],
        node_selector=_select_nodes(job, settings),
        tolerations=_build_tolerations(settings, devices),
        folder=str(job.run_file.parent),
        environment=environment,
        resources=_build_resources(job, devices),
        volumes=volumes,
        mounts=mounts,
    )


def _select_nodes(job: JobSpec, settings: PodSettings) -> dict[str, str]:
    selector = dict(settings.node_selector)
    if job.machine is not None:
        selector["node.kubernetes.io/instance-type"] = job.machine.name
    if settings.zone is not None:
        selector["topology.kubernetes.io/zone"] = settings.zone
    return selector | (dict(settings.spot_labels) if job.spot else {})


def _build_environment(job: JobSpec) -> list[dict[str, Any]]:
    """Return the container environment; secrets are references only."""
    environment: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in sorted(job.environment.items())
    ]
    for name, reference in sorted(job.secrets.items()):
        secret, _, key = reference.partition("/")
        if not (secret and key) or "/" in key:
            problem = f"launch.secrets.{name} is not a reference to a Kubernetes secret"
            raise SettingsError(problem, "write NAME/KEY, such as tracking/token")
        source = {"secretKeyRef": {"name": secret, "key": key}}
        environment.append({"name": name, "valueFrom": source})
    return environment


def _count_devices(job: JobSpec) -> dict[str, Any]:
    """Return a node's accelerators and EFA interfaces, by resource name."""
    devices: dict[str, Any] = {}
    if job.machine is not None and job.machine.chips:
        devices[find_device_resource(job.machine.vendor)] = job.machine.chips
    if job.machine is not None and job.uses_efa:
        devices |= {EFA_RESOURCE: job.machine.efa_interfaces, **HUGE_PAGES}
    return devices


def _build_resources(job: JobSpec, devices: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's resources: devices, most memory, and most CPUs without a limit.

    Without a machine type, a server has those planned from its artifacts.
    """
    machine, cpus, memory = job.machine, {}, {}
    if machine is None and job.server is not None and job.server.resources is not None:
        cpus["cpu"] = str(job.server.resources.cpus)
        memory["memory"] = f"{job.server.resources.memory_gib}Gi"
    if machine is not None and machine.vcpus is not None:
        cpus["cpu"] = str(max(1, int(machine.vcpus * NODE_SHARE)))
    if machine is not None and machine.memory_gib is not None:
        memory["memory"] = f"{max(1, int(machine.memory_gib * NODE_SHARE))}Gi"
    resources = {"requests": {**cpus, **memory, **devices}, "limits": {**memory, **devices}}
    return {key: value for key, value in resources.items() if value}


def _build_tolerations(settings: PodSettings, devices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a pod's tolerations; nodes with accelerators are tainted by resource name."""
    tolerations = [item.model_dump(exclude_none=True) for item in settings.tolerations]
    keys = {*HUGE_PAGES, *(item.get("key") for item in tolerations)}
    return tolerations + [
        {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
        for resource in devices
        if resource not in keys
    ]


def find_device_resource(vendor: str) -> str:
    """Return a vendor's accelerator resource; raises SettingsError for unknown vendors."""
    if vendor not in load_device_resources():
        problem = f"no Kubernetes resource is known for accelerators of {vendor}"
        raise SettingsError(problem, "choose another launch.instance")
    return load_device_resources()[vendor]


@cache
def load_device_resources() -> Mapping[str, str]:
    """Return vendor -> device plugin's extended resource, from `devices.csv`."""
    rows = read_csv_rows(Path(__file__).with_name("devices.csv"))
    return {row["vendor"]: row["resource"] for row in rows}
