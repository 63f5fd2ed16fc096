"""Inference plans: machines, batches, replicas, dollars per million, hours.

An artifact has batch times measured by `export`. Another chip computes them in proportion to one
weight's roofline: FLOPs at its peak and bytes at its bandwidth. A model without an artifact is
planned from its products (`roofline`). Both have a wider interval.
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
from regauge.machines.machine_rates import find_machine, load_cores
from regauge.machines.settings import Price
from regauge.planner import intervals
from regauge.planner.roofline import BYTES, MEMORY_SHARE, find_product_share, place_model
from regauge.planner.training_job import Estimate
from regauge.system.errors import SettingsError
from regauge.system.units import GIGA, MILLION, SECONDS_PER_HOUR, TERA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.machines.catalog import CatalogChip, Instance
    from regauge.planner.model_shape import ModelShape

SAME_CHIP_SPREAD, OTHER_CHIP_SPREAD, ROOFLINE_SPREAD = 0.1, 0.4, 0.3
"""Standard deviation for a time's logarithm: measured, on another chip, and by products."""
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
    """What is planned on each machine type, and its text lengths."""

    shapes: tuple[tuple[int, int], ...]
    """Length and rows for each batch shape."""
    histogram: tuple[int, ...]
    """Entry i is the number of texts with i tokens."""
    price: Price = field(default_factory=Price, kw_only=True)
    """Region and discounts for catalog prices, or the only machine type's price."""

    @property
    def obstacle(self) -> SettingsError:
        """The error if no machine type can be planned."""
        raise NotImplementedError

    def place(self, instance: Instance, *, is_named: bool) -> MachineTimes | None:
        """Return the times on a machine type; None if it cannot be planned."""
        raise NotImplementedError


@dataclass(frozen=True)
class ArtifactRequest(InferenceRequest):
    """An artifact with measured times."""

    times: ShapeTimes
    chip: str
    """Chip used in the measurement, as named by the machine."""
    threads: int
    """CPU threads used in the measurement."""

    @property
    def obstacle(self) -> SettingsError:
        problem = f"the chip '{self.chip}' of the artifact is not in the catalog"
        remedy = "name its machine type with --on, or add it with: regauge catalog import FILE"
        return SettingsError(problem, remedy)

    def place(self, instance: Instance, *, is_named: bool) -> MachineTimes | None:
        """Return the measured times, or those that another chip has in proportion.

        A named type has the measured times if the measured chip is unknown.
        """
        measured, chip = find_measured_chip(self.chip), load_chips().get(instance.chip)
        replicas = count_replicas(instance, self.threads)
        if measured is not None and chip is not None and chip.name == measured.name:
            return MachineTimes(self.times, replicas, SAME_CHIP_SPREAD, self.shapes)
        if measured is None:
            same = MachineTimes(self.times, replicas, OTHER_CHIP_SPREAD, self.shapes)
            return same if is_named else None
        if chip is None or not _can_compare(measured, chip):
            return None
        scaled = ScaledTimes(self.times, measured, chip)
        return MachineTimes(scaled, replicas, OTHER_CHIP_SPREAD, self.shapes)


@dataclass(frozen=True)
class ModelRequest(InferenceRequest):
    """A model that was not measured."""

    shape: ModelShape
    new_tokens: int = 0
    """Tokens generated for each text; 0 for encoders."""

    @property
    def num_parameters(self) -> int:
        """Parameters, with a causal model's output layer."""
        return round(self.shape.parameters("lm" if self.shape.attention.is_causal else "none"))

    @property
    def obstacle(self) -> SettingsError:
        gigabytes = BYTES * self.num_parameters / GIGA
        problem = f"no accelerator of known speed holds the model's {gigabytes:.3g} GB and one text"
        return SettingsError(problem, "name other machine types, or shorten the texts")

    def place(self, instance: Instance, *, is_named: bool) -> MachineTimes | None:  # noqa: ARG002
        """Return the times by the model's products; None without accelerators or memory.

        As many devices hold a copy as serve the most texts.
        """
        if not instance.chips:
            return None
        longest = find_quantile_length(self.histogram, 1.0)
        try:
            machine = find_machine(instance.name)
        except SettingsError:  # the memory of its chip is unknown
            return None
        placements = [
            MachineTimes(
                times,
                machine.devices // times.devices,
                ROOFLINE_SPREAD,
                tuple(shape for shape in self.shapes if times.fits(*shape)),
            )
            for times in place_model(self.shape, machine, longest, self.new_tokens)
        ]
        return max(placements, key=self._find_rate, default=None)

    def _find_rate(self, placement: MachineTimes) -> float:
        return placement.replicas / find_row_milliseconds(self, placement)[0]


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
    latency_ms: Estimate | None
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


