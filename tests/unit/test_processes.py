"""The rank of a process under each launcher, and the start of local processes."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from regauge.system import children, processes
from regauge.system.errors import SettingsError

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*processes.LAUNCHER_VARIABLES, "LOCAL_WORLD_SIZE", *SLURM):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_idle_threads_sleep_soon_unless_the_user_decides(
    given: dict[str, str], spin_count: str | None
) -> None:
    code = (
        "import os, sys; from regauge import __main__ as main; sys.argv = ['regauge', '--version'];"
        " main.run_process(); print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    others = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=others | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == str(spin_count)


def test_without_a_launcher_the_world_has_one_process() -> None:
    assert not processes.is_launched()
    assert processes.detect_world() == processes.World(0, 1, 0, 1)


def test_torchrun_variables_define_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**values, "MASTER_ADDR": "a", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert processes.detect_world() == processes.World(3, 4, 1, 2)


@pytest.mark.parametrize(("requested", "is_reported"), [(2, True), (1, False), ("auto", False)])
def test_a_launcher_with_another_number_of_processes_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    requested: int | Literal["auto"],
    is_reported: bool,  # noqa: FBT001
) -> None:
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    assert processes.detect_world(requested) == processes.World(0, 1, 0, 1)
    assert ("not execution.processes = 2" in caplog.text) == is_reported


def test_incomplete_launcher_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        processes.detect_world()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-08]", "gpu07"), ("gpu[07,09]", "gpu07"), ("n1,n2", "n1"), ("login", "login")],
)
def test_srun_variables_define_the_world(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    for name, value in {**SLURM, "SLURM_STEP_NODELIST": nodes}.items():
        monkeypatch.setenv(name, value)
    translated = processes.build_torchrun_variables({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert translated["MASTER_ADDR"] == first
    assert processes.FIRST_PORT <= int(translated["MASTER_PORT"]) < 40000
    for name, value in translated.items():
        monkeypatch.setenv(name, value)
    assert processes.detect_world() == processes.World(5, 8, 1, 4)


def test_every_process_gets_its_rank(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; rank = os.environ['RANK'];"
        "pathlib.Path(sys.argv[1], rank).write_text(os.environ['WORLD_SIZE']); print('hello')"
    )
    assert (
        children.run_processes([sys.executable, "-c", script, str(tmp_path)], 3, tmp_path / "logs")
        == 0
    )
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3", "3", "3"]
    assert (tmp_path / "logs" / "2.log").read_text() == "hello\n"


def test_a_failed_process_ends_the_others(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(64)\ntime.sleep(100)\n"
    )
    assert children.run_processes([sys.executable, "-c", script], 2, tmp_path) == 64


def test_the_environment_is_restored_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGAUGE_TEST_KEPT", "before")
    monkeypatch.setenv("REGAUGE_TEST_TAKEN", "before")
    with suppress(KeyError), processes.restore_environment():
        os.environ["REGAUGE_TEST_NEW"] = os.environ["REGAUGE_TEST_KEPT"] = "within"
        del os.environ["REGAUGE_TEST_TAKEN"]
        raise KeyError
    values = {name: os.environ.get(f"REGAUGE_TEST_{name}") for name in ("NEW", "KEPT", "TAKEN")}
    assert values == {"NEW": None, "KEPT": "before", "TAKEN": "before"}


@pytest.mark.parametrize(("text", "threads"), [("1", 1), ("99", 4), ("", 4), ("0", 4), ("2,3", 4)])
def test_a_single_process_has_the_threads_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, threads: int
) -> None:
    monkeypatch.setattr(processes, "available_cores", lambda: 4)
    monkeypatch.setattr(processes, "INHERITED_ENVIRONMENT", {"OMP_NUM_THREADS": text})
    assert processes.available_threads() == threads
