"""Processes that the fork server starts behave as spawned processes do."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from regauge import accelerators
from regauge.__main__ import starts_run
from regauge.accelerators import Availability
from regauge.accelerators.cpu import Cpu
from regauge.supervision import forks
from regauge.supervision.forks import MODULES, ForkedProcess, ForkServer, open_fork_server
from regauge.system import processes, stop_signals, timing
from regauge.system.choices import MODULE_FOLDERS_VARIABLE
from regauge.system.errors import StopSignalError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="not proved here: only Linux forks processes"
)
PROGRAM = """
import os, sys, random, signal, time, numpy
print(*sys.argv[1:], os.environ["RANK"], os.environ.get("OWN"), __name__, flush=True)
if sys.argv[1] == "look":
    print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    print(signal.getsignal(signal.SIGINT) == signal.SIG_DFL)
    print(random.random(), numpy.random.random())
elif sys.argv[1] == "places":
    from regauge.system import choices
    print(choices.module_folders_environment())
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
    """Write a module that a new process can import; the server imports almost nothing."""
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forks, "MODULES", ("not.there", "numpy.random", "regauge.system.choices"))


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    with open_fork_server() as server:
        yield server


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Start:
    def begin(mode: str, **variables: str) -> Any:
        command = [sys.executable, "-m", "a_program", mode]
        return fork_server.start(command, tmp_path / "log", {"RANK": "3", **variables}, 600)

    return begin


def server_pid(fork_server: ForkServer) -> int:
    assert fork_server._server is not None
    return fork_server._server._process.pid


def read_output(tmp_path: Path, num_lines: int = 1) -> list[str]:
    """Wait until a process has written some lines; return them."""
    log = tmp_path / "log"
    while not log.exists() or log.read_text().count("\n") < num_lines:
        time.sleep(0.01)
    return log.read_text().splitlines()


def test_a_forked_process_behaves_as_a_spawned_one(start: Start, tmp_path: Path) -> None:
    process = start("look", OWN="7")
    assert isinstance(process, ForkedProcess)
    assert process.wait(60) == process.poll() == 0
    assert start("look").wait() == 0
    first, session, interrupt, draws, second, *_, last = read_output(tmp_path)
    assert (first, second) == ("look 3 7 __main__", "look 3 None __main__")
    assert (session, interrupt) == ("True True", "True")
    assert not {*draws.split()} & {*last.split()}, "processes draw different numbers"


def test_a_forked_process_imports_custom_code_from_the_given_folders(
    start: Start, tmp_path: Path
) -> None:
    assert start("places", **{MODULE_FOLDERS_VARIABLE: "/here"}).wait(60) == 0
    assert read_output(tmp_path)[-1] == f"{{'{MODULE_FOLDERS_VARIABLE}': '/here'}}"


def test_a_forked_process_has_its_exit_code(start: Start, tmp_path: Path) -> None:
    assert start("exit").wait(60) == 3
    assert start("fail").wait(60) == 1
    assert read_output(tmp_path)[-1] == "ValueError: it is wrong"


def test_a_forked_process_can_be_terminated_and_killed(start: Start) -> None:
    terminated, killed = start("wait"), start("wait")
    with pytest.raises(subprocess.TimeoutExpired):
        terminated.wait(0.1)
    assert terminated.poll() is None
    terminated.terminate()
    killed.kill()
    assert (terminated.wait(60), killed.wait(60)) == (-signal.SIGTERM, -signal.SIGKILL)


def test_a_signal_to_all_processes_does_not_end_the_server(
    fork_server: ForkServer, start: Start
) -> None:
    start("exit").wait(60)
    before = server_pid(fork_server)
    for number in stop_signals.STOP_SIGNALS:
        with suppress(StopSignalError), stop_signals.record_signals():
            os.kill(before, number)
            with stop_signals.defer_stop():
                received = timing.wait_for(stop_signals.find_signal, 60, poll_seconds=0.01)
        assert received == number, "the server passes the signal on"
    assert start("exit").wait(60) == 3
    assert server_pid(fork_server) == before


