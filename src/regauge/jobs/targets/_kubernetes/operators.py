"""The pods that Kubeflow's operators and Kubernetes create for a job's documents.

A rehearsal starts them as local processes. Variable sources:

| kind | source |
| --- | --- |
| PyTorchJob | kubeflow/training-operator, pkg/controller.v1/pytorch: envvar.go, elastic.go |
| TrainJob | kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go |
| Job | https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from regauge.jobs.targets import LaunchPlan, LeaderAddress, NodeCommand
from regauge.jobs.targets._kubernetes.documents import find_leader

MASTER_PORT = 23456
"""The training operator's default MASTER_PORT."""
TRAINER_PORT = 29500
"""PET_MASTER_PORT set by the trainer."""


class PodSpec(NamedTuple):
    node: int
    """Node number, or array job number."""
    host_name: str
    container: dict[str, Any]
    """Container that runs the command, with the operator's variables."""
    spec: dict[str, Any]


def list_pods(documents: Iterable[dict[str, Any]]) -> list[PodSpec]:
    """Return a job's pods; the documents include the TrainingRuntime if there is one."""
    by_kind = {document["kind"]: document for document in documents}
    if "PyTorchJob" in by_kind:
        return _list_workers(by_kind["PyTorchJob"])
    if "TrainJob" in by_kind:
        return _list_trainer_pods(by_kind["TrainJob"], by_kind["TrainingRuntime"])
    return _list_batch_pods(by_kind["Job"])


def list_node_commands(plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
    """Return a plan's pod commands; `leader` replaces the first pod's Service."""
    address = f"{leader.host}:{leader.port}"
    services = {find_leader(plan.job, api): address for api in ("pytorchjob", "trainjob")}
    commands = []
    for pod in list_pods(document.content for document in plan.documents):
        container = pod.container
        texts = [*container["command"], *container.get("args", [])]
        environment = {
            item["name"]: _replace(item["value"].replace("$$", "$"), services)
            for item in container.get("env", [])
            if "value" in item
        }
        if "PET_RDZV_ID" in environment:
            environment["PET_RDZV_ID"] = leader.run_id
        command = tuple(_replace(text.replace("$$", "$"), services) for text in texts)
        commands.append(NodeCommand(pod.node, command, environment))
    return commands


def _list_workers(job: dict[str, Any]) -> list[PodSpec]:
    """Return a PyTorchJob's nodes: the master, then the workers."""
    spec, policy = job["spec"], job["spec"]["elasticPolicy"]
    name, replicas = job["metadata"]["name"], spec["pytorchReplicaSpecs"]
    hosts = [
        (f"{name}-{role.lower()}-{index}", replicas[role]["template"]["spec"])
        for role in ("Master", "Worker")
        for index in range(replicas[role]["replicas"])
    ]
    variables = {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": f"{policy['rdzvHost']}:{policy['rdzvPort']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_RDZV_ID": policy["rdzvId"],
        "MASTER_ADDR": f"{name}-master-0",
        "MASTER_PORT": str(MASTER_PORT),
        "WORLD_SIZE": str(len(hosts)),
    }
    return [
        _build_pod(node, host, template, {**variables, "RANK": str(node)})
        for node, (host, template) in enumerate(hosts)
    ]


def _list_trainer_pods(job: dict[str, Any], runtime: dict[str, Any]) -> list[PodSpec]:
    trainer = job["spec"]["trainer"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]["spec"]
    (container,) = template["containers"]
    fields = {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
    merged = {**template, "containers": [{**container, **fields}]}
    name = job["metadata"]["name"]
    pods = []
    for index in range(trainer["numNodes"]):
        variables = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", "auto")),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-{replicated['name']}-0-0.{name}",
            "PET_MASTER_PORT": str(TRAINER_PORT),
            "JOB_COMPLETION_INDEX": str(index),
        }
        host = f"{name}-{replicated['name']}-0-{index}"
        pods.append(_build_pod(index, host, merged, variables))
    return pods


def _list_batch_pods(job: dict[str, Any]) -> list[PodSpec]:
    spec, name = job["spec"], job["metadata"]["name"]
    template = spec["template"]["spec"]
    if spec.get("completionMode") != "Indexed":
        return [_build_pod(0, name, template, {})]
    return [
        _build_pod(index, f"{name}-{index}", template, {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(spec["completions"])
    ]


def _build_pod(
    index: int, host_name: str, template: dict[str, Any], variables: dict[str, str]
) -> PodSpec:
    (container,) = template["containers"]
    added = [{"name": name, "value": value} for name, value in variables.items()]
    merged = {**container, "env": [*container.get("env", []), *added]}
    return PodSpec(index, host_name, merged, template)


def _replace(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text
