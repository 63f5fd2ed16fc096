"""Controllers of a small cluster: PyTorchJob, TrainJob, JobSet, Job and Deployment.

They follow kubeflow/training-operator (pkg/controller.v1/common/pod.go, pytorchjob_controller.go),
kubeflow/trainer, kubernetes-sigs/jobset (pkg/controllers/jobset_controller.go), and the controller
of Jobs: pods are created by index, restarted by exit code, and
counted against limits.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launch.kubernetes_servers import Deployments
from regauge.jobs.targets._kubernetes.job_status import find_index
from regauge.jobs.targets._kubernetes.operators import PodSpec, list_pods

if TYPE_CHECKING:
    from launch.kubernetes_api import Store
    from launch.kubernetes_pods import Kubelet

Object = dict[str, Any]
JOB_SET_NAME = "jobset.sigs.k8s.io/jobset-name"
"""Label of the Jobs and pods of a JobSet."""
RETRYABLE = 128
"""First exit code after which the training operator restarts a pod (IsRetryableExitCode)."""
NO_CODE = 0xBEEF
"""Exit code that the training operator assumes for a pod that reports none."""


@dataclass
class Controllers:
    """Creates and restarts the pods of jobs, and writes the conditions of jobs."""

    store: Store
    kubelet: Kubelet
    quota: int | None = None
    """Maximum number of pods; None without a quota."""
    is_operator_running: bool = True
    failures: dict[str, Counter[int]] = field(default_factory=dict)
    """Pods that failed by exit code, by index, for each uid of a Job."""

    def __post_init__(self) -> None:
        self.deployments = Deployments(self.store, self.kubelet)

    def reconcile(self) -> None:
        """Bring every job and server one step further."""
        self.deployments.reconcile()
        for job in self.store.list("jobs"):
            self._reconcile_batch_job(job, job["spec"], "batch.kubernetes.io/job-name")
        if not self.is_operator_running:
            return
        for job in self.store.list("jobsets"):
            self._reconcile_job_set(job)
        for job in self.store.list("pytorchjobs"):
            self._reconcile_pytorch_job(job)
        for job in self.store.list("trainjobs"):
            runtime = self._find_runtime(job)
            spec = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
            numbers = {"completions": job["spec"]["trainer"]["numNodes"], "is_gang": True}
            suspend = {"suspend": job["spec"].get("suspend", False)}
            merged = {**spec, **numbers, **suspend}
            self._reconcile_batch_job(job, merged, "jobset.sigs.k8s.io/jobset-name")

    def _reconcile_pytorch_job(self, job: Object) -> None:
        """Create, restart or delete the workers of a PyTorchJob."""
        label = {"training.kubeflow.org/job-name": job["metadata"]["name"]}
        pods = self._pods(job, label)
        if job["spec"]["runPolicy"].get("suspend"):
            self._delete(pods)
            _set_condition(job, "Running", "False", "suspended")
            _set_condition(job, "Suspended", "True", f"PyTorchJob {job['metadata']['name']}")
            return
        if _is_finished(job):
            if job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running":
                self._delete([pod for pod in pods if pod["status"]["phase"] in _ACTIVE])
            return
        by_index = {find_index(pod): pod for pod in pods}
        for spec in list_pods([job]):
            pod = by_index.get(spec.node)
            if pod is None:
                role, index = spec.host_name.rsplit("-", 2)[1:]
                labels = {
                    **label,
                    "training.kubeflow.org/replica-type": role,
                    "training.kubeflow.org/replica-index": index,
                }
                template = job["spec"]["pytorchReplicaSpecs"][role.title()]["template"]
                self._create(job, spec, spec.host_name, template, labels)
            elif pod["status"]["phase"] == "Failed":
                self._handle_worker(job, pod)
        phases = Counter(pod["status"]["phase"] for pod in pods)
        if phases["Running"] and not _is_finished(job):
            _set_condition(job, "Running", "True", "PyTorchJob is running.")
            _set_condition(job, "Restarting", "False", "PyTorchJob is running.")
        if 0 in by_index and by_index[0]["status"]["phase"] == "Succeeded":
            _set_condition(job, "Succeeded", "True", "PyTorchJob successfully completed.")
            job["status"]["completionTime"] = _now()

    def _handle_worker(self, job: Object, pod: Object) -> None:
        """Restart a worker that failed if its exit code permits; otherwise fail the job."""
        code = _exit_code(pod)
        if code is not None:
            message = f"Pod: {pod['metadata']['name']} exited with code {code}"
            self.store.record_event(job, "ExitedWithCode", message)
        if (NO_CODE if code is None else code) >= RETRYABLE:
            self._delete([pod])
            _set_condition(job, "Restarting", "True", "Worker replica(s) failed.")
        else:
            _set_condition(job, "Failed", "True", "Worker replica(s) failed.")
            job["status"]["completionTime"] = _now()

    def _reconcile_job_set(self, job_set: Object) -> None:
        """Create the Jobs of a JobSet whose dependencies are complete; a failed Job ends it."""
        metadata, spec = job_set["metadata"], job_set["spec"]
        label = {JOB_SET_NAME: metadata["name"]}
        jobs = {
            job["metadata"]["name"]: job
            for job in self.store.list("jobs", metadata["namespace"], **label)
        }
        if spec.get("suspend"):
            for job in jobs.values():
                job["spec"]["suspend"] = True
            _set_condition(job_set, "Suspended", "True", "jobset is suspended")
            return
        if _is_finished(job_set):
            return
        for entry in spec["replicatedJobs"]:
            needed = [
                jobs.get(f"{metadata['name']}-{item['name']}-0")
                for item in entry.get("dependsOn", [])
            ]
            name = f"{metadata['name']}-{entry['name']}-0"
            if name not in jobs and all(job and _is_complete(job) for job in needed):
                jobs[name] = self._create_stage(job_set, entry, name)
        if any(_is_finished(job) and not _is_complete(job) for job in jobs.values()):
            _set_condition(
                job_set, "Failed", "True", "jobset failed due to one or more job failures"
            )
        elif len(jobs) == len(spec["replicatedJobs"]) and all(map(_is_complete, jobs.values())):
            _set_condition(job_set, "Completed", "True", "jobset completed successfully")

    def _create_stage(self, job_set: Object, entry: Object, name: str) -> Object:
        """Create the Job of a replicated job, whose pods have the label of the JobSet."""
        label = {JOB_SET_NAME: job_set["metadata"]["name"]}
        spec = deepcopy(entry["template"]["spec"])
        spec["template"]["metadata"]["labels"].update(label)
        annotations = entry["template"]["metadata"]["annotations"]
        namespace = job_set["metadata"]["namespace"]
        identity = {"name": name, "namespace": namespace, "labels": label}
        document = {"apiVersion": "batch/v1", "kind": "Job", "spec": spec}
        document["metadata"] = {**identity, "annotations": annotations}
        return self.store.create("jobs", document)

    def _reconcile_batch_job(self, job: Object, spec: Object, label_key: str) -> None:
        """Create the pods of a Job, and count those that failed against its limits."""
        label = {label_key: job["metadata"]["name"]}
        pods = self._pods(job, label)
        if spec.get("suspend"):
            self._delete([pod for pod in pods if pod["status"]["phase"] in _ACTIVE])
            _set_condition(job, "Suspended", "True", "Job suspended")
            return
        if _is_finished(job):
            self._delete([pod for pod in pods if pod["status"]["phase"] in _ACTIVE])
            return
        documents = [job] if job["kind"] == "Job" else [job, self._find_runtime(job)]
        failed_indexes = self._count_failures(job, spec, pods)
        if failed_indexes is None:
            return
        for pod_spec in list_pods(documents):
            attempts = [pod for pod in pods if find_index(pod) == pod_spec.node]
            is_done = any(pod["status"]["phase"] in {*_ACTIVE, "Succeeded"} for pod in attempts)
            if is_done or pod_spec.node in failed_indexes:
                continue
            index = {"batch.kubernetes.io/job-completion-index": str(pod_spec.node)}
            name = f"{pod_spec.host_name}-{uuid.uuid4().hex[:5]}"
            template = spec["template"]
            self._create(job, pod_spec, name, template, {**label, **index})
        self._finish_batch_job(job, spec, pods, failed_indexes)

    def _count_failures(self, job: Object, spec: Object, pods: list[Object]) -> set[int] | None:
        """Return the indexes that failed for ever; None if the whole job failed."""
        counted: Counter[int] = Counter()
        failed: set[int] = set()
        rules = spec["podFailurePolicy"]["rules"]
        for pod in pods:
            if pod["status"]["phase"] != "Failed":
                continue
            action = _find_action(rules, pod)
            if action == "FailJob":
                message = f"Container exited with code {_exit_code(pod)} matching FailJob rule"
                _set_condition(job, "Failed", "True", message)
                return None
            if action == "FailIndex":
                failed.add(find_index(pod))
            elif action != "Ignore":
                counted[find_index(pod)] += 1
        if counted.total() > spec.get("backoffLimit", 1 << 31):
            message = "Job has reached the specified backoff limit"
            _set_condition(job, "Failed", "True", message)
            return None
        limit = spec.get("backoffLimitPerIndex", 1 << 31)
        return failed | {index for index, count in counted.items() if count > limit}

    def _finish_batch_job(
        self, job: Object, spec: Object, pods: list[Object], failed: set[int]
    ) -> None:
        """Write the last condition of a Job whose indexes have all ended."""
        done = {find_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        if len(done | failed) < spec.get("completions", 1):
            return
        if failed:
            _set_condition(job, "Failed", "True", "Job has failed indexes")
        else:
            _set_condition(job, "Complete", "True", "Reached expected number of succeeded pods")
            job["status"]["completionTime"] = _now()

    def _create(
        self, job: Object, spec: PodSpec, name: str, template: Object, labels: dict[str, str]
    ) -> None:
        """Create a pod, unless a quota forbids it."""
        namespace = job["metadata"]["namespace"]
        used = len(self.store.list("pods", namespace))
        if self.quota is not None and used >= self.quota:
            message = (
                f'Error creating: pods "{name}" is forbidden: exceeded quota: compute, requested: '
                f"pods=1, used: pods={used}, limited: pods={self.quota}"
            )
            self.store.record_event(job, "FailedCreate", message)
            return
        merged = {**template.get("metadata", {}).get("labels", {}), **labels}
        job.setdefault("status", {}).setdefault("startTime", _now())
        self.store.create(
            "pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": namespace, "labels": merged},
                "spec": {**spec.spec, "containers": [spec.container], "hostname": spec.host_name},
                "status": {"phase": "Pending"},
            },
        )

    def _pods(self, job: Object, label: dict[str, str]) -> list[Object]:
        return self.store.list("pods", job["metadata"]["namespace"], **label)

    def _find_runtime(self, job: Object) -> Object:
        name = job["spec"]["runtimeRef"]["name"]
        return self.store.find("trainingruntimes", job["metadata"]["namespace"], name)

    def _delete(self, pods: list[Object]) -> None:
        for pod in pods:
            metadata = pod["metadata"]
            self.store.delete("pods", metadata["namespace"], metadata["name"])


_ACTIVE = ("Pending", "Running")


def _find_action(rules: list[Object], pod: Object) -> str:
    """Return the action of the first rule of a podFailurePolicy that a pod matches."""
    code = _exit_code(pod)
    conditions = {item["type"] for item in pod["status"].get("conditions", [])}
    for rule in rules:
        if any(item["type"] in conditions for item in rule.get("onPodConditions", [])):
            return str(rule["action"])
        codes = rule.get("onExitCodes")
        if codes and code and (code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return "Count"


def _exit_code(pod: Object) -> int | None:
    for status in pod["status"].get("containerStatuses", []):
        if "terminated" in status["state"]:
            return int(status["state"]["terminated"]["exitCode"])
    return None


def _is_finished(job: Object) -> bool:
    return _has_condition(job, "Succeeded", "Failed", "Complete", "Completed")


def _is_complete(job: Object) -> bool:
    return _has_condition(job, "Complete")


def _has_condition(job: Object, *kinds: str) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(item["type"] in kinds and item["status"] == "True" for item in conditions)


def _set_condition(job: Object, kind: str, status: str, message: str) -> None:
    conditions = job.setdefault("status", {}).setdefault("conditions", [])
    conditions[:] = [item for item in conditions if item["type"] != kind]
    time_of_change = {"lastTransitionTime": _now()}
    conditions.append({"type": kind, "status": status, "message": message, **time_of_change})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
