"""A program at work: every record answered once and in its place, with the memory there is."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regauge.accelerators.cpu import Cpu
from regauge.artifacts.buckets import Ladder, halves
from regauge.artifacts.engine import Engine, warm
from regauge.artifacts.manifest import Rung
from regauge.artifacts.rows import Rows, Texts
from regauge.errors import TransientError
from regauge.models.io_spec import Input
from unit.runners import Counting, answers, texts

LENGTHS = (4, 8, 20)
NO_MEMORY = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Failed to allocate memory for requested buffer"),
    MemoryError(),
]
"""What libraries raise where an allocation fails."""


class Small(Counting):
    """Has memory for so many tokens of a batch, and raises an error for more."""

    def __init__(self, most: int, error: Exception) -> None:
        super().__init__()
        self.most = most
        self.failed: list[tuple[int, int]] = []
        self._error = error

    def check(self, rows: int, length: int) -> None:
        if rows * length > self.most:
            self.failed.append((rows, length))
            raise self._error


def made(
    runner: Counting, most: int = 16, width: int = 3, *, filled: bool = True, **changes: Any
) -> Engine:
    rungs = tuple(Rung(length=length, rows=halves(most)) for length in LENGTHS)
    return Engine(runner, Ladder(rungs, filled=filled), width, **changes)


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100])
def test_answers_stand_in_the_order_of_the_records(count: int, *, filled: bool) -> None:
    ids = texts(count, 20, seed=count)
    runner = Counting()
    engine = made(runner, filled=filled)
    found = engine.answers(Rows.of(ids))
    assert (found.dtype, found.shape) == (np.float32, (count, 3))
    assert np.array_equal(found, answers(ids))
    assert runner.texts == count
    assert engine.slots == sum(rows * length for rows, length in runner.shapes)


def test_every_text_of_a_record_is_answered_beside_its_features() -> None:
    first, second = texts(40, 20, seed=1), texts(40, 6, seed=2, shortest=0)
    features = np.arange(80, dtype=np.float32).reshape(40, 2)
    runner = Counting()
    engine = made(runner, width=8)
    found = engine.answers(Rows([Texts.of(first), Texts.of(second)], [features]))
    assert np.array_equal(found, np.concatenate([answers(first, second), features], 1))
    assert engine.slots == 2 * sum(rows * length for rows, length in runner.shapes)


def test_a_text_without_a_token_is_answered() -> None:
    ids = [np.empty(0, np.int32), np.array([7], np.int32), np.empty(0, np.int32)]
    found = made(Counting()).answers(Rows.of(ids))
    assert found.tolist() == [[0, 0, 0], [7, 1, 7], [0, 0, 0]]


def test_narrow_answers_become_wide() -> None:
    class Narrow(Counting):
        def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
            return super().__call__(tokens, lengths, *features).to(torch.bfloat16)

    ids = texts(20, 8)
    found = made(Narrow()).answers(Rows.of(ids))
    assert found.dtype == np.float32
    assert np.array_equal(found, torch.from_numpy(answers(ids)).bfloat16().float().numpy())


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_where_memory_does_not_suffice_batches_are_smaller_from_then_on(
    error: Exception, *, filled: bool
) -> None:
    ids = texts(150, 20)
    runner = Small(4 * 20, error)
    told: list[int] = []
    engine = made(runner, filled=filled, told=told.append)
    found = engine.answers(Rows.of(ids))
    assert np.array_equal(found, answers(ids))
    assert runner.failed == [(16, 20), (8, 20)]
    assert engine.step == 2
    assert runner.texts == sum(told) == 150
    assert engine.slots == sum(rows * length for rows, length in runner.shapes)
    assert {rows for rows, _ in runner.shapes} <= {1, 2, 3, 4}
    again = texts(90, 20, seed=9)
    assert np.array_equal(engine.answers(Rows.of(again)), answers(again))
    assert len(runner.failed) == 2
    assert engine.step == 2


def test_memory_that_is_gone_in_the_middle_costs_no_record_and_no_batch_twice() -> None:
    class Later(Small):
        def check(self, rows: int, length: int) -> None:
            if len(self.shapes) >= 3:
                super().check(rows, length)

    ids = texts(120, 20)
    runner = Later(2 * 20, NO_MEMORY[1])
    engine = made(runner)
    assert np.array_equal(engine.answers(Rows.of(ids)), answers(ids))
    assert runner.shapes[:3] == [(16, 20)] * 3
    assert runner.texts == 120
    assert engine.step == 3


def test_what_others_have_met_is_begun_with() -> None:
    runner = Small(4 * 20, NO_MEMORY[0])
    engine = made(runner, step=2)
    ids = texts(50, 20)
    assert np.array_equal(engine.answers(Rows.of(ids)), answers(ids))
    assert not runner.failed


def test_only_declared_numbers_of_rows_are_tried() -> None:
    rungs = tuple(Rung(length=length, rows=(16, 6, 2)) for length in LENGTHS)
    runner = Small(3 * 20, NO_MEMORY[0])
    told: list[int] = []
    engine = Engine(runner, Ladder(rungs, filled=True), 3, told=told.append)
    ids = texts(75, 20)
    assert np.array_equal(engine.answers(Rows.of(ids)), answers(ids))
    assert sum(told) == 75 < sum(rows for rows, _ in runner.shapes)
    assert {rows for rows, _ in (*runner.shapes, *runner.failed)} == {16, 6, 2}


@pytest.mark.parametrize(
    ("rows", "filled", "fewest"),
    [((16, 8, 4), True, 4), ((16,), True, 16), ((16, 8, 4), False, 1), ((1,), True, 1)],
)
def test_where_memory_does_not_suffice_for_the_fewest_rows_it_may_another_time(
    rows: tuple[int, ...], fewest: int, *, filled: bool
) -> None:
    rungs = tuple(Rung(length=length, rows=rows) for length in LENGTHS)
    runner = Small(fewest * 20 - 1, NO_MEMORY[1])
    engine = Engine(runner, Ladder(rungs, filled=filled), 3)
    wanted = f"no memory for {fewest} rows of 20 tokens, and no fewer are allowed: CUDA out of"
    with pytest.raises(TransientError, match=wanted) as caught:
        engine.answers(Rows.of([*texts(40, 20), *texts(40, 20, shortest=20)]))
    assert caught.value.exit_code == 75
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
        KeyError("tokens"),
    ],
    ids=str,
)
def test_any_other_error_goes_through_as_it_is(error: Exception) -> None:
    runner = Small(4 * 20, error)
    engine = made(runner)
    with pytest.raises(type(error)) as caught:
        engine.answers(Rows.of(texts(50, 20)))
    assert caught.value is error
    assert len(runner.failed) == 1
    assert engine.step == 0


@dataclass
class Late:
    """An answer on a device: whoever wants it waits for it."""

    number: int
    events: list[str]
    value: Tensor

    def cpu(self) -> Tensor:
        self.events.append(f"fetched {self.number}")
        return self.value


def test_a_batch_is_given_to_the_device_before_the_one_before_is_waited_for() -> None:
    events: list[str] = []

    class Device(Counting):
        def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Any:
            number = len(self.shapes)
            events.append(f"given {number}")
            return Late(number, events, super().__call__(tokens, lengths, *features))

    ids = texts(48, 20, shortest=9)
    assert np.array_equal(made(Device()).answers(Rows.of(ids)), answers(ids))
    assert events == ["given 0", "given 1", "fetched 0", "given 2", "fetched 1", "fetched 2"]


@pytest.mark.parametrize("symbolic", [True, False])
def test_every_graph_is_made_before_the_first_record(*, symbolic: bool) -> None:
    """One graph for all shapes is made by the smallest of them, which takes no time."""
    inputs = (
        Input(name="tokens", shape=("rows", "length"), dtype="int32"),
        Input(name="lengths", shape=("rows",), dtype="int32"),
    )
    program, backend = SimpleNamespace(inputs=inputs), SimpleNamespace(symbolic=symbolic)
    manifest = SimpleNamespace(program=program, compiled=SimpleNamespace(backend=backend))
    artifact: Any = SimpleNamespace(manifest=manifest, accelerator=Cpu())
    runner = Counting()
    warm(made(runner, most=2), artifact)
    every = [(rows, length) for length in LENGTHS for rows in (2, 1)]
    assert runner.shapes == ([(1, LENGTHS[0])] if symbolic else every)
