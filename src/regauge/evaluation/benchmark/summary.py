"""Shared parts of training, artifact and server benchmarks: repeats, rates, costs, documents.

An unknown value is None, never zero. This module measures nothing itself.
"""

from __future__ import annotations

import datetime as dt
import math
import statistics
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from regauge.config.output_files import BENCHMARK
from regauge.evaluation.benchmark.load_generator import percentile
from regauge.evaluation.report.benchmark_section import PERCENTILES
from regauge.evaluation.report.benchmarks import read_benchmark
from regauge.inference.export.manifest import MANIFEST
from regauge.machines.catalog import find_price
from regauge.system.errors import SettingsError
from regauge.system.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from regauge.evaluation.benchmark.serving_settings import ArrivalSettings
    from regauge.evaluation.benchmark.settings import OpenLoop
    from regauge.machines.settings import Price

Document = dict[str, Any]
Latencies = Sequence[float | None]
"""Milliseconds per request; None if it was dropped or refused."""
Name = TypeVar("Name")
Result = TypeVar("Result")


def today() -> dt.date:
    """Return the current UTC date."""
    return dt.datetime.now(dt.UTC).date()


def repeat_alternately(
    names: Iterable[Name], num_repeats: int, measure: Callable[[Name, int], Result]
) -> dict[Name, list[Result]]:
    """Return name -> results of `measure(name, repeat number)`.

    Machine speed drifts from minute to minute. Therefore every name is measured once before any is
    measured again.
    """
    results: dict[Name, list[Result]] = {name: [] for name in names}
    for repeat, name in product(range(1, num_repeats + 1), results):
        results[name].append(measure(name, repeat))
    return results


def find_percentiles(repeats: Sequence[Latencies]) -> dict[str, float | None]:
    """Return the median over repeats for each latency percentile.

    It is None if a repeat has too few requests for it: the other repeats' median could be below a
    smaller percentile. It is also None if the median belongs to a dropped request.
    """
    medians = {}
    for percent in PERCENTILES:
        values = [
            percentile([math.inf if value is None else value for value in latencies], percent)
            for latencies in repeats
        ]
        known = [value for value in values if value is not None]
        median = statistics.median(known) if len(known) == len(values) else math.inf
        medians[f"p{percent}_ms"] = median if math.isfinite(median) else None
    return medians


def find_dropped_fraction(repeats: Sequence[Latencies]) -> float | None:
    """Return the fraction of dropped requests; None without requests."""
    latencies = [latency for repeat in repeats for latency in repeat]
    return latencies.count(None) / len(latencies) if latencies else None


def list_rates(
    open_loop: OpenLoop | ArrivalSettings, full_rate: float
) -> list[tuple[float | None, float]]:
    """Return (fraction of the full rate or None, requests per second) for each open-loop rate."""
    relative = [(fraction, fraction * full_rate) for fraction in open_loop.load_fractions]
    return [*relative, *((None, rate) for rate in open_loop.requests_per_second)]


def compute_usd_per_million(usd_per_hour: float | None, per_second: float) -> float | None:
    """Return dollars per million results."""
    if usd_per_hour is None or per_second <= 0:
        return None
    return usd_per_hour / SECONDS_PER_HOUR / per_second * 1e6


def describe_price(settings: Price) -> Document | None:
    """Return a price with source, date and a warning if it is old; None if unknown."""
    price = find_price(settings)
    if price is None:
        return None
    return {
        "usd_per_hour": price.usd_per_hour,
        "source": price.source,
        "as_of": price.as_of.isoformat() if price.as_of else None,
        "instance": settings.instance,
        "staleness_warning": price.staleness_warning(today()),
    }


def format_price(settings: Price) -> str:
    """Return a price in words; raises SettingsError for an unknown machine type."""
    price = find_price(settings)
    return price.description if price else "unknown"


def read_earlier(folder: Path, kind: str, description: str) -> Document:
    """Return the benchmark document in an output folder; empty without one.

    Raises SettingsError for a folder with other content: an artifact, or a benchmark other than the
    described one.
    """
    if (folder / MANIFEST).exists():
        raise SettingsError(f"{folder} is an artifact or a dataset", "set another output.folder")
    path = folder / BENCHMARK
    document = read_benchmark(path) if path.exists() else {}
    if document and document.get("kind") != kind:
        raise SettingsError(f"{path} is not {description}", "set another output.folder")
    return document
