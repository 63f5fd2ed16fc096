"""Chips, machine types and their dated prices, each row with its source.

`chips.csv` and `instances.csv` lie beside this file. What a row does not say is unknown, and is
never guessed from another.
"""

from __future__ import annotations

import csv
import datetime as dt
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.choices import did_you_mean
from regauge.errors import SettingsError
from regauge.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.planning.settings import Price

REGION = "us-east-1"
"""Of all prices in the catalog."""
STALE_DAYS = 90
"""A price older than that is said to be old: p5.48xlarge went from 98.32 to 55.04 in a year."""


@dataclass(frozen=True)
class Chip:
    """One accelerator, or one processor."""

    name: str
    vendor: str
    tdp_watts: float | None
    """Thermal design power: no more than that is drawn for long."""
    source: str


@dataclass(frozen=True)
class Instance:
    """A machine type that can be rented."""

    name: str
    chip: str
    chips: int | None
    """None for a machine of processors."""
    usd_per_hour: float | None
    """On demand; None where no source says it."""
    as_of: dt.date | None
    source: str


@dataclass(frozen=True)
class Rate:
    """What one machine costs, and who says so."""

    usd_per_hour: float
    source: str
    as_of: dt.date | None = None

    @property
    def usd_per_second(self) -> float:
        """The same, for a second."""
        return self.usd_per_hour / SECONDS_PER_HOUR

    @property
    def told(self) -> str:
        """The price with who says it and when."""
        day = f", {self.as_of}" if self.as_of else ""
        return f"{self.usd_per_hour:g} USD an hour ({self.source}{day})"

    def remark(self, today: dt.date) -> str | None:
        """Return what is to be said of an old price; None for a fresh one."""
        days = (today - self.as_of).days if self.as_of else 0
        if days <= STALE_DAYS:
            return None
        price = f"{self.usd_per_hour:g} USD an hour"
        return f"{price} is {days} days old; set execution.price.usd_per_hour"


@cache
def chips() -> Mapping[str, Chip]:
    """Return all chips by name."""
    return {
        row["name"]: Chip(row["name"], row["vendor"], _number(row["tdp_watts"]), row["source"])
        for row in _rows("chips.csv")
    }


@cache
def instances() -> Mapping[str, Instance]:
    """Return all machine types by name."""
    return {
        row["name"]: Instance(
            name=row["name"],
            chip=row["chip"],
            chips=int(row["chips"]) if row["chips"] else None,
            usd_per_hour=_number(row["usd_per_hour"]),
            as_of=dt.date.fromisoformat(row["as_of"]) if row["as_of"] else None,
            source=row["source"],
        )
        for row in _rows("instances.csv")
    }


def instance(name: str) -> Instance:
    """Return a machine type; raises SettingsError with the nearest name for an unknown one."""
    if name not in instances():
        near = did_you_mean(name, list(instances()))
        remedy = near if near.startswith("did") else "set usd_per_hour instead"
        raise SettingsError(f"price.instance = '{name}' is not in the catalog", remedy)
    return instances()[name]


def chip_of(price: Price) -> Chip | None:
    """Return the chip of a price's machine type; None where that or the chip is unknown."""
    return chips().get(instance(price.instance).chip) if price.instance is not None else None


def rate(price: Price) -> Rate | None:
    """Return what one machine costs; None where that is unknown."""
    kind = instance(price.instance) if price.instance is not None else None
    if price.usd_per_hour is not None:
        return Rate(price.usd_per_hour, f"the run file, {price.market}", price.as_of)
    if kind is None or kind.usd_per_hour is None:
        return None
    return Rate(kind.usd_per_hour, f"the catalog, on demand in {REGION}", kind.as_of)


def _rows(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> float | None:
    return float(text) if text else None