def test_processes_die_with_the_server_and_the_next_one_has_a_new_server(
    fork_server: ForkServer, start: Start, tmp_path: Path
) -> None:
    waiting = start("wait")
    read_output(tmp_path)
    os.kill(server_pid(fork_server), signal.SIGKILL)
    assert waiting.wait(60) == -signal.SIGKILL
    while Path(f"/proc/{waiting.pid}").exists():
        time.sleep(0.01)
    assert start("exit").wait(60) == 3


@pytest.mark.full
def test_a_changed_environment_starts_a_new_server(
    fork_server: ForkServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("exit").wait(60)
    before = server_pid(fork_server)
    monkeypatch.setenv("REGAUGE_TEST_NEW", "1")
    assert start("exit").wait(60) == 3
    assert server_pid(fork_server) != before


def test_processes_are_spawned_if_the_server_does_not_respond(
    start: Start,
    fork_server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "regauge")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(forks, "MODULES", ("hangs",))
    command = [sys.executable, "-m", "a_program", "exit"]
    process = fork_server.start(command, tmp_path / "log", {"RANK": "0"}, 0.5)
    assert process.wait(60) == 3
    assert "the fork server was not ready within 0.5 s" in caplog.text
    monkeypatch.setattr(forks, "SERVER", "not.there")
    assert start("exit").wait(60) == 3
    assert "the fork server has ended" in caplog.text


def test_nested_blocks_share_one_server() -> None:
    with open_fork_server() as outer:
        with open_fork_server() as inner:
            assert inner is outer
        with open_fork_server() as second_inner:
            assert second_inner is outer
    with open_fork_server() as other:
        assert other is not outer


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "run.toml", "stop.steps=1"], True),
        (["train", "run.toml", "--dry-run"], False),
        (["train", "--help"], False),
        (["prepare", "run.toml"], False),
        (["explain", "train"], False),
        ([], False),
    ],
)
def test_the_command_line_of_a_run_is_recognized(arguments: list[str], expected: bool) -> None:  # noqa: FBT001
    assert starts_run(arguments) == expected


def test_a_rank_of_a_launcher_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processes.LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "0")
    assert not starts_run(["train", "run.toml"])


@pytest.mark.full
@pytest.mark.skipif(
    not accelerators.is_cpu_only_torch(), reason="not proved here: only CPU runs fork processes"
)
def test_only_libraries_with_fork_handlers_have_threads(
    start: Start, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread would not exist after a fork, and its locks would never be released."""
    program = """if True:
        import numpy, pyarrow, os
        os.fork() or os._exit(0)
        print(len(os.listdir('/proc/self/task')))
    """
    alone = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    monkeypatch.setattr(forks, "MODULES", MODULES)
    assert start("exit").wait(600) == 3
    assert len(list(Path(f"/proc/{server_pid(fork_server)}/task").iterdir())) == int(alone.stdout)


@pytest.mark.full
def test_a_stopped_server_blocks_no_process(
    fork_server: ForkServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = start("wait")
    os.kill(server_pid(fork_server), signal.SIGSTOP)
    monkeypatch.setattr(forks, "KILL_SECONDS", 0.5)
    waiting.kill()
    assert waiting.wait() == -signal.SIGKILL
    assert start("exit").wait(60) == 3


def test_the_accelerator_is_known_without_torch_only_for_cpu_builds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerators, "is_cpu_only_torch", lambda: False)
    assert accelerators.choose_without_torch() is None
    monkeypatch.setattr(accelerators, "is_cpu_only_torch", lambda: True)
    monkeypatch.setattr(accelerators, "survey", lambda: {"cpu": Availability(1, "")})
    assert accelerators.choose_without_torch() == Cpu()
