"""The verdicts of `make ab`, and the order of its rounds; nothing here is timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EQUAL, SLOW = (1.0, 1.0), (1.0, 1.2)
SLIGHTLY_SLOW = (1.0, 1.1)


@pytest.fixture(name="verdicts")
def load_verdicts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("ab_verdicts")


@pytest.fixture(name="guard")
def load_guard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("ab")


@pytest.fixture(name="build")
def comparison_builder(verdicts: ModuleType) -> Callable[..., Any]:
    def build(*rounds: tuple[float, float], problem: str = "", min_rounds: int = 6) -> Any:
        return verdicts.Comparison("train", "step", min_rounds, list(rounds), problem)

    return build


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ([EQUAL] * 6, "ok"),
        ([SLOW] * 6, "slower"),
        ([(1.2, 1.0)] * 6, "ok"),
        ([SLIGHTLY_SLOW] * 6, "ok"),  # within the limit
        ([SLOW] * 5 + [(1.0, 0.9)], "ok"),  # the range includes equal times
        ([SLOW] * 14 + [(1.0, 0.9)] * 2, "slower"),  # two outliers of 16
        ([(1.0, 1.0)] * 8 + [(1.0, 1.4)] * 8, "ok"),  # one start of two
        ([], "not measured"),
    ],
)
def test_a_verdict_needs_the_limit_and_the_range(
    build: Callable[..., Any], rounds: list[tuple[float, float]], verdict: str
) -> None:
    assert build(*rounds).verdict == verdict


def test_a_workload_that_fails_later_is_not_measured(build: Callable[..., Any]) -> None:
    assert build(*[EQUAL] * 6, problem="new: ended").verdict == "not measured"


@pytest.mark.parametrize(
    ("count", "outliers"), [(1, 0), (2, 0), (6, 0), (11, 1), (12, 1), (16, 2), (24, 5)]
)
def test_the_range_leaves_out_outliers(verdicts: ModuleType, count: int, outliers: int) -> None:
    ratios = [float(number) for number in range(count)]
    assert verdicts.find_range(ratios[::-1]) == (outliers, count - 1 - outliers)


@pytest.mark.parametrize(
    ("rounds", "is_doubtful"),
    [
        ([EQUAL] * 3, False),
        ([SLOW] * 3, True),  # too few rounds to call it slower
        ([SLOW] * 6, False),
        ([SLIGHTLY_SLOW] * 6, True),
        ([SLOW] * 5 + [(1.0, 0.9)], True),
    ],
)
def test_only_a_clear_result_ends_the_rounds(
    build: Callable[..., Any], rounds: list[tuple[float, float]], *, is_doubtful: bool
) -> None:
    assert build(*rounds).is_doubtful == is_doubtful


def test_exit_codes(verdicts: ModuleType, build: Callable[..., Any]) -> None:
    ok, slower, failed = build(*[EQUAL] * 6), build(*[SLOW] * 6), build(problem="new: ended")
    assert verdicts.find_exit_code([ok, ok]) == 0
    assert verdicts.find_exit_code([ok, failed]) == 2
    assert verdicts.find_exit_code([failed, slower, ok]) == 1
    assert verdicts.find_exit_code([]) == 2


def test_the_table_has_ratio_range_medians_and_reason(
    verdicts: ModuleType, build: Callable[..., Any]
) -> None:
    rows = build((0.2, 0.25), (0.2, 0.24), (0.2, 0.26)), build(problem="base: no such command")
    heading, measured, failed = verdicts.format_table(rows).splitlines()
    assert heading.split() == ["workload", "new/base", "range", "base", "new", "rounds", "verdict"]
    cells = ["train", "1.25", "1.20 to 1.30", "200 ms/step", "250 ms/step", "3", "slower"]
    assert [cell.strip() for cell in measured.split("  ") if cell.strip()] == cells
    assert failed.endswith("not measured: base: no such command")


def test_the_document_is_json(build: Callable[..., Any]) -> None:
    document = json.loads(json.dumps(build((0.2, 0.25), (0.2, 0.24), (0.2, 0.26)).summarize()))
    assert document["ratio"] == pytest.approx(1.25)
    assert document["range"] == pytest.approx([1.2, 1.3])
    assert document["rounds"][0] == [0.2, 0.25]
    assert (document["unit"], document["verdict"]) == ("s/step", "slower")


class FakeProgram:
    """Takes a fixed time; records its calls."""

    def __init__(self, side: str, seconds: Iterator[float], events: list[str]) -> None:
        self._side, self._seconds, self._events = side, seconds, events

    def warm_up(self) -> None:
        self._events.append(f"{self._side} warm")

    def pause(self) -> None:
        self._events.append(f"{self._side} pause")

    def measure(self) -> float:
        self._events.append(self._side)
        return next(self._seconds)

    def close(self) -> None:
        self._events.append(f"{self._side} close")


def compare(
    guard: ModuleType, new_seconds: list[float], events: list[str], rounds: int = 2
) -> tuple[Any, int]:
    """Return the comparison of two fake programs, and the number of starts."""
    seconds = {"base": iter([1.0] * len(new_seconds)), "new": iter(new_seconds)}
    starts = []

    def start(side: str, _: object) -> FakeProgram:
        starts.append(side)
        return FakeProgram(side, seconds[side], events)

    workload = guard.Workload("train", "step", rounds, 2 * rounds, start)
    return guard.compare(workload, ["base", "new"], None), len(starts) // 2


def test_sides_alternate_and_swap_their_order(guard: ModuleType) -> None:
    events: list[str] = []
    comparison, starts = compare(guard, [1.0, 1.0, 1.0, 1.0], events)
    warm = ["base warm", "new warm", "base pause", "new pause"]
    assert events == [*warm, "base", "new", "new", "base", "new close", "base close"]
    assert (comparison.verdict, starts) == ("ok", 1)


def test_a_workload_that_looks_slower_starts_again(guard: ModuleType) -> None:
    comparison, starts = compare(guard, [1.3, 1.3, 1.0, 0.9, 1.0, 1.0], [])
    assert (comparison.verdict, starts, len(comparison.rounds)) == ("ok", 3, 6)
    comparison, starts = compare(guard, [1.3] * 6, [])
    assert (comparison.verdict, starts) == ("slower", 2)


def test_a_program_that_fails_is_closed_and_named(guard: ModuleType) -> None:
    events: list[str] = []

    def fail(side: str, _: object) -> FakeProgram:
        if side == "new":
            raise guard.CannotMeasureError("new: train ended with exit code 64")
        return FakeProgram(side, iter(()), events)

    comparison = guard.compare(guard.Workload("train", "step", 2, 4, fail), ["base", "new"], None)
    assert comparison.verdict == "not measured"
    assert comparison.problem == "new: train ended with exit code 64"
    assert events == ["base close"]
