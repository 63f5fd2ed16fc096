"""A submitted job: read its state, events and logs, cancel it, and remove its objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from regauge.jobs.targets import (
    FINAL_STATES,
    Handle,
    JobEvent,
    JobStatus,
    Leftover,
    LogRequest,
)
from regauge.jobs.targets._job_end import build_active_error, build_ended_error
from regauge.jobs.targets._kubernetes.documents import KINDS, SERVER
from regauge.jobs.targets._kubernetes.job_status import (
    COMPLETION_INDEX,
    JobObjects,
    Object,
    describe_job,
    describe_job_set,
    find_index,
)
from regauge.jobs.targets._kubernetes.kubectl import KubectlNamespace, split_handle
from regauge.jobs.targets._kubernetes.pods import (
    CANCELLED,
    JOB_LABEL,
    JOB_NAME,
    PROCESSES,
    QUEUE_LABEL,
)
from regauge.jobs.targets._kubernetes.volumes import DELETE_COMMANDS
from regauge.system.errors import SettingsError

JOB_SET_NAME = "jobset.sigs.k8s.io/jobset-name"
POD_LABELS = {
    "PyTorchJob": "training.kubeflow.org/job-name",
    "TrainJob": JOB_SET_NAME,
    "JobSet": JOB_SET_NAME,
    "Job": JOB_NAME,
    SERVER: JOB_LABEL,
}
"""Pod label with the job name, set by the job's controller."""
RUNTIMES, CLAIMS = "trainingruntimes.trainer.kubeflow.org", "persistentvolumeclaims"
OWNED_KINDS = (RUNTIMES, "configmaps", CLAIMS)
"""Kinds that `submit` creates in addition to the job, in deletion order."""
SCALED_OBJECTS = "scaledobjects.keda.sh"
SERVER_KINDS = (
    SCALED_OBJECTS,
    "horizontalpodautoscalers",
    "poddisruptionbudgets",
    "services",
    *OWNED_KINDS,
)
"""The same for a server."""
PAUSED = "autoscaling.keda.sh/paused-replicas"
"""https://keda.sh/docs/latest/concepts/scaling-deployments/#pausing-autoscaling."""
WORKLOADS = "workloads.kueue.x-k8s.io"
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""Workload label, https://kueue.sigs.k8s.io/docs/tasks/troubleshooting/troubleshooting_jobs."""
_NODES_LINE = re.compile(r"attempt \d+ on \d+ nodes: (?P<nodes>.+)")
_NODE = re.compile(r"(?P<host>\S+) \((?P<size>\d+)\)")


