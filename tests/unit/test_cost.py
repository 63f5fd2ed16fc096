"""What a run spent up to a target, and which one was the cheapest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from regauge.comparison.cost import between, common_target, ranked, saving, to_target
from regauge.planning.catalog import chips, instance
from regauge.planning.settings import Price
from regauge.results.run_folder import Run, read
from regauge.results.series import Series
from regauge.training.settings import Target

LOSS: Series = ((10, 5.0), (20, 4.0), (30, 3.0))
SECONDS: Series = tuple((step, 2.0 * step) for step in range(1, 31))


def run(name: str = "a", heldout: Series = LOSS, usd_per_second: float | None = 0.5) -> Run:
    spent = {"machine_seconds": SECONDS, "device_seconds": SECONDS}
    if usd_per_second is not None:
        spent["usd"] = tuple((step, value * usd_per_second) for step, value in SECONDS)
    return Run(Path(name), name, series={"heldout/loss": heldout}, spent=spent)


def test_the_cost_lies_straight_between_two_evaluations() -> None:
    found = to_target(run(), Target(metric="heldout/loss", at_most=3.25))
    assert (found.step, found.between) == (27.5, (20, 30))
    assert (found.machine_seconds, found.usd) == (55.0, 27.5)


@pytest.mark.parametrize(("value", "step"), [(4.0, 20.0), (5.0, 10.0), (9.0, 10.0), (3.0, 30.0)])
def test_a_target_that_was_measured_costs_what_was_spent_there(value: float, step: float) -> None:
    found = to_target(run(), Target(metric="heldout/loss", at_most=value))
    assert found.step == step
    assert found.machine_seconds == 2 * step


def test_a_metric_that_rises_is_reached_from_below() -> None:
    rises = Run(Path("a"), "a", series={"heldout/accuracy": ((1, 0.1), (3, 0.3))})
    found = to_target(rises, Target(metric="heldout/accuracy", at_least=0.2))
    assert found.step == pytest.approx(2.0)
    assert found.machine_seconds is None, "no ledger, no cost"


def test_a_target_that_is_never_reached_says_what_came_nearest() -> None:
    found = to_target(
        run(heldout=((10, 5.0), (20, 3.5), (30, 3.6))), Target(metric="heldout/loss", at_most=1.0)
    )
    assert (found.step, found.usd, found.best) == (None, None, (20, 3.5))
    assert to_target(run(heldout=()), Target(metric="heldout/loss", at_most=1.0)).best is None


def test_a_price_that_is_unknown_is_not_ranked() -> None:
    target = Target(metric="heldout/loss", at_most=4.0)
    dear, cheap = to_target(run("a"), target), to_target(run("b", usd_per_second=0.25), target)
    unknown = to_target(run("c", usd_per_second=None), target)
    assert [one.run for one in ranked([dear, unknown, cheap])] == ["b", "a"]
    assert saving(cheap, dear) == 0.5
    assert saving(unknown, dear) is None
    assert saving(cheap, unknown) is None
    assert unknown.machine_seconds == 40.0


def test_the_common_target_is_what_every_run_came_to() -> None:
    other = run("b", heldout=((10, 5.5), (30, 3.4)))
    assert common_target([run(), other], "heldout/loss") == Target(
        metric="heldout/loss", at_most=3.4
    )
    assert common_target([run(), run(heldout=())], "heldout/loss") is None


def test_growing_values_are_read_between_their_steps() -> None:
    assert between((), 3) is None
    assert between(((4, 8.0),), 2) == 4.0
    assert between(((4, 8.0), (8, 10.0)), 6) == 9.0
    assert between(((4, 8.0),), 9) == 8.0


def test_lost_work_is_part_of_the_cost(tmp_path: Path) -> None:
    lines = [(1, 10, 10.0), (1, 20, 20.0), (2, 15, 31.0), (2, 20, 36.0), (2, 30, 46.0)]
    text = "".join(
        json.dumps({"attempt": attempt, "step": step, "machine_seconds": paid, "usd": paid / 10})
        + "\n"
        for attempt, step, paid in lines
    )
    (tmp_path / "ledger.jsonl").write_text(text)
    found = read(tmp_path).spent
    assert found["usd"] == ((10, 1.0), (15, 3.1), (20, 3.6), (30, 4.6))


def test_another_price_counts_all_machine_time() -> None:
    target = Target(metric="heldout/loss", at_most=4.0)
    found = to_target(run(), target, Price(instance="trn1.32xlarge", usd_per_hour=36.0))
    assert (found.machine_seconds, found.usd) == (40.0, pytest.approx(0.4))
    assert found.rate is not None
    assert found.rate.usd_per_hour == 36.0
    watts = chips()[instance("trn1.32xlarge").chip].tdp_watts
    assert found.joules == (40.0 * watts if watts else None)
    unpriced = to_target(run(), target, Price())
    assert (unpriced.usd, unpriced.rate, unpriced.joules) == (None, None, None)


def test_a_run_s_own_price_is_in_its_settings() -> None:
    priced = replace(
        run(), settings={"execution": {"price": {"usd_per_hour": 3.0, "market": "spot"}}}
    )
    found = to_target(priced, Target(metric="heldout/loss", at_most=4.0))
    assert found.rate is not None
    assert "spot" in found.rate.told
    assert found.usd == 20.0, "what the meter counted, not what a price would make of it"


@pytest.mark.parametrize("values", [{}, {"at_least": 1.0, "at_most": 2.0}])
def test_a_target_has_one_value(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="set either at_least or at_most"):
        Target(metric="heldout/loss", **values)
