"""Health checks: the process that pairs blame, storage, device speed, and vendor tools."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import weakref
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge import accelerators
from regauge.accelerators.cpu import Cpu
from regauge.supervision.health import device, machine, vendors
from regauge.supervision.health.examination import blame_from_pairs
from regauge.supervision.health.findings import Finding, raise_if_bad
from regauge.supervision.health.machine import check_machine
from regauge.supervision.health.preflight import run_preflight
from regauge.supervision.health.probe import schedule_partners
from regauge.supervision.health.vendors import check_vendors
from regauge.system import timing
from regauge.system.errors import PreflightError
from regauge.system.hooks import inject_nothing
from regauge.system.processes import World

LAZY_WORK: dict[str, Any] = {}
"""The result that the lazy device holds, and whether it was still held when computed."""


@pytest.mark.parametrize("size", range(2, 12))
def test_all_pairs_meet_once_and_in_the_same_round(size: int) -> None:
    plan = [schedule_partners(rank, size) for rank in range(size)]
    assert len({len(rounds) for rounds in plan}) == 1
    meetings = []
    for rank, rounds in enumerate(plan):
        for number, partner in enumerate(rounds):
            if partner is not None:
                assert plan[partner][number] == rank
                meetings.append(tuple(sorted((rank, partner))))
    assert sorted(meetings) == sorted(2 * list(combinations(range(size), 2)))


def pairs(size: int, *bad: int, problem: str = "wrong") -> dict[tuple[int, int], str]:
    ranks = combinations(range(size), 2)
    return {pair: problem if set(pair) & set(bad) else "" for pair in ranks}


@pytest.mark.parametrize("size", [3, 4, 7])
def test_a_process_that_fails_with_every_other_is_blamed(size: int) -> None:
    for rank in range(size):
        assert blame_from_pairs(pairs(size, rank), []).location == f"process {rank}"


def test_two_bad_processes_cannot_be_separated_from_the_others() -> None:
    finding = blame_from_pairs(pairs(4, 0, 2), [])
    assert finding.location == "processes 0, 1, 2, 3"
    assert not finding.ok
    assert finding.problem == "wrong; the bad process is unknown"


def test_of_two_processes_the_one_in_the_problem_is_blamed() -> None:
    problem = "data of process 1 arrived changed"
    assert blame_from_pairs(pairs(2, 1, problem=problem), []).location == "process 1"
    assert blame_from_pairs(pairs(2, 1, problem="timed out"), []).location == "processes 0, 1"


def test_a_process_that_did_not_finish_is_blamed() -> None:
    assert blame_from_pairs({(0, 1): "timed out"}, [0]).location == "process 0"


def test_no_process_is_blamed_if_all_pairs_are_good() -> None:
    finding = blame_from_pairs(pairs(3), [])
    assert not finding.ok
    assert finding.problem == "each pair is good separately"


def test_the_blamed_process_is_raised_before_the_first_problem() -> None:
    first = Finding.bad("all-gather", "process 0", "wrong")
    blamed = Finding.bad("pairs", "process 2", "fails")
    with pytest.raises(PreflightError, match="process 2: pairs: fails"):
        raise_if_bad([Finding("memory", "process 1"), first, blamed])
    raise_if_bad([Finding("memory", "process 1")])


def test_storage_is_written_and_no_file_remains(tmp_path: Path) -> None:
    findings = list(check_machine(tmp_path / "not" / "yet"))
    assert all(finding.ok for finding in findings)
    assert findings[0].location == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_cannot_be_written_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    storage = next(check_machine(tmp_path))
    assert not storage.ok
    assert storage.problem == "cannot be written: Read-only file system"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MIN_FREE_DISK_BYTES", 1 << 62)
    bad = [finding.check for finding in check_machine(tmp_path) if not finding.ok]
    assert bad == ["free space"]


class Lazy(Cpu):
    """A device that computes the results that are still held at the end of a step."""

    kind = "lazy"

    @property
    def is_lazy(self) -> bool:
        return True

    def end_step(self) -> None:
        LAZY_WORK["computed"] = LAZY_WORK["held"]() is not None


def test_the_timed_result_of_a_lazy_device_is_held_until_it_is_computed() -> None:
    def work() -> torch.Tensor:
        value = torch.ones(2)
        LAZY_WORK["held"] = weakref.ref(value)
        return value

    assert device._time_once(Lazy(), work) > 0
    assert LAZY_WORK["computed"]


def test_a_preflight_does_not_measure_the_memory_bandwidth() -> None:
    """Only `regauge doctor` reports it: no decision depends on it."""
    cpu, here = Cpu(), torch.device("cpu")
    checks = list(device.check_device(cpu, here, (), "here", inject_nothing))
    assert [check for check in checks if isinstance(check, str)] == ["memory"]
    name, finding = device.check_bandwidth(cpu, here, "here")
    assert isinstance(finding, Finding)
    assert (name, finding.check, finding.ok) == ("bandwidth", "bandwidth", True)
    assert float(finding.value.partition(" GB/s")[0]) > 0


class Slow(Cpu):
    """A device that computes at a tenth of its peak."""

    kind = "slow"
    measured: bool = True

    def chip_peak(self, precision: accelerators.Precision) -> accelerators.ChipPeak:
        peak = 10.0 * 2 * device.MIN_SIZE**3
        return accelerators.ChipPeak("slow", {precision: peak}, is_measured=self.measured)


@pytest.mark.parametrize("measured", [True, False])
def test_a_tenth_of_the_data_sheet_s_peak_is_slow_but_not_of_a_measured_peak(
    monkeypatch: pytest.MonkeyPatch, *, measured: bool
) -> None:
    monkeypatch.setattr(device, "_time_once", lambda *_: 1.0)
    chip, here = Slow(measured=measured), torch.device("cpu")
    checks = device.check_device(chip, here, ("fp32",), "here", inject_nothing)
    findings = [check for check in checks if isinstance(check, Finding)]
    (speed,) = [finding for finding in findings if "speed" in finding.check]
    assert speed.ok == measured
    assert ("slow" in speed.problem) != measured


def test_a_busy_device_is_timed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenth of the peak in the first measurement, then nine tenths."""
    first = 1 + timing.MIN_TRIES + device.MIN_TRIES
    seconds = itertools.chain([1.0] * first, itertools.repeat(1 / 9))
    monkeypatch.setattr(device, "_time_once", lambda *_: next(seconds))
    monkeypatch.setattr(device, "SPEED_SECONDS", 0.0)
    monkeypatch.setattr(timing, "REPEAT_PAUSE_SECONDS", 0.0)
    chip, faults = Slow(measured=False), inject_nothing
    *_, speed = device.check_device(chip, torch.device("cpu"), ("fp32",), "here", faults)
    assert isinstance(speed, Finding)
    assert speed.ok
    assert speed.value == "2 GFLOP/s, 90% of the chip's (best of 2 measurements)"


