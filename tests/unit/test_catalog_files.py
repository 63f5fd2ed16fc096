"""Catalog files of a user: columns, units, values, and rows that replace built-in ones."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from regauge import cli
from regauge.machines import catalog
from regauge.machines.settings import Price
from regauge.machines.updates.catalog_files import TABLES, import_file
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PRICES = "instance,as_of,usd_per_hour,source\n"
CHIPS = "name,vendor,memory_gb,bf16_teraflops,bandwidth_gb_per_s,source\n"
INSTANCES = "name,chip,chips,memory_gib,network_gbit_per_s,source\n"


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "catalog"
    monkeypatch.setenv("REGAUGE_CATALOG", str(folder))
    catalog.forget_catalog()
    yield folder
    catalog.forget_catalog()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_file(text: str) -> Path:
        path = tmp_path / "rows.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_imported_prices_become_the_newest_ones(write: Callable[[str], Path]) -> None:
    before = catalog.load_instances()["p5.48xlarge"]
    answer = import_file(write(PRICES + "p5.48xlarge,2026-10-01,41.5,quote 17\n"))
    assert (answer["kind"], answer["num_rows"], answer["names"]) == ("prices", 1, ["p5.48xlarge"])
    after = catalog.load_instances()["p5.48xlarge"]
    assert (before.usd_per_hour, after.usd_per_hour) == (55.04, 41.5)
    assert (after.as_of, after.source) == (dt.date(2026, 10, 1), "quote 17")
    dates = [price.as_of for price in catalog.load_prices()["p5.48xlarge"]]
    assert dates == sorted(dates)
    assert dates[0] == dt.date(2023, 8, 8)


def test_an_older_imported_price_is_history_only(write: Callable[[str], Path]) -> None:
    import_file(write(PRICES + "p5.48xlarge,2024-01-01,90,quote 16\n"))
    assert catalog.load_instances()["p5.48xlarge"].usd_per_hour == 55.04
    assert 90 in {price.usd_per_hour for price in catalog.load_prices()["p5.48xlarge"]}


def test_a_second_import_replaces_the_price_of_a_date(
    write: Callable[[str], Path], user_folder: Path
) -> None:
    for price in ("41.5", "40"):
        import_file(write(PRICES + f"p5.48xlarge,2026-10-01,{price},quote\n"))
    assert catalog.load_instances()["p5.48xlarge"].usd_per_hour == 40
    assert len((user_folder / catalog.PRICES).read_text().splitlines()) == 2


def test_an_imported_chip_and_machine_type_can_be_used(write: Callable[[str], Path]) -> None:
    import_file(write(CHIPS + "X1,Example,64,500,2000,data sheet\n"))
    import_file(write(INSTANCES + "x1.8xlarge,X1,8,1024,400,data sheet\n"))
    chip = catalog.find_chip(Price(instance="x1.8xlarge"))
    assert chip is not None
    assert (chip.bf16_teraflops, chip.memory_gb, chip.bandwidth_gb_per_s) == (500, 64, 2000)
    instance = catalog.find_instance("x1.8xlarge")
    assert (instance.chips, instance.network_gbit_per_s) == (8, 400)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            CHIPS.replace("memory_gb", "memory_gib") + "X,V,64,5,2,s\n",
            "GB .1 GiB = 1.07.*memory_gb'",
        ),
        (
            CHIPS.replace("bf16_teraflops", "bf16_pflops") + "X,V,64,5,2,s\n",
            "name it 'bf16_teraflops'",
        ),
        (
            CHIPS.replace("bandwidth_gb_per_s", "bandwidth_tb_per_s") + "X,V,64,5,2,s\n",
            "1 TB/s = 1000",
        ),
        (
            PRICES.replace("usd_per_hour", "usd_per_second") + "p5.48xlarge,2026-10-01,1,s\n",
            "USD/h",
        ),
        (PRICES.replace("usd_per_hour", "eur_per_month") + "p5.48xlarge,2026-10-01,1,s\n", "730"),
        (INSTANCES.replace("gbit_per_s", "gb_per_s") + "x,H200-SXM-141GB,8,9,4,s\n", "8 Gbit/s"),
        (
            INSTANCES.replace("memory_gib", "memory_gb") + "x,H200-SXM-141GB,8,9,4,s\n",
            "memory_gib'",
        ),
        (CHIPS.replace("vendor", "vendr") + "X,V,64,5,2,s\n", "did you mean 'vendor'"),
        (PRICES.replace(",source", "") + "p5.48xlarge,2026-10-01,1\n", "'source' is missing"),
    ],
)
def test_a_wrong_column_names_the_right_one(
    write: Callable[[str], Path], text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(text)
    with pytest.raises(SettingsError, match=message):
        import_file(path)
    assert cli.main(["catalog", "import", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CHIPS + "X,V,64,312e12,2000,s\n", "bf16_teraflops = 312e12 is outside .*TFLOP/s"),
        (CHIPS + "X,V,80000,312,2000,s\n", "memory_gb = 80000 is outside 1 to 4096 GB"),
        (CHIPS + "X,V,80,nan,2000,s\n", "nan is outside"),
        (CHIPS + "X,V,80,fast,2000,s\n", "not a number; write it in TFLOP/s"),
        (CHIPS + "X,V,,312,2000,s\n", "line 2: 'memory_gb' is empty"),
        (PRICES + "p5.48xlarge,2026-10-01,-1,s\n", "usd_per_hour = -1 is outside"),
        (PRICES + "p5.48xlarge,01.10.2026,1,s\n", "write it as YYYY-MM-DD"),
        (PRICES + "p5.48xlarge,2999-01-01,1,s\n", "in the future"),
        (PRICES + "p5.48xlarg,2026-10-01,1,s\n", "did you mean 'p5.48xlarge'"),
        (PRICES + "p5.48xlarge,2026-10-01,1,s\n" * 2, "line 3 repeats p5.48xlarge"),
        (PRICES + "p5.48xlarge,2026-10-01,1,s,t\n", "more cells than the header"),
        (PRICES + "p5.48xlarge,2026-10-01\n", "fewer cells than the header"),
        (INSTANCES + "x,H200-SXM-141G,8,9,4,s\n", "did you mean 'H200-SXM-141GB'"),
        (INSTANCES + "x,H200-SXM-141GB,8.5,9,4,s\n", "not a whole number"),
        ("", "has no rows"),
    ],
)
def test_a_wrong_value_is_refused_with_its_line(
    write: Callable[[str], Path], user_folder: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        import_file(write(text))
    assert not user_folder.exists(), "nothing is stored"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        import_file(tmp_path / "missing.csv")
    (tmp_path / "latin.csv").write_bytes(PRICES.encode() + b"\xff\xfe,2026-10-01,1,s\n")
    with pytest.raises(SettingsError, match="UTF-8"):
        import_file(tmp_path / "latin.csv")


def test_a_damaged_user_file_is_named(user_folder: Path) -> None:
    user_folder.mkdir()
    (user_folder / catalog.PRICES).write_text("instance,as_of\np5.48xlarge,yesterday\n")
    with pytest.raises(SettingsError, match=r"price_history\.csv is damaged"):
        catalog.load_instances()


def test_the_columns_are_those_of_the_package() -> None:
    for table in TABLES.values():
        header = catalog.Path(catalog.__file__).with_name(table.file).read_text().splitlines()[0]
        assert set(header.split(",")) <= set(table.columns), table.file


def test_a_discount_reduces_the_price_of_the_catalog() -> None:
    discounts = {"p5": 0.25, "p4d.24xlarge": 0.5, "*": 0.1}
    prices = {
        name: catalog.find_price(Price(instance=name, discounts=discounts))
        for name in ("p5.48xlarge", "p4d.24xlarge", "trn1.32xlarge")
    }
    factors = {
        name: price.usd_per_hour / (catalog.find_instance(name).usd_per_hour or 0)
        for name, price in prices.items()
        if price is not None
    }
    assert factors == pytest.approx(
        {"p5.48xlarge": 0.75, "p4d.24xlarge": 0.5, "trn1.32xlarge": 0.9}
    )
    assert "less 25 %" in getattr(prices["p5.48xlarge"], "source", "")


def test_a_discount_contradicts_a_price() -> None:
    with pytest.raises(ValueError, match="remove them or usd_per_hour"):
        Price(usd_per_hour=3.0, discounts={"p5": 0.1})
