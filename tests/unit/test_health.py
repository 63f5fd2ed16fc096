"""Who is at fault, told from pairs; storage; the vendor's tools."""

from __future__ import annotations

import itertools
import os
import stat
import weakref
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge import accelerators, timing
from regauge.accelerators.cpu import Cpu
from regauge.errors import PreflightError
from regauge.health import device, machine, vendors
from regauge.health.examination import blamed
from regauge.health.findings import Finding, require
from regauge.health.machine import check_machine
from regauge.health.probe import partners
from regauge.health.vendors import check_vendors
from regauge.hooks import inject_nothing

MADE: dict[str, Any] = {}
"""What the lazy device was given, and whether it was still there."""


@pytest.mark.parametrize("size", range(2, 12))
def test_all_pairs_meet_once_and_in_the_same_round(size: int) -> None:
    plan = [partners(rank, size) for rank in range(size)]
    assert len({len(rounds) for rounds in plan}) == 1
    met = []
    for rank, rounds in enumerate(plan):
        for number, partner in enumerate(rounds):
            if partner is not None:
                assert plan[partner][number] == rank
                met.append(tuple(sorted((rank, partner))))
    assert sorted(met) == sorted(2 * list(combinations(range(size), 2)))


def pairs(size: int, *bad: int, problem: str = "wrong") -> dict[tuple[int, int], str]:
    every = combinations(range(size), 2)
    return {pair: problem if set(pair) & set(bad) else "" for pair in every}


@pytest.mark.parametrize("size", [3, 4, 7])
def test_one_that_fails_with_every_other_is_named(size: int) -> None:
    for rank in range(size):
        assert blamed(pairs(size, rank), []).where == f"process {rank}"


def test_two_bad_ones_cannot_be_told_from_the_rest() -> None:
    found = blamed(pairs(4, 0, 2), [])
    assert found.where == "processes 0, 1, 2, 3"
    assert not found.ok


def test_of_two_the_one_that_the_check_names_is_named() -> None:
    problem = "what process 1 sent is not what came"
    assert blamed(pairs(2, 1, problem=problem), []).where == "process 1"
    assert blamed(pairs(2, 1, problem="timed out"), []).where == "processes 0, 1"


def test_one_that_came_to_no_end_is_named() -> None:
    assert blamed({(0, 1): "timed out"}, [0]).where == "process 0"


def test_where_all_pairs_are_well_nobody_is_named() -> None:
    found = blamed(pairs(3), [])
    assert not found.ok
    assert "well alone" in found.problem


def test_who_is_in_all_pairs_is_what_is_raised() -> None:
    first = Finding.bad("all-gather", "process 0", "wrong")
    named = Finding.bad("pairs", "process 2", "fails")
    with pytest.raises(PreflightError, match="process 2: pairs: fails"):
        require([Finding("memory", "process 1"), first, named])
    require([Finding("memory", "process 1")])


def test_storage_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    found = list(check_machine(tmp_path / "not" / "yet"))
    assert all(finding.ok for finding in found)
    assert found[0].where == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_cannot_be_written_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refused)
    storage = next(check_machine(tmp_path))
    assert not storage.ok
    assert storage.problem == "cannot be written: Read-only file system"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_FREE_BYTES", 1 << 62)
    bad = [finding.check for finding in check_machine(tmp_path) if not finding.ok]
    assert bad == ["free space"]


class Lazy(Cpu):
    """A device that computes, at the end of a step, what is still held."""

    kind = "lazy"

    @property
    def lazy(self) -> bool:
        return True

    def end_step(self) -> None:
        MADE["computed"] = MADE["held"]() is not None


def test_what_a_lazy_device_is_timed_for_is_held_until_it_is_computed() -> None:
    def work() -> torch.Tensor:
        value = torch.ones(2)
        MADE["held"] = weakref.ref(value)
        return value

    assert device._timed(Lazy(), work) > 0
    assert MADE["computed"]


def test_a_run_does_not_wait_for_the_bandwidth_of_its_memory() -> None:
    """It is told to people: nothing is decided by it."""
    cpu, here = Cpu(), torch.device("cpu")
    before = list(device.check_device(cpu, here, (), "here", inject_nothing))
    assert [each for each in before if isinstance(each, str)] == ["memory"]
    name, found = device.bandwidth(cpu, here, "here")
    assert isinstance(found, Finding)
    assert (name, found.check, found.ok) == ("bandwidth", "bandwidth", True)
    assert float(found.value.partition(" GB/s")[0]) > 0


class Slow(Cpu):
    """Computes a tenth of its peak."""

    kind = "slow"
    measured: bool = True

    def chip(self, precision: accelerators.Precision) -> accelerators.Chip:
        peak = 10.0 * 2 * device.FIRST_SIZE**3
        return accelerators.Chip("slow", {precision: peak}, measured=self.measured)


@pytest.mark.parametrize("measured", [True, False])
def test_a_tenth_of_a_data_sheet_s_peak_is_slow_and_of_a_peak_timed_here_is_not(
    monkeypatch: pytest.MonkeyPatch, *, measured: bool
) -> None:
    monkeypatch.setattr(device, "_timed", lambda *_: 1.0)
    chip, here = Slow(measured=measured), torch.device("cpu")
    found = device.check_device(chip, here, ("fp32",), "here", inject_nothing)
    (speed,) = [each for each in found if isinstance(each, Finding) and "speed" in each.check]
    assert speed.ok == measured
    assert ("slow" in speed.problem) != measured


def test_a_device_that_was_busy_is_timed_again_before_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenth of the peak in the first measurement, then nine tenths."""
    first = 1 + timing.TRIES + device.LEAST_TRIES
    seconds = itertools.chain([1.0] * first, itertools.repeat(1 / 9))
    monkeypatch.setattr(device, "_timed", lambda *_: next(seconds))
    monkeypatch.setattr(device, "SPEED_SECONDS", 0.0)
    monkeypatch.setattr(timing, "REPEAT_PAUSE_SECONDS", 0.0)
    chip, faults = Slow(measured=False), inject_nothing
    *_, speed = device.check_device(chip, torch.device("cpu"), ("fp32",), "here", faults)
    assert isinstance(speed, Finding)
    assert speed.ok
    assert speed.value == "2 GFLOP/s, 90% of the chip's (best of 2 measurements)"


class Chip(Cpu):
    """A device whose vendor has tools."""

    kind = "chip"

    def tools(self, size: int) -> tuple[tuple[str, ...], ...]:
        return (("chip-test", str(size)), ("chip-absent",))

    def occupants(self) -> tuple[str, ...]:
        return ("chip-users",)


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("test", "users", "said"),
    [
        ("echo devices: $1; echo all well", "", ["all well", "no other on the devices"]),
        ("echo link down; exit 3", "", ["ended with code 3: link down", "no other on the devices"]),
        ("echo all well", "echo 12, python, 3 MiB", ["all well", "in use: 12, python, 3 MiB"]),
        ("sleep 60", "exit 4", ["no answer in 1 s", "unknown: code 4"]),
    ],
)
def test_the_vendor_s_verdict_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, users: str, said: list[str]
) -> None:
    tool(tmp_path, "chip-test", test)
    tool(tmp_path, "chip-users", users)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(vendors, "LIMIT_SECONDS", 1)
    found = list(check_vendors(Chip(), 2))
    assert len(found) == 2
    for finding, text in zip(found, said, strict=True):
        assert text in finding.value + finding.problem
    assert [finding.ok for finding in found] == ["well" in said[0], "in use" not in said[1]]
