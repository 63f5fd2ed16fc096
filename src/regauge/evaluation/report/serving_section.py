"""Report section on a server benchmark: loads, saturation, regressions and charts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.evaluation.report.benchmark_section import (
    BenchmarkSection,
    ReportTable,
    build_tables,
    format_latencies,
    format_load,
    format_milliseconds,
    format_price,
)
from regauge.evaluation.report.charts import Bar, Curve, chart_bars, chart_latencies
from regauge.run_folders import formatting
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from regauge.evaluation.report.benchmark_section import Document, Row
    from regauge.evaluation.report.charts import Chart

LATENCY_TITLE = "p99 latency by throughput"
WIDE_COLUMNS = ("p90 ms", "p95 ms", "requests", "statuses")
"""Columns too wide for a terminal."""
OK = "200"


def build_section(document: Document, name: str = "") -> BenchmarkSection:
    """Return a server benchmark's section.

    `name` is the output folder's name, for the title.
    """
    saturation, regression = document["saturation"], document.get("regression")
    return BenchmarkSection(
        title=f"Serving{': ' if name else ''}{name}",
        tables=tuple(_build_tables(document)),
        summary=(*_describe_saturation(saturation), *_describe_regression(regression)),
        sentences=tuple(_describe_method(document)),
        document=document,
        charts=(*_chart_latencies(document), *_chart_phases(document)),
    )


def _build_tables(document: Document) -> Iterator[ReportTable]:
    closed_rows = tuple(
        {
            "connections x texts": _name_connections(row),
            "texts/s": f"{row['texts_per_second']:,.4g}",
            **_format_load(row),
        }
        for row in document["closed_loop"]
    )
    title = "Closed loop: each connection has one request at a time"
    yield ReportTable(title, closed_rows, WIDE_COLUMNS)
    open_rows = (
        {
            "arrivals": row["arrivals"],
            "load": format_load(row["load_fraction"]),
            "requests/s": f"{row['rate']:,.4g}",
            **_format_load(row),
        }
        for row in document["open_loop"]
    )
    title = "Open loop: latency from the moment of arrival"
    yield from build_tables(title, open_rows, WIDE_COLUMNS)
    trials = (document["saturation"] or {}).get("trials", ())
    trial_rows = (
        {
            "requests/s": f"{trial['rate']:,.4g}",
            "meets objective": "yes" if trial["meets_objective"] else "no",
            **_format_load(trial),
        }
        for trial in sorted(trials, key=lambda trial: trial["rate"])
    )
    yield from build_tables("Search of the saturation rate", trial_rows, WIDE_COLUMNS)
    regressions = (document.get("regression") or {}).get("rows", ())
    yield from build_tables(
        "Regressions", (_format_regression(row) for row in regressions if row["is_regression"])
    )


def _name_connections(row: Document) -> str:
    return f"{row['concurrency']} x {row['texts_per_request']}"


def _format_load(row: Mapping[str, Any]) -> Row:
    answered = row["statuses"].get(OK, 0)
    failed = {status: count for status, count in row["statuses"].items() if status != OK}
    is_slow = "" if row["generator"]["kept_up"] else " *"
    return {
        **_format_tokens(row),
        **format_latencies(row),
        "goodput": formatting.percent(row["goodput_fraction"]),
        "dropped": formatting.percent(row["dropped_fraction"]),
        "requests": f"{row['num_requests']:,}",
        "statuses": ", ".join(f"{status}: {count:,}" for status, count in failed.items())
        or f"{OK}: {answered:,}",
        "client": formatting.percent(row["generator"]["processor_share"]) + is_slow,
    }


def _format_tokens(row: Mapping[str, Any]) -> Row:
    """Return the columns of generated text, if the server generates text."""
    if "tokens_per_second" not in row:
        return {}
    token_ms = format_milliseconds(row["token_ms"]["p50_ms"])
    return {"tokens/s": f"{row['tokens_per_second']:,.4g}", "ms/token": token_ms}


def _format_regression(row: Mapping[str, Any]) -> Row:
    return {
        "load": row["load"],
        "figure": row["figure"].replace("_", " "),
        "baseline": f"{row['baseline']:,.4g}",
        "now": f"{row['now']:,.4g}",
        "change": f"{row['change']:+.1%}",
    }


def _describe_saturation(saturation: Document | None) -> Iterator[str]:
    if saturation is None:
        return
    objective = f"p{saturation['percentile']} <= {saturation['slo_ms']:g} ms"
    rate = saturation["requests_per_second"]
    if rate is None:
        yield f"No tried rate meets the objective {objective}."
        return
    usd = formatting.dollars(saturation["usd_per_million_texts"])
    cost = "" if usd == formatting.UNKNOWN else f", {usd} per million texts"
    if "usd_per_million_tokens" in saturation:
        cost = f", {formatting.dollars(saturation['usd_per_million_tokens'])} per million tokens"
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
    if any("tokens_per_second" in row for row in document["closed_loop"]):
        yield f"Latency: {formulas['latency_of_text']}."
    yield f"Goodput: {formulas['goodput']}. Saturation: {formulas['saturation']}."
    yield f"Client: processor time of the load generator per second. {_describe_client(document)}"
    price = document["price"]
    price_text = format_price(price) if price else "unknown, set execution.price"
    yield f"Dollars: {formulas['usd_per_million_texts']}. Price: {price_text}."


def _describe_client(document: Document) -> str:
    rows = [*document["closed_loop"], *document["open_loop"]]
    formula = document["formulas"]["generator"]
    if all(row["generator"]["kept_up"] for row in rows):
        return f"It kept up with every load: {formula}."
    return f"*: it did not keep up, so the latency may be the client's; {formula}."


def _chart_latencies(document: Document) -> list[Chart]:
    groups: dict[str, list[Document]] = {}
    for row in document["closed_loop"]:
        count = format_count(row["texts_per_request"], "text")
        groups.setdefault(f"closed, {count}", []).append(row)
    for row in document["open_loop"]:
        groups.setdefault(row["arrivals"], []).append(row)
    curves = []
    for label, rows in groups.items():
        points = (
            (row["texts_per_second"], row["p99_ms"] or row["max_ms"])
            for row in sorted(rows, key=lambda row: row["texts_per_second"])
        )
        known = tuple((speed, latency) for speed, latency in points if latency)
        curves.append(Curve(label, known, "points"))
    return chart_latencies(LATENCY_TITLE, curves, "texts/s")


def _chart_phases(document: Document) -> list[Chart]:
    """Return a chart of each phase's milliseconds per text, if the server counts them."""
    bars = []
    for row in document["closed_loop"]:
        phases = row["phase_seconds"] or {}
        texts = row["texts_per_second"] * row["duration_seconds"]
        if phases and texts:
            pieces = tuple((name, 1e3 * seconds / texts) for name, seconds in phases.items())
            bars.append(Bar(_name_connections(row), pieces))
    return chart_bars("Milliseconds of the server per text", bars, " ms")
