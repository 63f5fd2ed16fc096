"""Catalog of chips, machine types and their dated prices, each row with its source.

The data is in `chips.csv`, `instances.csv` and `efa.csv` in this folder. An empty cell means
unknown; it is never guessed from another row.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.choices import did_you_mean
from regauge.errors import SettingsError
from regauge.files import read_csv_rows
from regauge.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.planning.settings import Price

REGION = "us-east-1"
"""Region of all prices in the catalog."""
NO_VENDOR = "CPU"
"""Vendor of a machine type without accelerators."""
STALE_DAYS = 90
"""Age from which a price is reported as old: p5.48xlarge fell from 98.32 to 55.04 in a year."""


@dataclass(frozen=True)
class CatalogChip:
    """One accelerator or CPU model of the catalog."""

    name: str
    vendor: str
    tdp_watts: float | None
    """Thermal design power: the largest sustained power."""
    source: str


@dataclass(frozen=True)
class Instance:
    """A machine type of a cloud."""

    name: str
    chip: str
    chips: int | None
    """Number of accelerators; None for a CPU machine."""
    usd_per_hour: float | None
    """On-demand price in `REGION`; None if unknown."""
    as_of: dt.date | None
    """Date of the price."""
    source: str
    vcpus: int | None = None
    memory_gib: int | None = None
    """Main memory in GiB."""


@dataclass(frozen=True)
class MachinePrice:
    """Price of one machine, with its source and date."""

    usd_per_hour: float
    source: str
    as_of: dt.date | None = None

    @property
    def usd_per_second(self) -> float:
        """Price per second."""
        return self.usd_per_hour / SECONDS_PER_HOUR

    @property
    def description(self) -> str:
        """Price, source and date in words."""
        date = f", {self.as_of}" if self.as_of else ""
        return f"{self.usd_per_hour:g} USD per hour ({self.source}{date})"

    def staleness_warning(self, today: dt.date) -> str | None:
        """Return a warning about an old price; None if it is recent."""
        days = (today - self.as_of).days if self.as_of else 0
        if days <= STALE_DAYS:
            return None
        price = f"the price of {self.usd_per_hour:g} USD per hour"
        return f"{price} is {days} days old; set execution.price.usd_per_hour"


@cache
def load_chips() -> Mapping[str, CatalogChip]:
    """Return all chips of the catalog by name."""
    return {
        row["name"]: CatalogChip(
            row["name"], row["vendor"], _parse_number(row["tdp_watts"]), row["source"]
        )
        for row in _read_rows("chips.csv")
    }


@cache
def load_instances() -> Mapping[str, Instance]:
    """Return all machine types of the catalog by name."""
    return {
        row["name"]: Instance(
            name=row["name"],
            chip=row["chip"],
            chips=int(row["chips"]) if row["chips"] else None,
            usd_per_hour=_parse_number(row["usd_per_hour"]),
            as_of=dt.date.fromisoformat(row["as_of"]) if row["as_of"] else None,
            source=row["source"],
            vcpus=int(row["vcpus"]) if row["vcpus"] else None,
            memory_gib=int(row["memory_gib"]) if row["memory_gib"] else None,
        )
        for row in _read_rows("instances.csv")
    }


def find_instance(name: str, key: str = "price.instance") -> Instance:
    """Return a machine type; raises SettingsError with the closest name if it is unknown.

    `key` is the setting that names it.
    """
    if name not in load_instances():
        suggestion = did_you_mean(name, list(load_instances()))
        alternative = "set usd_per_hour instead" if key == "price.instance" else f"correct {key}"
        remedy = suggestion if suggestion.startswith("did") else alternative
        raise SettingsError(f"{key} = '{name}' is not in the catalog", remedy)
    return load_instances()[name]


@cache
def _load_efa_interfaces() -> Mapping[str, int]:
    return {row["instance"]: int(row["interfaces"]) for row in _read_rows("efa.csv")}


def find_efa_interfaces(instance: str) -> int:
    """Return the number of EFA network interfaces of a machine type; 0 if it has none."""
    return _load_efa_interfaces().get(instance, 0)


def find_vendor(instance: Instance) -> str:
    """Return the vendor of a machine type's accelerators; `NO_VENDOR` without accelerators."""
    chip = load_chips().get(instance.chip)
    return chip.vendor if chip is not None and instance.chips else NO_VENDOR


def find_chip(price: Price) -> CatalogChip | None:
    """Return the chip of a price's machine type; None if no type is set or its chip is unknown."""
    if price.instance is None:
        return None
    return load_chips().get(find_instance(price.instance).chip)


def find_price(price: Price) -> MachinePrice | None:
    """Return the price of one machine; None if unknown.

    `usd_per_hour` of the settings takes precedence over the catalog. Raises SettingsError for an
    unknown machine type.
    """
    machine = find_instance(price.instance) if price.instance is not None else None
    if price.usd_per_hour is not None:
        return MachinePrice(price.usd_per_hour, f"run file, {price.market}", price.as_of)
    if machine is None or machine.usd_per_hour is None:
        return None
    source = f"catalog, on-demand in {REGION}"
    return MachinePrice(machine.usd_per_hour, source, machine.as_of)


def _read_rows(name: str) -> list[dict[str, str]]:
    return read_csv_rows(Path(__file__).with_name(name))


def _parse_number(text: str) -> float | None:
    return float(text) if text else None
