"""What a scheduler must know about a launched server. This module imports nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class ServerResources(NamedTuple):
    """A replica's share of a machine."""

    num_workers: int
    """Workers per model."""
    cpus: int
    memory_gib: int


@dataclass(frozen=True)
class ServerSpec:
    """What a scheduler must know about a launched server."""

    port: int
    start_seconds: float
    """Time limit for loading the models."""
    drain_seconds: float
    """Time to complete accepted requests after SIGTERM."""
    resources: ServerResources | None = None
    """A replica's resources without a machine type; None if unknown."""
    artifacts: Mapping[str, str] = field(default_factory=dict)
    """Address by model name."""
    options: tuple[str, ...] = ()
    """Other settings below `serve`, as overrides."""
