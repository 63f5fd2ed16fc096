"""The settings of replicas on a Ray cluster; this module does not import torch."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.config.validation import require_pattern


class RayServing(Settings):
    """Server replicas on a Ray cluster."""

    address: str | None = None
    """Cluster address, or `auto` for the running one. By default a Ray is started on this machine
    and ends with the command."""
    name: Annotated[
        str, require_pattern(r"[\w.-]+", "a name; use letters, digits and '.', '-' and '_'")
    ] = "regauge"
    """Ray Serve application name."""
    route_prefix: Annotated[
        str, require_pattern(r"/|(/[\w.+-]+)+", "a path; begin it with '/', such as '/models'")
    ] = "/"
    """Path in front of all routes, such as `/models`."""
    replicas: int = Field(default=1, ge=1)
    """Number of replicas; the minimum if `max_replicas` is set. Each loads all models."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Maximum number of replicas. Ray then adds and removes replicas with the load."""
    target_requests: float = Field(default=32.0, gt=0)
    """Autoscaling target for requests in progress per replica."""
    replicas_per_machine: int | None = Field(default=None, ge=1)
    """Maximum replicas per machine; by default as many as its resources allow."""
    cpus: float = Field(default=1, ge=0)
    """CPUs per replica."""
    gpus: int = Field(default=0, ge=0)
    """Accelerators per replica that Ray counts as GPUs; a worker runs on each."""
    resources: dict[str, float] = {}
    """Other resources per replica, by their names in the cluster, such as `{neuron_cores = 1}`."""

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is smaller than replicas = {self.replicas}")
        return self
