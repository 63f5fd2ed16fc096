"""Cost of a run up to a target, and the ranking of runs by cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from regauge.evaluation.compare.cost import (
    compute_cost_to_target,
    find_common_target,
    interpolate,
    rank_by_cost,
    relative_saving,
)
from regauge.machines.catalog import find_instance, load_chips
from regauge.machines.settings import Price
from regauge.run_folders.run_folder import RunFolder, read_run_folder
from regauge.run_folders.series import Series
from regauge.training.settings import Target

LOSS: Series = ((10, 5.0), (20, 4.0), (30, 3.0))
UNREACHED = Target(metric="heldout/loss", at_most=1.0)
SECONDS: Series = tuple((step, 2.0 * step) for step in range(1, 31))


def run(name: str = "a", heldout: Series = LOSS, usd_per_second: float | None = 0.5) -> RunFolder:
    cost_series = {"machine_seconds": SECONDS, "device_seconds": SECONDS}
    if usd_per_second is not None:
        cost_series["usd"] = tuple((step, value * usd_per_second) for step, value in SECONDS)
    return RunFolder(Path(name), name, series={"heldout/loss": heldout}, cost_series=cost_series)


def test_the_cost_is_interpolated_between_two_evaluations() -> None:
    cost = compute_cost_to_target(run(), Target(metric="heldout/loss", at_most=3.25))
    assert (cost.step, cost.interval) == (27.5, (20, 30))
    assert (cost.machine_seconds, cost.usd) == (55.0, 27.5)


@pytest.mark.parametrize(("value", "step"), [(4.0, 20.0), (5.0, 10.0), (9.0, 10.0), (3.0, 30.0)])
def test_a_target_that_an_evaluation_hits_has_the_cost_of_that_step(
    value: float, step: float
) -> None:
    cost = compute_cost_to_target(run(), Target(metric="heldout/loss", at_most=value))
    assert cost.step == step
    assert cost.machine_seconds == 2 * step


def test_a_rising_metric_reaches_its_target_from_below() -> None:
    rises = RunFolder(Path("a"), "a", series={"heldout/accuracy": ((1, 0.1), (3, 0.3))})
    cost = compute_cost_to_target(rises, Target(metric="heldout/accuracy", at_least=0.2))
    assert cost.step == pytest.approx(2.0)
    assert cost.machine_seconds is None, "no ledger, no cost"


def test_a_target_that_is_not_reached_has_the_best_value() -> None:
    cost = compute_cost_to_target(run(heldout=((10, 5.0), (20, 3.5), (30, 3.6))), UNREACHED)
    assert (cost.step, cost.usd, cost.best) == (None, None, (20, 3.5))
    assert compute_cost_to_target(run(heldout=()), UNREACHED).best is None


def test_a_run_of_unknown_price_is_not_ranked() -> None:
    target = Target(metric="heldout/loss", at_most=4.0)
    dear, cheap = (
        compute_cost_to_target(run("a"), target),
        compute_cost_to_target(run("b", usd_per_second=0.25), target),
    )
    unknown = compute_cost_to_target(run("c", usd_per_second=None), target)
    assert [cost.run for cost in rank_by_cost([dear, unknown, cheap])] == ["b", "a"]
    assert relative_saving(cheap, dear) == 0.5
    assert relative_saving(unknown, dear) is None
    assert relative_saving(cheap, unknown) is None
    assert unknown.machine_seconds == 40.0


def test_the_common_target_is_the_best_value_that_every_run_reached() -> None:
    other = run("b", heldout=((10, 5.5), (30, 3.4)))
    assert find_common_target([run(), other], "heldout/loss") == Target(
        metric="heldout/loss", at_most=3.4
    )
    assert find_common_target([run(), run(heldout=())], "heldout/loss") is None


def test_a_growing_series_is_interpolated() -> None:
    assert interpolate((), 3) is None
    assert interpolate(((4, 8.0),), 2) == 4.0
    assert interpolate(((4, 8.0), (8, 10.0)), 6) == 9.0
    assert interpolate(((4, 8.0),), 9) == 8.0


def test_lost_work_is_part_of_the_cost(tmp_path: Path) -> None:
    lines = [(1, 10, 10.0), (1, 20, 20.0), (2, 15, 31.0), (2, 20, 36.0), (2, 30, 46.0)]
    text = "".join(
        json.dumps(
            {"attempt": attempt, "step": step, "machine_seconds": seconds, "usd": seconds / 10}
        )
        + "\n"
        for attempt, step, seconds in lines
    )
    (tmp_path / "ledger.jsonl").write_text(text)
    costs = read_run_folder(tmp_path).cost_series
    assert costs["usd"] == ((10, 1.0), (15, 3.1), (20, 3.6), (30, 4.6))


def test_a_given_price_applies_to_all_machine_time() -> None:
    target = Target(metric="heldout/loss", at_most=4.0)
    cost = compute_cost_to_target(run(), target, Price(instance="trn1.32xlarge", usd_per_hour=36.0))
    assert (cost.machine_seconds, cost.usd) == (40.0, pytest.approx(0.4))
    assert cost.price is not None
    assert cost.price.usd_per_hour == 36.0
    watts = load_chips()[find_instance("trn1.32xlarge").chip].tdp_watts
    assert cost.max_joules == (40.0 * watts if watts else None)
    unpriced = compute_cost_to_target(run(), target, Price())
    assert (unpriced.usd, unpriced.price, unpriced.max_joules) == (None, None, None)


def test_the_price_of_a_run_is_read_from_its_settings() -> None:
    priced = replace(
        run(), settings={"execution": {"price": {"usd_per_hour": 3.0, "market": "spot"}}}
    )
    cost = compute_cost_to_target(priced, Target(metric="heldout/loss", at_most=4.0))
    assert cost.price is not None
    assert "spot" in cost.price.description
    assert cost.usd == 20.0, "the dollars that the meter counted, not a product with the price"


@pytest.mark.parametrize("values", [{}, {"at_least": 1.0, "at_most": 2.0}])
def test_a_target_has_one_value(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="set either at_least or at_most"):
        Target(metric="heldout/loss", **values)
