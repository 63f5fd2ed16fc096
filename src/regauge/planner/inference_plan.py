"""Inference plans for an artifact: machines, buckets, replicas, dollars per million, hours.

`export` measured the batch times (`bucket_times.json`). Another chip computes in proportion to its
data sheet, with a wider interval: the slower of its peak and its bandwidth decides.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from regauge.machines.catalog import (
    NO_VENDOR,
    find_instance,
    find_listed_price,
    load_chips,
    load_instances,
    missing_price,
)
from regauge.machines.machine_rates import load_cores
from regauge.machines.settings import Price
from regauge.planner import intervals
from regauge.planner.training_job import Estimate
from regauge.system.errors import SettingsError
from regauge.system.units import MILLION, SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.machines.catalog import CatalogChip, Instance

SAME_CHIP_SPREAD, OTHER_CHIP_SPREAD = 0.1, 0.4
"""Standard deviation of a time's logarithm, on the measured chip and on another one."""
MAX_LOAD = 0.7
"""Share of the time that a server computes; above it, queues grow."""
BATCHES_PER_ANSWER = 2
"""Batches that a request waits for at most: the running one, and its own."""
HOST_SHARE = 0.9
"""Share of the measured rate that remains with reading, tokenizing and writing."""


class ShapeTimes(Protocol):
    """Batch shape -> milliseconds."""

    def milliseconds(self, length: int, rows: int) -> float:
        """Return the milliseconds for a batch with `rows` rows and `length` tokens each."""


@dataclass(frozen=True)
class InferenceRequest:
    """An artifact with measured times, and its text lengths."""

    times: ShapeTimes
    shapes: tuple[tuple[int, int], ...]
    """Measured length and rows for each batch shape."""
    chip: str
    """Chip used in the measurement, as named by the machine."""
    threads: int
    """CPU threads used in the measurement."""
    histogram: tuple[int, ...]
    """Entry i is the number of texts with i tokens."""
    price: Price = field(default_factory=Price)
    """Region and discounts for catalog prices, or the only machine type's price."""


@dataclass(frozen=True)
class InferenceOption:
    instance: Instance
    usd_per_hour: float
    """Dollars per hour for one machine."""
    count: int
    replicas: int
    """Programs that compute at the same time on one machine."""
    rows: int
    """Rows in the largest batch."""
    rows_per_second: Estimate
    """Rows per second over all machines, fully loaded."""
    latency_ms: float | None
    """Request milliseconds for the longest usual text (p99 length)."""
    usd_per_million: Estimate
    hours: Estimate | None = None
    usd: Estimate | None = None
    is_measured: bool = False
    """Whether the times were measured on this chip."""


def find_measured_chip(text: str) -> CatalogChip | None:
    """Return the catalog chip named in a machine's text, such as `NVIDIA L4`."""
    words = text.replace("(R)", " ").replace("-", " ").replace("_", " ").lower().split()
    for chip in load_chips().values():
        marks = [word.lower() for word in chip.name.replace("-", " ").split()]
        model = next((word for word in marks if any(char.isdigit() for char in word)), marks[0])
        if model in words:
            return chip
    return None


class Placed(NamedTuple):
    """A machine type for an artifact."""

    instance: Instance
    usd_per_hour: float
    factor: float
    """How much longer a batch takes than it was measured."""
    replicas: int
    is_measured: bool


def list_placements(request: InferenceRequest, names: Sequence[str] = ()) -> list[Placed]:
    """Return the machine types that can be planned, or the named ones.

    The measured chip has factor 1, and so does a named type if the measured chip is unknown. Types
    without a price are left out. Raises SettingsError if nothing can be planned, or if a named type
    lacks a price.
    """
    measured = find_measured_chip(request.chip)
    instances = [find_instance(name, "--on") for name in names] or list(load_instances().values())
    placements = []
    for instance in instances:
        chip = load_chips().get(instance.chip)
        is_measured = measured is not None and chip is not None and chip.name == measured.name
        factor = 1.0 if is_measured or (names and measured is None) else None
        if factor is None and measured is not None and chip is not None:
            factor = _compare_chips(measured, chip)
        price = _find_price(instance, request.price)
        if price is None and names:
            raise missing_price(request.price.region, instance.name)
        if factor is None or price is None:
            continue
        replicas = count_replicas(instance, request.threads)
        placements.append(Placed(instance, price, factor, replicas, is_measured))
    if not placements:
        problem = f"the chip '{request.chip}' of the artifact is not in the catalog"
        remedy = "name its machine type with --on, or add it with: regauge catalog import FILE"
        raise SettingsError(problem, remedy)
    return placements


