"""The compile decision: a run is compiled only if compiling saves more time than it takes."""

from __future__ import annotations

import pytest

from regauge.training.compile.decision import CompileTiming, is_worthwhile


@pytest.mark.parametrize(
    ("trial", "steps", "graphs", "pays"),
    [
        (
            CompileTiming(eager_seconds=1.0, compiled_seconds=0.75, compile_seconds=10.0),
            1000,
            2,
            True,
        ),
        (
            CompileTiming(eager_seconds=1.0, compiled_seconds=0.75, compile_seconds=10.0),
            41,
            2,
            True,
        ),
        (
            CompileTiming(eager_seconds=1.0, compiled_seconds=0.75, compile_seconds=10.0),
            40,
            2,
            False,
        ),
        (
            CompileTiming(eager_seconds=1.0, compiled_seconds=0.75, compile_seconds=10.0),
            100,
            10,
            False,
        ),
        (
            CompileTiming(eager_seconds=1.0, compiled_seconds=1.0, compile_seconds=0.0),
            1000,
            2,
            False,
        ),
        (
            CompileTiming(eager_seconds=1.0, compiled_seconds=1.25, compile_seconds=0.0),
            10**6,
            2,
            False,
        ),
    ],
)
def test_compiling_must_save_more_than_the_remaining_graphs_cost(
    trial: CompileTiming, steps: int, graphs: int, *, pays: bool
) -> None:
    """The first graph is compiled already when it has been measured."""
    is_better, reason = is_worthwhile(trial, steps, graphs)
    assert is_better is pays
    assert f"{steps:,} steps" in reason
