"""Devices and networks that must not start a run: rows 33 and 34 of the fault matrix."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.test_resume import assert_same
from faults.conftest import FULL, Jobs
from regauge.config import merge

CHECKED: dict[str, Any] = {"execution": {"supervision": {"preflight": "full"}}}
BROKEN = {
    "wrong product": (3, "device", {"kind": "corrupt"}, "the tolerance is"),
    "nan": (3, "device", {"kind": "nan"}, "not finite"),
    "hang": (3, "device", {"kind": "stop"}, "did not finish"),
    "slow device": (2, "speed", {"kind": "sleep", "seconds": 0.7}, "slow"),
    "corrupt message": (3, "collective", {"kind": "corrupt"}, "arrived changed"),
    "one of two": (2, "collective", {"kind": "corrupt"}, "arrived changed"),
    "dropped": (3, "collective", {"kind": "skip-collective"}, "every other process"),
    "delayed message": (
        3,
        "collective",
        {"kind": "sleep", "seconds": 0.5},
        "every other process",
    ),
    "silent network": (3, "collective", {"kind": "stop"}, "it hangs"),
}


def run_doctor(
    tmp_path: Path, size: int, *faults: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "regauge", "doctor", "--quick", "--json"]
    command += ["--processes", str(size)]
    if faults:
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps({"fault": faults}))
        command += ["--chaos", str(plan)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)


@FULL
@pytest.mark.parametrize("name", BROKEN)
def test_the_doctor_names_the_bad_process(
    tmp_path: Path, name: str, figure: Callable[[str, float], None]
) -> None:
    size, point, fault, problem = BROKEN[name]
    began = time.monotonic()
    fault = {**fault, "at": f"preflight:{point}", "rank": 1, "step": 0}
    result = run_doctor(tmp_path, size, fault)
    figure("seconds of a doctor that finds a fault", time.monotonic() - began)
    assert result.returncode == 76, result.stderr
    line = result.stderr.splitlines()[-1]
    assert "process 1" in line.partition(": ")[2].partition(":")[0]
    assert problem in line
    rows = json.loads(result.stdout)["checks"]
    bad = [row for row in rows if not row["ok"]]
    assert bad
    if point != "collective":
        assert {row["location"].partition(" on")[0] for row in bad} == {"process 1"}
    assert not list(tmp_path.glob(".regauge*"))


@FULL
def test_a_healthy_machine_passes(tmp_path: Path, figure: Callable[[str, float], None]) -> None:
    began = time.monotonic()
    result = run_doctor(tmp_path, 2)
    figure("seconds of a doctor that finds nothing", time.monotonic() - began)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert all(row["ok"] for row in answer["checks"])
    checks = {row["check"] for row in answer["checks"]}
    assert {"storage", "memory", "all-reduce", "all-to-all", "clocks", "versions"} <= checks
    assert {row["op"] for row in answer["bandwidth"]} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
    assert all(row["busbw_gbs"] > 0 and row["wrong"] == 0 for row in answer["bandwidth"])


@FULL
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "nan", "at": "preflight:device"},
        {"kind": "corrupt", "at": "preflight:collective"},
        {"kind": "stop", "at": "preflight:device"},
    ],
)
def test_a_run_does_not_start_on_a_bad_device(jobs: Jobs, fault: dict[str, Any]) -> None:
    limits = merge(CHECKED, {"execution": {"timeout_seconds": 20}})
    job = jobs.create({**fault, "rank": 1, "step": 0, "attempt": 0}, **limits).finish(76)
    assert "process 1" in job.stderr.splitlines()[-1]
    assert job.triggered_faults
    assert not (job.folder / "checkpoints").exists()
    jobs.assert_nothing_is_left(job)


@FULL
def test_devices_are_checked_again_after_a_hang_and_not_after_a_kill(jobs: Jobs) -> None:
    check_fault = {"kind": "sleep", "seconds": 0.0, "at": "preflight:device", "rank": 0, "step": 0}
    faults = (
        {"kind": "kill", "rank": 1, "step": 8, "attempt": 1},
        {"kind": "stop", "rank": 1, "step": 10, "attempt": 2},
        {**check_fault, "attempt": 0},
    )
    job = jobs.assert_survives(jobs.create(*faults, **CHECKED))
    attempts = [
        line["attempt"] for line in job.triggered_faults if line["at"] == "preflight:device"
    ]
    assert set(attempts) == {1, 3}


THREE = """
import os
from pathlib import Path

from regauge.accelerators import Availability
from regauge.accelerators.cpu import Cpu


class Three(Cpu):
    \"\"\"The processor as three devices, of which one may refuse.\"\"\"

    refuses: int | None = None
    \"\"\"The device that nobody can take.\"\"\"

    @classmethod
    def available(cls):
        return Availability(1, "it is a toy")

    def num_devices(self):
        return 3

    def claim(self, index, threads):
        if index == self.refuses:
            raise RuntimeError("it is broken")
        if "REGAUGE_SUPERVISED" in os.environ:
            with Path(os.environ["CLAIMS"]).open("a") as file:
                file.write(f"{os.environ['WORLD_SIZE']}:{index} ")
        return super().claim(index, threads)
"""


@FULL
@pytest.mark.parametrize("defect", ["it refuses", "it computes wrong"])
def test_a_run_on_all_devices_excludes_a_bad_one(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    package = tmp_path / "three-1.0.dist-info"
    package.mkdir()
    (tmp_path / "three.py").write_text(THREE)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: three\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[regauge.accelerators]\nthree = three:Three\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    claims = tmp_path / "claims"
    monkeypatch.setenv("CLAIMS", str(claims))
    fault = {"kind": "corrupt", "at": "preflight:device", "rank": 1, "step": 0}
    job = jobs.create(*([fault] if defect == "it computes wrong" else []), **CHECKED)
    run = json.loads(job.folder.with_suffix(".json").read_text())
    run["execution"]["processes"] = "auto"
    refuses = {"refuses": 1} if defect == "it refuses" else {}
    run["accelerator"] = {"kind": "three", **refuses}
    job.folder.with_suffix(".json").write_text(json.dumps(run))
    job.finish()
    assert "device 1 is excluded; the run uses 2 processes" in job.stderr_line
    assert job.attempts[-1]["processes"] == 2
    entries = claims.read_text().split()
    assert {entry for entry in entries if entry.startswith("2:")} == {"2:0", "2:2"}
    assert_same(jobs.undisturbed_folder(job), job.folder)
