"""The compile decision: a run is compiled only if compiling saves more time than it takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed import datasets
from regauge.data.dataset import Dataset
from regauge.data.settings import DataSettings
from regauge.tasks.classify import Classify
from regauge.training.compile.decision import (
    CompileTiming,
    LengthShares,
    find_cost_problem,
    is_worthwhile,
    measure_length_shares,
)


@pytest.mark.parametrize(
    ("compiled", "compiling", "steps", "graphs", "pays"),
    [
        (0.75, 10.0, 1000, 2, True),
        (0.75, 10.0, 41, 2, True),
        (0.75, 10.0, 40, 2, False),
        (0.75, 10.0, 100, 10, False),
        (1.0, 0.0, 1000, 2, False),
        (1.25, 0.0, 10**6, 2, False),
    ],
)
def test_compiling_must_save_more_than_the_remaining_graphs_cost(
    compiled: float, compiling: float, steps: int, graphs: int, *, pays: bool
) -> None:
    """An eager step takes 1 s. The first graph is compiled already when it has been measured."""
    is_better, reason = is_worthwhile(CompileTiming(1.0, compiled, compiling), steps, graphs)
    assert is_better is pays
    assert f"{steps:,} steps" in reason


def test_a_measurement_takes_at_most_three_percent_of_a_run() -> None:
    """Compiling takes 10 s, and six steps are timed."""
    assert find_cost_problem(eager_seconds=1.0, slowdown=1.0, run_seconds=534.0) is None
    assert find_cost_problem(eager_seconds=1.0, slowdown=1.0, run_seconds=533.0) == (
        "to compile and time one graph takes about 16 s, more than 3 % of the estimated run time,"
        " 533 s"
    )


def test_a_machine_that_is_shared_compiles_more_slowly() -> None:
    assert find_cost_problem(eager_seconds=1.0, slowdown=2.0, run_seconds=534.0) is not None
    assert find_cost_problem(eager_seconds=1.0, slowdown=2.0, run_seconds=867.0) is None


def test_an_eager_run_of_short_texts_computes_less_than_a_compiled_one(tmp_path: Path) -> None:
    """One text in nine has 128 tokens, so nearly each batch of 32 has the largest length."""
    datasets.write_lengths(tmp_path / "data", {"text": ([8] * 8 + [128]) * 64})
    data = Dataset(tmp_path / "data")

    def measure(*, can_pack: bool) -> LengthShares:
        batch = SimpleNamespace(rows=32, microbatch=32)
        task: Any = SimpleNamespace(
            task=Classify(),
            batch=batch,
            manifest=data.manifest,
            bucket_lengths=(8, 128),
            can_pack=can_pack,
        )
        config = SimpleNamespace(data=DataSettings(path=str(data.folder)))
        context: Any = SimpleNamespace(
            settings=SimpleNamespace(task_configs=(config,), seed=0),
            tasks=(task,),
            accelerator=SimpleNamespace(has_dynamic_shapes=True),
        )
        return measure_length_shares(context, task)

    shares = measure(can_pack=True)
    real = (8 * 8 / 9 + 128 / 9) / 128
    assert shares.eager == pytest.approx(real, rel=0.1)
    assert shares.compiled > 0.9
    times = CompileTiming(eager_seconds=2.0, compiled_seconds=1.0, compile_seconds=5.0)
    assert times.scale(shares) == (2.0 * shares.eager, shares.compiled, 5.0)
    assert measure(can_pack=False) == (shares.compiled, shares.compiled)
