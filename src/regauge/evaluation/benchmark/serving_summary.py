"""Server benchmark figures: percentiles, goodput, costs, and regressions.

An unknown value is None, never zero. This module measures nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.evaluation.benchmark import summary
from regauge.evaluation.benchmark.http_load import OK
from regauge.evaluation.benchmark.load_generator import percentile
from regauge.system.errors import InconclusiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.evaluation.benchmark.http_load import LoadResult
    from regauge.evaluation.benchmark.serving_settings import SaturationSettings
    from regauge.evaluation.benchmark.summary import Document

MAX_PROCESSOR_SHARE = 0.85
"""CPU seconds per second above which a sending process is too slow."""
MAX_DELAY_FRACTION = 0.2
"""Largest p99 delay of requests after their arrival, as a fraction of the p99 latency."""
MIN_DELAY_MS = 2.0
"""Delay that is never too large: timer resolution."""
FORMULAS = {
    "closed_loop": "each connection sends a request when its last one is answered; latency counts "
    "from the request",
    "open_loop": "arrivals of a Poisson process, or of bursts of a Poisson process; latency counts "
    "from the arrival, however late the request is sent",
    "percentiles_ms": "nearest rank over all requests; a request without an answer of status 200 "
    "is infinitely late; unknown with too few requests",
    "texts_per_second": "texts of the requests with status 200 / seconds until the last answer",
    "latency_of_text": "time to the first token; token_ms: (time of the last token - time of the "
    "first one) / (tokens - 1) for each answer",
    "goodput": "requests with status 200 within the latency objective / seconds",
    "saturation": "largest rate of Poisson arrivals at which the percentile of the latency is "
    "within the objective; found by doubling, then by bisection",
    "usd_per_million_tokens": "the same with generated tokens",
    "usd_per_million_texts": "USD per hour of the server's machine / 3600 / texts per second at "
    "the saturation rate x 1e6",
    "generator": f"it kept up if each process used at most {MAX_PROCESSOR_SHARE:.0%} of a core, "
    f"and the p99 delay of a request after its arrival is below {MIN_DELAY_MS:g} ms or "
    f"{MAX_DELAY_FRACTION:.0%} of the p99 latency",
}
"""Figure -> formula, as recorded in the benchmark document."""


def summarize_load(result: LoadResult, texts_per_request: int, slo_ms: float) -> Document:
    """Return one load's figures."""
    latencies = [latency for latency in result.latencies_ms if latency is not None]
    num_answered, count = result.statuses.get(OK, 0), len(result.latencies_ms)
    num_within = sum(latency <= slo_ms for latency in latencies)
    seconds = max(result.seconds, 1e-9)
    return {
        "num_requests": count,
        "duration_seconds": result.seconds,
        "requests_per_second": num_answered / seconds,
        "texts_per_second": texts_per_request * num_answered / seconds,
        **summary.find_percentiles([result.latencies_ms]),
        "max_ms": max(latencies, default=None),
        "goodput_requests_per_second": num_within / seconds,
        "goodput_fraction": num_within / count if count else None,
        "dropped_fraction": summary.find_dropped_fraction([result.latencies_ms]),
        "statuses": result.statuses,
        "generator": describe_generator(result),
    }


def summarize_tokens(result: LoadResult) -> Document:
    """Return one load's figures on generated text."""
    return {
        "tokens_per_second": result.num_tokens / max(result.seconds, 1e-9),
        "token_ms": summary.find_percentiles([result.token_ms]),
    }


def _find_tail(values: Sequence[float]) -> float:
    """Return the 99th percentile, or the largest of few values; 0 without values."""
    return percentile(values, 99) or max(values, default=0.0)


def describe_generator(result: LoadResult) -> Document:
    """Return the load on the sending processes, and whether they kept up."""
    share = max(result.processor_shares, default=0.0)
    answered = [latency for latency in result.latencies_ms if latency is not None]
    delay = _find_tail(result.send_delays_ms)
    max_delay = max(MIN_DELAY_MS, MAX_DELAY_FRACTION * _find_tail(answered))
    return {
        "processor_share": share,
        "p99_delay_ms": delay if result.send_delays_ms else None,
        "kept_up": share <= MAX_PROCESSOR_SHARE and delay <= max_delay,
    }


def meets_objective(figures: Document, saturation: SaturationSettings) -> bool:
    """Return whether a load meets the latency objective and the error limit.

    The largest latency replaces a percentile with too few requests.
    """
    latency = figures[f"p{saturation.percentile}_ms"] or figures["max_ms"]
    dropped = figures["dropped_fraction"]
    is_complete = dropped is not None and dropped <= saturation.max_error_fraction
    return is_complete and latency is not None and latency <= saturation.slo_ms


def find_regressions(
    document: Document, baseline: Document, max_regression: float
) -> list[Document]:
    """Return p99 latencies and throughputs worse than in an earlier document.

    A row has the load, the figure, both values and whether the change is permitted. Raises
    InconclusiveError if the documents do not share a load.
    """
    before, now = _list_figures(baseline), _list_figures(document)
    shared = [key for key in now if key in before]
    if not shared:
        problem = "the baseline does not share a load with this benchmark"
        raise InconclusiveError(problem, "measure it with the same settings")
    rows = []
    for load, name in shared:
        change = now[load, name] / before[load, name] - 1
        worsening = change if name == "p99_ms" else -change
        rows.append(
            {
                "load": load,
                "figure": name,
                "baseline": before[load, name],
                "now": now[load, name],
                "change": change,
                "is_regression": worsening > max_regression,
            }
        )
    return rows


def _list_figures(document: Document) -> dict[tuple[str, str], float]:
    """Return (load, figure) -> value for comparison, without unknown figures."""
    figures = {}
    for row in document["closed_loop"]:
        figures[name_closed_load(row), "p99_ms"] = row.get("p99_ms")
        figures[name_closed_load(row), "texts_per_second"] = row.get("texts_per_second")
    for row in document["open_loop"]:
        figures[name_open_load(row), "p99_ms"] = row.get("p99_ms")
    saturation = document.get("saturation") or {}
    figures["saturation", "requests_per_second"] = saturation.get("requests_per_second")
    return {key: value for key, value in figures.items() if value}


def name_closed_load(row: Document) -> str:
    """Return a closed loop's name: connections x texts per request."""
    return f"{row['concurrency']} x {row['texts_per_request']}"


def name_open_load(row: Document) -> str:
    """Return an open loop's name: the arrivals and the fraction or rate."""
    fraction = row["load_fraction"]
    load = f"{row['rate']:g}/s" if fraction is None else f"{fraction:.0%}"
    return f"{row['arrivals']} {load}"
