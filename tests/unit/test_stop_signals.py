"""Stop signals are recorded, raised at chosen points, and end a command at its limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from regauge.system import children, stop_signals
from regauge.system.errors import StopSignalError
from regauge.system.timing import wait_for

BEGIN = """
import atexit, os, signal, subprocess, sys, time
from regauge.system import stop_signals
stop_signals.LIMIT_SECONDS, stop_signals.REPEAT_SECONDS = 0.5, 0.5
stop_signals.start_command()
def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
def compute(seconds):
    "A computation that no point interrupts."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
"""


def run_command(program: str, *, begin: str = BEGIN) -> tuple[int, str]:
    """Run a program as a command; return its exit code and its output."""
    result = subprocess.run(
        [sys.executable, "-c", begin + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
        text=True,
    )
    return result.returncode, result.stdout


@pytest.mark.parametrize("number", stop_signals.STOP_SIGNALS)
def test_a_signal_is_raised_once_and_only_at_a_point(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signals.record_signals():
        os.kill(os.getpid(), number)
        assert stop_signals.find_signal() == number
        with stop_signals.defer_stop():
            stop_signals.check_stop()
        with pytest.raises(StopSignalError, match="stopped by a signal") as stop:
            wait_for(lambda: None, 60, poll_seconds=0.01)
        assert stop.value.exit_code == 128 + number
        stop_signals.check_stop()
    assert signal.getsignal(number) == before
    assert stop_signals.find_signal() is None


def test_a_signal_that_no_point_raised_is_raised_at_the_end_of_the_block() -> None:
    steps = []

    @stop_signals.record_signals()
    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append("after the signal")

    with pytest.raises(StopSignalError):
        work()
    assert steps
    assert stop_signals.find_signal() is None


def test_only_the_main_thread_raises() -> None:
    errors: list[BaseException] = []

    def check() -> None:
        try:
            stop_signals.check_stop()
        except BaseException as error:  # noqa: BLE001 - it is asserted below
            errors.append(error)

    with suppress(StopSignalError), stop_signals.record_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        assert not errors
        with pytest.raises(StopSignalError):
            stop_signals.check_stop()


def test_a_signal_during_a_destructor_is_not_lost() -> None:
    class Slow:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with stop_signals.record_signals():
        Slow()
        with pytest.raises(StopSignalError) as stop:
            stop_signals.check_stop()
    assert stop.value.number == signal.SIGINT


@pytest.mark.parametrize("number", stop_signals.STOP_SIGNALS)
def test_the_limit_ends_a_command_that_reaches_no_point(number: int) -> None:
    code, text = run_command(f"""
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
with stop_signals.call_at_limit(lambda: os.write(1, b"removed")):
    send({number}, {number}, {number})
    compute(30)
print("not stopped")
""")
    pid, rest = text.split("\n")
    assert (code, rest) == (128 + number, "removed")
    assert wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists(), 10, poll_seconds=0.01) or (
        not Path(f"/proc/{pid}/cmdline").read_bytes()
    ), "a child process is left"


def test_a_block_without_a_limit_ends_by_itself_unless_the_signal_is_repeated() -> None:
    program = """
with stop_signals.defer_stop(has_limit=False):
    send(signal.SIGTERM, signal.SIGINT)
    compute(1.5)
    print("saved", flush=True)
    if sys.argv[1:] or {is_repeated}:
        send(signal.SIGINT)
        compute(30)
        print("not stopped", flush=True)
stop_signals.check_stop()
"""
    code, text = run_command(program.format(is_repeated=False))
    assert (code, text.splitlines()[0]) == (1, "saved")
    assert text.splitlines()[-1].startswith("regauge.system.errors.StopSignalError")
    assert run_command(program.format(is_repeated=True)) == (143, "saved\n")


def test_the_exit_code_survives_signals_during_the_exit() -> None:
    program = """
import numpy
send_often = (
    "import os, sys, time\\n"
    "for _ in range(3000):\\n"
    "    [os.kill(int(sys.argv[1]), number) for number in (1, 2, 3, 15)]\\n"
    "    time.sleep(0.0002)"
)
subprocess.Popen(
    [sys.executable, "-c", send_often, str(os.getpid())],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
while stop_signals.find_signal() is None:
    pass
sys.exit(7)
"""
    assert run_command(program) == (7, "")


def test_an_ignored_signal_stays_ignored() -> None:
    ignore = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    program = "send(signal.SIGHUP)\ncompute(1.0)\nprint(stop_signals.find_signal())"
    assert run_command(program, begin=ignore + BEGIN) == (0, "None\n")


def test_a_forked_process_has_no_part_in_the_signals_of_its_parent() -> None:
    program = """
pid = os.fork()
if pid == 0:
    send(signal.SIGTERM)
    os._exit(1)
status = os.waitpid(pid, 0)[1]
compute(0.2)
print(os.waitstatus_to_exitcode(status), stop_signals.find_signal())
"""
    assert run_command(program) == (0, f"{-signal.SIGTERM} None\n")


@pytest.mark.parametrize("delay_seconds", [0.0, 0.02, 0.5])
def test_a_helper_passes_signals_on_from_its_first_moment(delay_seconds: float) -> None:
    helper = "from regauge.system import stop_signals; stop_signals.pass_to_parent(); input()"
    with suppress(StopSignalError), stop_signals.record_signals():
        with stop_signals.block_signals():
            process = subprocess.Popen([sys.executable, "-c", helper], stdin=subprocess.PIPE)
        time.sleep(delay_seconds)
        process.send_signal(signal.SIGQUIT)
        with stop_signals.defer_stop():
            assert wait_for(stop_signals.find_signal, 60, poll_seconds=0.01) == signal.SIGQUIT
        assert process.poll() is None
        process.communicate(b"\n")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("code", "is_stop"),
    [(None, False), (0, False), (64, False), (-9, False), (-15, True), (143, True), (129, True)],
)
def test_exits_of_stopped_processes(code: int | None, *, is_stop: bool) -> None:
    assert stop_signals.is_stop_exit(code) == is_stop


def test_a_stop_ends_processes_that_a_command_waits_for(tmp_path: Path) -> None:
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    log = tmp_path / "1.log"

    def stop_running() -> None:
        while not (log.exists() and log.read_text().endswith("\n")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_running, daemon=True).start()
    with pytest.raises(StopSignalError):
        children.run_processes([sys.executable, "-c", script], 2, tmp_path)
    pid = log.read_text().strip()
    assert not Path(f"/proc/{pid}").exists()
