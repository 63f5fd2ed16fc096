"""Checks of a plan before it is submitted; each finding names its source.

A check is a function of the plan. The modules `lints_*` define the checks by topic in `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from regauge.launchers import LaunchPlan


class Lint(NamedTuple):
    """A finding of a check."""

    code: str
    """Name of the check, such as `efa-count`."""
    problem: str
    remedy: str
    source: str
    """Document of the vendor, or thread of a public project, that states the rule."""
    is_error: bool = True
    """Whether the job is refused; otherwise the finding is a warning."""


Check = Callable[[LaunchPlan], Iterator[Lint]]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a JSON-ready value with its path, such as `spec.replicas[0].name`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]")
    else:
        yield path, value


def run_lints(plan: LaunchPlan) -> list[Lint]:
    """Return the findings of all checks, errors first."""
    findings = [lint for check in _list_checks() for lint in check(plan)]
    return sorted(findings, key=lambda lint: not lint.is_error)


def _list_checks() -> list[Check]:
    from regauge.launching import lints_aws_batch

    return [*lints_aws_batch.CHECKS]
