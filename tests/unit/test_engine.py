"""The engine computes every record once, in order, within the memory of the device."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regauge.accelerators.cpu import Cpu
from regauge.inference.export.buckets import Buckets, list_halves
from regauge.inference.export.engine import Engine, warm_up
from regauge.inference.export.manifest import Bucket
from regauge.inference.export.records import TextRecords, TokenizedTexts
from regauge.models.io_spec import TensorSpec
from regauge.system.errors import TransientError
from unit.runners import CountingRunner, expected_outputs, random_ids

LENGTHS = (4, 8, 20)
OUT_OF_MEMORY_ERRORS = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Failed to allocate memory for requested buffer"),
    MemoryError(),
]
"""Errors of libraries when an allocation fails."""


class LimitedRunner(CountingRunner):
    """Raises an error for a batch of more than `max_tokens` tokens."""

    def __init__(self, max_tokens: int, error: Exception) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.failed: list[tuple[int, int]] = []
        self._error = error

    def check(self, rows: int, length: int) -> None:
        if rows * length > self.max_tokens:
            self.failed.append((rows, length))
            raise self._error


def build_engine(
    runner: CountingRunner,
    max_rows: int = 16,
    width: int = 3,
    *,
    pad: bool = True,
    **options: Any,
) -> Engine:
    shapes = tuple(Bucket(length=length, batch_sizes=list_halves(max_rows)) for length in LENGTHS)
    return Engine(runner, Buckets(shapes, needs_row_padding=pad), width, **options)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100])
def test_outputs_are_in_the_order_of_the_records(count: int, *, pad: bool) -> None:
    ids = random_ids(count, 20, seed=count)
    runner = CountingRunner()
    engine = build_engine(runner, pad=pad)
    outputs = engine.compute(TextRecords.from_lists(ids))
    assert (outputs.dtype, outputs.shape) == (np.float32, (count, 3))
    assert np.array_equal(outputs, expected_outputs(ids))
    assert runner.texts == count
    assert engine.computed_tokens == sum(rows * length for rows, length in runner.shapes)


def test_several_texts_and_features_of_a_record_are_computed() -> None:
    first, second = random_ids(40, 20, seed=1), random_ids(40, 6, seed=2, min_length=0)
    features = np.arange(80, dtype=np.float32).reshape(40, 2)
    runner = CountingRunner()
    engine = build_engine(runner, width=8)
    outputs = engine.compute(
        TextRecords(
            [TokenizedTexts.from_lists(first), TokenizedTexts.from_lists(second)], [features]
        )
    )
    assert np.array_equal(outputs, np.concatenate([expected_outputs(first, second), features], 1))
    assert engine.computed_tokens == 2 * sum(rows * length for rows, length in runner.shapes)


def test_an_empty_text_is_computed() -> None:
    ids = [np.empty(0, np.int32), np.array([7], np.int32), np.empty(0, np.int32)]
    outputs = build_engine(CountingRunner()).compute(TextRecords.from_lists(ids))
    assert outputs.tolist() == [[0, 0, 0], [7, 1, 7], [0, 0, 0]]


def test_bf16_outputs_become_fp32() -> None:
    class Bf16Runner(CountingRunner):
        def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
            return super().__call__(tokens, lengths, *features).to(torch.bfloat16)

    ids = random_ids(20, 8)
    outputs = build_engine(Bf16Runner()).compute(TextRecords.from_lists(ids))
    assert outputs.dtype == np.float32
    assert np.array_equal(
        outputs, torch.from_numpy(expected_outputs(ids)).bfloat16().float().numpy()
    )


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("error", OUT_OF_MEMORY_ERRORS, ids=str)
def test_batches_are_halved_after_running_out_of_memory(error: Exception, *, pad: bool) -> None:
    ids = random_ids(150, 20)
    runner = LimitedRunner(4 * 20, error)
    batch_sizes: list[int] = []
    engine = build_engine(runner, pad=pad, on_batch=batch_sizes.append)
    outputs = engine.compute(TextRecords.from_lists(ids))
    assert np.array_equal(outputs, expected_outputs(ids))
    assert runner.failed == [(16, 20), (8, 20)]
    assert engine.halvings == 2
    assert runner.texts == sum(batch_sizes) == 150
    assert engine.computed_tokens == sum(rows * length for rows, length in runner.shapes)
    assert {rows for rows, _ in runner.shapes} <= {1, 2, 3, 4}
    more_ids = random_ids(90, 20, seed=9)
    assert np.array_equal(
        engine.compute(TextRecords.from_lists(more_ids)), expected_outputs(more_ids)
    )
    assert len(runner.failed) == 2
    assert engine.halvings == 2


def test_running_out_of_memory_midway_repeats_no_batch_and_loses_no_record() -> None:
    class LaterLimitedRunner(LimitedRunner):
        def check(self, rows: int, length: int) -> None:
            if len(self.shapes) >= 3:
                super().check(rows, length)

    ids = random_ids(120, 20)
    runner = LaterLimitedRunner(2 * 20, OUT_OF_MEMORY_ERRORS[1])
    engine = build_engine(runner)
    assert np.array_equal(engine.compute(TextRecords.from_lists(ids)), expected_outputs(ids))
    assert runner.shapes[:3] == [(16, 20)] * 3
    assert runner.texts == 120
    assert engine.halvings == 3


def test_an_engine_starts_with_halved_batches() -> None:
    runner = LimitedRunner(4 * 20, OUT_OF_MEMORY_ERRORS[0])
    engine = build_engine(runner, halvings=2)
    ids = random_ids(50, 20)
    assert np.array_equal(engine.compute(TextRecords.from_lists(ids)), expected_outputs(ids))
    assert not runner.failed


def test_only_declared_batch_sizes_are_used() -> None:
    shapes = tuple(Bucket(length=length, batch_sizes=(16, 6, 2)) for length in LENGTHS)
    runner = LimitedRunner(3 * 20, OUT_OF_MEMORY_ERRORS[0])
    batch_sizes: list[int] = []
    engine = Engine(runner, Buckets(shapes, needs_row_padding=True), 3, on_batch=batch_sizes.append)
    ids = random_ids(75, 20)
    assert np.array_equal(engine.compute(TextRecords.from_lists(ids)), expected_outputs(ids))
    assert sum(batch_sizes) == 75 < sum(rows for rows, _ in runner.shapes)
    assert {rows for rows, _ in (*runner.shapes, *runner.failed)} == {16, 6, 2}


@pytest.mark.parametrize(
    ("rows", "pad", "min_rows"),
    [((16, 8, 4), True, 4), ((16,), True, 16), ((16, 8, 4), False, 1), ((1,), True, 1)],
)
def test_running_out_of_memory_at_the_smallest_batch_is_a_transient_error(
    rows: tuple[int, ...], min_rows: int, *, pad: bool
) -> None:
    shapes = tuple(Bucket(length=length, batch_sizes=rows) for length in LENGTHS)
    runner = LimitedRunner(min_rows * 20 - 1, OUT_OF_MEMORY_ERRORS[1])
    engine = Engine(runner, Buckets(shapes, needs_row_padding=pad), 3)
    message = f"no memory for {min_rows} rows of 20 tokens, the smallest batch: CUDA out of memory"
    with pytest.raises(TransientError, match=message) as caught:
        engine.compute(
            TextRecords.from_lists([*random_ids(40, 20), *random_ids(40, 20, min_length=20)])
        )
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
def test_other_errors_are_not_caught(error: Exception) -> None:
    runner = LimitedRunner(4 * 20, error)
    engine = build_engine(runner)
    with pytest.raises(type(error)) as caught:
        engine.compute(TextRecords.from_lists(random_ids(50, 20)))
    assert caught.value is error
    assert len(runner.failed) == 1
    assert engine.halvings == 0


@pytest.mark.parametrize(
    ("count", "pad", "shapes"),
    [
        (0, True, []),
        (5, True, [(8, 8)]),
        (5, False, [(5, 8)]),
        (16, True, [(16, 8)]),
        (19, True, [(16, 8), (4, 8)]),
        (19, False, [(16, 8), (3, 8)]),
    ],
)
def test_chosen_records_are_one_batch_of_the_chosen_length(
    count: int, shapes: list[tuple[int, int]], *, pad: bool
) -> None:
    ids = random_ids(count, 4)
    runner = CountingRunner()
    outputs = build_engine(runner, width=5, pad=pad).compute_bucket(TextRecords.from_lists(ids), 8)
    assert runner.shapes == shapes
    assert (outputs.dtype, outputs.shape) == (np.float32, (count, 5))
    assert np.array_equal(outputs[:, :3], expected_outputs(ids))
    assert not outputs[:, 3:].any()


@pytest.mark.parametrize(("pad", "sizes"), [(True, [4, 4, 4, 4]), (False, [4, 4, 4, 3])])
def test_a_chosen_batch_is_computed_in_parts_after_running_out_of_memory(
    sizes: list[int], *, pad: bool
) -> None:
    ids = random_ids(15, 8)
    runner = LimitedRunner(4 * 20, OUT_OF_MEMORY_ERRORS[0])
    engine = build_engine(runner, pad=pad)
    assert np.array_equal(
        engine.compute_bucket(TextRecords.from_lists(ids), 20), expected_outputs(ids)
    )
    assert runner.shapes == [(rows, 20) for rows in sizes]
    assert engine.halvings == 2
    assert len(runner.failed) == 2


def test_a_chosen_length_must_be_a_bucket_that_holds_the_records() -> None:
    engine = build_engine(CountingRunner())
    records = TextRecords.from_lists(random_ids(3, 8, min_length=8))
    with pytest.raises(ValueError, match="a record of 8 tokens is longer than 4"):
        engine.compute_bucket(records, 4)
    with pytest.raises(ValueError, match="no bucket has a length of 9 tokens"):
        engine.compute_bucket(records, 9)


@dataclass
class DeviceTensor:
    """An output on a device; records when it is copied to the host."""

    number: int
    events: list[str]
    value: Tensor

    def cpu(self) -> Tensor:
        self.events.append(f"fetched {self.number}")
        return self.value


def test_a_batch_is_submitted_before_the_previous_output_is_fetched() -> None:
    events: list[str] = []

    class AsynchronousRunner(CountingRunner):
        def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Any:
            number = len(self.shapes)
            events.append(f"submitted {number}")
            return DeviceTensor(number, events, super().__call__(tokens, lengths, *features))

    ids = random_ids(48, 20, min_length=9)
    assert np.array_equal(
        build_engine(AsynchronousRunner()).compute(TextRecords.from_lists(ids)),
        expected_outputs(ids),
    )
    assert events == [
        "submitted 0",
        "submitted 1",
        "fetched 0",
        "submitted 2",
        "fetched 1",
        "fetched 2",
    ]


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_warm_up_compiles_every_graph(*, is_dynamic: bool) -> None:
    """A graph that serves all shapes is compiled at the smallest one."""
    inputs = (
        TensorSpec(name="tokens", shape=("rows", "length"), dtype="int32"),
        TensorSpec(name="lengths", shape=("rows",), dtype="int32"),
    )
    program, backend = (
        SimpleNamespace(inputs=inputs),
        SimpleNamespace(has_dynamic_shapes=is_dynamic),
    )
    manifest = SimpleNamespace(compiled=SimpleNamespace(backend=backend))
    artifact: Any = SimpleNamespace(manifest=manifest, program=program, accelerator=Cpu())
    runner = CountingRunner()
    warm_up(build_engine(runner, max_rows=2), artifact)
    declared = [(rows, length) for length in LENGTHS for rows in (2, 1)]
    assert runner.shapes == ([(1, LENGTHS[0])] if is_dynamic else declared)
