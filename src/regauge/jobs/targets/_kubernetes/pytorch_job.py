"""The PyTorchJob (kubeflow.org/v1) of a training whose number of nodes may change.

The document is valid for the training operator 1.7, 1.8 and 1.9. The container of a node must be
named `pytorch`. The operator sets PET_NNODES and PET_RDZV_* there. Source:
kubeflow/training-operator, pkg/controller.v1/pytorch/elastic.go.

Node 0 is the master, whose end ends the job. Without a master, the job ends after every worker. A
worker for which the cluster has no room would never end (UpdateJobStatus in
pytorchjob_controller.go).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets._kubernetes.pods import build_pod_template, check_host_name
from regauge.system.errors import RESTART_CODES, PreemptedError, SettingsError

if TYPE_CHECKING:
    from regauge.jobs.targets import JobSpec
    from regauge.jobs.targets._kubernetes.settings import PodSettings

CONTAINER = "pytorch"
"""Name that the operator requires; it ignores containers with other names."""
API_VERSION, KIND = "kubeflow.org/v1", "PyTorchJob"
PORTS = {"c10d": 29400, "etcd": 2379}
"""Port of each rendezvous backend, if the endpoint has none."""
SHELL = ("/bin/sh", "-c")


def build_pytorch_job(
    job: JobSpec, pod: PodSettings, metadata: dict[str, Any], ttl_seconds: int | None
) -> dict[str, Any]:
    """Return the PyTorchJob of a training, with an elastic policy.

    Pods restart by exit code. The operator counts no restarts with this policy, so the container
    limits its attempts itself.
    """
    if job.max_nodes == 1:
        problem = "an elastic PyTorchJob has at least two nodes, and the number of nodes is 1"
        raise SettingsError(problem, "set launch.target.api to 'trainjob'")
    check_host_name(job, f"-worker-{job.max_nodes - 2}")
    template = build_pod_template(job, pod, CONTAINER, metadata)
    container = template["spec"]["containers"][0]
    container["command"] = [*SHELL, build_restart_script(job.max_attempts), "regauge-restart"]
    container["args"] = list(job.command)
    run_policy: dict[str, Any] = {"cleanPodPolicy": "Running"}
    if job.limit_seconds is not None:
        run_policy["activeDeadlineSeconds"] = job.limit_seconds
    if ttl_seconds is not None:
        run_policy["ttlSecondsAfterFinished"] = ttl_seconds
    replicas = {
        role: {"replicas": count, "restartPolicy": "ExitCode", "template": template}
        for role, count in (("Master", 1), ("Worker", job.max_nodes - 1))
    }
    spec = {
        "nprocPerNode": str(job.processes),
        "elasticPolicy": _build_elastic_policy(job, metadata["namespace"]),
        "runPolicy": run_policy,
        "pytorchReplicaSpecs": replicas,
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def build_restart_script(max_attempts: int) -> str:
    """Return the script that runs its arguments again after exit codes of RESTART_CODES.

    Code 143 leaves the pod, so that the operator replaces it; so does SIGKILL of the whole pod.
    """
    text = Path(__file__).with_name("restart.sh").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    codes = " | ".join(str(code) for code in RESTART_CODES if code != PreemptedError.exit_code)
    script = "\n".join(lines) + "\n"
    return script.replace("@ATTEMPTS@", str(max_attempts)).replace("@CODES@", codes)


def find_leader(job: JobSpec) -> str:
    """Return the host and port of the c10d rendezvous: the Service of the master."""
    return f"{job.name}-master-0:{PORTS['c10d']}"


def _build_elastic_policy(job: JobSpec, namespace: str) -> dict[str, Any]:
    """Return the elastic policy; each attempt meets at the rendezvous `<rdzvId>-<attempt>`."""
    endpoint = find_leader(job)
    if job.rendezvous == "etcd":
        if job.rendezvous_endpoint is None:
            problem = "execution.nodes.rendezvous is etcd, and no endpoint is set"
            raise SettingsError(problem, "set execution.nodes.endpoint to its host and port")
        endpoint = job.rendezvous_endpoint
    host, _, port = endpoint.partition(":")
    if port and not port.isdigit():
        problem = f"execution.nodes.endpoint = '{endpoint}' is invalid"
        raise SettingsError(problem, "set it to a host and port, such as etcd:2379")
    return {
        "minReplicas": job.min_nodes,
        "maxReplicas": job.max_nodes,
        "maxRestarts": job.max_attempts - 1,
        "rdzvBackend": job.rendezvous,
        "rdzvHost": host,
        "rdzvPort": int(port or PORTS[job.rendezvous]),
        "rdzvId": f"{namespace}-{job.name}",
    }
