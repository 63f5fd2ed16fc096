"""Catalog of chips, machine types and their dated prices, each row with a source.

The data is in `chips.csv`, `instances.csv`, `price_history.csv`, `inference_chips.csv` and
`efa.csv` in this folder. Files with the first three names in the `find_user_folder` folder add rows
and replace rows with the same name. Of two prices of a machine type, the one with the newer date
applies. An empty cell means unknown; it is never guessed from another row.
"""

from __future__ import annotations

import datetime as dt
import difflib
import os
import re
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError
from regauge.system.files import read_csv_rows
from regauge.system.units import SECONDS_PER_HOUR
from regauge.system.wording import join_first

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.machines.settings import Price

T = TypeVar("T")
REGION = "us-east-1"
"""Region for the package's prices; users may add others."""
NO_VENDOR = "CPU"
"""Vendor for machine types without accelerators."""
EVERY_INSTANCE = "*"
"""Discount key for all machine types not listed themselves."""
STALE_DAYS = 90
"""Age from which a price is reported as old: p5.48xlarge fell from 98.32 to 55.04 in a year."""
_CHIPS = re.compile(r"(?:(?P<count>[1-9]\d*) ?[x*] ?)?(?P<chip>\w[\w -]*)", re.IGNORECASE)
"""Chips with their number: `A100`, `8xA100`, `8x A100 80GB`."""
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
MAX_SUGGESTIONS = 6
"""Maximum number of machine types named in a message."""
CHIPS, INSTANCES, PRICES = "chips.csv", "instances.csv", "price_history.csv"
"""Catalog files, in this folder and in the user's folder."""


@dataclass(frozen=True)
class CatalogChip:
    name: str
    vendor: str
    source: str = ""
    tdp_watts: float | None = None
    """Thermal design power: the largest sustained power."""
    bf16_teraflops: float | None = None
    """Peak for dense bf16 matrix products in TFLOP/s, without structured sparsity."""
    fp16_teraflops: float | None = None
    fp32_teraflops: float | None = None
    tf32_teraflops: float | None = None
    fp8_teraflops: float | None = None
    memory_gb: float | None = None
    """Device memory in GB (10^9 bytes) as the vendor names it."""
    bandwidth_gb_per_s: float | None = None
    """Device memory bandwidth in GB/s."""
    link_gb_per_s: float | None = None
    """Bandwidth to the other chips in a machine in GB/s, in one direction."""
    measured_bf16_teraflops: float | None = None
    """Largest measured rate for bf16 matrix products in TFLOP/s."""


@dataclass(frozen=True)
class Instance:
    name: str
    chip: str
    chips: int | None = None
    """Accelerator count; None for a CPU machine."""
    usd_per_hour: float | None = None
    """On-demand price in `REGION`; None if unknown."""
    as_of: dt.date | None = None
    source: str = ""
    vcpus: int | None = None
    memory_gib: int | None = None
    """Main memory in GiB."""
    network_gbit_per_s: float | None = None
    """Network bandwidth between machines in Gbit/s, in one direction."""
    region: str = REGION


@dataclass(frozen=True)
class CatalogPrice:
    instance: str
    as_of: dt.date
    usd_per_hour: float
    source: str
    region: str = REGION
    market: str = "on-demand"
    """How the machine is sold; `Capacity Block` is a reservation paid in advance."""


@dataclass(frozen=True)
class MachinePrice:
    usd_per_hour: float
    source: str
    as_of: dt.date | None = None

    @property
    def usd_per_second(self) -> float:
        return self.usd_per_hour / SECONDS_PER_HOUR

    @property
    def description(self) -> str:
        date = f", {self.as_of}" if self.as_of else ""
        return f"{self.usd_per_hour:g} USD per hour ({self.source}{date})"

    def staleness_warning(self, today: dt.date) -> str | None:
        """Return a warning about an old price; None if it is recent."""
        days = (today - self.as_of).days if self.as_of else 0
        if days <= STALE_DAYS:
            return None
        price = f"the price of {self.usd_per_hour:g} USD per hour"
        remedy = "set execution.price.usd_per_hour, or run: regauge catalog refresh"
        return f"{price} is {days} days old; {remedy}"


