"""Child processes start in one module, and waits have one interval."""

from __future__ import annotations

import ast

import pytest

from architecture.tree import Source, calls, sources

STARTERS = {
    "regauge/system/children.py": {"subprocess.Popen"},
    "regauge/supervision/forkserver.py": {"os.fork"},  # a forked process skips the imports
    "regauge/jobs/targets/_local_scheduler.py": {"os.fork"},  # the scheduler outlives its command
    "regauge/jobs/targets/_kubernetes/kubectl.py": {"subprocess.Popen"},  # a stream of lines
    "regauge/monitoring/notify/delivery.py": {"subprocess.Popen"},  # started by a thread
}
"""Files that start processes without waiting for their end, and how."""
START_CALLS = {"subprocess.Popen", "os.fork", "multiprocessing.Process", "multiprocessing.Pool"}
INTERVALS = "regauge/system/timing.py"


def find_starts(source: Source) -> list[str]:
    """Return the calls of a file that start a process and are not permitted there."""
    allowed = STARTERS.get(source.path, set())
    return [
        f"{source.path}:{call.lineno} calls {ast.unparse(call.func)}"
        for call in calls(source)
        if ast.unparse(call.func) in START_CALLS - allowed
    ]


def find_intervals(source: Source) -> list[str]:
    """Return the definitions of an interval of waits in a file."""
    return [
        f"{source.path}:{node.lineno} defines {node.id}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and node.id.endswith("POLL_SECONDS")
        and source.path != INTERVALS
    ]


def test_processes_start_in_one_module() -> None:
    problems = [problem for source in sources() for problem in find_starts(source)]
    assert not problems, "\n".join([*problems, "use regauge.system.children"])


def test_the_interval_of_waits_is_defined_once() -> None:
    problems = [problem for source in sources() for problem in find_intervals(source)]
    assert not problems, "\n".join([*problems, f"import it from {INTERVALS}"])


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (find_starts, "subprocess.Popen(['true'])"),
        (find_starts, "def f():\n    return os.fork()"),
        (find_intervals, "LOCK_POLL_SECONDS = 0.1"),
        (find_intervals, "START_SECONDS, POLL_SECONDS = 1.0, 0.1"),
    ],
)
def test_a_second_one_is_found(find: object, text: str) -> None:
    assert callable(find)
    assert find(Source("regauge/jobs/a.py", text))
