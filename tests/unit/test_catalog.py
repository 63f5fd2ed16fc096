"""Chips, machine types and prices: each with its source, and nothing guessed."""

from __future__ import annotations

import datetime as dt

import pytest
from pydantic import ValidationError

from regauge.errors import SettingsError
from regauge.planning.catalog import chips, instance, instances, rate
from regauge.planning.settings import Price


def test_every_price_has_a_day_and_a_source() -> None:
    assert len(instances()) > 100
    for each in instances().values():
        assert (each.usd_per_hour is None) == (each.as_of is None), each.name
        assert each.source or each.usd_per_hour is None, each.name
        assert each.chips is None or each.chips >= 1, each.name


def test_every_chip_has_a_source() -> None:
    assert len(chips()) > 30
    assert all(each.source for each in chips().values())
    assert chips()["H100-SXM-80GB"].tdp_watts == 700
    assert chips()["Trainium1"].tdp_watts is None, "nobody published it"


def test_the_catalog_knows_the_price_of_a_machine() -> None:
    found = rate(Price(instance="trn1.32xlarge"))
    assert found is not None
    assert (found.usd_per_hour, found.as_of) == (21.5, dt.date(2026, 7, 20))
    assert "on demand" in found.source


def test_your_own_price_goes_first() -> None:
    found = rate(Price(instance="trn1.32xlarge", usd_per_hour=8.2, market="reserved"))
    assert found is not None
    assert found.usd_per_hour == 8.2
    assert "reserved" in found.source


@pytest.mark.parametrize("price", [Price(), Price(instance="trn2.48xlarge")])
def test_what_nobody_says_is_unknown(price: Price) -> None:
    assert rate(price) is None


def test_an_unknown_machine_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"did you mean 'p5\.48xlarge'"):
        instance("p5.48large")
    with pytest.raises(SettingsError, match="set usd_per_hour"):
        instance("my-own-machine")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"market": "spot"}, "set its usd_per_hour"),
        ({"as_of": "2026-01-01"}, "set both"),
        ({"usd_per_hour": -1}, "greater than or equal to 0"),
    ],
)
def test_half_a_price_is_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Price.model_validate(table)


def test_an_old_price_is_said_to_be_old() -> None:
    found = rate(Price(usd_per_hour=3.0, as_of=dt.date(2026, 1, 1)))
    assert found is not None
    assert found.remark(dt.date(2026, 4, 1)) is None
    assert "91 days old" in (found.remark(dt.date(2026, 4, 2)) or "")
