"""Checks of a plan before it is submitted; each finding names its source.

A check is a function of the plan. The modules `lints_*` of this folder define the checks by topic
in `CHECKS`. A new file adds checks, and no other file changes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regauge.jobs.targets import LaunchPlan


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


def find_images(plan: LaunchPlan) -> set[str]:
    """Return the images of the containers in the documents of a plan; empty without containers."""
    leaves = (leaf for document in plan.documents for leaf in walk(document.content))
    return {str(value) for path, value in leaves if path.endswith(".image") and value}


def run_lints(plan: LaunchPlan) -> list[Lint]:
    """Return the findings of all checks, errors first."""
    findings = [lint for check in _list_checks() for lint in check(plan)]
    return sorted(findings, key=lambda lint: not lint.is_error)


def _list_checks() -> list[Check]:
    """Return the checks of all topics, in the order of their files."""
    stems = sorted(path.stem for path in Path(__file__).parent.glob("lints_*.py"))
    modules = (importlib.import_module(f"regauge.jobs.{stem}") for stem in stems)
    return [check for module in modules for check in module.CHECKS]
