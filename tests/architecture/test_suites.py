"""A change runs the suites whose programs import what has changed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from architecture.suites import (
    PASSED,
    SUITES,
    Suite,
    build_graph,
    choose_suites,
    find_closure,
    find_module,
    list_due_suites,
    read_graph,
)
from architecture.tree import ROOT, Source

FILES = (
    Source("regauge/__init__.py", 'LAZY = {"Client": "regauge.commands._python"}'),
    Source("regauge/commands/_python/__init__.py", ""),
    Source("regauge/config.py", ""),
    Source("regauge/commands/__init__.py", ""),
    Source("regauge/commands/train.py", "def main():\n    from regauge.tasks import Task"),
    Source("regauge/commands/report.py", "import regauge.evaluation.report.page"),
    Source("regauge/tasks/__init__.py", ""),
    Source("regauge/tasks/mlm.py", 'WORKER = "regauge.worker_of_tasks"'),
    Source("regauge/worker_of_tasks.py", ""),
    Source("regauge/evaluation/report/__init__.py", ""),
    Source("regauge/evaluation/report/page.py", "if TYPE_CHECKING:\n    import regauge.tasks"),
)
TWO_SUITES = {
    "speed": Suite(("commands.train",), ("benchmarks/ab",)),
    "pages": Suite(("commands.report",)),
}


@pytest.mark.parametrize(
    ("path", "suites"),
    [
        ("src/regauge/commands/train.py", {"speed"}),
        ("src/regauge/tasks/mlm.py", {"speed"}),  # an option
        ("src/regauge/worker_of_tasks.py", {"speed"}),  # started by name
        ("src/regauge/tasks/removed.py", {"speed"}),
        ("src/regauge/tasks/words.txt", {"speed"}),
        ("src/regauge/commands/__init__.py", {"speed", "pages"}),
        ("src/regauge/evaluation/report/page.py", {"pages"}),
        ("src/regauge/commands/_python/__init__.py", set()),
        ("src/regauge/config.py", {"speed", "pages"}),
        ("pyproject.toml", {"speed", "pages"}),
        ("benchmarks/ab_sides.py", {"speed"}),
        ("docs/index.md", set()),
    ],
)
def test_a_change_runs_the_suites_that_import_it(path: str, suites: set[str]) -> None:
    assert choose_suites([path], build_graph(FILES), TWO_SUITES) == suites


def test_the_changes_of_several_files_add_up() -> None:
    paths = ["docs/index.md", "src/regauge/tasks/mlm.py", "src/regauge/evaluation/report/page.py"]
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
        "inference/backends/openvino.py",
        "data/loader.py",
        "models/attention.py",
        "inference/predict/worker.py",
        "serving/scheduler.py",
        "supervision/forkserver.py",
        "tasks/mlm.py",
        "training/optimizer.py",
    ],
)
def test_the_speed_guard_runs_for_what_is_computed(path: str) -> None:
    assert "ab" in choose_suites([f"src/regauge/{path}"], read_graph())


@pytest.mark.parametrize(
    "path", ["jobs/targets/slurm.py", "evaluation/report/page.py", "jobs/clusters/terraform.py"]
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


def test_suites_are_due_after_a_change_the_oldest_first() -> None:
    dates = {name: f"2026-01-{day:02}" for day, name in enumerate(sorted(SUITES, reverse=True), 1)}
    unknown = {name: {"commit": "0" * 40, "date": date} for name, date in dates.items()}
    assert list_due_suites(unknown) == sorted(SUITES, reverse=True)
    unchanged = {name: {"commit": "HEAD", "date": date} for name, date in dates.items()}
    assert list_due_suites(unchanged) == []
    del unchanged["serve"]
    assert list_due_suites(unchanged) == ["serve"]


def test_every_suite_is_a_target_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\ntest-{name}:" in makefile for name in SUITES if name != "ab")
    assert {suite.lane for suite in SUITES.values()} == {"waiting", "working"}


def test_the_record_names_existing_suites() -> None:
    assert json.loads(PASSED.read_text(encoding="utf-8")).keys() <= SUITES.keys()
