"""Checks of Kubernetes documents: names, devices, limits of finished jobs, and volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from regauge.jobs.lints import Check, Lint, walk
from regauge.jobs.lints_job import is_mounted, is_pinned
from regauge.jobs.settings import is_job_name
from regauge.jobs.targets import LaunchPlan, is_local_folder

CONTAINER_NAMES = {"PyTorchJob": "pytorch", "TrainingRuntime": "node"}
"""Name that an operator requires of the container with the command, by kind of document."""
CONTAINER_SOURCE = (
    "https://github.com/kubeflow/training-operator/blob/v1.9.0/pkg/apis/kubeflow.org/v1/"
    "pytorch_types.go"
)
NAMED_KINDS = ("Job", "JobSet", "PyTorchJob", "Service", "TrainJob", "TrainingRuntime")
"""Kinds whose names become host names or Services."""
TTL = "ttlSecondsAfterFinished"
RESERVED_VARIABLES = {
    f"PET_{name}"
    for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
}
"""Variables that the trainer sets; its webhook refuses a TrainJob with one of them."""
TRAINER = "trainer.kubeflow.org/"


class PodTemplate(NamedTuple):
    """The specification of the pods of a document."""

    kind: str
    """Kind of the document."""
    spec: dict[str, Any]


def check_container_name(plan: LaunchPlan) -> Iterator[Lint]:
    """Report pods of an operator without a container of the name that it requires."""
    for template in list_templates(plan):
        required = CONTAINER_NAMES.get(template.kind)
        names = [container.get("name") for container in template.spec["containers"]]
        if required is not None and required not in names:
            yield Lint(
                "container-name",
                f"the container of a {template.kind} is named '{names[0]}'",
                f"name it {required}: the operator ignores other containers",
                CONTAINER_SOURCE,
            )


def check_names(plan: LaunchPlan) -> Iterator[Lint]:
    """Report names that cannot be host names."""
    for document in _list_documents(plan):
        name = str(document["metadata"].get("name", ""))
        if document["kind"] in NAMED_KINDS and not is_job_name(name):
            yield Lint(
                "dns-label",
                f"the {document['kind']} '{name}' is not named by a label of RFC 1035",
                "set launch.name to at most 63 lowercase letters, digits and hyphens",
                "https://kubernetes.io/docs/concepts/overview/working-with-objects/names/"
                "#rfc-1035-label-names",
            )


def check_finished_job(plan: LaunchPlan) -> Iterator[Lint]:
    """Report a TrainJob whose JobSet or Job is deleted after a time: it would run again."""
    documents = [item for item in _list_documents(plan) if TRAINER in item.get("apiVersion", "")]
    if any(path.endswith(TTL) for item in documents for path, _ in walk(item)):
        yield Lint(
            "trainjob-ttl",
            f"{TTL} deletes the JobSet of a TrainJob, and a TrainJob that failed then runs again",
            "remove launch.target.ttl_seconds",
            "https://github.com/kubeflow/trainer/issues/3737",
        )


def check_autoscaler(plan: LaunchPlan) -> Iterator[Lint]:
    """Report an autoscaler that counts processor load, in a job with accelerators."""
    machine = plan.job.machine
    if machine is None or not machine.chips:
        return
    for document in _list_documents(plan):
        spec = document.get("spec", {})
        metrics = [*spec.get("metrics", []), *spec.get("elasticPolicy", {}).get("metrics", [])]
        if any(metric.get("resource", {}).get("name") == "cpu" for metric in metrics):
            yield Lint(
                "autoscaler-metric",
                f"an autoscaler of nodes with {machine.chip} counts the load of their processors",
                "remove the metric, or choose one of the accelerator",
                "https://github.com/kubeflow/training-operator/blob/v1.9.0/pkg/controller.v1/"
                "pytorch/hpa.go",
            )


def check_device_limits(plan: LaunchPlan) -> Iterator[Lint]:
    """Report accelerators or EFA whose requests differ from their limits."""
    for resources in _list_resources(plan):
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for name in sorted(name for name in {*requests, *limits} if "/" in name):
            if requests.get(name, limits.get(name)) != limits.get(name):
                yield Lint(
                    "device-limits",
                    f"{name} is requested {requests.get(name)} times and limited to "
                    f"{limits.get(name, 0)}",
                    "write the same number in requests and limits",
                    "https://kubernetes.io/docs/concepts/configuration/"
                    "manage-resources-containers/#consuming-extended-resources",
                )


def check_pull_policy(plan: LaunchPlan) -> Iterator[Lint]:
    """Report images without a fixed version that nodes pull only once."""
    for template in list_templates(plan):
        for container in template.spec["containers"]:
            image, policy = container.get("image", ""), container.get("imagePullPolicy", "Always")
            if image and not is_pinned(image) and policy != "Always":
                yield Lint(
                    "pull-policy",
                    f"nodes may run different versions of '{image}', because they pull it once",
                    "name a tag other than latest, or a digest, in launch.image",
                    "https://kubernetes.io/docs/concepts/containers/images/#image-pull-policy",
                )


def check_output(plan: LaunchPlan) -> Iterator[Lint]:
    """Report an output folder that is lost with its pod; several nodes cannot share it either."""
    output = plan.job.output
    templates = list_templates(plan)
    if not is_local_folder(output) or not templates:
        return
    mounts = [
        mount["mountPath"]
        for template in templates
        for container in template.spec["containers"]
        for mount in container.get("volumeMounts", [])
    ]
    if not is_mounted(output, mounts):
        yield Lint(
            "output-volume",
            f"output.folder = '{output}' is not on a volume, so a lost pod loses it",
            "set it to a folder below the mount of one of launch.volumes",
            "https://kubernetes.io/docs/concepts/storage/volumes/#background",
            is_error=plan.job.max_nodes > 1 or plan.job.jobs > 1 or bool(plan.job.stages),
        )


def check_reserved_variables(plan: LaunchPlan) -> Iterator[Lint]:
    """Report variables of a TrainJob that the trainer sets itself."""
    for document in _list_documents(plan):
        if document["kind"] != "TrainJob":
            continue
        names = {item["name"] for item in document["spec"].get("trainer", {}).get("env", [])}
        for name in sorted(names & RESERVED_VARIABLES):
            yield Lint(
                "reserved-variable",
                f"the trainer refuses a TrainJob with the variable {name}",
                f"remove launch.environment.{name}",
                "https://github.com/kubeflow/trainer/blob/v2.2.1/pkg/runtime/framework/plugins/"
                "torch/torch.go",
            )


def list_templates(plan: LaunchPlan) -> list[PodTemplate]:
    """Return the different specifications of the pods of all documents of a plan."""
    templates: list[PodTemplate] = []
    for document in _list_documents(plan):
        for spec in _find_pod_specs(document):
            template = PodTemplate(document["kind"], spec)
            if template not in templates:
                templates.append(template)
    return templates


def _list_documents(plan: LaunchPlan) -> list[dict[str, Any]]:
    """Return the Kubernetes documents of a plan; empty for other targets."""
    contents = [document.content for document in plan.documents]
    return [item for item in contents if isinstance(item, dict) and {"kind", "metadata"} <= {*item}]


def _find_pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the mappings with a list of containers, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield value
        for item in value.values():
            yield from _find_pod_specs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _find_pod_specs(item)


def _list_resources(plan: LaunchPlan) -> Iterator[dict[str, Any]]:
    """Yield the resources of all containers, and of the nodes of a TrainJob."""
    for template in list_templates(plan):
        for container in template.spec["containers"]:
            yield container.get("resources", {})
    for document in _list_documents(plan):
        yield document.get("spec", {}).get("trainer", {}).get("resourcesPerNode", {})


CHECKS: tuple[Check, ...] = (
    check_container_name,
    check_names,
    check_finished_job,
    check_autoscaler,
    check_device_limits,
    check_pull_policy,
    check_output,
    check_reserved_variables,
)
