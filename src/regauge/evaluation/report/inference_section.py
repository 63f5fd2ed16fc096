"""Report section on an inference benchmark: one row per artifact and batch x length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.evaluation.report.benchmark_section import (
    ARTIFACT,
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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from regauge.evaluation.report.benchmark_section import Document, Row
    from regauge.evaluation.report.charts import Chart

THROUGHPUT_TITLE = "Inferences per second, closed loop"
CHARTED_PERCENTILES = (50, 99)
"""Latency percentiles in charts."""


def build_section(document: Document, name: str = "") -> BenchmarkSection | None:
    """Return an inference benchmark's section; None if it does not have rows.

    `name` is the output folder's name, for the title.
    """
    if not document.get("rows"):
        return None
    pairs = _group_pairs(document)
    return BenchmarkSection(
        title=f"Inference{': ' if name else ''}{name}",
        tables=(
            *(_build_pair_table(document, pair) for pair in pairs),
            _build_closed_loop_table(document),
            *_build_open_loop_table(document),
            _build_artifact_table(document),
        ),
        summary=tuple(map(_describe_pair, pairs)),
        sentences=tuple(_describe_method(document)),
        document=document,
        charts=(*_chart_throughput(document), *_chart_latencies(document)),
    )


def _format_shape(document: Document, row: Mapping[str, Any]) -> Row:
    models = {artifact["name"]: artifact["model"] for artifact in document["artifacts"]}
    shape = f"{row['batch_size']} x {row['input_length']}"
    if len(set(models.values())) == 1:
        return {"batch x length": shape}
    model = models[row.get(ARTIFACT) or row["baseline"]]
    return {"model, batch x length": f"{model}, {shape}"}


def _order_rows(document: Document) -> list[Document]:
    shapes = list(dict.fromkeys(map(_get_shape, document["rows"])))
    names = [artifact["name"] for artifact in document["artifacts"]]
    return sorted(
        document["rows"],
        key=lambda row: (shapes.index(_get_shape(row)), names.index(row[ARTIFACT])),
    )


def _get_shape(row: Document) -> tuple[int, int]:
    return row["batch_size"], row["input_length"]


def _build_closed_loop_table(document: Document) -> ReportTable:
    rows = tuple(
        {
            **_format_shape(document, row),
            ARTIFACT: row[ARTIFACT],
            **format_latencies(row["closed_loop"]),
            "p50 range": " to ".join(map(format_milliseconds, row["closed_loop"]["p50_range_ms"])),
            "inferences/s": f"{row['closed_loop']['inferences_per_second']:,.4g}",
            "tokens/s": f"{row['closed_loop']['tokens_per_second']:,.0f}",
            "% of peak": formatting.percent(row["closed_loop"]["peak_fraction"]),
            "joules": _format_joules(row["closed_loop"]),
            "$ per 1M": formatting.dollars(row["closed_loop"]["usd_per_million_inferences"]),
        }
        for row in _order_rows(document)
    )
    title = "Closed loop: one request at a time"
    return ReportTable(title, rows, ("p50 range", "tokens/s", "joules"))


def _format_joules(closed: Mapping[str, Any]) -> str:
    value = closed["joules_per_inference"]
    bound = "at most " if closed["joules_method"] == "upper_bound" else ""
    return formatting.UNKNOWN if value is None else f"{bound}{value:.3g}"


def _build_open_loop_table(document: Document) -> Iterator[ReportTable]:
    rows = (
        {
            **_format_shape(document, row),
            ARTIFACT: row[ARTIFACT],
            "load": format_load(load["load_fraction"]),
            "requests/s": f"{load['requests_per_second']:,.4g}",
            **format_latencies(load),
            "dropped": formatting.percent(load["dropped_fraction"]),
            "$ per 1M": formatting.dollars(load["usd_per_million_inferences"]),
        }
        for row in _order_rows(document)
        for load in row["open_loop"]
    )
    title = "Open loop: Poisson arrivals, latency from the moment of arrival"
    return build_tables(title, rows, ("$ per 1M",))


def _build_artifact_table(document: Document) -> ReportTable:
    rows = tuple(
        {
            ARTIFACT: artifact["name"],
            "model": artifact["model"],
            "backend": f"{artifact['backend_description']}, {_format_threads(artifact['machine'])}",
            "startup": formatting.duration(artifact["startup"]["total_seconds"]),
            "loading": formatting.duration(artifact["startup"]["load_seconds"]),
            "warm-up": formatting.duration(artifact["startup"]["warmup_seconds"]),
            "memory": _format_bytes(artifact["peak_memory_bytes"]),
            "chip": artifact["chip"],
            "$ per hour": _format_price(artifact["price"]),
            "date": artifact["date"],
        }
        for artifact in document["artifacts"]
    )
    return ReportTable("Startup and memory", rows, ("loading", "warm-up", "$ per hour", "date"))


def _format_threads(machine: Mapping[str, Any]) -> str:
    count = machine["threads"]
    return "1 thread" if count == 1 else f"{format_count(count, 'thread')}"


def _format_bytes(value: int | None) -> str:
    return formatting.UNKNOWN if value is None else f"{value / 1e6:,.0f} MB"


def _format_price(price: Mapping[str, Any] | None) -> str:
    return formatting.UNKNOWN if price is None else f"{price['usd_per_hour']:g}"


def _group_pairs(document: Document) -> list[list[Document]]:
    pairs: dict[tuple[str, str], list[Document]] = {}
    for ratios in document["ratios"]:
        pairs.setdefault((ratios["baseline"], ratios["candidate"]), []).append(ratios)
    return list(pairs.values())


def _build_pair_table(document: Document, pair: Sequence[Document]) -> ReportTable:
    closed = {(row[ARTIFACT], *_get_shape(row)): row["closed_loop"] for row in document["rows"]}
    first, second = pair[0]["baseline"], pair[0]["candidate"]
    rows = []
    for ratios in pair:
        shape = _get_shape(ratios)
        figures = closed[first, *shape], closed[second, *shape]
        overlap = " *" if ratios["ranges_overlap"] else ""
        usd = _format_both(figures, "usd_per_million_inferences", formatting.dollars)
        rows.append(
            {
                **_format_shape(document, ratios),
                "p50 ms": _format_both(figures, "p50_ms", format_milliseconds),
                "latency ratio": _format_ratio(ratios["latency_ratio"]) + overlap,
                "inferences/s": _format_both(
                    figures, "inferences_per_second", lambda value: f"{value:,.4g}"
                ),
                "throughput ratio": _format_ratio(ratios["throughput_ratio"]),
                "$ per 1M": usd,
                "cost ratio": _format_ratio(ratios["cost_ratio"]),
            }
        )
    title = f"{first} / {second}, and the ratio of {second} to {first}"
    return ReportTable(title, tuple(rows))


def _format_both(
    figures: Sequence[Mapping[str, Any]], key: str, format_value: Callable[[Any], str]
) -> str:
    """Return a pair's two values, or a single `unknown` if neither is known."""
    cells = [format_value(figure[key]) for figure in figures]
    is_known = any(figure[key] is not None for figure in figures)
    return " / ".join(cells if is_known else cells[:1])