def test_a_measured_peak_is_at_least_the_speed_of_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other work can slow the measurement of the peak, and end before the check."""
    monkeypatch.setattr(device, "_time_once", lambda *_: 1 / 30)
    monkeypatch.setattr(device, "SPEED_SECONDS", 0.0)
    chip, faults = Slow(measured=True), inject_nothing
    *_, speed = device.check_device(chip, torch.device("cpu"), ("fp32",), "here", faults)
    assert isinstance(speed, Finding)
    assert speed.ok
    assert speed.value.endswith(" GFLOP/s, 100% of the chip's")


@pytest.mark.parametrize(("measured", "size"), [(True, 1), (True, 2), (False, 1)])
def test_a_busy_machine_does_not_refuse_a_single_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, measured: bool, size: int
) -> None:
    monkeypatch.setattr(device, "_time_once", lambda *_: 1000.0)
    monkeypatch.setattr(timing, "REPEAT_PAUSE_SECONDS", 0.0)
    chip, here, world = Slow(measured=measured), torch.device("cpu"), World(0, size)
    with contextlib.ExitStack() as stack:
        if size > 1 or not measured:
            stack.enter_context(pytest.raises(PreflightError, match="slow: 0 GFLOP/s"))
        run_preflight(chip, here, "fp32", world, inject_nothing)
    assert ("other programs may use the machine" in caplog.text) == (measured and size == 1)


class Chip(Cpu):
    """A device whose vendor has tools."""

    kind = "chip"

    def diagnostic_commands(self, size: int) -> tuple[tuple[str, ...], ...]:
        return (("chip-test", str(size)), ("chip-absent",))

    def process_list_command(self) -> tuple[str, ...]:
        return ("chip-users",)


def write_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("test", "users", "texts"),
    [
        ("echo devices: $1; echo all well", "", ["all well", "no other on the devices"]),
        (
            "echo link down; exit 3",
            "",
            ["exited with code 3: link down", "no other on the devices"],
        ),
        ("echo all well", "echo 12, python, 3 MiB", ["all well", "in use: 12, python, 3 MiB"]),
        ("sleep 60", "exit 4", ["no answer in 1 s", "unknown: code 4"]),
    ],
)
def test_the_vendor_s_verdict_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, users: str, texts: list[str]
) -> None:
    write_tool(tmp_path, "chip-test", test)
    write_tool(tmp_path, "chip-users", users)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(vendors, "TIMEOUT_SECONDS", 1)
    findings = list(check_vendors(Chip(), 2))
    assert len(findings) == 2
    for finding, text in zip(findings, texts, strict=True):
        assert text in finding.value + finding.problem
    is_ok = ["well" in texts[0], "in use" not in texts[1]]
    assert [finding.ok for finding in findings] == is_ok
