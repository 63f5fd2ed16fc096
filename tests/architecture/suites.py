"""Chooses the suites that CI runs: those whose programs import a module that has changed.

    PYTHONPATH=tests python -m architecture.suites              prints the suites that are due, each
                                                                with its duration, lane and base
    PYTHONPATH=tests python -m architecture.suites serve xla    records that they passed

A suite is due if its programs have changed since the commit at which it last passed, which
`.ci/passed.json` records. The one that passed longest ago comes first.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from architecture.layers import GROUND
from architecture.tree import OPTION_PACKAGES, ROOT, Source, imports, sources

GROUND_FILES = ("pyproject.toml", "constraints.txt")
"""Files that every program depends on, next to the ground of the package."""


PASSED = ROOT / ".ci" / "passed.json"
"""The commit at which each suite last passed."""


class Suite(NamedTuple):
    """The programs of a suite, and the files of the suite."""

    entries: tuple[str, ...]
    """Modules that the programs start with, without `regauge.`; they reach what they import."""
    files: tuple[str, ...] = ()
    """Beginnings of further paths, such as `tests/serve/`."""
    seconds: int = 600
    """Usual duration on two cores."""
    lane: str = "working"
    """Suites that mostly wait run beside those that work."""


TRAINING = ("training.run", "commands.compile", "evaluation.offline", "inference.export.export")
SUITES = {
    "ab": Suite(
        (
            "cli",
            *(f"commands.{name}" for name in ("train", "prepare", "export", "predict", "serve")),
        ),
        ("benchmarks/ab",),
        600,
    ),
    "faults": Suite(
        ("commands.train", "commands.predict", "supervision.supervisor"),
        ("tests/faults/",),
        1700,
        "waiting",
    ),
    "launch": Suite(
        tuple(f"commands.{name}" for name in ("launch", "job", "cluster", "image")),
        ("tests/launch/",),
        1100,
        "waiting",
    ),
    "monitor": Suite(
        tuple(f"commands.{name}" for name in ("monitor", "top", "runs", "pipeline", "promote")),
        ("tests/monitor/",),
        700,
        "waiting",
    ),
    "next": Suite(TRAINING, ("constraints-next.txt", "tests/contracts/"), 900),
    "peers": Suite(("commands.export", "inference.export.model"), ("tests/peers/",), 300),
    "rest": Suite(
        ("commands.train", "commands.pipeline", "commands.serve"),
        ("tests/end_to_end/", "tests/distributed/"),
        1700,
    ),
    "serve": Suite(("commands.serve", "serving.client.client"), ("tests/serve/",), 500, "waiting"),
    "simulated": Suite(TRAINING, ("tests/simulated/", "tests/contracts/"), 1100),
    "xla": Suite(TRAINING, ("constraints-xla.txt", "tests/contracts/"), 700),
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
    """Return whether a module is in a room that everything imports."""
    return [*module.split("."), ""][1] in GROUND


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


def list_changes(commit: str | None) -> list[str]:
    """Return the paths that have changed since a commit; everything if it is unknown."""
    if commit is None or not is_known(commit):
        return list(GROUND_FILES)
    return run_git("diff", "--name-only", "--no-renames", commit, "HEAD").splitlines()


def is_known(commit: str) -> bool:
    """Return whether this clone has a commit."""
    return bool(run_git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"))


def run_git(*arguments: str) -> str:
    """Return the output of a command of git; nothing if it fails."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def list_due_suites(passed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the suites to run, the one that passed longest ago first."""
    graph, due = read_graph(), []
    for name, suite in SUITES.items():
        changes = list_changes(passed.get(name, {}).get("commit"))
        if choose_suites(changes, graph, {name: suite}):
            due.append((passed.get(name, {}).get("date", ""), name))
    return [name for _, name in sorted(due)]


def main() -> None:
    """Print the suites that are due with their duration, or record those that passed."""
    passed = json.loads(PASSED.read_text(encoding="utf-8"))
    if not sys.argv[1:]:
        for name in list_due_suites(passed):
            suite, commit = SUITES[name], passed.get(name, {}).get("commit", "")
            base = commit if is_known(commit) else "HEAD~1"
            sys.stdout.write(f"{name} {suite.seconds} {suite.lane} {base}\n")
        return
    if unknown := set(sys.argv[1:]) - SUITES.keys():
        raise SystemExit(f"no suite is named {', '.join(sorted(unknown))}")
    commit, date = run_git("log", "-1", "--format=%h %cs").split()
    passed |= {name: {"commit": commit, "date": date} for name in sys.argv[1:]}
    text = json.dumps(dict(sorted(passed.items())), indent=2)
    PASSED.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