def count_replicas(instance: Instance, threads: int) -> int:
    """Return how many programs compute at the same time: one per core or thread group."""
    if instance.chips:
        return instance.chips * load_cores().get(instance.chip, 1)
    return max((instance.vcpus or 1) // max(threads, 1), 1)


def _compare_chips(measured: CatalogChip, chip: CatalogChip) -> float | None:
    """Return how much longer a chip computes than the measured one; None if a peak is unknown.

    Cores are compared, if a chip has several. A processor and an accelerator are not compared.
    """
    if (measured.vendor == NO_VENDOR) != (chip.vendor == NO_VENDOR):
        return None
    before, after = _find_peak(measured), _find_peak(chip)
    if before is None or after is None:
        return None
    ratio = before / after
    if measured.bandwidth_gb_per_s and chip.bandwidth_gb_per_s:
        ratio = max(ratio, measured.bandwidth_gb_per_s / chip.bandwidth_gb_per_s)
    return ratio * load_cores().get(chip.name, 1) / load_cores().get(measured.name, 1)


def _find_peak(chip: CatalogChip) -> float | None:
    return chip.bf16_teraflops or chip.fp16_teraflops or chip.fp32_teraflops


def plan_prediction(
    request: InferenceRequest, num_rows: int, names: Sequence[str] = ()
) -> list[InferenceOption]:
    """Return single machines for batch inference on a number of rows, cheapest first.

    Hours and dollars are for all rows; several machines divide the hours, not the dollars.
    """
    milliseconds, rows = find_row_milliseconds(request)
    options = []
    for placed in list_placements(request, names):
        rate = 1000 / (milliseconds * placed.factor) * placed.replicas * HOST_SHARE
        option = _build_option(placed, 1, rows, rate)
        hours = option.rows_per_second.invert(num_rows / SECONDS_PER_HOUR)
        usd = hours.scale(placed.usd_per_hour)
        options.append(replace(option, hours=hours, usd=usd))
    return sorted(options, key=lambda option: option.usd_per_million.p50)


def plan_serving(
    request: InferenceRequest, rate: float, slo_ms: float, names: Sequence[str] = ()
) -> list[InferenceOption]:
    """Return machines that serve `rate` requests per second within `slo_ms`, the cheapest first.

    The batch is the largest one with which the p99 length meets the limit. Raises SettingsError if
    no machine type meets it, with the shortest time.
    """
    options, fastest = [], math.inf
    longest = find_quantile_length(request.histogram, 0.99)
    for placed in list_placements(request, names):
        spread = _find_spread(placed)
        worst = intervals.estimate(placed.factor, spread).p90 * BATCHES_PER_ANSWER
        fastest = min(fastest, request.times.milliseconds(longest, 1) * worst)
        sizes = [
            rows
            for rows in list_batch_rows(request)
            if request.times.milliseconds(longest, rows) * worst <= slo_ms
        ]
        if not sizes:
            continue
        milliseconds, rows = find_row_milliseconds(request, max(sizes))
        capacity = 1000 / (milliseconds * placed.factor) * placed.replicas * MAX_LOAD
        count = math.ceil(rate / intervals.estimate(capacity, spread).p10)
        option = _build_option(placed, count, rows, capacity)
        latency = request.times.milliseconds(longest, rows) * placed.factor * BATCHES_PER_ANSWER
        usd = placed.usd_per_hour * count / SECONDS_PER_HOUR / rate * MILLION
        options.append(replace(option, latency_ms=latency, usd_per_million=Estimate(usd, usd, usd)))
    if not options:
        problem = f"no machine type answers within {slo_ms:g} ms"
        raise SettingsError(problem, f"allow {fastest:.3g} ms, or export a faster artifact")
    return sorted(options, key=lambda option: (option.usd_per_million.p50, option.count))


def _find_spread(placed: Placed) -> float:
    return SAME_CHIP_SPREAD if placed.is_measured else OTHER_CHIP_SPREAD


def _find_price(instance: Instance, settings: Price) -> float | None:
    """Return a machine type's dollars per hour; None if unknown."""
    if settings.usd_per_hour is not None and settings.instance in (None, instance.name):
        return settings.usd_per_hour
    price = find_listed_price(instance, settings.discounts, settings.region)
    return price.usd_per_hour if price else None


def _build_option(placed: Placed, count: int, rows: int, rate: float) -> InferenceOption:
    """Return an option with `count` machines, each with a rate in rows per second."""
    estimate = intervals.estimate(rate, _find_spread(placed))
    price = placed.usd_per_hour
    return InferenceOption(
        instance=placed.instance,
        usd_per_hour=price,
        count=count,
        replicas=placed.replicas,
        rows=rows,
        rows_per_second=estimate.scale(count),
        latency_ms=None,
        usd_per_million=estimate.invert(price / SECONDS_PER_HOUR * MILLION),
        is_measured=placed.is_measured,
    )


def list_batch_rows(request: InferenceRequest) -> list[int]:
    """Return the measured batch row counts, in rising order."""
    return sorted({rows for _, rows in request.shapes})


def list_lengths(request: InferenceRequest) -> list[int]:
    return sorted({length for length, _ in request.shapes})


def find_row_milliseconds(
    request: InferenceRequest, max_rows: int | None = None
) -> tuple[float, int]:
    """Return mean milliseconds per row, and the best batch's row count.

    Each text is padded to the next measured length. A batch has at most `max_rows` rows, and a row
    count measured for its length unless all of those are larger: another shape's time is an
    estimate, which may be lower than each measured one.
    """
    lengths = list_lengths(request)
    limit = math.inf if max_rows is None else max_rows
    small = [rows for rows in list_batch_rows(request) if rows <= limit]
    counts = dict.fromkeys(lengths, 0)
    for length, count in enumerate(request.histogram):
        if count:
            index = min(bisect_left(lengths, length), len(lengths) - 1)
            counts[lengths[index]] += count
    total, best_rows = 0.0, 1
    for length, count in counts.items():
        if count:
            sizes = [rows for rows in small if (length, rows) in request.shapes] or small
            best = min(sizes, key=lambda rows: request.times.milliseconds(length, rows) / rows)
            total += count * request.times.milliseconds(length, best) / best
            best_rows = max(best_rows, best)
    return total / sum(counts.values()), best_rows


def find_quantile_length(histogram: Sequence[int], share: float) -> int:
    """Return the smallest length that covers a share of the texts."""
    limit, covered = share * sum(histogram), 0
    for length, count in enumerate(histogram):
        covered += count
        if covered >= limit:
            return max(length, 1)
    return max(len(histogram) - 1, 1)
