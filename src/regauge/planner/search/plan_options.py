"""The options of the verb `plan`, grouped by their meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_MAX_NODES = 64


@dataclass(frozen=True)
class Machines:
    """The machines of a plan."""

    on: str | None = None
    """Machine type with a count."""
    compare: str | None = None
    """Machine types with counts, separated by commas."""
    cheapest: bool = False
    """Whether to search all machine types."""
    deadline: str | None = None
    """Longest time of the run."""
    max_nodes: int = DEFAULT_MAX_NODES
    """Largest number of machines of a search."""
    probe: bool = False
    """Whether to measure some steps on this machine."""
    show_all: bool = False
    """Whether to list all options of a search."""


@dataclass(frozen=True)
class Purpose:
    """A plan other than that of one training run."""

    to_target: Path | None = None
    """Folder of a short run, whose curve is continued to the target."""
    serve: float | None = None
    """Requests per second of a server."""
    predict: int | None = None
    """Number of rows of batch inference."""
    slo_ms: float | None = None
    """Milliseconds that a request may take."""
    lengths: Path | None = None
    """Folder of a prepared dataset with the lengths of the texts."""
