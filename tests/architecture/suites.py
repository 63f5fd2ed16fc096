"""Chooses the suites that CI runs for a change: those whose programs import a changed module.

PYTHONPATH=tests python -m architecture.suites BASE     prints the suites, one per line
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from architecture.layers import FOUNDATION
from architecture.tree import OPTION_PACKAGES, ROOT, Source, imports, sources

GROUND_FILES = ("pyproject.toml", "constraints.txt")
"""Files that every program depends on, next to the foundation of the package."""


class Suite(NamedTuple):
    """The programs of a suite, and the files of the suite."""

    entries: tuple[str, ...]
    """Modules that the programs start with, without `regauge.`; they reach what they import."""
    files: tuple[str, ...] = ()
    """Beginnings of further paths, such as `tests/serve/`."""


SUITES = {
    "ab": Suite(
        ("cli", *(f"verbs.{verb}" for verb in ("train", "prepare", "export", "predict", "serve"))),
        ("benchmarks/ab",),
    ),
}


def choose_suites(
    paths: Iterable[str], graph: Mapping[str, set[str]], suites: Mapping[str, Suite] = SUITES
) -> set[str]:
    """Return the names of the suites that depend on one of the paths."""
    changes = tuple(paths)
    modules = {find_module(path, graph) for path in changes}
    if any(is_ground(module) for module in modules) or set(changes) & set(GROUND_FILES):
        return set(suites)
    return {
        name
        for name, suite in suites.items()
        if modules & find_closure(suite.entries, graph)
        or any(path.startswith(suite.files) for path in changes)
    }


def find_module(path: str, graph: Mapping[str, set[str]]) -> str:
    """Return the module of a path; for data and deleted files, the package that contains them.

    The result is empty for a file outside of the package.
    """
    if not path.startswith("src/regauge/"):
        return ""
    name = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    while name not in graph:
        name = name.rpartition(".")[0]
    return name


def is_ground(module: str) -> bool:
    """Return whether a module is of the foundation, which everything imports."""
    return [*module.split("."), ""][1] in FOUNDATION


def find_closure(entries: Iterable[str], graph: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that some modules import, also indirectly, and these modules."""
    closure: set[str] = set()
    waiting = [f"regauge.{entry}" for entry in entries]
    while waiting:
        module = waiting.pop()
        if module not in closure:
            closure.add(module)
            waiting += graph[module]
    return closure


def build_graph(files: Iterable[Source]) -> dict[str, set[str]]:
    """Return the modules that each module reaches at run time.

    An option is loaded by its name, so the package of the options reaches all of them.
    """
    by_name = {source.module: source for source in files}
    graph = {name: _list_targets(source) & by_name.keys() for name, source in by_name.items()}
    for name in by_name:
        package = name.rpartition(".")[0]
        if package in OPTION_PACKAGES:
            graph[package].add(name)
        if package in graph:
            graph[name].add(package)  # the import of a module runs its package's `__init__`
    return graph


@cache
def read_graph() -> dict[str, set[str]]:
    """Return the graph of the package."""
    return build_graph(sources())


def _list_targets(source: Source) -> set[str]:
    """Return the modules that a file imports, or names in a text, such as `python -m`."""
    targets = {target for _, target in imports(source, typing=False)}
    if source.module == "regauge":  # its texts are classes that only Python programs load
        return targets
    return targets | {
        node.value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def main() -> None:
    """Print the suites for the changes since a commit; all of them if there is no such commit."""
    command = ["git", "diff", "--name-only", "--no-renames", sys.argv[1], "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    paths = done.stdout.splitlines() if done.returncode == 0 else GROUND_FILES
    sys.stdout.writelines(f"{name}\n" for name in sorted(choose_suites(paths, read_graph())))


if __name__ == "__main__":
    main()
