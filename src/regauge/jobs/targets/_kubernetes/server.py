"""A server's documents: Deployment, Service, disruption budget and autoscaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge.jobs.targets import JobSpec
from regauge.jobs.targets._kubernetes.pods import JOB_LABEL, build_pod_template
from regauge.jobs.targets._kubernetes.settings import (
    KubernetesSettings,
    PodSettings,
    ReplicaSettings,
)
from regauge.jobs.targets._server_spec import ServerSpec
from regauge.jobs.targets._templates import render_documents
from regauge.monitoring.vocabulary import SERVE_QUEUE_SECONDS, SERVE_REQUESTS
from regauge.system.errors import SettingsError

CONTAINER = "regauge"
PRE_STOP_SECONDS = 5
"""Time for the cluster to remove a replica's address before the replica refuses connections."""
GRACE_SECONDS = 10
"""Time to end after the accepted requests are answered."""
PROBE_SECONDS = 5
ZONE = "topology.kubernetes.io/zone"
SCALE_DOWN_SECONDS = 300
"""Time for which the load must be lower before a replica is removed."""
BEHAVIOR = {
    "scaleUp": {"policies": [{"type": "Percent", "value": 100, "periodSeconds": 30}]},
    "scaleDown": {"stabilizationWindowSeconds": SCALE_DOWN_SECONDS},
}
"""At most twice as many replicas every 30 seconds."""


def build_server(
    job: JobSpec, server: ServerSpec, target: KubernetesSettings, metadata: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return a server's documents, the Deployment last.

    Raises SettingsError for an autoscaler that cannot measure the load.
    """
    options = target.server
    return render_documents(
        Path(__file__).parent / "templates" / "server.yaml.jinja",
        metadata=metadata,
        replicas=job.jobs,
        max_replicas=_find_max_replicas(job, options),
        start_seconds=round(server.start_seconds),
        selector={JOB_LABEL: job.name},
        template=_build_template(job, server, target.pod, metadata),
        behavior=BEHAVIOR,
        cpu_percent=options.cpu_percent,
        prometheus=options.prometheus,
        queries=_list_queries(job, target),
    )


def _find_max_replicas(job: JobSpec, options: ReplicaSettings) -> int | None:
    """Return the autoscaler's maximum; None without one."""
    maximum = options.max_replicas
    if maximum is None or maximum == job.jobs:
        return None
    if maximum < job.jobs:
        problem = f"launch.target.server.max_replicas = {maximum} is less than launch.jobs"
        raise SettingsError(problem, f"set it to at least {job.jobs}")
    has_cpus = job.server is not None and job.server.resources is not None
    if options.prometheus is None and (job.machine.chips if job.machine else not has_cpus):
        chip = job.machine.chip if job.machine else "an unknown machine"
        problem = f"CPU load does not show the load of a server on {chip}"
        remedy = "set launch.target.server.prometheus, or launch.instance to a CPU machine"
        raise SettingsError(problem, remedy)
    return maximum


def _build_template(
    job: JobSpec, server: ServerSpec, pod: PodSettings, metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return a replica's pod template, with probes and a drain before its end."""
    template = build_pod_template(job, pod, metadata, CONTAINER)
    spec = template["spec"]
    spec["restartPolicy"] = "Always"
    spec["terminationGracePeriodSeconds"] = round(
        PRE_STOP_SECONDS + server.drain_seconds + GRACE_SECONDS
    )
    constraint = {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "ScheduleAnyway"}
    labels = {"labelSelector": {"matchLabels": {JOB_LABEL: job.name}}}
    spec.setdefault("topologySpreadConstraints", [constraint | labels])
    (container,) = spec["containers"]
    container["ports"] = [{"name": "http", "containerPort": server.port}]
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}}
    live, ready = (
        {"httpGet": {"path": f"/v2/health/{name}", "port": "http"}, "periodSeconds": PROBE_SECONDS}
        for name in ("live", "ready")
    )
    count = max(1, round(server.start_seconds / PROBE_SECONDS))
    container["startupProbe"] = ready | {"failureThreshold": count}
    container["livenessProbe"] = live | {"timeoutSeconds": PROBE_SECONDS, "failureThreshold": 6}
    container["readinessProbe"] = ready | {"failureThreshold": 2}
    return template


def _list_queries(job: JobSpec, target: KubernetesSettings) -> list[tuple[str, str]]:
    """Return the autoscaler's PromQL queries and thresholds: queue time, and requests per replica.

    Both select this server's pods.
    """
    options = target.server
    pods = f'namespace="{target.namespace}", pod=~"{job.name}-.*"'
    queries = [(f"max({SERVE_QUEUE_SECONDS.name}{{{pods}}})", f"{options.max_queue_seconds:g}")]
    if options.requests_per_second is not None:
        rate = f"sum(rate({SERVE_REQUESTS.name}{{{pods}}}[1m]))"
        queries.append((rate, f"{options.requests_per_second:g}"))
    return queries
