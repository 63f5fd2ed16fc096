"""Prices from AWS's price list, with recorded answers of `GetProducts`."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pytest

from regauge.machines import catalog
from regauge.machines.updates.catalog_files import store_prices
from regauge.machines.updates.price_refresh import fetch_prices, read_price
from regauge.system.errors import DataError, PreflightError, SettingsError, TransientError

if TYPE_CHECKING:
    from pathlib import Path

boto3 = pytest.importorskip("boto3", reason="no boto3: the refresh of prices is not proved")
botocore_stub = pytest.importorskip("botocore.stub")
TODAY = dt.date(2026, 11, 20)


def build_product(instance: str, usd: str, unit: str = "Hrs") -> str:
    sku, term, rate = "5RHA6Q4EXAMPLE", "JRTCKXETXF", "6YS6EN2CT7"
    dimension = {
        "unit": unit,
        "endRange": "Inf",
        "description": f"${usd} per On Demand Linux {instance} Instance Hour",
        "appliesTo": [],
        "rateCode": f"{sku}.{term}.{rate}",
        "beginRange": "0",
        "pricePerUnit": {"USD": usd},
    }
    offer = {
        "priceDimensions": {f"{sku}.{term}.{rate}": dimension},
        "sku": sku,
        "effectiveDate": "2026-11-01T00:00:00Z",
        "offerTermCode": term,
        "termAttributes": {},
    }
    product = {
        "product": {
            "productFamily": "Compute Instance",
            "attributes": {"instanceType": instance, "regionCode": "us-east-1"},
            "sku": sku,
        },
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {f"{sku}.{term}": offer}},
        "version": "20261118000000",
        "publicationDate": "2026-11-18T00:00:00Z",
    }
    return json.dumps(product)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the client of the price list that is used, and sends nothing."""
    pricing = boto3.client(
        "pricing",
        region_name="us-east-1",
        aws_access_key_id="example",
        aws_secret_access_key="example",  # noqa: S106
    )
    monkeypatch.setattr(boto3, "client", lambda *_, **__: pricing)
    return pricing


def expected_request(instance: str, region: str = "us-east-1") -> dict[str, Any]:
    attributes = {
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "instanceType": instance,
        "regionCode": region,
    }
    filters = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value}
        for field, value in attributes.items()
    ]
    return {"ServiceCode": "AmazonEC2", "Filters": filters, "MaxResults": 100}


def test_prices_are_read_and_stored(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGAUGE_CATALOG", str(tmp_path))
    with botocore_stub.Stubber(client) as stub:
        for name, products in (
            ("p5.48xlarge", [build_product("p5.48xlarge", "51.2000000000")]),
            ("p5e.48xlarge", []),
        ):
            stub.add_response("get_products", {"PriceList": products}, expected_request(name))
        prices = fetch_prices(["p5.48xlarge", "p5e.48xlarge"], "us-east-1", TODAY)
        stub.assert_no_pending_responses()
    assert [(price.instance, price.usd_per_hour, price.as_of) for price in prices] == [
        ("p5.48xlarge", 51.2, TODAY)
    ]
    store_prices(prices)
    instance = catalog.find_instance("p5.48xlarge")
    assert (instance.usd_per_hour, instance.as_of) == (51.2, TODAY)
    assert instance.source == "AWS price list, AmazonEC2, us-east-1"


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("AccessDeniedException", PreflightError, "allow pricing:GetProducts"),
        ("ExpiredTokenException", PreflightError, "renew the AWS credentials"),
        ("ThrottlingException", TransientError, "try again later"),
        ("InvalidParameterException", SettingsError, "correct the setting"),
    ],
)
def test_an_error_of_the_service_has_a_remedy(
    client: Any, code: str, error: type[Exception], message: str
) -> None:
    stub = botocore_stub.Stubber(client)
    stub.add_client_error("get_products", code, "refused")
    with stub, pytest.raises(error, match=message):
        fetch_prices(["p5.48xlarge"], "us-east-1", TODAY)


@pytest.mark.usefixtures("client")
def test_an_unknown_machine_type_is_refused_before_a_request() -> None:
    with pytest.raises(SettingsError, match=r"did you mean 'p5\.48xlarge'"):
        fetch_prices(["p5.48xlarg"], "us-east-1", TODAY)


@pytest.mark.parametrize(
    ("products", "message"),
    [
        (["{}"], "another shape"),
        (["[]"], "another shape"),
        ([build_product("x", "1", unit="Quantity")], "the unit is Quantity"),
        ([build_product("x", "1"), build_product("x", "2")], "several prices for x: 1, 2"),
    ],
)
def test_an_answer_that_is_unclear_is_refused(products: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_price({"PriceList": products}, "x")


def test_prices_of_zero_are_reservations_and_ignored() -> None:
    products = [build_product("x", "0.0000000000"), build_product("x", "1.5")]
    assert read_price({"PriceList": products}, "x") == 1.5
