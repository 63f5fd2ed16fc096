"""List chips, machine types and prices with their sources; import and refresh them.

For example:

    $ regauge catalog show p5.48xlarge
"""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands
from regauge.machines import catalog
from regauge.machines.updates.catalog_files import import_file, store_prices
from regauge.machines.updates.price_refresh import fetch_prices
from regauge.system import choices
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.machines.catalog import CatalogChip, CatalogPrice, Instance

Action = Literal["list", "show", "import", "refresh"]


def main(
    action: Annotated[Action, Parameter(help="Action on the catalog.")],
    *names: Annotated[
        str, Parameter(help="Parts of names to list, names to show or refresh, files to import.")
    ],
    chips: Annotated[bool, Parameter(help="With list: list chips, not machine types.")] = False,
    region: Annotated[str, Parameter(help="With refresh: price region.")] = catalog.REGION,
    json: commands.OutputFormat = commands.TEXT,
) -> dict[str, Any]:
    """List chips, machine types and dated prices; import rows from a file; refresh prices.

    `refresh` reads on-demand prices from AWS's price list with your credentials.

    For example:

        >>> regauge.catalog("show", "p5.48xlarge")
    """
    if region != catalog.REGION and action != "refresh":
        raise SettingsError(f"--region has no effect on {action}", "remove it")
    if chips and action != "list":
        raise SettingsError(f"--chips has no effect on {action}", "remove it")
    if action == "list":
        answer = list_chips(names) if chips else list_instances(names)
    elif action == "show":
        answer = show_entries(names)
    elif action == "import":
        answer = import_files(names)
    else:
        answer = refresh_prices(names, region)
    if action == "show" and not json.is_json:
        for entry in answer["entries"]:
            commands.show({entry["name"]: entry}, as_json=False)
        return answer
    return commands.show(answer, as_json=json.is_json)


def list_instances(words: Sequence[str]) -> dict[str, Any]:
    """Return the machine types whose name or chip contains a word; all without words.

    Old prices are named in `warnings`. Raises SettingsError if no name matches.
    """
    instances = catalog.load_instances()
    names = _select(words, {name: f"{name} {item.chip}" for name, item in instances.items()})
    stale = [name for name in names if _is_stale(instances[name])]
    answer: dict[str, Any] = {"instances": [_describe(instances[name]) for name in names]}
    if stale:
        age = f"older than {catalog.STALE_DAYS} days"
        text = f"{len(stale)} of {len(names)} prices are {age}; run: regauge catalog refresh"
        answer["warnings"] = [text]
    return answer


def _describe(instance: Instance) -> dict[str, Any]:
    return {
        "name": instance.name,
        "chip": instance.chip,
        "chips": instance.chips,
        "usd_per_hour": instance.usd_per_hour,
        "as_of": str(instance.as_of) if instance.as_of else None,
        "network_gbit_per_s": instance.network_gbit_per_s,
    }


def _is_stale(instance: Instance) -> bool:
    price = catalog.find_listed_price(instance)
    return price is not None and price.staleness_warning(_today()) is not None


def _today() -> dt.date:
    return dt.datetime.now(dt.UTC).date()


def list_chips(words: Sequence[str]) -> dict[str, Any]:
    """Return the chips whose name or vendor contains a word; all without words."""
    chips = catalog.load_chips()
    names = _select(words, {name: f"{name} {chip.vendor}" for name, chip in chips.items()})
    keys = ("name", "vendor", "bf16_teraflops", "memory_gb", "bandwidth_gb_per_s", "link_gb_per_s")
    return {"chips": [{key: getattr(chips[name], key) for key in keys} for name in names]}


def _select(words: Sequence[str], texts: dict[str, str]) -> list[str]:
    """Return the names whose text contains a word; raises SettingsError for an unmatched word."""
    for word in words:
        if not any(word.lower() in text.lower() for text in texts.values()):
            remedy = choices.did_you_mean(word, list(texts))
            raise SettingsError(f"'{word}' is not in the catalog", remedy)
    lowered = [word.lower() for word in words]
    return [
        name
        for name, text in texts.items()
        if not words or any(word in text.lower() for word in lowered)
    ]


def show_entries(names: Sequence[str]) -> dict[str, Any]:
    """Return all values for chips and machine types, with sources and price history.

    Raises SettingsError without names, and for an unknown name with the closest one.
    """
    if not names:
        raise SettingsError("'show' needs a name", "write: regauge catalog show p5.48xlarge")
    return {"entries": [_show_entry(name) for name in names]}


def _show_entry(name: str) -> dict[str, Any]:
    chips, instances = catalog.load_chips(), catalog.load_instances()
    if name in instances:
        return _show_instance(instances[name])
    if name in chips:
        return _drop_unknown(chips[name])
    remedy = choices.did_you_mean(name, [*instances, *chips])
    raise SettingsError(f"'{name}' is not in the catalog", remedy)


def _show_instance(instance: Instance) -> dict[str, Any]:
    entry = _drop_unknown(instance) | {"efa_interfaces": catalog.find_efa_interfaces(instance.name)}
    prices = catalog.load_prices().get(instance.name, ())
    entry["prices"] = ", ".join(_describe_price(price) for price in prices)
    if (price := catalog.find_listed_price(instance)) is not None:
        warning = price.staleness_warning(_today())
        return entry | ({"warning": warning} if warning else {})
    return entry


def _drop_unknown(entry: Instance | CatalogChip) -> dict[str, Any]:
    values = {key: value for key, value in asdict(entry).items() if value is not None}
    return {key: str(item) if isinstance(item, dt.date) else item for key, item in values.items()}


def import_files(names: Sequence[str]) -> dict[str, Any]:
    """Add CSV rows to the user's catalog.

    Raises SettingsError without files, and for a file with another column, unit or value.
    """
    if not names:
        raise SettingsError("'import' needs a file", "write: regauge catalog import prices.csv")
    return {"files": [import_file(Path(name)) for name in names]}


def _describe_price(price: CatalogPrice) -> str:
    suffix = "" if price.region == catalog.REGION else f" in {price.region}"
    market = "" if price.market == "on-demand" else f" as {price.market}"
    return f"{price.as_of}: {price.usd_per_hour:g}{suffix}{market}"


def refresh_prices(names: Sequence[str], region: str = catalog.REGION) -> dict[str, Any]:
    """Read current on-demand prices from AWS and add them to the user's catalog.

    Without names, all machine types are read. Returns the changes. Raises PreflightError without
    boto3 or credentials, and TransientError if the service is unreachable.
    """
    before = catalog.load_instances()
    requested = list(names) or list(before)
    prices = fetch_prices(requested, region, _today())
    file = store_prices(prices)
    changes = [
        f"{item.instance}: {before[item.instance].usd_per_hour} -> {item.usd_per_hour:g} USD/h"
        for item in prices
        if before[item.instance].usd_per_hour != item.usd_per_hour
    ]
    missing = sorted(set(requested) - {item.instance for item in prices})
    return {
        "num_prices": len(prices),
        "changes": changes,
        "not_offered": missing,
        "file": str(file),
    }
