"""`kubernetes` target settings. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.jobs.targets import ContainerLauncher


class Toleration(Settings):
    """A node taint that pods tolerate, as in the Kubernetes API."""

    key: str | None = None
    """Taint key; None tolerates all taints."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether the taint must have `value`."""
    value: str | None = None
    """Taint value, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; None tolerates all effects."""

    @model_validator(mode="after")
    def _check_value(self) -> Toleration:
        if (self.operator == "Equal") != (self.value is not None):
            raise ValueError("'Equal' needs a value, and 'Exists' has none; correct the toleration")
        if self.key is None and self.operator == "Equal":
            raise ValueError("'Equal' needs a key; set key of the toleration")
        return self


class PodSecurity(Settings):
    """Privileges and user for a pod's processes."""

    restricted: bool = True
    """Whether pods meet the Pod Security Standard `restricted`, which many clusters enforce."""
    run_as_user: int | None = Field(default=None, ge=1)
    """User id for the processes; by default the image's user, which must be a number other than 0
    for `restricted` pods."""
    fs_group: int | None = Field(default=None, ge=1)
    """Group id that owns the mounted volumes, so that a user other than root can write to them."""


class PodSettings(Settings):
    """Scheduling, identity and grace period for a job's pods."""

    service_account: str | None = None
    """Pod service account."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with the registry credentials."""
    node_selector: Mapping[str, str] = Field(default_factory=dict)
    """Node labels, in addition to the machine type."""
    spot_labels: Mapping[str, str] = Field(
        default_factory=lambda: {"eks.amazonaws.com/capacityType": "SPOT"}
    )
    """Labels on interruptible nodes, selected by `launch.spot`."""
    zone: str | None = None
    """Node availability zone, for example a capacity reservation's."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints to tolerate; taints named like the accelerator's resource are included."""
    affinity: Mapping[str, Any] = Field(default_factory=dict)
    """Pod and node affinity, as in the Kubernetes API."""
    topology_spread: tuple[Mapping[str, Any], ...] = ()
    """Topology spread constraints, as in the Kubernetes API; by default a server spreads over
    zones."""
    annotations: Mapping[str, str] = Field(default_factory=dict)
    """Pod annotations."""
    priority_class: str | None = None
    """Pod priority class."""
    security: PodSecurity = PodSecurity()
    """Privileges and user for the processes."""
    grace_seconds: int = Field(default=120, ge=0)
    """Seconds from SIGTERM to SIGKILL, in which a run saves a checkpoint."""


class ReplicaSettings(Settings):
    """Autoscaling for a server; `launch.jobs` is the minimum number of replicas."""

    max_replicas: int | None = Field(default=None, ge=1)
    """Maximum number of replicas; by default their number does not change."""
    prometheus: str | None = None
    """Prometheus address, such as `http://prometheus.monitoring:9090`. KEDA then adds replicas by
    queue time and requests; otherwise a HorizontalPodAutoscaler adds them by CPU load."""
    max_queue_seconds: float = Field(default=0.5, gt=0)
    """Expected wait for a new request above which KEDA adds replicas."""
    requests_per_second: float | None = Field(default=None, gt=0)
    """Requests per second for each replica within the latency objective, as measured by
    `regauge benchmark --serve`; KEDA adds replicas above it."""
    cpu_percent: int = Field(default=70, ge=1, le=100)
    """CPU load, in percent of the requested CPUs, above which replicas are added."""


class KubernetesSettings(ContainerLauncher):
    """Namespace, kind and pods for a job."""

    namespace: str = "default"
    """Job namespace."""
    context: str | None = None
    """kubectl context; by default the current one."""
    api: Literal["auto", "pytorchjob", "trainjob"] = "auto"
    """Kind of a training job; `auto` is a PyTorchJob for elastic nodes, otherwise a TrainJob."""
    trainjob_version: Literal["2.0", "2.1", "2.2"] = "2.2"
    """Kubeflow Trainer API version."""
    runtime: str | None = None
    """Existing ClusterTrainingRuntime for a TrainJob; by default the documents include one."""
    region: str | None = None
    """AWS region, for `fsx` volume host names."""
    queue: str | None = None
    """Kueue LocalQueue where the job waits."""
    ttl_seconds: int | None = Field(default=None, ge=0)
    """Seconds after which a finished PyTorchJob or Job is deleted."""
    server: ReplicaSettings = ReplicaSettings()
    """Autoscaling for a server."""
    pod: PodSettings = PodSettings()
    """Scheduling, identity and grace period for the pods."""
