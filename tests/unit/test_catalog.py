"""Catalog of chips, machine types and prices: every entry has a source."""

from __future__ import annotations

import datetime as dt

import pytest
from pydantic import ValidationError

from regauge.machines.catalog import (
    find_instance,
    find_price,
    load_chips,
    load_instances,
    load_prices,
)
from regauge.machines.settings import Price
from regauge.system.errors import SettingsError


def test_every_price_has_a_date_and_a_source() -> None:
    assert len(load_instances()) > 100
    for instance in load_instances().values():
        assert (instance.usd_per_hour is None) == (instance.as_of is None), instance.name
        assert instance.source or instance.usd_per_hour is None, instance.name
        assert instance.chips is None or instance.chips >= 1, instance.name


def test_every_chip_has_a_source() -> None:
    assert len(load_chips()) > 30
    assert all(chip.source for chip in load_chips().values())
    assert load_chips()["H100-SXM-80GB"].tdp_watts == 700
    assert load_chips()["Trainium1"].tdp_watts is None, "not published"


def test_the_catalog_has_the_price_of_a_machine_type() -> None:
    price = find_price(Price(instance="trn1.32xlarge"))
    assert price is not None
    assert (price.usd_per_hour, price.as_of) == (21.5, dt.date(2026, 7, 20))
    assert price.source == "catalog, on-demand in us-east-1"


def test_a_price_in_the_run_file_replaces_the_catalog_price() -> None:
    price = find_price(Price(instance="trn1.32xlarge", usd_per_hour=8.2, market="reserved"))
    assert price is not None
    assert price.usd_per_hour == 8.2
    assert price.source == "run file, reserved"


@pytest.mark.parametrize(
    ("name", "region", "dollars", "source"),
    [
        ("g5.xlarge", "eu-central-1", 1.258, "catalog, on-demand in eu-central-1"),
        ("g7e.12xlarge", "us-east-1", 8.28608, "catalog, on-demand in us-east-1"),
        ("g7.48xlarge", "us-west-2", 28.51328, "catalog, on-demand in us-west-2"),
        ("p5e.48xlarge", "us-east-2", 43.26, "catalog, Capacity Block in us-east-2"),
    ],
)
def test_a_price_names_its_region_and_market(
    name: str, region: str, dollars: float, source: str
) -> None:
    price = find_price(Price(instance=name, region=region))
    assert price is not None
    assert (price.usd_per_hour, price.source) == (dollars, source)
    assert price.as_of is not None


def test_every_price_of_a_region_has_a_date_and_a_source() -> None:
    listed = [price for prices in load_prices().values() for price in prices]
    assert {price.region for price in listed} >= {"us-east-1", "us-west-2", "eu-west-1"}
    assert all(price.source and price.usd_per_hour > 0 for price in listed)
    assert all(price.as_of > dt.date(2022, 1, 1) for price in listed)
    assert {price.instance for price in listed} <= set(load_instances())


def test_the_sizes_of_a_family_have_the_same_chip() -> None:
    """The sizes that a family's price list has are all in the catalog."""
    chips = {name: (item.chip, item.chips) for name, item in load_instances().items()}
    assert [chips[f"g6.{size}xlarge"] for size in (4, 16, 24)] == [("L4", 1), ("L4", 1), ("L4", 4)]
    assert chips["g7e.24xlarge"] == ("RTX-PRO-6000-SE (g7e)", 4)
    priced = [item for item in load_instances().values() if item.chips and item.usd_per_hour]
    assert len(priced) >= 45 + 34
    assert all(item.chip in load_chips() for item in priced)


@pytest.mark.parametrize("price", [Price(), Price(instance="trn2.48xlarge")])
def test_a_missing_price_is_unknown(price: Price) -> None:
    assert find_price(price) is None


def test_an_unknown_machine_type_is_refused_with_the_closest_name() -> None:
    with pytest.raises(SettingsError, match=r"did you mean 'p5\.48xlarge'"):
        find_instance("p5.48large")
    with pytest.raises(SettingsError, match="set usd_per_hour"):
        find_instance("my-own-machine")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"market": "spot"}, "set its usd_per_hour"),
        ({"as_of": "2026-01-01"}, "set both"),
        ({"usd_per_hour": -1}, "greater than or equal to 0"),
    ],
)
def test_an_incomplete_price_is_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Price.model_validate(table)


def test_an_old_price_has_a_warning() -> None:
    price = find_price(Price(usd_per_hour=3.0, as_of=dt.date(2026, 1, 1)))
    assert price is not None
    assert price.staleness_warning(dt.date(2026, 4, 1)) is None
    assert "91 days old" in (price.staleness_warning(dt.date(2026, 4, 2)) or "")
