"""Checks for a plan before submission; each finding names a source.

A check is a function that takes the plan. The `lints_*` modules in this folder list checks by topic
in `CHECKS`. To add checks, add a file; other files need not change.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regauge.jobs.targets import LaunchPlan


class Lint(NamedTuple):
    """A check's finding."""

    code: str
    """Check name, such as `efa-count`."""
    problem: str
    remedy: str
    source: str
    """Vendor document, or thread in a public project, that states the rule."""
    is_error: bool = True
    """Whether the job is refused; otherwise the finding is a warning."""


Check = Callable[[LaunchPlan], Iterator[Lint]]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path, such as `spec.replicas[0].name`, and the value of every leaf."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]")
    else:
        yield path, value


def find_images(plan: LaunchPlan) -> set[str]:
    """Return the container images in a plan's documents; empty without containers."""
    leaves = (leaf for document in plan.documents for leaf in walk(document.content))
    return {str(value) for path, value in leaves if path.endswith(".image") and value}


def run_lints(plan: LaunchPlan) -> list[Lint]:
    """Run all checks; return the findings, errors first."""
    findings = [lint for check in _list_checks() for lint in check(plan)]
    return sorted(findings, key=lambda lint: not lint.is_error)


def _list_checks() -> list[Check]:
    """Return the checks for all topics, in file order."""
    stems = sorted(path.stem for path in Path(__file__).parent.glob("lints_*.py"))
    modules = (importlib.import_module(f"regauge.jobs.{stem}") for stem in stems)
    return [check for module in modules for check in module.CHECKS]
