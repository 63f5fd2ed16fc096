"""Kubernetes document checks: names, devices, limits for finished jobs, and volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from regauge.jobs.lints import Check, Lint, build_lint, walk
from regauge.jobs.lints_job import is_mounted, is_pinned
from regauge.jobs.settings import is_job_name
from regauge.jobs.targets import LaunchPlan, is_local_folder

CONTAINER_NAMES = {"PyTorchJob": "pytorch", "TrainingRuntime": "node"}
"""Document kind -> container name that the operator requires for the command."""
NAMED_KINDS = ("Job", "JobSet", "PyTorchJob", "Service", "TrainJob", "TrainingRuntime")
"""Kinds whose names become host names or Services."""
RESERVED_VARIABLES = {
    f"PET_{name}"
    for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
}
"""Variables set by the trainer, whose webhook refuses a TrainJob that sets them."""
Object = dict[str, Any]


class PodTemplate(NamedTuple):
    kind: str
    spec: Object


def check_pods(plan: LaunchPlan) -> Iterator[Lint]:
    """Report ignored container names, images that nodes pull once, and forbidden host paths."""
    for kind, spec in list_templates(plan):
        if spec.get("securityContext", {}).get("runAsNonRoot"):
            for volume in spec.get("volumes", []):
                if "hostPath" in volume:
                    yield build_lint("pod-security", volume=volume["name"])
        required = CONTAINER_NAMES.get(kind)
        names = [container.get("name") for container in spec["containers"]]
        if required is not None and required not in names:
            yield build_lint("container-name", kind=kind, name=names[0], required=required)
        for container in spec["containers"]:
            image, policy = container.get("image", ""), container.get("imagePullPolicy", "Always")
            if image and not is_pinned(image) and policy != "Always":
                yield build_lint("pull-policy", image=image)


def check_documents(plan: LaunchPlan) -> Iterator[Lint]:
    """Report document fields that Kubernetes or an operator refuses or misunderstands."""
    for document in _list_documents(plan):
        kind, name = document["kind"], str(document["metadata"].get("name", ""))
        if kind in NAMED_KINDS and not is_job_name(name):
            yield build_lint("dns-label", kind=kind, name=name)
        if document.get("apiVersion", "").startswith("trainer.kubeflow.org/"):
            yield from _check_trainer(document)
        if plan.job.machine is not None and plan.job.machine.chips:
            yield from _check_autoscaler(document.get("spec", {}), plan.job.machine.chip)


def _check_trainer(document: Object) -> Iterator[Lint]:
    """Report a TrainJob that would run again after the end, or that the trainer refuses."""
    if any(path.endswith("ttlSecondsAfterFinished") for path, _ in walk(document)):
        yield build_lint("trainjob-ttl")
    variables = document.get("spec", {}).get("trainer", {}).get("env", [])
    for name in sorted({item["name"] for item in variables} & RESERVED_VARIABLES):
        yield build_lint("reserved-variable", name=name)


def _check_autoscaler(spec: Object, chip: str) -> Iterator[Lint]:
    """Report an autoscaler that counts CPU load in a job with accelerators."""
    metrics = [*spec.get("metrics", []), *spec.get("elasticPolicy", {}).get("metrics", [])]
    if any(metric.get("resource", {}).get("name") == "cpu" for metric in metrics):
        yield build_lint("autoscaler-metric", chip=chip)


def check_device_limits(plan: LaunchPlan) -> Iterator[Lint]:
    """Report accelerators or EFA whose requests differ from their limits."""
    containers = [item for template in list_templates(plan) for item in template.spec["containers"]]
    resources = [container.get("resources", {}) for container in containers]
    trainers = (item.get("spec", {}).get("trainer", {}) for item in _list_documents(plan))
    for item in (*resources, *(trainer.get("resourcesPerNode", {}) for trainer in trainers)):
        requests, limits = item.get("requests", {}), item.get("limits", {})
        for name in sorted(name for name in {*requests, *limits} if "/" in name):
            request, limit = requests.get(name, limits.get(name)), limits.get(name)
            if request != limit:
                yield build_lint("device-limits", name=name, request=request, limit=limit or 0)


def check_output(plan: LaunchPlan) -> Iterator[Lint]:
    """Report an output folder that is lost with the pod, and cannot be shared by several nodes."""
    job, templates = plan.job, list_templates(plan)
    containers = [item for template in templates for item in template.spec["containers"]]
    mounts = [mount["mountPath"] for item in containers for mount in item.get("volumeMounts", [])]
    if templates and is_local_folder(job.output) and not is_mounted(job.output, mounts):
        is_shared = job.max_nodes > 1 or job.jobs > 1 or bool(job.stages)
        yield build_lint("output-volume", output=job.output)._replace(is_error=is_shared)


def list_templates(plan: LaunchPlan) -> list[PodTemplate]:
    templates: list[PodTemplate] = []
    for document in _list_documents(plan):
        for spec in _find_pod_specs(document):
            template = PodTemplate(document["kind"], spec)
            if template not in templates:
                templates.append(template)
    return templates


def _list_documents(plan: LaunchPlan) -> list[Object]:
    """Return a plan's Kubernetes documents; empty for other targets."""
    contents = [document.content for document in plan.documents]
    return [item for item in contents if isinstance(item, dict) and {"kind", "metadata"} <= {*item}]


def _find_pod_specs(value: Any) -> Iterator[Object]:
    """Yield every mapping with a container list, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _find_pod_specs(item)


CHECKS: tuple[Check, ...] = (check_pods, check_documents, check_device_limits, check_output)
