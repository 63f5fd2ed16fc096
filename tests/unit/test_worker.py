"""Workers get a request, write lines, and are stopped at their limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from regauge.system import jsonl, processes
from regauge.system.processes import RankLayout
from regauge.system.timing import wait_for
from regauge.system.worker import LINES, Line, WorkerExit, WorkerLimits, run_worker

Run = Callable[..., WorkerExit]
"""Runs a program with the names `job`, `os`, `sys`, `time`; passes its keywords to run_worker."""
BEGIN = """
import os, subprocess, sys, time
from regauge.system.worker import receive_job
job = receive_job()
"""
PROMPT = WorkerLimits(total=60, silence=60)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (modules := tmp_path / "modules").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(modules))

    def run(
        program: str, limits: WorkerLimits = PROMPT, *, request: Any = None, **options: Any
    ) -> WorkerExit:
        (modules / "program.py").write_text(BEGIN + program)
        return run_worker("program", request or {}, tmp_path / "work", limits, **options)

    return run


def build_layout(size: int) -> RankLayout:
    return RankLayout(size, processes.find_free_port())


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_worker_gets_its_request_and_its_lines_are_received(run: Run) -> None:
    lines: list[Line] = []
    line_counts: list[int] = []
    program = """
for value in job.request["values"]:
    job.write_line({"double": 2 * value})
    time.sleep(0.2)
"""
    ended = run(
        program,
        request={"values": [1, 2, 3]},
        on_line=lines.append,
        on_poll=lambda: line_counts.append(len(lines)),
    )
    assert ended == WorkerExit(0)
    assert lines == [{"rank": 0, "double": double} for double in (2, 4, 6)]
    assert {0, 1, 2} <= set(line_counts)


def test_each_rank_is_a_worker_that_writes_its_rank(run: Run) -> None:
    lines: list[Line] = []
    ended = run(
        'job.write_line({"size": os.environ["WORLD_SIZE"]})',
        layout=build_layout(3),
        on_line=lines.append,
    )
    assert ended.code == 0
    assert sorted(line["rank"] for line in lines) == [0, 1, 2]
    assert {line["size"] for line in lines} == {"3"}


def test_a_failed_worker_has_its_exit_code_and_last_lines(run: Run) -> None:
    ended = run("print('on the way'); sys.exit('it is full')")
    assert (ended.code, ended.problem) == (1, "ended with code 1")
    assert set(ended.last_lines) == {"on the way", "it is full"}


def test_the_lines_of_a_killed_worker_remain(run: Run, tmp_path: Path) -> None:
    lines: list[Line] = []
    ended = run('job.write_line({"begins": 4}); os.kill(os.getpid(), 9)', on_line=lines.append)
    assert (ended.code, ended.problem) == (-9, "killed by SIGKILL")
    assert lines == [{"rank": 0, "begins": 4}]
    assert jsonl.read_lines(tmp_path / "work" / LINES) == lines


def test_a_silent_worker_is_killed_with_its_children(run: Run) -> None:
    lines: list[Line] = []
    program = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
job.write_line({"pids": [os.getpid(), child.pid]})
time.sleep(600)
"""
    ended = run(program, WorkerLimits(start=60, silence=0.5), on_line=lines.append)
    assert (ended.code, ended.problem) == (None, "wrote nothing for 0.5 s")
    worker, child = lines[0]["pids"]
    assert not is_alive(worker)
    assert wait_for(lambda: not is_alive(child), 10, poll_seconds=0.05)


def test_a_worker_that_keeps_writing_ends_at_the_total_limit(run: Run) -> None:
    program = 'while True: job.write_line({"beat": 1}); time.sleep(0.05)'
    ended = run(program, WorkerLimits(total=5, start=60, silence=3))
    assert (ended.code, ended.problem) == (None, "did not end within 5 s")


def test_the_silence_limit_applies_after_every_rank_has_written(run: Run) -> None:
    program = """
if job.rank == 1:
    time.sleep(2)
job.write_line({"begins": 1})
"""
    assert run(program, WorkerLimits(start=60, silence=1), layout=build_layout(2)).code == 0
    ended = run(program, WorkerLimits(start=0.01, silence=60), layout=build_layout(2))
    assert ended.problem == "wrote nothing for 0.01 s"


@pytest.mark.parametrize(("late", "pause", "num_lines"), [(0.0, 600, 0), (60.0, 1, 1)])
def test_other_workers_have_limited_time_after_a_failure(
    run: Run, late: float, pause: int, num_lines: int
) -> None:
    lines: list[Line] = []
    program = """
if job.rank == 1:
    sys.exit(7)
time.sleep(job.request["pause"])
job.write_line({"late": 1})
"""
    ended = run(
        program,
        WorkerLimits(after_failure=late),
        layout=build_layout(2),
        request={"pause": pause},
        on_line=lines.append,
    )
    assert (ended.code, ended.problem) == (7, "ended with code 7")
    assert len(lines) == num_lines


def test_a_worker_does_not_outlive_an_error_of_its_parent(run: Run) -> None:
    lines: list[Line] = []

    def fail(line: Line) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run('job.write_line({"pid": os.getpid()}); time.sleep(600)', on_line=fail)
    assert not is_alive(lines[0]["pid"])


def test_lines_and_logs_of_earlier_workers_are_removed(run: Run, tmp_path: Path) -> None:
    run('job.write_line({"first": 1}); print("first")')
    lines: list[Line] = []
    assert run("", on_line=lines.append).last_lines == ()
    assert lines == []
    assert not (tmp_path / "work" / LINES).exists()


def test_a_tail_reads_each_complete_line_once(tmp_path: Path) -> None:
    tail = jsonl.Tail(tmp_path / "a.jsonl")
    assert tail.read() == []
    with (tmp_path / "a.jsonl").open("w") as file:
        file.write('{"a": 1}\n{"b"')
        file.flush()
        assert tail.read() == [{"a": 1}]
        assert tail.read() == []
        file.write(': 2}\ntorn\n{"c": 3}\n')
        file.flush()
        assert tail.read() == [{"b": 2}, {"c": 3}]
    (tmp_path / "a.jsonl").write_text('{"d": 4}\n')
    assert tail.read() == [{"d": 4}], "the file was truncated"
    (tmp_path / "b.jsonl").write_text('{"e": 5}\n{"f": 6}\n')
    (tmp_path / "b.jsonl").replace(tmp_path / "a.jsonl")
    assert tail.read() == [{"e": 5}, {"f": 6}], "the file was replaced"
    assert tail.read() == []
