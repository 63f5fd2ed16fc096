"""Jobs for each Kubernetes API: Job, PyTorchJob, TrainJob with a runtime, and JobSet.

The documents are in `templates/`. The PyTorchJob is valid for the training operator 1.7, 1.8 and
1.9, the TrainJob for the trainer 2.0, 2.1 and 2.2.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from regauge.jobs.targets import JobSpec
from regauge.jobs.targets._kubernetes.pods import MAX_HOST_NAME, QUEUE_LABEL, build_pod_template
from regauge.jobs.targets._kubernetes.server import build_server
from regauge.jobs.targets._kubernetes.settings import KubernetesSettings
from regauge.jobs.targets._templates import render_document
from regauge.system.errors import RESTART_CODES, PreemptedError, SettingsError

Object = dict[str, Any]
KINDS = {
    "pytorchjob": ("PyTorchJob", "kubeflow.org/v1"),
    "trainjob": ("TrainJob", "trainer.kubeflow.org/v1alpha1"),
    "job": ("Job", "batch/v1"),
    "jobset": ("JobSet", "jobset.x-k8s.io/v1alpha2"),
    "deployment": ("Deployment", "apps/v1"),
}
"""API -> job kind and version."""
SERVER = KINDS["deployment"][0]
"""Server kind."""
CONTAINERS = {"pytorchjob": "pytorch", "trainjob": "node", "job": "regauge", "jobset": "regauge"}
"""Name of the command's container; Kubeflow's operators ignore other containers."""
PORTS = {"c10d": 29400, "etcd": 2379}
"""Rendezvous backend -> default port, if the endpoint does not set one."""
ETCD_ENDPOINT = "etcd.etcd:2379"
"""Service, namespace and port of the etcd server in the manifests of `cluster render`."""
OVERRIDABLE = ("serviceAccountName", "nodeSelector", "tolerations", "volumes")
"""Pod fields that every trainer version can override."""
_TEMPLATES = Path(__file__).with_name("templates")
_SHELL = ("/bin/sh", "-c")


def build_documents(
    job: JobSpec, api: str, target: KubernetesSettings, metadata: Object
) -> list[Object]:
    """Return an API's job, preceded by the runtime if it is a TrainJob.

    Raises SettingsError if the API cannot run the job.
    """
    if api == "pytorchjob":
        return [build_pytorch_job(job, target, metadata)]
    if api == "trainjob":
        return build_train_job(job, target, metadata)
    if job.server is not None:
        return build_server(job, job.server, target, metadata)
    build = build_job_set if api == "jobset" else build_batch_job
    return [build(job, target, metadata)]


def build_batch_job(job: JobSpec, target: KubernetesSettings, metadata: Object) -> Object:
    """Return a Job for one node, or an Indexed Job with one pod per array job.

    After one array job fails, the others continue.
    """
    pods = job.jobs if job.jobs > 1 else None
    if pods:
        check_host_name(job, f"-{pods - 1}")
    template = build_pod_template(job, target.pod, metadata, CONTAINERS["job"])
    ttl = target.ttl_seconds
    spec = _build_job_spec(job, template, pods=pods, is_array=pods is not None, ttl_seconds=ttl)
    kind, version = KINDS["job"]
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _build_job_spec(job: JobSpec, template: Object, **changes: Any) -> Object:
    """Return a Job specification; `pods` is the pod count for an Indexed Job."""
    values = {
        "template": template,
        "pods": None,
        "is_array": False,
        "failures": job.max_attempts - 1,
        "restart_codes": list(RESTART_CODES),
        "limit_seconds": job.limit_seconds,
        "ttl_seconds": None,
    }
    return _render("job_spec", **(values | changes))


def _render(name: str, **values: Any) -> Object:
    return render_document(_TEMPLATES / f"{name}.yaml.jinja", **values)


def build_pytorch_job(job: JobSpec, target: KubernetesSettings, metadata: Object) -> Object:
    """Return a PyTorchJob for training with a variable node count.

    The operator sets PET_NNODES and PET_RDZV_*, and each attempt meets at `<rdzvId>-<attempt>`
    (kubeflow/training-operator, pkg/controller.v1/pytorch/elastic.go).
    """
    if job.max_nodes == 1:
        problem = "an elastic PyTorchJob has at least two nodes, and the number of nodes is 1"
        raise SettingsError(problem, "set launch.target.api to 'trainjob'")
    check_host_name(job, f"-worker-{job.max_nodes - 2}")
    template = build_pod_template(job, target.pod, metadata, CONTAINERS["pytorchjob"])
    del template["spec"]["restartPolicy"]  # it is that of the replicas
    container = template["spec"]["containers"][0]
    container["command"] = [*_SHELL, build_restart_script(job.max_attempts), "regauge-restart"]
    container["args"] = list(job.command)
    host, port = _find_rendezvous(job)
    return _render(
        "pytorch_job",
        job=job,
        metadata=metadata,
        template=template,
        host=host,
        port=port,
        ttl_seconds=target.ttl_seconds,
    )


def _find_rendezvous(job: JobSpec) -> tuple[str, int]:
    endpoint = find_leader(job, "pytorchjob")
    if job.rendezvous == "etcd":
        if job.rendezvous_endpoint is None:
            problem = "execution.nodes.rendezvous is etcd, and no endpoint is set"
            remedy = f"set execution.nodes.endpoint, such as {ETCD_ENDPOINT} of `cluster render`"
            raise SettingsError(problem, remedy)
        endpoint = job.rendezvous_endpoint
    host, _, port = endpoint.partition(":")
    if port and not port.isdigit():
        problem = f"execution.nodes.endpoint = '{endpoint}' is invalid"
        raise SettingsError(problem, "set it to a host and port, such as etcd:2379")
    return host, int(port or PORTS[job.rendezvous])


def build_restart_script(max_attempts: int) -> str:
    """Return a script that reruns its arguments after exit codes in RESTART_CODES.

    Code 143 leaves the pod, so that the operator replaces it; so does SIGKILL for the whole pod.
    """
    text = Path(__file__).with_name("restart.sh").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    codes = " | ".join(str(code) for code in RESTART_CODES if code != PreemptedError.exit_code)
    script = "\n".join(lines) + "\n"
    return script.replace("@ATTEMPTS@", str(max_attempts)).replace("@CODES@", codes)


def build_train_job(job: JobSpec, target: KubernetesSettings, metadata: Object) -> list[Object]:
    """Return a TrainJob for training with a fixed node count, after its TrainingRuntime.

    The runtime has the pods and the restart policy; the TrainJob has the command. An existing
    runtime is overridden instead.
    """
    if job.is_elastic:
        problem = f"a TrainJob cannot have elastic nodes, and the node count is {job.node_range}"
        remedy = "set launch.target.api to 'pytorchjob', or execution.nodes.count to one number"
        raise SettingsError(problem, remedy)
    check_host_name(job, f"-node-0-{job.max_nodes - 1}")
    template = build_pod_template(job, target.pod, metadata, CONTAINERS["trainjob"])
    container = template["spec"]["containers"][0]
    fields = {name: container.pop(name, None) for name in ("image", "command", "env", "resources")}
    environment = fields["env"] or []
    if job.max_nodes > 1 and job.rendezvous == "c10d":
        # Not reserved by the trainer, which sets PET_MASTER_ADDR to the same host.
        endpoint = {"name": "PET_RDZV_ENDPOINT", "value": find_leader(job, "trainjob")}
        environment = [*environment, endpoint]
    train_job = _render(
        "train_job",
        job=job,
        metadata=metadata,
        version=target.trainjob_version,
        runtime=target.runtime,
        template=template,
        environment=environment,
        resources=fields["resources"],
        overrides=_list_overrides(template, target) if target.runtime else None,
    )
    if target.runtime and target.ttl_seconds is not None:
        raise SettingsError("launch.target.ttl_seconds has no effect on a TrainJob", "remove it")
    if target.runtime:
        return [train_job]
    return [_build_runtime(job, target, metadata, template), train_job]


def _build_runtime(
    job: JobSpec, target: KubernetesSettings, metadata: Object, template: Object
) -> Object:
    """Return a TrainJob's TrainingRuntime.

    A Job counts every failed pod. All nodes in an attempt fail together, so the limit is a multiple
    of the node count.
    """
    limit = job.limit_seconds if target.trainjob_version != "2.2" else None
    failures = (job.max_attempts - 1) * job.max_nodes
    labels = {key: value for key, value in metadata["labels"].items() if key != QUEUE_LABEL}
    return _render(
        "training_runtime",
        job=job,
        metadata={**metadata, "labels": labels},
        job_spec=_build_job_spec(job, template, failures=failures, limit_seconds=limit),
        ttl_seconds=target.ttl_seconds,
    )


def _list_overrides(template: Object, target: KubernetesSettings) -> Object:
    """Return the pod fields that a TrainJob overrides in an existing runtime.

    Raises SettingsError for a setting that a TrainJob cannot override in this version.
    """
    pod, version = target.pod, target.trainjob_version
    refused = {
        "priority_class": pod.priority_class is not None,
        "image_pull_secrets": bool(pod.image_pull_secrets) and version == "2.0",
        "grace_seconds": "grace_seconds" in pod.model_fields_set,
    }
    if name := next((name for name, is_set in refused.items() if is_set), None):
        problem = f"launch.target.pod.{name} cannot change an existing runtime ({version})"
        raise SettingsError(problem, "remove it, or remove launch.target.runtime")
    fields = {name: template["spec"][name] for name in OVERRIDABLE if name in template["spec"]}
    container = template["spec"]["containers"][0]
    fields["containers"] = [{name: container[name] for name in ("name", "volumeMounts")}]
    if pod.image_pull_secrets:
        fields["imagePullSecrets"] = template["spec"]["imagePullSecrets"]
    return fields


def build_job_set(job: JobSpec, target: KubernetesSettings, metadata: Object) -> Object:
    return _render(
        "job_set",
        metadata=metadata,
        ttl_seconds=target.ttl_seconds,
        stages=[
            (
                stage.name.removeprefix(f"{job.name}-"),
                stage.stage,
                _build_stage(job, stage, target, metadata),
            )
            for stage in job.stages
        ],
    )


def _build_stage(
    job: JobSpec, stage: JobSpec, target: KubernetesSettings, metadata: Object
) -> Object:
    """Return a stage's Job specification; its pods share the job's volumes.

    Training on several nodes is an Indexed Job, whose pod 0 serves the rendezvous.
    """
    count = stage.max_nodes
    host = f"{stage.name}-0-{count - 1}"
    if len(host) > MAX_HOST_NAME:
        problem = f"the host name '{host}' of stage '{stage.stage}' is too long"
        raise SettingsError(problem, "shorten launch.name, or the name of the stage")
    if stage.is_elastic:
        problem = f"stage '{stage.stage}' has {stage.node_range} nodes, and a JobSet is not elastic"
        raise SettingsError(problem, "set execution.nodes.count to one number")
    named = replace(stage, name=job.name)
    template = build_pod_template(named, target.pod, metadata, CONTAINERS["jobset"])
    if count == 1:
        return _build_job_spec(stage, template)
    variables = {"PET_NNODES": str(count)}
    if stage.processes_per_node is not None:
        variables["PET_NPROC_PER_NODE"] = str(stage.processes_per_node)
    if stage.rendezvous == "c10d":
        variables["PET_RDZV_ENDPOINT"] = f"{stage.name}-0-0.{job.name}:{PORTS['c10d']}"
    container = template["spec"]["containers"][0]
    container.setdefault("env", []).extend(
        {"name": name, "value": value} for name, value in variables.items()
    )
    failures = (stage.max_attempts - 1) * count  # all nodes of an attempt fail together
    return _build_job_spec(stage, template, pods=count, failures=failures)


def find_leader(job: JobSpec, api: str) -> str:
    """Return the c10d rendezvous host and port, served by the first pod.

    The host is the master's Service, or a name in the JobSet's Service.
    """
    hosts = {
        "pytorchjob": f"{job.name}-master-0",
        "trainjob": f"{job.name}-node-0-0.{job.name}",
    }
    return f"{hosts[api]}:{PORTS['c10d']}"


def check_host_name(job: JobSpec, suffix: str) -> None:
    """Raise SettingsError if the pods' host names, name and suffix, would be too long."""
    maximum = MAX_HOST_NAME - len(suffix)
    if len(job.name) > maximum:
        problem = f"launch.name = '{job.name}' has more than {maximum} characters"
        raise SettingsError(problem, f"shorten it: pods are named {job.name}{suffix}")
