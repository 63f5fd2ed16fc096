"""A run is compiled where that saves more time than it takes."""

from __future__ import annotations

import pytest

from regauge.training.compile.decision import Trial, is_worthwhile


@pytest.mark.parametrize(
    ("trial", "steps", "graphs", "pays"),
    [
        (Trial(eager=1.0, compiled=0.75, once=10.0), 1000, 2, True),
        (Trial(eager=1.0, compiled=0.75, once=10.0), 41, 2, True),
        (Trial(eager=1.0, compiled=0.75, once=10.0), 40, 2, False),
        (Trial(eager=1.0, compiled=0.75, once=10.0), 100, 10, False),
        (Trial(eager=1.0, compiled=1.0, once=0.0), 1000, 2, False),
        (Trial(eager=1.0, compiled=1.25, once=0.0), 10**6, 2, False),
    ],
)
def test_what_is_saved_has_to_be_more_than_what_the_other_graphs_take(
    trial: Trial, steps: int, graphs: int, *, pays: bool
) -> None:
    """The first graph is there when it has been measured."""
    found, reason = is_worthwhile(trial, steps, graphs)
    assert found is pays
    assert f"{steps:,} steps" in reason
