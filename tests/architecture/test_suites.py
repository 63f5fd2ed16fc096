"""A change runs the suites whose programs import what has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from architecture.suites import (
    SUITES,
    Suite,
    build_graph,
    choose_suites,
    find_closure,
    find_module,
    read_graph,
)
from architecture.tree import ROOT, Source

FILES = (
    Source("regauge/__init__.py", 'LAZY = {"Client": "regauge.api"}'),
    Source("regauge/api/__init__.py", ""),
    Source("regauge/config.py", ""),
    Source("regauge/verbs/__init__.py", ""),
    Source("regauge/verbs/train.py", "def main():\n    from regauge.tasks import Task"),
    Source("regauge/verbs/report.py", "import regauge.reporting.page"),
    Source("regauge/tasks/__init__.py", ""),
    Source("regauge/tasks/mlm.py", 'WORKER = "regauge.worker_of_tasks"'),
    Source("regauge/worker_of_tasks.py", ""),
    Source("regauge/reporting/__init__.py", ""),
    Source("regauge/reporting/page.py", "if TYPE_CHECKING:\n    import regauge.tasks"),
)
TWO_SUITES = {
    "speed": Suite(("verbs.train",), ("benchmarks/ab",)),
    "pages": Suite(("verbs.report",)),
}


@pytest.mark.parametrize(
    ("path", "suites"),
    [
        ("src/regauge/verbs/train.py", {"speed"}),
        ("src/regauge/tasks/mlm.py", {"speed"}),  # an option
        ("src/regauge/worker_of_tasks.py", {"speed"}),  # started by name
        ("src/regauge/tasks/removed.py", {"speed"}),
        ("src/regauge/tasks/words.txt", {"speed"}),
        ("src/regauge/verbs/__init__.py", {"speed", "pages"}),
        ("src/regauge/reporting/page.py", {"pages"}),
        ("src/regauge/api/__init__.py", set()),
        ("src/regauge/config.py", {"speed", "pages"}),
        ("pyproject.toml", {"speed", "pages"}),
        ("benchmarks/ab_sides.py", {"speed"}),
        ("docs/index.md", set()),
    ],
)
def test_a_change_runs_the_suites_that_import_it(path: str, suites: set[str]) -> None:
    assert choose_suites([path], build_graph(FILES), TWO_SUITES) == suites


def test_the_changes_of_several_files_add_up() -> None:
    paths = ["docs/index.md", "src/regauge/tasks/mlm.py", "src/regauge/reporting/page.py"]
    assert choose_suites(paths, build_graph(FILES), TWO_SUITES) == {"speed", "pages"}


def test_the_entries_and_files_of_every_suite_exist() -> None:
    graph = read_graph()
    for suite in SUITES.values():
        assert {f"regauge.{entry}" for entry in suite.entries} <= graph.keys()
        for beginning in suite.files:
            assert list(ROOT.glob(f"{beginning}*"))


@pytest.mark.parametrize(
    "path",
    [
        "accelerators/cpu.py",
        "backends/openvino.py",
        "data/loader.py",
        "models/attention.py",
        "prediction/worker.py",
        "serving/scheduler.py",
        "supervision/forkserver.py",
        "tasks/mlm.py",
        "training/optimizer_step.py",
    ],
)
def test_the_speed_guard_runs_for_what_is_computed(path: str) -> None:
    assert "ab" in choose_suites([f"src/regauge/{path}"], read_graph())


@pytest.mark.parametrize(
    "path", ["launchers/slurm.py", "reporting/page.py", "clusters/terraform.py"]
)
def test_the_speed_guard_does_not_run_for_other_commands(path: str) -> None:
    graph = read_graph()
    assert find_module(f"src/regauge/{path}", graph) in graph
    assert "ab" not in choose_suites([f"src/regauge/{path}"], graph)


def test_the_report_shows_the_modules_of_each_suite(report: Callable[[str], None]) -> None:
    graph = read_graph()
    sizes = {name: len(find_closure(suite.entries, graph)) for name, suite in SUITES.items()}
    report(f"modules of suites: {sizes} of {len(graph)}")
    assert all(0 < size < len(graph) for size in sizes.values())