def _format_ratio(value: float | None) -> str:
    return formatting.UNKNOWN if value is None else f"x {value:.2f}"


def _describe_pair(pair: Sequence[Document]) -> str:
    first, second = pair[0]["baseline"], pair[0]["candidate"]
    latency_ratios = sorted(
        ratios["latency_ratio"] for ratios in pair if ratios["latency_ratio"] is not None
    )
    if not latency_ratios:
        return f"The latency of {second} relative to {first} is unknown."
    ratio = f"{latency_ratios[0]:.2f}"
    if f"{latency_ratios[-1]:.2f}" != ratio:
        ratio += f" to {latency_ratios[-1]:.2f}"
    num_shapes = len(latency_ratios)
    shapes = "one batch x length" if num_shapes == 1 else f"{num_shapes} shapes (batch x length)"
    num_overlaps = sum(bool(ratios["ranges_overlap"]) for ratios in pair)
    overlaps = f"; the repeats overlap at {num_overlaps} of {len(pair)}" if num_overlaps else ""
    return f"{second} has {ratio} times the median latency of {first} at {shapes}{overlaps}."


def _describe_method(document: Document) -> Iterator[str]:
    formulas = document["formulas"]
    num_repeats = document["repeats"]
    repeats = "one repeat" if num_repeats == 1 else f"{num_repeats} alternating repeats"
    seconds = document["duration_seconds"]
    yield (
        f"Medians of {repeats}, {seconds:g} s for each batch x length, each repeat in "
        f"a separate process, {document['date']}. Percentiles: {formulas['percentiles_ms']}."
    )
    if any(ratios["ranges_overlap"] for ratios in document["ratios"]):
        yield "*: the repeats of both artifacts overlap; the difference may be noise."
    yield f"Open loop: {formulas['open_loop']}."
    yield (
        f"Inference: {formulas['inference']}. Inferences/s: {formulas['inferences_per_second']}. "
        "Tokens exclude padding."
    )
    peaks = _describe_artifacts(
        document, "peak_flops_per_second", "{peak_flops_per_second:.4g} FLOP/s, {peak_source}"
    )
    flops = formulas["flops_per_inference"]
    yield f"% of peak: {formulas['peak_fraction']}. FLOPs: {flops}. Peak: {peaks}."
    power = _describe_artifacts(document, "tdp_watts", "{tdp_watts:g} W, {tdp_source}")
    yield f"Joules: {formulas['joules_per_inference']}. Thermal design power: {power}."
    yield f"Dollars: {formulas['usd_per_million_inferences']}. Price: {_describe_prices(document)}."
    yield f"Startup: {formulas['startup_seconds']}. Memory: {formulas['peak_memory_bytes']}."