def find_user_folder() -> Path:
    """Return the folder of a user's catalog files, by the XDG Base Directory Specification.

    The variable REGAUGE_CATALOG names another folder.
    """
    return _find_folder(*map(os.environ.get, ("REGAUGE_CATALOG", "XDG_DATA_HOME", "HOME")))


@cache
def _find_folder(folder: str | None, data: str | None, home: str | None) -> Path:
    """Return the folder for values of the variables; a plan asks for it thousands of times."""
    del home  # `Path` reads it
    if folder:
        return Path(folder).expanduser()
    base = Path(data) if data and data.startswith("/") else Path.home() / ".local" / "share"
    return base / "regauge" / "catalog"


def load_chips() -> Mapping[str, CatalogChip]:
    return _load_chips(find_user_folder())


def load_instances() -> Mapping[str, Instance]:
    """Return name -> machine type, with newest prices."""
    return _load_instances(find_user_folder())


def load_prices() -> Mapping[str, tuple[CatalogPrice, ...]]:
    """Return machine type -> prices, oldest first."""
    return _load_prices(find_user_folder())


def forget_catalog() -> None:
    """Discard the rows in memory, so that changed files are read again."""
    for load in (_load_chips, _load_instances, _load_prices):
        load.cache_clear()


@cache
def _load_chips(folder: Path) -> Mapping[str, CatalogChip]:
    return {chip.name: chip for chip in _parse_rows(CHIPS, folder, CatalogChip)}


@cache
def _load_instances(folder: Path) -> Mapping[str, Instance]:
    instances = {item.name: item for item in _parse_rows(INSTANCES, folder, Instance)}
    for name, listed in _load_prices(folder).items():
        newest = next((price for price in reversed(listed) if price.region == REGION), None)
        instance = instances.get(name)
        if instance and newest and newest.as_of >= (instance.as_of or dt.date.min):
            instances[name] = replace(
                instance,
                usd_per_hour=newest.usd_per_hour,
                as_of=newest.as_of,
                source=newest.source,
                region=newest.region,
            )
    return instances


@cache
def _load_prices(folder: Path) -> Mapping[str, tuple[CatalogPrice, ...]]:
    prices: dict[str, dict[tuple[dt.date, str], CatalogPrice]] = {}
    listed = [
        CatalogPrice(item.name, item.as_of, item.usd_per_hour, item.source)
        for item in _parse_rows(INSTANCES, folder, Instance)
        if item.usd_per_hour is not None and item.as_of is not None
    ]
    for price in (*listed, *_parse_rows(PRICES, folder, CatalogPrice)):
        prices.setdefault(price.instance, {})[price.as_of, price.region] = price
    return {
        name: tuple(by_date[key] for key in sorted(by_date)) for name, by_date in prices.items()
    }


def find_instance(name: str, key: str = "price.instance") -> Instance:
    """Return a machine type; raises SettingsError with the closest name if it is unknown.

    `key` is the setting that names it.
    """
    if name in load_instances():
        return load_instances()[name]
    is_option = key.startswith("--")
    problem = f"{key}{':' if is_option else ' ='} '{name}' is not in the catalog"
    chip = _CHIPS.fullmatch(name)
    if with_chip := find_by_chips(name) or (chip and find_by_chips(chip["chip"])):
        names = join_first(with_chip, MAX_SUGGESTIONS)
        raise SettingsError(problem, f"write a machine type with that chip: {names}")
    if is_option:
        (nearest,) = difflib.get_close_matches(name, list(load_instances()), n=1, cutoff=0.0)
        raise SettingsError(problem, f"did you mean '{nearest}'? All names: regauge catalog list")
    suggestion = did_you_mean(name, list(load_instances()))
    alternative = "set usd_per_hour instead" if key == "price.instance" else f"correct {key}"
    raise SettingsError(problem, suggestion if suggestion.startswith("did") else alternative)


def find_by_chips(text: str) -> list[str]:
    """Return the machine types with a chip, or with this number of chips; empty if none has.

    >>> find_by_chips("8xA100")
    ['p4d.24xlarge', 'p4de.24xlarge']
    """
    match = _CHIPS.fullmatch(text)
    if match is None:
        return []
    words = _split_chip(match["chip"])
    return [
        item.name
        for item in load_instances().values()
        if item.chips
        and all(any(map(partial(_is_named, word), _split_chip(item.chip))) for word in words)
        and int(match["count"] or item.chips) == item.chips
    ]


