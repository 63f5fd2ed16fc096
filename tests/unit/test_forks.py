"""Processes that are forked from one are as those that are spawned."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regauge import accelerators
from regauge.accelerators import Availability
from regauge.accelerators.cpu import Cpu
from regauge.choices import PLACES
from regauge.supervision import forks as forking
from regauge.supervision.forks import MODULES, Forked, Forks, forks

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="not proved here: processes are forked on Linux alone"
)
PROGRAM = """
import os, sys, random, signal, time, numpy
print(*sys.argv[1:], os.environ["RANK"], os.environ.get("OWN"), __name__, flush=True)
if sys.argv[1] == "look":
    print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    print(signal.getsignal(signal.SIGINT) == signal.default_int_handler)
    print(random.random(), numpy.random.random())
elif sys.argv[1] == "places":
    from regauge import choices
    print(choices.places())
elif sys.argv[1] == "exit":
    sys.exit(3)
elif sys.argv[1] == "fail":
    raise ValueError("it is wrong")
elif sys.argv[1] == "wait":
    time.sleep(600)
"""
Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay a module where a new process finds it, and let the server import next to nothing."""
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forking, "MODULES", ("not.there", "numpy.random", "regauge.choices"))


@pytest.fixture
def forked() -> Iterator[Forks]:
    with forks() as found:
        yield found


@pytest.fixture
def start(forked: Forks, tmp_path: Path) -> Start:
    def begin(what: str, **variables: str) -> Any:
        command = [sys.executable, "-m", "a_program", what]
        return forked.start(command, tmp_path / "log", {"RANK": "3", **variables}, 600)

    return begin


def server(forked: Forks) -> int:
    assert forked._server is not None
    return forked._server._process.pid


def told(tmp_path: Path, lines: int = 1) -> list[str]:
    """Wait until a process has said something."""
    log = tmp_path / "log"
    while not log.exists() or log.read_text().count("\n") < lines:
        time.sleep(0.01)
    return log.read_text().splitlines()


def test_a_forked_process_is_as_one_that_was_spawned(start: Start, tmp_path: Path) -> None:
    one = start("look", OWN="7")
    assert isinstance(one, Forked)
    assert one.wait(60) == one.poll() == 0
    assert start("look").wait() == 0
    first, alike, whole, draws, second, *_, last = told(tmp_path)
    assert (first, second) == ("look 3 7 __main__", "look 3 None __main__")
    assert (alike, whole) == ("True True", "True")
    assert not {*draws.split()} & {*last.split()}, "processes do not draw alike"


def test_it_looks_for_ones_own_code_where_it_was_told_to(start: Start, tmp_path: Path) -> None:
    assert start("places", **{PLACES: "/here"}).wait(60) == 0
    assert told(tmp_path)[-1] == f"{{'{PLACES}': '/here'}}"


def test_it_ends_with_its_own_code(start: Start, tmp_path: Path) -> None:
    assert start("exit").wait(60) == 3
    assert start("fail").wait(60) == 1
    assert told(tmp_path)[-1] == "ValueError: it is wrong"


def test_it_can_be_told_to_end(start: Start) -> None:
    waits, killed = start("wait"), start("wait")
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.1)
    assert waits.poll() is None
    waits.terminate()
    killed.kill()
    assert (waits.wait(60), killed.wait(60)) == (-signal.SIGTERM, -signal.SIGKILL)


def test_a_signal_for_all_processes_leaves_what_they_are_forked_from(
    forked: Forks, start: Start
) -> None:
    start("exit").wait(60)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(server(forked), number)
    before = server(forked)
    assert start("exit").wait(60) == 3
    assert server(forked) == before


def test_its_processes_end_with_it_and_the_next_has_another(
    forked: Forks, start: Start, tmp_path: Path
) -> None:
    waits = start("wait")
    told(tmp_path)
    os.kill(server(forked), signal.SIGKILL)
    assert waits.wait(60) == -signal.SIGKILL
    while Path(f"/proc/{waits.pid}").exists():
        time.sleep(0.01)
    assert start("exit").wait(60) == 3


def test_another_environment_has_another_process_to_fork_from(
    forked: Forks, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("exit").wait(60)
    before = server(forked)
    monkeypatch.setenv("REGAUGE_TEST_NEW", "1")
    assert start("exit").wait(60) == 3
    assert server(forked) != before


def test_one_that_does_not_answer_is_left_and_processes_are_spawned(
    start: Start,
    forked: Forks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "regauge")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(forking, "MODULES", ("hangs",))
    command = [sys.executable, "-m", "a_program", "exit"]
    one = forked.start(command, tmp_path / "log", {"RANK": "0"}, 0.5)
    assert one.wait(60) == 3
    assert "was not ready within 0.5 s" in caplog.text
    monkeypatch.setattr(forking, "SERVER", "not.there")
    assert start("exit").wait(60) == 3
    assert "the process to fork from has ended" in caplog.text


def test_blocks_within_a_block_have_the_same() -> None:
    with forks() as outer:
        with forks() as inner:
            assert inner is outer
        with forks() as again:
            assert again is outer
    with forks() as other:
        assert other is not outer


@pytest.mark.skipif(
    not accelerators.for_cpus(), reason="not proved here: processes are forked for CPUs alone"
)
def test_only_libraries_that_know_of_forks_have_threads(
    start: Start, forked: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread would not be there after a fork, and what it holds would never be let go."""
    program = """if True:
        import numpy, pyarrow, os
        os.fork() or os._exit(0)
        print(len(os.listdir('/proc/self/task')))
    """
    alone = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    monkeypatch.setattr(forking, "MODULES", MODULES)
    assert start("exit").wait(600) == 3
    assert len(list(Path(f"/proc/{server(forked)}/task").iterdir())) == int(alone.stdout)


def test_one_that_is_stopped_holds_nobody_up(
    forked: Forks, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = start("wait")
    os.kill(server(forked), signal.SIGSTOP)
    monkeypatch.setattr(forking, "KILLED_SECONDS", 0.5)
    waits.kill()
    assert waits.wait() == -signal.SIGKILL
    assert start("exit").wait(60) == 3


def test_what_is_forked_is_known_only_where_torch_is_for_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerators, "for_cpus", lambda: False)
    assert accelerators.foreseen() is None
    monkeypatch.setattr(accelerators, "for_cpus", lambda: True)
    monkeypatch.setattr(accelerators, "survey", lambda: {"cpu": Availability(1, "")})
    assert accelerators.foreseen() == Cpu()
