"""The run file tables read by the supervisor; this module does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from regauge.config import Settings


class Supervision(Settings):
    """How a run is checked before it starts, and when it restarts after a failure."""

    max_attempts_per_step: int = Field(default=3, ge=1)
    """Attempts that may fail in the same way at one step; then the exit code is 66."""
    preflight: Literal["full", "brief"] = "full"
    """Checks before an attempt: `full` includes devices and collectives, `brief` only storage."""
    hang_timeout_seconds: float = Field(default=60.0, gt=0)
    """Silence after which a process counts as hung; at least ten times its usual silence."""
    spot_notices: Literal["none", "ec2"] = "none"
    """Source of spot interruption notices; after a notice the run saves and stops."""


class Nodes(Settings):
    """The run's nodes and their rendezvous; every node runs the same command."""

    count: int | str | None = Field(default=None, union_mode="left_to_right")
    """Number of nodes, or a range such as `2:4`; by default the launcher's number, or 1."""
    rendezvous: Literal["c10d", "etcd"] | None = None
    """Rendezvous backend: a store on one node (default), or a separate etcd."""
    endpoint: str | None = None
    """Rendezvous host and port; by default those set by the launcher."""
    join_seconds: float = Field(default=600.0, gt=0)
    """Maximum wait for the minimum number of nodes; then the command ends with code 75."""
    last_call_seconds: float = Field(default=30.0, ge=0)
    """Wait for additional nodes after the minimum has joined, when the run starts."""
    node_timeout_seconds: float = Field(default=5.0, gt=0)
    """Seconds without a heartbeat after which a node is lost and the others continue."""

    @field_validator("count")
    @classmethod
    def _check_count(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            parse_node_range(value)
        return value


def parse_node_range(count: int | str) -> tuple[int, int]:
    """Return minimum and maximum of `2` or `2:4`; raises ValueError."""
    minimum, colon, maximum = str(count).partition(":")
    try:
        limits = int(minimum), int(maximum if colon else minimum)
    except ValueError:
        limits = 0, 0
    if not 1 <= limits[0] <= limits[1]:
        raise ValueError(f"{count!r} is not a number of nodes; write 2, or a range such as 2:4")
    return limits