def _describe_artifacts(document: Document, key: str, template: str) -> str:
    texts = dict.fromkeys(
        template.format(**artifact) if artifact[key] else f"unknown for {artifact['name']}"
        for artifact in document["artifacts"]
    )
    return "; ".join(texts)


def _describe_prices(document: Document) -> str:
    prices = []
    for artifact in document["artifacts"]:
        price = artifact["price"]
        if price is None:
            prices.append(f"unknown for {artifact['name']}, set execution.price")
            continue
        instance = f"{price['instance']}, " if price["instance"] else ""
        warning = f"; {price['staleness_warning']}" if price["staleness_warning"] else ""
        prices.append(f"{instance}{format_price(price)}{warning}")
    return "; ".join(dict.fromkeys(prices))


def _chart_throughput(document: Document) -> list[Chart]:
    bars = []
    for row in _order_rows(document):
        (label,) = _format_shape(document, row).values()
        bars.append(Bar(label, ((row[ARTIFACT], row["closed_loop"]["inferences_per_second"]),)))
    return chart_bars(THROUGHPUT_TITLE, bars, " inferences/s")


def _chart_latencies(document: Document) -> Iterator[Chart]:
    for shape in dict.fromkeys(map(_get_shape, document["rows"])):
        rows = [row for row in document["rows"] if _get_shape(row) == shape]
        curves = [_build_curve(row, percent) for row in rows for percent in CHARTED_PERCENTILES]
        title = f"Latency at {shape[0]} x {shape[1]} by request rate"
        yield from chart_latencies(title, curves, "requests/s")


def _build_curve(row: Document, percent: int) -> Curve:
    loads = sorted(row["open_loop"], key=lambda load: load["requests_per_second"])
    points = [(load["requests_per_second"], load[f"p{percent}_ms"]) for load in loads]
    known = tuple((rate, value) for rate, value in points if value is not None)
    return Curve(f"{row[ARTIFACT]} p{percent}", known, "points")
