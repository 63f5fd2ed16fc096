"""The charts of a comparison: all runs in one, with the band and the noise of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.comparison import sentences
from regauge.comparison.cost import between
from regauge.comparison.gaps import at
from regauge.comparison.verdict import LOSS, measured
from regauge.reporting.drawing import Band, Bar, Chart, Level, Line, Place, Scale, bars, curves
from regauge.reporting.run_charts import memory
from regauge.results.series import smoothed

if TYPE_CHECKING:
    from regauge.comparison.compare import Compared
    from regauge.comparison.gaps import Metric
    from regauge.results.run_folder import Run
    from regauge.results.series import Points, Series

METRICS = 4
"""Held-out metrics that are drawn, the first ones."""
SMALLEST = 1e-9
"""Drawn in place of a difference of zero, which a logarithmic axis does not have."""
SPEED, PADDING = "train/tokens_per_second", "train/padding_share"
DIFFERENCES = Scale(y="relative difference", logarithmic=True)


def charts(found: Compared, key: str) -> tuple[Chart, ...]:
    """Return the charts of a comparison; `key` keeps ids apart in a page."""
    place = Place(key, " and ".join(run.name for run in found.runs))
    drawn = [chart for metric in _metrics(found) for chart in _measured(found, metric, place)]
    drawn += curves("Training loss, smoothed", _losses(found), place)
    drawn += _differences(found, place)
    drawn += _against_cost(found, place)
    drawn += bars("Slots per second", _speeds(found), place, unit=" slots/s")
    drawn += _scaling(found, place)
    drawn += bars("Memory of a process", memory(found.runs), place, unit=" MB")
    return tuple(drawn)


def _metrics(found: Compared) -> list[Metric]:
    """Return the metrics that some run shares with the first one, each once."""
    named = {metric.name: metric for parity in found.parities for metric in parity.metrics}
    return list(named.values())[:METRICS]


def _measured(found: Compared, metric: Metric, place: Place) -> list[Chart]:
    """Draw a held-out metric of all runs within what may differ from the first."""
    lines = [Line(run.name, measured(run).get(metric.name, ()), "points") for run in found.runs]
    first = measured(found.runs[0])[metric.name]
    band = _around(f"± {sentences.percent(metric.band)}", first, ((0, metric.band),))
    noise = _around("noise of the first", first, metric.noise, hatched=True)
    beside = (band, noise) if metric.noise else (band,)
    return curves(metric.name, lines, place, beside=beside)


def _around(label: str, first: Series, shares: Series, *, hatched: bool = False) -> Band:
    lower = tuple((step, value - abs(value) * at(shares, step)) for step, value in first)
    upper = tuple((step, value + abs(value) * at(shares, step)) for step, value in first)
    return Band(label, lower, upper, hatched)


def _losses(found: Compared) -> list[Line]:
    return [Line(run.name, smoothed(run.series.get(LOSS, ())), "mean") for run in found.runs]


def _differences(found: Compared, place: Place) -> list[Chart]:
    """Draw how far the training loss of each run is from the first one's, step by step."""
    lines = []
    for parity in found.parities:
        points = tuple((gap.step, max(gap.share, SMALLEST)) for gap in parity.losses)
        lines.append(Line(parity.theirs, points, "mean"))
    if found.noise and found.parities:
        floor = tuple((step, max(share, SMALLEST)) for step, share in found.parities[0].floor)
        lines.append(Line("noise of the first", floor, "raw"))
    band = Level(f"band, {sentences.percent(found.band)}", found.band)
    title = "Training loss: difference from the first"
    return curves(title, lines, place, scale=DIFFERENCES, beside=(band,))


def _against_cost(found: Compared, place: Place) -> list[Chart]:
    """Draw the target's metric against dollars, or machine time where a price is unknown."""
    if found.target is None:
        return []
    priced = all(one.rate is not None for one in found.spent)
    lines = [Line(run.name, _cost(run, found, priced=priced), "points") for run in found.runs]
    level = Level("target", found.target.value)
    x = "dollars" if priced else "seconds of machine time"
    title = f"{found.target.metric} against {x}"
    return curves(title, lines, place, scale=Scale(x=x), beside=(level,))


def _cost(run: Run, found: Compared, *, priced: bool) -> Points:
    """Return the metric by what was spent until it was measured."""
    if found.target is None:
        return ()
    seconds = run.spent.get("machine_seconds", ())
    rate = next((one.rate for one in found.spent if one.run == run.name), None)
    factor = rate.usd_per_second if priced and rate else 1.0
    spent = [
        (between(seconds, step), value) for step, value in run.series.get(found.target.metric, ())
    ]
    return tuple((paid * factor, value) for paid, value in spent if paid is not None)


def _speeds(found: Compared) -> list[Bar]:
    """Return how many slots each run computes in a second: real tokens, and padding."""
    known = []
    for run in found.runs:
        speed, padding = _median(run.series.get(SPEED, ())), run.ledger.get("padding_share")
        if speed is None or padding is None or padding >= 1:
            continue
        slots = speed / (1 - padding)
        known.append(Bar(run.name, (("real tokens", speed), ("padding", slots - speed))))
    return known


def _scaling(found: Compared, place: Place) -> list[Chart]:
    """Draw the speed over the number of devices, where runs differ in it, beside the ideal."""
    points: dict[int, float] = {}
    for run in found.runs:
        speed = _median(run.series.get(SPEED, ()))
        if run.devices is not None and speed is not None:
            points[run.devices] = max(speed, points.get(run.devices, 0.0))
    if len(points) < 2:  # noqa: PLR2004  (a line)
        return []
    measured = tuple(sorted(points.items()))
    devices, speed = measured[0]
    ideal = tuple((count, speed * count / devices) for count, _ in measured)
    lines = [Line("measured", measured, "points"), Line("in proportion", ideal, "mean")]
    return curves("Real tokens per second", lines, place, scale=Scale(x="device"))


def _median(series: Series) -> float | None:
    """Return the middle value: the first intervals of a run are slower."""
    values = sorted(value for _, value in series)
    return values[len(values) // 2] if values else None
