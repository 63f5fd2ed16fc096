"""The work by deadline equals that of a schedule with the earliest deadline first."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.serving.deadline_demand import SLOT_SECONDS, DeadlineDemand

RECORDS = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0.1, 500), st.booleans()), min_size=1, max_size=20
)


@given(RECORDS, st.floats(0, 5), st.floats(0, 3), st.floats(0.0005, 0.01))
def test_the_slack_is_that_of_the_earliest_deadline_first(
    records: list[tuple[float, float, bool]], now: float, busy: float, pace: float
) -> None:
    """Some records are removed again."""
    demand = DeadlineDemand()
    for deadline, milliseconds, _ in records:
        demand.add(deadline, milliseconds)
    for deadline, milliseconds, is_removed in records:
        if is_removed:
            demand.remove(deadline, milliseconds)
    expected, total = math.inf, busy
    waiting = [(deadline, cost) for deadline, cost, is_removed in records if not is_removed]
    slots = sorted((int(deadline / SLOT_SECONDS), cost) for deadline, cost in waiting)
    for index, (slot, cost) in enumerate(slots):
        total += cost * pace
        is_last = index + 1 == len(slots) or slots[index + 1][0] != slot
        if is_last:
            expected = min(expected, slot * SLOT_SECONDS - now - total)
    slack = demand.find_slack(now, busy, pace)
    assert slack.seconds == pytest.approx(expected)
    if waiting:
        assert any(deadline < slack.deadline for deadline, _ in waiting)


def test_earlier_deadlines_may_be_late_for_a_later_record() -> None:
    demand = DeadlineDemand()
    demand.add(1.0, 5000)
    demand.add(10.0, 1000)
    assert demand.find_slack(0.0, 0.0, 1e-3).seconds == pytest.approx(-4.0)
    assert demand.find_slack(0.0, 0.0, 1e-3, since=5.0).seconds == pytest.approx(4.0)


def test_records_without_a_deadline_are_never_late() -> None:
    demand = DeadlineDemand()
    assert demand.find_slack(0.0, 9.0, 1e-3).seconds == math.inf
    demand.add(math.inf, 1e6)
    assert demand.find_slack(0.0, 9.0, 1e-3).seconds > 1e9
