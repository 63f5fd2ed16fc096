"""Kubernetes document checks: names, devices, limits for finished jobs, and volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from regauge.jobs.lints import Check, Lint, walk
from regauge.jobs.lints_job import is_mounted, is_pinned
from regauge.jobs.settings import is_job_name
from regauge.jobs.targets import LaunchPlan, is_local_folder

CONTAINER_NAMES = {"PyTorchJob": "pytorch", "TrainingRuntime": "node"}
"""Document kind -> container name that the operator requires for the command."""
NAMED_KINDS = ("Job", "JobSet", "PyTorchJob", "Service", "TrainJob", "TrainingRuntime")
"""Kinds whose names become host names or Services."""
TTL = "ttlSecondsAfterFinished"
RESERVED_VARIABLES = {
    f"PET_{name}"
    for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
}
"""Variables set by the trainer, whose webhook refuses a TrainJob that sets them."""
OPERATOR = "https://github.com/kubeflow/training-operator/blob/v1.9.0/pkg/"
TRAINER = "https://github.com/kubeflow/trainer/"
KUBERNETES = "https://kubernetes.io/docs/concepts/"
Object = dict[str, Any]


class PodTemplate(NamedTuple):
    kind: str
    spec: Object


def check_pods(plan: LaunchPlan) -> Iterator[Lint]:
    """Report container names that the operator ignores, and images that nodes pull only once."""
    for kind, spec in list_templates(plan):
        required = CONTAINER_NAMES.get(kind)
        names = [container.get("name") for container in spec["containers"]]
        if required is not None and required not in names:
            problem = f"the container of a {kind} is named '{names[0]}'"
            remedy = f"name it {required}: the operator ignores other containers"
            source = f"{OPERATOR}apis/kubeflow.org/v1/pytorch_types.go"
            yield Lint("container-name", problem, remedy, source)
        for container in spec["containers"]:
            image, policy = container.get("image", ""), container.get("imagePullPolicy", "Always")
            if image and not is_pinned(image) and policy != "Always":
                problem = (
                    f"nodes may run different versions of '{image}', because they pull it once"
                )
                remedy = "name a tag other than latest, or a digest, in launch.image"
                source = f"{KUBERNETES}containers/images/#image-pull-policy"
                yield Lint("pull-policy", problem, remedy, source)


def check_documents(plan: LaunchPlan) -> Iterator[Lint]:
    """Report document fields that Kubernetes or an operator refuses or misunderstands."""
    for document in _list_documents(plan):
        yield from _check_name(document["kind"], str(document["metadata"].get("name", "")))
        if document.get("apiVersion", "").startswith("trainer.kubeflow.org/"):
            yield from _check_trainer(document)
        if plan.job.machine is not None and plan.job.machine.chips:
            yield from _check_autoscaler(document.get("spec", {}), plan.job.machine.chip)


def _check_name(kind: str, name: str) -> Iterator[Lint]:
    if kind in NAMED_KINDS and not is_job_name(name):
        problem = f"the {kind} '{name}' is not named by a label of RFC 1035"
        remedy = "set launch.name to at most 63 lowercase letters, digits and hyphens"
        source = f"{KUBERNETES}overview/working-with-objects/names/#rfc-1035-label-names"
        yield Lint("dns-label", problem, remedy, source)


def _check_trainer(document: Object) -> Iterator[Lint]:
    """Report a TrainJob that would run again after the end, or that the trainer refuses."""
    if any(path.endswith(TTL) for path, _ in walk(document)):
        problem = (
            f"{TTL} deletes the JobSet of a TrainJob, and a TrainJob that failed then runs again"
        )
        remedy = "remove launch.target.ttl_seconds"
        yield Lint("trainjob-ttl", problem, remedy, f"{TRAINER}issues/3737")
    variables = document.get("spec", {}).get("trainer", {}).get("env", [])
    for name in sorted({item["name"] for item in variables} & RESERVED_VARIABLES):
        problem = f"the trainer refuses a TrainJob with the variable {name}"
        source = f"{TRAINER}blob/v2.2.1/pkg/runtime/framework/plugins/torch/torch.go"
        yield Lint("reserved-variable", problem, f"remove launch.environment.{name}", source)


def _check_autoscaler(spec: Object, chip: str) -> Iterator[Lint]:
    """Report an autoscaler that counts CPU load in a job with accelerators."""
    metrics = [*spec.get("metrics", []), *spec.get("elasticPolicy", {}).get("metrics", [])]
    if any(metric.get("resource", {}).get("name") == "cpu" for metric in metrics):
        problem = f"an autoscaler of nodes with {chip} counts the load of their processors"
        remedy = "remove the metric, or choose one of the accelerator"
        source = f"{OPERATOR}controller.v1/pytorch/hpa.go"
        yield Lint("autoscaler-metric", problem, remedy, source)


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
                problem = f"{name} is requested {request} times and limited to {limit or 0}"
                remedy = "write the same number in requests and limits"
                source = "configuration/manage-resources-containers/#consuming-extended-resources"
                yield Lint("device-limits", problem, remedy, f"{KUBERNETES}{source}")


def check_output(plan: LaunchPlan) -> Iterator[Lint]:
    """Report an output folder that is lost with the pod, and cannot be shared by several nodes."""
    job, templates = plan.job, list_templates(plan)
    containers = [item for template in templates for item in template.spec["containers"]]
    mounts = [mount["mountPath"] for item in containers for mount in item.get("volumeMounts", [])]
    if templates and is_local_folder(job.output) and not is_mounted(job.output, mounts):
        problem = f"output.folder = '{job.output}' is not on a volume, so a lost pod loses it"
        remedy = "set it to a folder below the mount of one of launch.volumes"
        source = f"{KUBERNETES}storage/volumes/#background"
        is_error = job.max_nodes > 1 or job.jobs > 1 or bool(job.stages)
        yield Lint("output-volume", problem, remedy, source, is_error)


def list_templates(plan: LaunchPlan) -> list[PodTemplate]:
    """Return the distinct pod specifications in a plan's documents."""
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
