"""Options for the verb `plan`, grouped by meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.planner.run_plans.software import REGAUGE
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

DEFAULT_MAX_NODES = 64


@dataclass(frozen=True)
class Machines:
    """A plan's machines."""

    on: str | None = None
    """Machine type with a count."""
    compare: str | None = None
    """Machine types with counts, separated by commas."""
    cheapest: bool = False
    """Whether to search all machine types."""
    deadline: str | None = None
    """Longest run time."""
    max_nodes: int = DEFAULT_MAX_NODES
    """Maximum machine count in a search."""
    probe: bool = False
    """Whether to measure some steps on this machine."""
    show_all: bool = False
    """Whether to list all options found."""


@dataclass(frozen=True)
class Purpose:
    """A plan other than for one training run."""

    to_target: Path | None = None
    """Short run's folder, whose curve is continued to the target."""
    serve: float | None = None
    """Server requests per second."""
    predict: int | None = None
    """Row count for batch inference."""
    slo_ms: float | None = None
    """Milliseconds allowed per request."""
    lengths: Path | None = None
    """Prepared dataset folder with the text lengths."""
    tokens: int | None = None
    """Tokens per text, without a dataset."""
    new_tokens: int | None = None
    """Tokens that a causal model generates for each text."""
    software: str = REGAUGE
    """Planned training software."""


def name_option(field: str) -> str:
    """Return the option of a field, such as `--slo-ms`."""
    return f"--{field.replace('_', '-')}"


def refuse_options(purpose: Purpose, fields: Iterable[str], problem: str, remedy: str) -> None:
    """Raise SettingsError for the first of some fields that is set."""
    for field in fields:
        if getattr(purpose, field) is not None:
            raise SettingsError(f"{name_option(field)} {problem}", remedy)
