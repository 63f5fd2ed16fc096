"""Checks for a plan before submission; each finding names a source.

A check is a function that takes the plan. The `lints_*` modules in this folder list checks by topic
in `CHECKS`, and `lints.csv` has their messages. A new topic is a new file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from regauge.jobs.targets import LaunchPlan
from regauge.system.errors import SettingsError
from regauge.system.files import read_csv_rows


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


@cache
def load_rules() -> dict[str, dict[str, str]]:
    """Return check name -> level, source and message templates, from `lints.csv`."""
    return {row["code"]: row for row in read_csv_rows(Path(__file__).with_name("lints.csv"))}


def build_lint(code: str, **values: object) -> Lint:
    """Return the finding of a check, with values for the placeholders of its messages."""
    rule = load_rules()[code]
    problem, remedy, source = (
        rule[name].format(**values) for name in ("problem", "remedy", "source")
    )
    return Lint(code, problem, remedy, source, rule["level"] == "error")


def raise_errors(lints: Iterable[Lint]) -> None:
    """Raise SettingsError for the first error, naming the check and the source."""
    for lint in lints:
        if lint.is_error:
            raise SettingsError(f"{lint.problem} ({lint.code}: {lint.source})", lint.remedy)


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


def walk_documents(plan: LaunchPlan) -> Iterator[tuple[str, Any]]:
    for document in plan.documents:
        yield from walk(document.content)


def find_images(plan: LaunchPlan) -> set[str]:
    """Return the container images in a plan's documents; empty without containers."""
    return {str(value) for path, value in walk_documents(plan) if path.endswith(".image") and value}


def run_lints(plan: LaunchPlan) -> list[Lint]:
    """Run all checks; return the findings, errors first."""
    stems = sorted(path.stem for path in Path(__file__).parent.glob("lints_*.py"))
    modules = [importlib.import_module(f"regauge.jobs.{stem}") for stem in stems]
    findings = [lint for module in modules for check in module.CHECKS for lint in check(plan)]
    return sorted(findings, key=lambda lint: not lint.is_error)
