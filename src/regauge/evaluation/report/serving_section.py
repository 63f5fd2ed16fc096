"""Section of a report on a benchmark of a server: loads, saturation, regressions and charts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.evaluation.report.inference_section import (
    PERCENTILES,
    ReportTable,
    format_milliseconds,
)
from regauge.run_folders import formatting
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from regauge.evaluation.report.drawing import Chart, ChartContext

Document = dict[str, Any]
Row = dict[str, str]
LOG_SCALE_RATIO = 20
"""Ratio of the largest to the smallest latency above which the axis is logarithmic."""
WIDE_COLUMNS = ("p90 ms", "p95 ms", "requests", "statuses")
"""Columns that do not fit a terminal."""
OK = "200"


@dataclass(frozen=True)
class ServingSection:
    """One benchmark of a server, formatted."""

    title: str
    tables: tuple[ReportTable, ...]
    summary: tuple[str, ...]
    """The saturation rate, and the regressions if there is a baseline."""
    sentences: tuple[str, ...]
    """Method, formulas and sources."""
    document: Document


def build_serving_section(document: Document, name: str = "") -> ServingSection | None:
    """Return the section of a benchmark of a server; None for any other document.

    `name` is the name of the output folder, for the title.
    """
    if document.get("kind") != "serving":
        return None
    title = f"Serving{': ' if name else ''}{name}"
    tables = (
        _build_closed_table(document["closed_loop"]),
        *_build_open_table(document["open_loop"]),
        *_build_trial_table(document["saturation"]),
        *_build_regression_table(document.get("regression")),
    )
    summary = (*_describe_saturation(document), *_describe_regression(document.get("regression")))
    return ServingSection(title, tables, summary, tuple(_describe_method(document)), document)


def _build_closed_table(rows: Sequence[Document]) -> ReportTable:
    cells = tuple(
        {
            "connections x texts": f"{row['concurrency']} x {row['texts_per_request']}",
            "texts/s": f"{row['texts_per_second']:,.4g}",
            **_format_load(row),
        }
        for row in rows
    )
    title = "Closed loop: each connection has one request at a time"
    return ReportTable(title, cells, WIDE_COLUMNS)


def _build_open_table(rows: Sequence[Document]) -> Iterator[ReportTable]:
    """Yield the table of the open loop, if the benchmark has one."""
    cells = tuple(
        {
            "arrivals": row["arrivals"],
            "load": "fixed" if row["load_fraction"] is None else f"{row['load_fraction']:.0%}",
            "requests/s": f"{row['rate']:,.4g}",
            **_format_load(row),
        }
        for row in rows
    )
    if cells:
        yield ReportTable("Open loop: latency from the moment of arrival", cells, WIDE_COLUMNS)


def _build_trial_table(saturation: Document | None) -> Iterator[ReportTable]:
    """Yield the table of the trials of the search, if there was one."""
    cells = tuple(
        {
            "requests/s": f"{trial['rate']:,.4g}",
            "meets objective": "yes" if trial["meets_objective"] else "no",
            **_format_load(trial),
        }
        for trial in sorted((saturation or {}).get("trials", ()), key=lambda trial: trial["rate"])
    )
    if cells:
        yield ReportTable("Search of the saturation rate", cells, WIDE_COLUMNS)


def _format_load(row: Mapping[str, Any]) -> Row:
    """Return the cells that all loads have."""
    answered = row["statuses"].get(OK, 0)
    failed = {status: count for status, count in row["statuses"].items() if status != OK}
    is_slow = "" if row["generator"]["kept_up"] else " *"
    return {
        **{f"p{percent} ms": _format_latency(row, percent) for percent in PERCENTILES},
        "goodput": formatting.percent(row["goodput_fraction"]),
        "dropped": formatting.percent(row["dropped_fraction"]),
        "requests": f"{row['num_requests']:,}",
        "statuses": ", ".join(f"{status}: {count:,}" for status, count in failed.items())
        or f"{OK}: {answered:,}",
        "client": formatting.percent(row["generator"]["processor_share"]) + is_slow,
    }


def _format_latency(row: Mapping[str, Any], percent: int) -> str:
    value = row[f"p{percent}_ms"]
    is_lost = value is None and 100 * (row["dropped_fraction"] or 0.0) > 100 - percent
    return "dropped" if is_lost else format_milliseconds(value)


def _build_regression_table(regression: Document | None) -> Iterator[ReportTable]:
    """Yield the figures that became worse than permitted, if there are any."""
    cells = tuple(
        {
            "load": row["load"],
            "figure": row["figure"].replace("_", " "),
            "baseline": f"{row['baseline']:,.4g}",
            "now": f"{row['now']:,.4g}",
            "change": f"{row['change']:+.1%}",
        }
        for row in (regression or {}).get("rows", ())
        if row["is_regression"]
    )
    if cells:
        yield ReportTable("Regressions", cells)


def _describe_saturation(document: Document) -> Iterator[str]:
    saturation = document["saturation"]
    if saturation is None:
        return
    objective = f"p{saturation['percentile']} <= {saturation['slo_ms']:g} ms"
    rate = saturation["requests_per_second"]
    if rate is None:
        yield f"No tried rate meets the objective {objective}."
        return
    usd = formatting.dollars(saturation["usd_per_million_texts"])
    cost = "" if usd == formatting.UNKNOWN else f", {usd} per million texts"
    yield f"The server meets {objective} up to {rate:,.4g} requests/s{cost}."


def _describe_regression(regression: Document | None) -> Iterator[str]:
    if regression is None:
        return
    count = sum(row["is_regression"] for row in regression["rows"])
    limit = f"{regression['max_regression']:.0%}"
    total = format_count(len(regression["rows"]), "figure")
    verb = "is" if count == 1 else "are"
    yield f"{count} of {total} {verb} worse than the baseline by more than {limit}."


def _describe_method(document: Document) -> Iterator[str]:
    """Yield the method, and the formula or source of each figure."""
    formulas, trace, server = document["formulas"], document["trace"], document["server"]
    name = server["artifact"] or server["url"]
    yield f"Server: {name}, protocol {server['protocol']}, {document['date']}."
    if server["start_seconds"] is not None:
        yield f"Startup: {formatting.duration(server['start_seconds'])} until it is healthy."
    yield (
        f"Texts: {trace['count']:,} {trace['origin']}, {trace['mean_characters']:.0f} characters "
        f"on average, {trace['max_characters']:,} at most."
    )
    yield f"Closed loop: {formulas['closed_loop']}. Open loop: {formulas['open_loop']}."
    yield f"Percentiles: {formulas['percentiles_ms']}. Texts/s: {formulas['texts_per_second']}."
    yield f"Goodput: {formulas['goodput']}. Saturation: {formulas['saturation']}."
    yield f"Client: processor time of the load generator per second. {_describe_client(document)}"
    yield f"Dollars: {formulas['usd_per_million_texts']}. {_describe_price(document['price'])}."


def _describe_client(document: Document) -> str:
    rows = [*document["closed_loop"], *document["open_loop"]]
    formula = document["formulas"]["generator"]
    if all(row["generator"]["kept_up"] for row in rows):
        return f"It kept up with every load: {formula}."
    return f"*: it did not keep up, so the latency may be the client's; {formula}."


def _describe_price(price: Mapping[str, Any] | None) -> str:
    if price is None:
        return "Price: unknown, set execution.price"
    date = f", {price['as_of']}" if price["as_of"] else ""
    return f"Price: {price['usd_per_hour']:g} USD per hour ({price['source']}{date})"


def build_charts(section: ServingSection, context: ChartContext) -> list[Chart]:
    """Draw the latency by throughput of all loads, and the time of the server's phases."""
    return [
        *build_latency_chart(section, context),
        *_build_phase_chart(section.document, context),
    ]


