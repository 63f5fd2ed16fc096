"""Kubernetes: a PyTorchJob with elastic nodes, a TrainJob, a Job, or a server's Deployment.

The documents are created with kubectl, and the state of a job is read from the cluster. A handle is
`kubernetes://<context>/<namespace>/<kind>/<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from regauge.jobs.targets import (
    COMMON_FIELDS,
    Document,
    Handle,
    JobEvent,
    JobSpec,
    JobStatus,
    LaunchPlan,
    LeaderAddress,
    Leftover,
    LogRequest,
    NodeCommand,
)
from regauge.jobs.targets._kubernetes.documents import KINDS, build_documents
from regauge.jobs.targets._kubernetes.job_client import JobClient
from regauge.jobs.targets._kubernetes.kubectl import APPLY, KubectlNamespace, find_context
from regauge.jobs.targets._kubernetes.operators import list_node_commands
from regauge.jobs.targets._kubernetes.pods import build_metadata, escape_references
from regauge.jobs.targets._kubernetes.settings import KubernetesSettings
from regauge.jobs.targets._kubernetes.volumes import build_claims, build_config_map
from regauge.jobs.targets._server_spec import ServerSpec
from regauge.jobs.targets._stage_jobs import RULE
from regauge.system.errors import RegaugeError

USED = COMMON_FIELDS | {"jobs", "spot", "image", "volumes", "shared_memory_gib"}
"""Job fields contained in every kind of document."""


class Kubernetes(KubernetesSettings):
    """Jobs on a Kubernetes cluster, such as EKS, with Kubeflow's operators."""

    supports_elastic: ClassVar[bool] = True
    supports_arrays: ClassVar[bool] = True
    supports_servers: ClassVar[bool] = True
    supports_stages: ClassVar[bool] = True

    def plan(self, job: JobSpec) -> LaunchPlan:
        api, reason = self._choose_api(job)
        notes = [reason]
        if job.server is not None and job.jobs == 1:
            notes.append("A lost machine interrupts a single replica; set launch.jobs = 2.")
        if job.server is not None and (self.server.max_replicas or 0) > job.jobs:
            maximum = self.server.max_replicas
            notes.append(f"The price is for {job.jobs} replicas; there may be {maximum}.")
        if job.server is not None and job.machine is None:
            notes.append(_describe_resources(job.server))
        if job.uses_efa and job.machine is not None:
            notes.append(f"Each node requests {job.machine.efa_interfaces} EFA interfaces.")
        metadata = build_metadata(job, self.namespace, self.queue)
        documents = [build_config_map(job, metadata)] if job.run_file_text else []
        documents += build_claims(job, metadata, self.region)
        documents += build_documents(escape_references(job), api, self, metadata)
        return LaunchPlan(
            job,
            documents=tuple(Document(_name_file(item), item) for item in documents),
            commands=tuple(self._build_command(item, job) for item in documents),
            notes=tuple(notes),
            restart_policy=self._describe_restarts(job, api),
            used=USED - self._find_unused(api),
        )

    def list_node_commands(self, plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
        return list_node_commands(plan, leader)

    def submit(self, plan: LaunchPlan) -> Handle:
        """Create the documents; if one is refused, the earlier ones are deleted again.

        Those of a server are changed instead if they exist, and its replicas replaced one by one.
        """
        cluster = KubectlNamespace(find_context(self.context), self.namespace)
        kind = plan.documents[-1].content["kind"].lower()
        handle = Handle(self.kind, cluster.context, f"{self.namespace}/{kind}/{plan.job.name}")
        if plan.job.server is not None:
            JobClient.open(handle).update([document.text for document in plan.documents])
            return handle
        created: list[str] = []
        for document in plan.documents:
            try:
                created.append(cluster.create(document.text))
            except RegaugeError as error:
                remaining = _delete_objects(cluster.delete, created)
                if remaining:
                    command = cluster.command("delete", *remaining)
                    problem = f"{error.problem}; {', '.join(remaining)} still exists"
                    error = type(error)(problem, f"run: {command}")
                raise error from None
        return handle

    def find_status(self, handle: Handle) -> JobStatus:
        return JobClient.open(handle).find_status()

    def list_events(self, handle: Handle) -> list[JobEvent]:
        return JobClient.open(handle).list_events()

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        return JobClient.open(handle).read_log(request)

    def cancel(self, handle: Handle) -> None:
        JobClient.open(handle).cancel()

    def clean_up(self, handle: Handle) -> list[Leftover]:
        return JobClient.open(handle).clean_up()

    def _choose_api(self, job: JobSpec) -> tuple[str, str]:
        """Return a job's API and the reason, as one sentence."""
        if job.server is not None:
            return "deployment", "The server is a Deployment behind a Service."
        if job.stages:
            return "jobset", "The job is a JobSet with a Job per stage; dependsOn orders the Jobs."
        if job.verb != "train":
            kind = "an Indexed Job" if job.jobs > 1 else "a Job"
            return "job", f"The job is {kind} (batch/v1), because '{job.verb}' has no rendezvous."
        if self.api != "auto":
            return self.api, f"The job is a {KINDS[self.api][0]}, as launch.target.api requires."
        if job.is_elastic:
            reason = f"the number of nodes is {job.node_range}, and a TrainJob is not elastic"
            return "pytorchjob", f"The job is a PyTorchJob, because {reason}."
        reason = f"the number of nodes is fixed ({job.node_range})"
        return "trainjob", f"The job is a TrainJob, because {reason}."

    def _build_command(self, document: dict[str, Any], job: JobSpec) -> tuple[str, ...]:
        context = () if self.context is None else (f"--context={self.context}",)
        options = (*context, f"--namespace={self.namespace}")
        action = ("create",) if job.server is None else APPLY
        return ("kubectl", *options, *action, "-f", _name_file(document))

    def _describe_restarts(self, job: JobSpec, api: str) -> str:
        if job.server is not None:
            return "A replica that ends or does not answer is replaced, without limit."
        codes = "exit codes 75 and 76"
        if api == "pytorchjob":
            return (
                f"The operator replaces a lost pod while at least {job.min_nodes} continue; after "
                f"{codes} a pod starts its command again, {job.max_attempts} times in all; other "
                "exit codes end the job."
            )
        if api == "trainjob" and self.runtime is not None:
            return f"The runtime {self.runtime} decides."
        scope = "job of the array" if job.jobs > 1 else "job"
        if job.stages:
            scope = f"pipeline. {RULE.removesuffix('.')}"
        return (
            f"A lost pod is replaced without limit; exit codes 75, 76 and 143 restart a pod, up to "
            f"{job.max_attempts} attempts; other exit codes end the {scope}."
        )

    def _find_unused(self, api: str) -> frozenset[str]:
        """Return job fields without effect, such as those that an existing runtime decides."""
        if api == "deployment":
            return frozenset({"max_attempts", "hours"})
        if api != "trainjob" or self.runtime is None:
            return frozenset()
        has_deadline = self.trainjob_version == "2.2"
        return frozenset({"max_attempts"} | (set() if has_deadline else {"hours"}))


def _name_file(document: dict[str, Any]) -> str:
    return f"{document['kind'].lower()}-{document['metadata']['name']}.yaml"


def _delete_objects(delete: Callable[[str], object], names: list[str]) -> list[str]:
    """Delete objects, newest first; return the names that still exist."""
    remaining = []
    for name in reversed(names):
        try:
            delete(name)
        except RegaugeError:
            remaining.append(name)
    return remaining


def _describe_resources(server: ServerSpec) -> str:
    if server.resources is None:
        return "The replicas request no CPUs or memory; set launch.instance."
    count, cpus, memory_gib = server.resources
    workers = f"{count} worker{'s' if count > 1 else ''} per model"
    return f"A replica requests {cpus} CPUs and {memory_gib} GiB, planned for {workers}."