class MachineTimes(NamedTuple):
    """A request's times on a machine type."""

    times: ShapeTimes
    replicas: int
    spread: float
    """Standard deviation for a time's logarithm."""
    shapes: tuple[tuple[int, int], ...]
    """Batch shapes that the memory holds."""


class Placed(NamedTuple):
    """A machine type for a request."""

    instance: Instance
    usd_per_hour: float
    placement: MachineTimes


@dataclass(frozen=True)
class ScaledTimes:
    """Measured times on another similar chip."""

    times: ShapeTimes
    measured: CatalogChip
    chip: CatalogChip

    def milliseconds(self, length: int, rows: int) -> float:
        """Return the measured milliseconds, times both rooflines' ratio."""
        before, after = (
            _weight_seconds(chip, length * rows) for chip in (self.measured, self.chip)
        )
        return self.times.milliseconds(length, rows) * after / before


def list_placements(request: InferenceRequest, names: Sequence[str] = ()) -> list[Placed]:
    """Return the machine types that can be planned, or the named ones.

    Types without a price are left out. Raises SettingsError if nothing can be planned, or if a
    named type lacks a price.
    """
    instances = [find_instance(name, "--on") for name in names] or list(load_instances().values())
    region, has_prices, placements = request.price.region, False, []
    for instance in instances:
        price = _find_price(instance, request.price)
        if price is None:
            if names:
                raise missing_price(region, instance.name)
            continue
        has_prices = True
        if (placement := request.place(instance, is_named=bool(names))) is not None:
            placements.append(Placed(instance, price, placement))
    if not placements:
        raise request.obstacle if has_prices else missing_price(region)
    return placements