def build_latency_chart(section: ServingSection, context: ChartContext) -> list[Chart]:
    """Draw the latency by throughput: a curve per request size and per kind of arrivals."""
    from regauge.evaluation.report.drawing import AxisScale, Curve, draw_curves

    document = section.document
    groups: dict[str, list[Document]] = {}
    for row in document["closed_loop"]:
        count = format_count(row["texts_per_request"], "text")
        groups.setdefault(f"closed, {count}", []).append(row)
    for row in document["open_loop"]:
        groups.setdefault(row["arrivals"], []).append(row)
    curves = []
    for label, rows in groups.items():
        ordered = sorted(rows, key=lambda row: row["texts_per_second"])
        points = tuple(
            (row["texts_per_second"], row["p99_ms"] or row["max_ms"])
            for row in ordered
            if row["p99_ms"] or row["max_ms"]
        )
        curves.append(Curve(label, points, "points"))
    values = [value for curve in curves for _, value in curve.points]
    logarithmic = bool(values) and max(values) > LOG_SCALE_RATIO * min(values)
    scale = AxisScale(x="texts/s", y="ms", logarithmic=logarithmic)
    return draw_curves("p99 latency by throughput", curves, context, scale=scale)


def _build_phase_chart(document: Document, context: ChartContext) -> list[Chart]:
    """Draw the milliseconds per text of each phase of the server, if it has counters of them."""
    from regauge.evaluation.report.drawing import Bar, draw_bars

    bars = []
    for row in document["closed_loop"]:
        phases = row["phase_seconds"] or {}
        texts = row["texts_per_second"] * row["duration_seconds"]
        if phases and texts:
            pieces = tuple((name, 1e3 * seconds / texts) for name, seconds in phases.items())
            bars.append(Bar(f"{row['concurrency']} x {row['texts_per_request']}", pieces))
    return draw_bars("Milliseconds of the server per text", bars, context, unit=" ms")