def _is_named(word: str, part: str) -> bool:
    """Return whether a word names a part of a chip name: `trainium` each one, `a10` not `a100`."""
    return part == word or (word[-1].isalpha() and part.startswith(word))


def _split_chip(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


@cache
def _load_efa_interfaces() -> Mapping[str, int]:
    return {row["instance"]: int(row["interfaces"]) for row in _read_rows("efa.csv")}


def find_efa_interfaces(instance: str) -> int:
    """Return a machine type's EFA network interface count; 0 without EFA."""
    return _load_efa_interfaces().get(instance, 0)


@cache
def load_inference_chips() -> frozenset[str]:
    """Return the names of chips that cannot train."""
    return frozenset(row["chip"] for row in _read_rows("inference_chips.csv"))


def find_vendor(instance: Instance) -> str:
    """Return a machine type's accelerator vendor; `NO_VENDOR` without accelerators."""
    chip = load_chips().get(instance.chip)
    return chip.vendor if chip is not None and instance.chips else NO_VENDOR


def find_chip(price: Price) -> CatalogChip | None:
    """Return the chip for a price's machine type; None without a type, or if unknown."""
    if price.instance is None:
        return None
    return load_chips().get(find_instance(price.instance).chip)


def find_price(price: Price) -> MachinePrice | None:
    """Return one machine's price; None if unknown.

    `usd_per_hour` in the settings takes precedence over the catalog price, which is reduced by the
    configured discount. Raises SettingsError for an unknown machine type.
    """
    machine = find_instance(price.instance) if price.instance is not None else None
    if price.usd_per_hour is not None:
        return MachinePrice(price.usd_per_hour, f"run file, {price.market}", price.as_of)
    return None if machine is None else find_listed_price(machine, price.discounts, price.region)


def find_listed_price(
    machine: Instance, discounts: Mapping[str, float] | None = None, region: str = REGION
) -> MachinePrice | None:
    """Return the newest price of the catalog in a region, less a discount; None if unknown.

    `discounts` has fractions by machine type, by family (`p5`), or by `*` for all others.
    """
    listed = [item for item in load_prices().get(machine.name, ()) if item.region == region]
    if not listed:
        return None
    newest = listed[-1]
    source = f"catalog, {newest.market} in {region}"
    names = (machine.name, machine.name.partition(".")[0], EVERY_INSTANCE)
    discount = next((discounts[name] for name in names if name in discounts), 0) if discounts else 0
    if discount:
        source += f", less {100 * discount:g} %"
    return MachinePrice(newest.usd_per_hour * (1 - discount), source, newest.as_of)


def missing_price(region: str, instance: str = "") -> SettingsError:
    """Return the error for a region without a price for a machine type, or for any type."""
    problem = f"the catalog has no price in {region}{f' for {instance}' if instance else ''}"
    if not _REGION.fullmatch(region):
        regions = {price.region for listed in load_prices().values() for price in listed}
        return SettingsError(problem, did_you_mean(region, sorted(regions)))
    remedy = f"set execution.price.usd_per_hour, or run: regauge catalog refresh --region {region}"
    return SettingsError(problem, remedy)


def _parse_rows(name: str, user_folder: Path, row_type: type[T]) -> list[T]:
    """Return the rows in a catalog file, then those in the user's file with that name.

    Raises SettingsError if the user's file is damaged.
    """
    adapter, path = TypeAdapter(row_type), user_folder / name

    def parse(rows: list[dict[str, str]]) -> list[T]:
        cells = ({column: cell for column, cell in row.items() if cell} for row in rows)
        return [adapter.validate_python(row) for row in cells]

    rows = parse(_read_rows(name))
    if not path.is_file():
        return rows
    try:
        return rows + parse(read_csv_rows(path))
    except ValidationError as error:
        (first, *_) = error.errors()
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError) as error:
        reason = repr(error)
    raise SettingsError(f"{path} is damaged: {reason}", "remove it, then import its rows again")


def _read_rows(name: str) -> list[dict[str, str]]:
    return read_csv_rows(Path(__file__).with_name(name))
