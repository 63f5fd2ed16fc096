"""Reads current on-demand prices from AWS's price list, with the user's credentials.

The price list is the boto3 service `pricing`, which answers in us-east-1 for all regions.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

from regauge.machines.aws_client import AwsClient
from regauge.machines.catalog import CatalogPrice, find_instance
from regauge.system.errors import DataError
from regauge.system.json_files import parse_object

PRICE_LIST_REGION = "us-east-1"
"""Region for the price list's endpoint; it has prices for all regions."""
SERVICE = "AmazonEC2"
FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
"""Attributes that select a plain Linux machine paid by the hour."""
HOUR = "Hrs"


def fetch_prices(instances: Iterable[str], region: str, today: dt.date) -> list[CatalogPrice]:
    """Return on-demand prices for machine types in a region; types without one are left out.

    Raises PreflightError without boto3 or credentials, TransientError if the service is
    unreachable, and SettingsError for an unknown machine type.
    """
    names = [find_instance(name, "catalog refresh").name for name in instances]
    with AwsClient("pricing", PRICE_LIST_REGION, "the region") as client:
        prices = [_fetch_price(client, name, region) for name in names]
    source = f"AWS price list, {SERVICE}, {region}"
    return [
        CatalogPrice(name, today, price, source, region)
        for name, price in zip(names, prices, strict=True)
        if price is not None
    ]


def _fetch_price(client: AwsClient, instance: str, region: str) -> float | None:
    """Return a machine type's USD per hour; None if the region does not have it."""
    attributes = {**FILTERS, "instanceType": instance, "regionCode": region}
    filters = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value}
        for field, value in attributes.items()
    ]
    answer = client.call("get_products", ServiceCode=SERVICE, Filters=filters, MaxResults=100)
    return read_price(answer, instance)


def read_price(answer: Mapping[str, Any], instance: str) -> float | None:
    """Return the USD per hour in a GetProducts answer; None without products.

    Raises DataError for another shape, another unit, or two different prices.
    """
    try:
        prices = {price for text in answer["PriceList"] for price in _list_prices(text)}
    except (KeyError, TypeError, ValueError) as error:
        problem = f"the price list has another shape for {instance}: {error!r}"
        raise DataError(problem, "update regauge, or import prices from a file") from None
    if len(prices) > 1:
        listed = ", ".join(f"{price:g}" for price in sorted(prices))
        problem = f"the price list has several prices for {instance}: {listed}"
        raise DataError(problem, "import the right one with: regauge catalog import FILE")
    return next(iter(prices), None)


def _list_prices(text: str) -> list[float]:
    product = parse_object(text.encode())
    dimensions = [
        dimension
        for term in product["terms"].get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
    ]
    if units := {dimension["unit"] for dimension in dimensions} - {HOUR}:
        raise ValueError(f"the unit is {min(units)}, not {HOUR}")
    prices = [float(dimension["pricePerUnit"]["USD"]) for dimension in dimensions]
    return [price for price in prices if price > 0]
