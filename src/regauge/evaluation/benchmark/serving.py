"""HTTP server benchmark: closed loops, the saturation rate, and open loops.

Separate processes (`load_processes`) send the requests. An artifact is served for the benchmark by
`regauge serve` in a child process.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import FORMAT, dump
from regauge.config.output_files import BENCHMARK
from regauge.data.sources import Record
from regauge.data.sources.python_docs import PythonDocs
from regauge.evaluation.benchmark import serving_summary, summary
from regauge.evaluation.benchmark.load_generator import draw_arrivals, draw_bursts, search_rate
from regauge.evaluation.benchmark.load_processes import LoadProcesses
from regauge.evaluation.benchmark.served_target import (
    open_server,
    read_key,
    read_phase_seconds,
    subtract_phases,
)
from regauge.evaluation.report.benchmarks import read_benchmark
from regauge.inference.export.probe_texts import STDLIB_FOLDER, STDLIB_PACKAGES
from regauge.system import processes
from regauge.system.errors import DataError, SettingsError, find_refusal
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from regauge.data.sources import Source
    from regauge.evaluation.benchmark.http_load import HttpTarget, LoadResult
    from regauge.evaluation.benchmark.serving_settings import (
        ServingBenchmarkSettings,
        TraceSettings,
    )
    from regauge.evaluation.benchmark.summary import Document

KIND, DESCRIPTION = "serving", "a server benchmark"
"""Benchmark document kind, and the name in errors."""
SERVER_LOG = "server.log"
POISSON = "poisson"
MIN_PERCENTILE_REQUESTS = 110
"""Expected requests in a trial, enough for the 99th percentile."""
MIN_REQUESTS = 20
"""Expected requests in a slow open loop, if the duration permits."""
START_FRACTION = 0.5
"""First rate in the search, as a fraction of the largest closed-loop request rate."""
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
CHARACTERS = range(20, 401)
"""Default text lengths; servers refuse texts with more tokens than the model reads."""


def plan(settings: ServingBenchmarkSettings) -> Document:
    """Return the measurements of `run`; raises SettingsError for impossible ones."""
    server, closed, open_loop = settings.server, settings.closed_loop, settings.open_loop
    if server.url is None and server.artifact is None:
        remedy = "name the address of a server or an artifact"
        raise SettingsError("no server to benchmark", remedy)
    read_key(server)
    folder = Path(settings.output.folder)
    num_rates = len(summary.list_rates(open_loop, 1.0))
    seconds = closed.warmup_seconds + closed.duration_seconds * len(_list_closed(settings))
    seconds += open_loop.duration_seconds * num_rates * len(open_loop.arrivals)
    search_seconds = settings.saturation.trial_seconds * settings.saturation.max_trials
    return {
        "output": str(folder),
        "server": server.url or f"regauge serve {server.artifact}",
        "connections_x_texts": [
            f"{connections} x {texts}" for connections, texts in _list_closed(settings)
        ],
        "objective": f"p{settings.saturation.percentile} <= {settings.saturation.slo_ms:g} ms",
        "min_seconds": round(seconds),
        "search_seconds": round(search_seconds),
        "price": summary.format_price(settings.execution.price),
        **find_refusal(lambda: summary.read_earlier(folder, KIND, DESCRIPTION)),
    }


def run(settings: ServingBenchmarkSettings) -> Document:
    """Measure the server and return the benchmark document.

    Raises SettingsError if the server does not answer, and the errors of `run_server`.
    """
    plan(settings)
    folder = Path(settings.output.folder)
    summary.read_earlier(folder, KIND, DESCRIPTION)
    baseline = _read_baseline(settings)
    folder.mkdir(parents=True, exist_ok=True)
    trace = read_trace(settings.trace)
    with open_server(settings.server, folder / SERVER_LOG) as (target, running):
        if target.generates_text:
            settings = _use_one_text(settings)
        with LoadProcesses(target, trace.texts, folder, settings.trace.processes) as load:
            measurements = ServerMeasurement(settings, target, load).measure()
        processor_seconds = running.read_processor_seconds() if running else None
    server = {
        "url": None if running else target.url,
        "artifact": settings.server.artifact,
        "protocol": target.protocol,
        "model": target.model,
        "start_seconds": running.start_seconds if running else None,
        "processor_seconds": processor_seconds,
    }
    document = build_document(settings, trace, {"server": server, **measurements})
    if baseline is not None:
        limit = settings.regression.max_regression
        rows = serving_summary.find_regressions(document, baseline, limit)
        document["regression"] = {"max_regression": limit, "rows": rows}
    return document


def build_document(
    settings: ServingBenchmarkSettings, trace: TextTrace, measurements: Document
) -> Document:
    """Return the benchmark document: figures, formulas, machine, price and settings."""
    price = summary.describe_price(settings.execution.price)
    saturation = measurements["saturation"]
    if saturation is not None:
        texts = (saturation["requests_per_second"] or 0.0) * settings.open_loop.texts_per_request
        usd = price["usd_per_hour"] if price else None
        saturation["usd_per_million_texts"] = summary.compute_usd_per_million(usd, texts)
        met = (trial for trial in saturation["trials"] if trial["meets_objective"])
        if tokens := max((trial.get("tokens_per_second", 0.0) for trial in met), default=0.0):
            saturation["usd_per_million_tokens"] = summary.compute_usd_per_million(usd, tokens)
    return {
        "format": FORMAT,
        "kind": KIND,
        "date": summary.today().isoformat(),
        "formulas": serving_summary.FORMULAS,
        "trace": trace.describe(),
        "generator": {
            "processes": settings.trace.processes,
            "platform": platform.platform(),
            "cores": processes.available_cores(),
            "load_average": os.getloadavg()[0],
        },
        "price": price,
        **measurements,
        "settings": dump(settings),
    }


@dataclass(frozen=True)
class ServerMeasurement:
    settings: ServingBenchmarkSettings
    target: HttpTarget
    load: LoadProcesses

    def measure(self) -> Document:
        """Return figures for the closed loops, the saturation rate and the open loops."""
        closed_loop = self._measure_closed_loops()
        saturation = self._search_saturation(closed_loop)
        return {
            "closed_loop": closed_loop,
            "saturation": saturation,
            "open_loop": self._measure_open_loops(closed_loop, saturation),
        }

    def _measure_closed_loops(self) -> list[Document]:
        closed = self.settings.closed_loop
        if closed.warmup_seconds:
            sizes = max(closed.concurrency), max(closed.texts_per_request)
            self.load.run_closed(*sizes, closed.warmup_seconds)
        rows = []
        for concurrency, texts in _list_closed(self.settings):
            run_load = partial(self.load.run_closed, concurrency, texts, closed.duration_seconds)
            figures = self._measure(run_load, texts)
            rows.append({"concurrency": concurrency, "texts_per_request": texts, **figures})
            self._log(serving_summary.name_closed_load(rows[-1]), figures)
        return rows

    def _search_saturation(self, closed_loop: list[Document]) -> Document | None:
        """Return the saturation rate with the trials; None if the search is off."""
        saturation, trials = self.settings.saturation, list[dict[str, Any]]()
        if not saturation.max_trials:
            return None

        def meets(rate: float) -> bool:
            seconds = self._limit_trial(MIN_PERCENTILE_REQUESTS / rate)
            seconds = max(saturation.trial_seconds, seconds)
            arrivals = draw_arrivals(rate, seconds, self.settings.seed, len(trials))
            figures = self._measure_arrivals(arrivals, seconds)
            is_met = serving_summary.meets_objective(figures, saturation)
            trials.append({"rate": rate, "meets_objective": is_met, **figures})
            self._log(f"trial {rate:.4g} requests/s", figures)
            return is_met

        start = START_FRACTION * max(row["requests_per_second"] for row in closed_loop)
        rate = None
        if start > 0:
            rate = search_rate(
                meets,
                start,
                precision=saturation.precision,
                max_trials=saturation.max_trials,
            )
        return {
            "requests_per_second": rate,
            "slo_ms": saturation.slo_ms,
            "percentile": saturation.percentile,
            "trials": trials,
        }

    def _measure_open_loops(
        self, closed_loop: list[Document], saturation: Document | None
    ) -> list[Document]:
        open_loop = self.settings.open_loop
        highest = (saturation or {}).get("requests_per_second")
        highest = highest or max(row["requests_per_second"] for row in closed_loop)
        rates = summary.list_rates(open_loop, highest)
        rows: list[Document] = []
        for (fraction, rate), arrivals in product(rates, open_loop.arrivals):
            if rate <= 0:
                continue
            seconds = max(open_loop.duration_seconds, self._limit_trial(MIN_REQUESTS / rate))
            figures = self._measure_arrivals(
                self._draw(arrivals, rate, seconds, len(rows)), seconds
            )
            row = {"arrivals": arrivals, "load_fraction": fraction, "rate": rate, **figures}
            rows.append(row)
            self._log(f"{serving_summary.name_open_load(row)}, {rate:.4g} requests/s", figures)
        return rows

    def _limit_trial(self, seconds: float) -> float:
        return min(seconds, self.settings.saturation.max_trial_seconds)

    def _draw(self, kind: str, rate: float, seconds: float, index: int) -> np.ndarray:
        """Return open-loop arrivals, [requests] in seconds."""
        open_loop, seed = self.settings.open_loop, self.settings.seed
        key = (seed, 1 + index)
        if kind == POISSON:
            return draw_arrivals(rate, seconds, *key)
        return draw_bursts(rate, open_loop.burst_size, seconds, *key)

    def _measure_arrivals(self, arrivals: np.ndarray, seconds: float) -> Document:
        texts = self.settings.open_loop.texts_per_request
        return self._measure(lambda: self.load.run_open(arrivals, texts, seconds), texts)

    def _measure(self, run_load: Callable[[], LoadResult], texts_per_request: int) -> Document:
        before = read_phase_seconds(self.target.url)
        result = run_load()
        phases = subtract_phases(read_phase_seconds(self.target.url), before)
        slo_ms = self.settings.saturation.slo_ms
        figures = serving_summary.summarize_load(result, texts_per_request, slo_ms)
        if self.target.generates_text:
            figures |= serving_summary.summarize_tokens(result)
        return {**figures, "phase_seconds": phases or None}

    def _log(self, load: str, figures: Document) -> None:
        p50, p99 = figures["p50_ms"], figures["p99_ms"]
        latency = f"p50 {p50:.4g} ms" if p50 is not None else "p50 unknown"
        latency += f", p99 {p99:.4g} ms" if p99 is not None else ""
        logger.info("%s: %.4g texts/s, %s", load, figures["texts_per_second"], latency)
        if not figures["generator"]["kept_up"]:
            logger.warning("%s: the load generator did not keep up", load)


def _list_closed(settings: ServingBenchmarkSettings) -> list[tuple[int, int]]:
    """Return (connections, texts per request) of each closed loop."""
    closed = settings.closed_loop
    return list(product(closed.concurrency, closed.texts_per_request))


def _use_one_text(settings: ServingBenchmarkSettings) -> ServingBenchmarkSettings:
    """Return the settings with one text per request, as a request for generated text has."""
    closed = settings.closed_loop.model_copy(update={"texts_per_request": (1,)})
    open_loop = settings.open_loop.model_copy(update={"texts_per_request": 1})
    return settings.model_copy(update={"closed_loop": closed, "open_loop": open_loop})


def _read_baseline(settings: ServingBenchmarkSettings) -> Document | None:
    if settings.regression.baseline is None:
        return None
    path = Path(settings.regression.baseline)
    return read_benchmark(path / BENCHMARK if path.is_dir() else path)


@dataclass(frozen=True)
class TextTrace:
    """Texts for requests, in their real lengths."""

    texts: tuple[str, ...]
    origin: str

    def describe(self) -> dict[str, Any]:
        """Return the texts' origin, count and lengths."""
        lengths = [len(text) for text in self.texts]
        return {
            "origin": self.origin,
            "count": len(lengths),
            "mean_characters": statistics.fmean(lengths),
            "max_characters": max(lengths),
        }


def read_trace(settings: TraceSettings) -> TextTrace:
    """Return the source's first texts, or sentences from docstrings without a source.

    Raises DataError if the source does not contain any text.
    """
    if settings.source is not None:
        origin = f"source '{settings.source.kind}'"
        texts = _read_texts(settings.source)
    else:
        origin = "sentences of docstrings of Python's standard library"
        roots = tuple(str(STDLIB_FOLDER / name) for name in STDLIB_PACKAGES)
        texts = _split_sentences(_read_texts(PythonDocs(roots=roots)))
    distinct = tuple(islice(dict.fromkeys(texts), settings.count))
    if not distinct:
        raise DataError("trace.source does not contain text", "name another trace.source")
    return TextTrace(distinct, origin)


def _read_texts(source: Source) -> Iterator[str]:
    for piece in source.list_pieces():
        for record in source.read(piece):
            if isinstance(record, Record):
                values = record.fields.values()
                yield from (value for value in values if isinstance(value, str) and value.strip())


def _split_sentences(texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        for part in SENTENCE.split(text):
            sentence = " ".join(part.split())
            if len(sentence) in CHARACTERS:
                yield sentence