@dataclass(frozen=True)
class JobClient:
    """A job in a cluster namespace."""

    handle: Handle
    cluster: KubectlNamespace
    kind: str
    """Object kind, such as `PyTorchJob`."""
    resource: str
    """The kind's name for kubectl, with the group."""
    name: str

    @classmethod
    def open(cls, handle: Handle) -> JobClient:
        """Return a handle's client; raises SettingsError for another form."""
        parts = split_handle(handle)
        if len(parts) != len(("context", "namespace", "kind", "name")) or parts[2] not in KINDS:
            problem = f"'{handle}' is not a handle of target 'kubernetes'"
            remedy = "use kubernetes://CONTEXT/NAMESPACE/KIND/NAME, as `launch` printed it"
            raise SettingsError(problem, remedy)
        context, namespace, kind, name = parts
        title, version = KINDS[kind]
        group, slash, number = version.partition("/")
        return cls(
            handle,
            KubectlNamespace(context, namespace),
            title,
            f"{kind}s.{number}.{group}" if slash else f"{kind}s",
            name,
        )

    def find_status(self) -> JobStatus:
        job = self._read_job()
        pods = self._list_pods()
        events = [] if pods else self._list_events(job)
        objects = JobObjects(job, pods, events, self._list_workloads(job))
        if self.kind == "JobSet":
            selector = f"--selector={JOB_SET_NAME}={self.name}"
            return describe_job_set(
                self.handle, objects, self.cluster.list_items("jobs.v1.batch", selector)
            )
        return describe_job(self.handle, objects)

    def list_events(self) -> list[JobEvent]:
        return [_convert_event(event) for event in self._list_events(self._read_job())]

    def read_log(self, request: LogRequest) -> Iterator[str]:
        """Yield the log of the pod with a rank; raises SettingsError without such a pod.

        For a pipeline, this is a pod in the last stage that has started.
        """
        pods = sorted(self._list_pods(), key=_find_creation_time)
        if self.kind == "JobSet":
            stages = [pod["metadata"]["labels"].get(JOB_NAME) for pod in pods]
            pods = [pod for pod, stage in zip(pods, stages, strict=True) if stage == stages[-1]]
        if not pods:
            self._read_job()
            raise SettingsError(f"{self.handle} has no pods", "read its status with --why")
        index = 0 if request.rank is None else self._find_node(request.rank, pods)
        starts = [
            (pod, is_previous)
            for pod in pods
            if find_index(pod) == index
            for is_previous in ((True, False) if _has_restarted(pod) else (False,))
        ]
        if not starts:
            raise SettingsError(f"node {index} has no pod", "choose another --rank")
        attempt = len(starts) if request.attempt is None else request.attempt
        if not 1 <= attempt <= len(starts):
            problem = f"the log of attempt {attempt} is not available"
            remedy = f"choose an --attempt from 1 to {len(starts)}: the cluster keeps no others"
            raise SettingsError(problem, remedy)
        pod, is_previous = starts[attempt - 1]
        options = ["--follow"] * request.follow + ["--previous"] * is_previous
        yield from self.cluster.stream("logs", pod["metadata"]["name"], *options)

    def update(self, texts: list[str]) -> None:
        """Create or change a server's documents; raises SettingsError if it was cancelled."""
        server = self.cluster.find(self.resource, self.name)
        if server and CANCELLED in server["metadata"].get("annotations", {}):
            raise build_ended_error(self.handle, "cancelled")
        for text in texts:
            self.cluster.apply(text)

    def cancel(self) -> None:
        """Suspend the job, or scale the server to 0; the controllers then delete the pods.

        Raises SettingsError if the job has ended.
        """
        job = self._read_job()
        state = describe_job(self.handle, JobObjects(job, ())).state
        if state in FINAL_STATES:
            raise build_ended_error(self.handle, state)
        spec: dict[str, Any] = {"suspend": True}
        if self.kind == "PyTorchJob":
            spec = {"runPolicy": spec}
        if self.kind == SERVER:
            spec = {"replicas": 0}
            for item in self.cluster.list_items(SCALED_OBJECTS, self._selector):
                pause = {"metadata": {"annotations": {PAUSED: "0"}}}
                self.cluster.patch(SCALED_OBJECTS, item["metadata"]["name"], pause)
        annotations = {"annotations": {CANCELLED: "true"}}
        self.cluster.patch(self.resource, self.name, {"metadata": annotations, "spec": spec})
        for workload in self._list_workloads(job):
            name = workload["metadata"]["name"]
            self.cluster.patch(WORKLOADS, name, {"spec": {"active": False}})

    def clean_up(self) -> list[Leftover]:
        """Delete the job and the objects created by `submit`; return the remaining file systems.

        The job is deleted first: a failed TrainJob runs again if its JobSet is deleted before it
        (kubeflow/trainer#3737).
        """
        job = self.cluster.find(self.resource, self.name)
        if job is not None:
            status = describe_job(self.handle, JobObjects(job, self._list_pods()))
            if not status.is_final:
                raise build_active_error(self.handle, status.state)
        claims = self._list_claims(job) if job else []
        volumes = [
            volume
            for volume in self.cluster.list_items("persistentvolumes", self._selector)
            if volume["spec"].get("claimRef", {}).get("namespace", self.cluster.namespace)
            == self.cluster.namespace
        ]
        self.cluster.delete(self.resource, self.name, "--cascade=foreground")
        for kind in self._owned_kinds:
            for item in self.cluster.list_items(kind, self._selector):
                self.cluster.delete(kind, item["metadata"]["name"])
        for volume in volumes:
            self.cluster.delete("persistentvolumes", volume["metadata"]["name"])
        return [
            *self._audit_objects(claims),
            *filter(None, map(_describe_file_system, volumes)),
        ]

    @property
    def _selector(self) -> str:
        return f"--selector={JOB_LABEL}={self.name}"

    @property
    def _owned_kinds(self) -> tuple[str, ...]:
        return SERVER_KINDS if self.kind == SERVER else OWNED_KINDS

    def _audit_objects(self, claims: list[str]) -> list[Leftover]:
        """Return the job's remaining objects, and the user's claims."""
        late = "it was not deleted in time"
        foreign = "it existed before the job, and its files cost money"
        objects = [
            (kind, item["metadata"]["name"], late)
            for kind in ("pods", *self._owned_kinds, "persistentvolumes")
            for item in self.cluster.list_items(kind, self._selector)
        ]
        objects += [(CLAIMS, name, foreign) for name in claims]
        return [
            Leftover(f"{kind}/{name}", reason, self.cluster.command("delete", kind, name))
            for kind, name, reason in objects
        ]

    def _list_claims(self, job: Object) -> list[str]:
        """Return claims in a job's pods that `submit` did not create."""
        documents = [job, *self.cluster.list_items(RUNTIMES, self._selector)]
        names = {name for document in documents for name in _find_values(document, "claimName")}
        created = self.cluster.list_items(CLAIMS, self._selector)
        return sorted(names - {item["metadata"]["name"] for item in created})

    def _find_node(self, rank: int, pods: list[Object]) -> int:
        """Return the index of the pod that runs a rank.

        The rendezvous numbers the nodes; every pod logs their hosts in this order. Without that
        line, the pod order is used.
        """
        sizes: list[tuple[int, int]] = []
        hosts = {pod["spec"].get("hostname", pod["metadata"]["name"]): pod for pod in pods}
        if len({find_index(pod) for pod in pods}) > 1:
            text = "\n".join(self.cluster.stream("logs", pods[-1]["metadata"]["name"]))
            lines = list(_NODES_LINE.finditer(text))
            members = list(_NODE.finditer(lines[-1]["nodes"])) if lines else []
            if all(member["host"] in hosts for member in members):
                sizes = [
                    (find_index(hosts[member["host"]]), int(member["size"])) for member in members
                ]
        if not sizes:
            sizes = [(index, self._count_processes()) for index in sorted(map(find_index, pods))]
        for index, size in sizes:
            if rank < size:
                return index
            rank -= size
        raise SettingsError("no node has this rank", "choose a smaller --rank")

    def _count_processes(self) -> int:
        """Return the processes per node, as planned; 1 if the machine decides."""
        value = self._read_job()["metadata"].get("annotations", {}).get(PROCESSES, "auto")
        return int(value) if value.isdigit() else 1

    def _read_job(self) -> Object:
        job = self.cluster.find(self.resource, self.name)
        if job is None:
            problem = f"the cluster has no {self.kind} '{self.name}' in {self.cluster.namespace}"
            raise SettingsError(problem, "correct the handle")
        return job

    def _list_pods(self) -> list[Object]:
        """Return the job's pods; a server's replicas are numbered by age."""
        pods = self.cluster.list_items("pods", f"--selector={POD_LABELS[self.kind]}={self.name}")
        if self.kind == SERVER:
            pods.sort(key=_find_creation_time)
            for index, pod in enumerate(pods):
                pod["metadata"]["labels"][COMPLETION_INDEX] = str(index)
        return pods

    def _list_events(self, job: Object) -> list[Object]:
        """Return events for the job and for objects whose names begin with the job name.

        An earlier job with this name may have events, too.
        """
        name = re.compile(rf"{re.escape(self.name)}(-.*)?")
        events = [
            event
            for event in self.cluster.list_items("events")
            if name.fullmatch(event["involvedObject"]["name"])
            and _find_event_time(event) >= _find_creation_time(job)
        ]
        return sorted(events, key=_find_event_time)

    def _list_workloads(self, job: Object) -> list[Object]:
        if QUEUE_LABEL not in job["metadata"].get("labels", {}):
            return []
        uid = job["metadata"].get("uid", "")
        return self.cluster.list_items(WORKLOADS, f"--selector={JOB_UID_LABEL}={uid}")


def _convert_event(event: Object) -> JobEvent:
    subject = event["involvedObject"]
    source = f"{subject.get('kind', '').lower()}/{subject['name']}"
    return JobEvent(
        _find_event_time(event), source, f"{event.get('reason', '')}: {event['message']}"
    )


def _find_event_time(event: Object) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return str(next(filter(None, times), ""))


def _find_creation_time(item: Object) -> str:
    return str(item["metadata"].get("creationTimestamp", ""))


def _has_restarted(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return any(status.get("restartCount", 0) for status in statuses)


def _find_values(value: Any, key: str) -> Iterator[str]:
    """Yield a key's values anywhere in a JSON-ready value."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == key:
                yield str(item)
            else:
                yield from _find_values(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _find_values(item, key)


def _describe_file_system(volume: Object) -> Leftover | None:
    """Return the leftover file system behind a static volume; None for other volumes."""
    source = volume["spec"].get("csi", {})
    command = DELETE_COMMANDS.get(source.get("driver", ""))
    if command is None:
        return None
    handle = source["volumeHandle"]
    reason = "it contains the files of the job and costs money"
    return Leftover(handle, reason, command.format(handle))