def count_replicas(instance: Instance, threads: int) -> int:
    """Return how many programs compute at the same time: one per core or thread group."""
    if instance.chips:
        return instance.chips * load_cores().get(instance.chip, 1)
    return max((instance.vcpus or 1) // max(threads, 1), 1)


def _can_compare(measured: CatalogChip, chip: CatalogChip) -> bool:
    """Return whether two chips are both processors or both not, with known peaks."""
    is_same_kind = (measured.vendor == NO_VENDOR) == (chip.vendor == NO_VENDOR)
    return is_same_kind and _find_peak(measured) is not None and _find_peak(chip) is not None


def _weight_seconds(chip: CatalogChip, tokens: int) -> float:
    """Return a core's time for one bf16 weight in a product with some tokens."""
    peak = (_find_peak(chip) or math.inf) * TERA / load_cores().get(chip.name, 1)
    compute = 2 * tokens / (find_product_share(chip.name) * peak)
    bandwidth = (chip.bandwidth_gb_per_s or math.inf) * GIGA
    return math.hypot(compute, 2 / (MEMORY_SHARE * bandwidth))


def _find_peak(chip: CatalogChip) -> float | None:
    return chip.bf16_teraflops or chip.fp16_teraflops or chip.fp32_teraflops


def plan_prediction(
    request: InferenceRequest, num_rows: int | None, names: Sequence[str] = ()
) -> list[InferenceOption]:
    """Return single machines for batch inference on a number of rows, cheapest first.

    Hours and dollars are for all rows, if their number is known; several machines divide the hours,
    not the dollars.
    """
    options = []
    for placed in list_placements(request, names):
        milliseconds, rows = find_row_milliseconds(request, placed.placement)
        rate = 1000 / milliseconds * placed.placement.replicas * HOST_SHARE
        option = _build_option(placed, 1, rows, rate)
        if num_rows is not None:
            hours = option.rows_per_second.invert(num_rows / SECONDS_PER_HOUR)
            option = replace(option, hours=hours, usd=hours.scale(placed.usd_per_hour))
        options.append(option)
    return sorted(options, key=lambda option: option.usd_per_million.p50)


def plan_serving(
    request: InferenceRequest, rate: float, slo_ms: float, names: Sequence[str] = ()
) -> list[InferenceOption]:
    """Return machines that serve `rate` requests per second within `slo_ms`, the cheapest first.

    The batch is the largest one with which the p99 length meets the limit at p90. The machines
    suffice at their capacity's p10; the dollars for p50 and p10 are for fewer machines.
    Raises SettingsError if no machine type meets the limit, with the shortest time.
    """
    options, fastest = [], math.inf
    longest = find_quantile_length(request.histogram, 0.99)
    for placed in list_placements(request, names):
        placement = placed.placement

        def answer(rows: int, placement: MachineTimes = placement) -> Estimate:
            milliseconds = placement.times.milliseconds(longest, rows) * BATCHES_PER_ANSWER
            return intervals.estimate(milliseconds, placement.spread)

        fastest = min(fastest, answer(1).p90)
        row_counts = {rows for _, rows in placement.shapes}
        sizes = [rows for rows in row_counts if answer(rows).p90 <= slo_ms]
        if not sizes:
            continue
        milliseconds, rows = find_row_milliseconds(request, placement, max(sizes))
        capacity = 1000 / milliseconds * placement.replicas * MAX_LOAD
        one = intervals.estimate(capacity, placement.spread)
        counts = [math.ceil(rate / value) for value in (one.p90, one.p50, one.p10)]
        option = _build_option(placed, counts[-1], rows, capacity)
        dollars = placed.usd_per_hour / SECONDS_PER_HOUR / rate * MILLION
        usd = Estimate(*(dollars * count for count in counts))
        options.append(replace(option, latency_ms=answer(rows), usd_per_million=usd))
    if not options:
        problem = f"no machine type answers within {slo_ms:g} ms"
        raise SettingsError(problem, f"allow {fastest:.3g} ms, or export a faster artifact")
    return sorted(options, key=lambda option: (option.usd_per_million.p90, option.count))


def _find_price(instance: Instance, settings: Price) -> float | None:
    """Return a machine type's dollars per hour; None if unknown."""
    if settings.usd_per_hour is not None and settings.instance in (None, instance.name):
        return settings.usd_per_hour
    price = find_listed_price(instance, settings.discounts, settings.region)
    return price.usd_per_hour if price else None


def _build_option(placed: Placed, count: int, rows: int, rate: float) -> InferenceOption:
    """Return an option with `count` machines, each with a rate in rows per second."""
    estimate = intervals.estimate(rate, placed.placement.spread)
    price = placed.usd_per_hour
    return InferenceOption(
        instance=placed.instance,
        usd_per_hour=price,
        count=count,
        replicas=placed.placement.replicas,
        rows=rows,
        rows_per_second=estimate.scale(count),
        latency_ms=None,
        usd_per_million=estimate.invert(price / SECONDS_PER_HOUR * MILLION),
        is_measured=placed.placement.spread == SAME_CHIP_SPREAD,
    )


def find_row_milliseconds(
    request: InferenceRequest, placement: MachineTimes, max_rows: int | None = None
) -> tuple[float, int]:
    """Return mean milliseconds per row, and the best batch's row count.

    Each text is padded to the next batch length. A batch has at most `max_rows` rows, and a row
    count from its length unless all of those are larger: another shape's time is an estimate,
    which may be lower than each measured one.
    """
    shapes, times = placement.shapes, placement.times
    lengths = sorted({length for length, _ in shapes})
    limit = math.inf if max_rows is None else max_rows
    small = [rows for rows in sorted({rows for _, rows in shapes}) if rows <= limit]
    counts = dict.fromkeys(lengths, 0)
    for length, count in enumerate(request.histogram):
        if count:
            index = min(bisect_left(lengths, length), len(lengths) - 1)
            counts[lengths[index]] += count
    total, best_rows = 0.0, 1
    for length, count in counts.items():
        if count:
            sizes = [rows for rows in small if (length, rows) in shapes] or small
            best = min(sizes, key=lambda rows: times.milliseconds(length, rows) / rows)
            total += count * times.milliseconds(length, best) / best
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


def find_mean_length(histogram: Sequence[int]) -> float:
    """Return the mean tokens per text."""
    return sum(length * count for length, count in enumerate(histogram)) / sum(histogram)


def list_powers(limit: int) -> list[int]:
    """Return the powers of 2 up to a limit."""
    return [2**power for power in range(limit.bit_length())] if limit > 0 else []
