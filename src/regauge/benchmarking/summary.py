"""What turns of artifacts come to: medians over them, and every figure with its formula.

What is not known is None, and never a zero. Nothing here measures.
"""

from __future__ import annotations

import datetime as dt
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.artifacts.manifest import ARTIFACT, MODEL
from regauge.benchmarking.load_generator import PATIENCE, percentile
from regauge.config import FORMAT, dump
from regauge.planning.catalog import Rate, chip_of, rate
from regauge.reporting.inference_section import PERCENTILES
from regauge.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from regauge.artifacts.manifest import Manifest
    from regauge.benchmarking.settings import Measuring


Document = dict[str, Any]
Turn = list[Document]

GENERIC_NAMES = (MODEL, ARTIFACT)
"""Folders whose names say nothing of the model in them."""
RATIO_FORMULA = (
    "second / first, of p50_ms, inferences_per_second and usd_per_million_inferences; overlap: "
    "the p50_ms of some turn of one lies among those of the other"
)
FORMULAS = {
    "inference": "one record; a request has as many as its batch",
    "percentiles_ms": "nearest rank in each turn, then the median over turns; unknown where one "
    "has so few requests that none lies beyond",
    "closed": "each request begins when the one before is answered",
    "open": "Poisson arrivals; latency counts from the moment of arrival, also while earlier "
    f"requests are answered; not served: not begun after {PATIENCE} times the seconds",
    "inferences_per_second": "batch x requests / seconds of the closed loop",
    "tokens_per_second": "real tokens of the requests / the same seconds",
    "flops_per_inference": "(2 N + 4 L h S) a token x real tokens: a third of training's "
    "6 N + 12 L h S (Chowdhery et al., 2022, appendix B), without embeddings, pooling and heads",
    "peak_share": "flops_per_inference x inferences_per_second / peak_flops_per_second",
    "joules_per_inference": "measured: what the chip counts, of a processor all its packages, "
    "whatever else the machine did, / inferences; or at most the chip's thermal design power / "
    "inferences_per_second",
    "usd_per_million_inferences": "USD an hour of the machine / 3600 / inferences_per_second x "
    "1e6, whatever part of the machine one process uses",
    "ready_seconds": "from the start of a process until the artifact is loaded, and each shape "
    "that has a graph of its own was computed once",
    "memory_bytes": "the most of a turn: of the device, or of the whole process on a processor",
    "beside": RATIO_FORMULA,
}


def today() -> dt.date:
    """Return the day by which prices are old."""
    return dt.datetime.now(dt.UTC).date()


def document(
    settings: Measuring,
    manifests: Mapping[str, Manifest],
    found: Mapping[str, Sequence[Turn]],
    earlier: Document,
) -> Document:
    """Return what is written of a benchmark.

    Artifacts that an earlier job measured with the same requests are kept, each with its own chip,
    day and price: jobs on several machines make one table.
    """
    measured = [_artifact(settings, name, manifests[name], found[name]) for name in found]
    kept = [each for each in earlier.get("artifacts", ()) if each["name"] not in found]
    every = {each["name"]: each for each in [*kept, *measured]}
    _share_peaks(every.values())
    names = {each["name"] for each in kept}
    rows = [each for each in earlier.get("rows", ()) if each["artifact"] in names]
    for name in found:
        rows += _rows(settings, every[name], found[name])
    for row in rows:
        row["closed"]["peak_share"] = _peak_share(row["closed"], every[row["artifact"]])
    return {
        "format": FORMAT,
        "measured": "inference",
        "date": today().isoformat(),
        "turns": settings.inference.turns,
        "seconds": settings.inference.seconds,
        "formulas": FORMULAS,
        "artifacts": list(every.values()),
        "rows": rows,
        "beside": ratios(settings.inference.beside, list(every), rows),
        "alike": alike(settings),
        "settings": dump(settings),
    }


def alike(settings: Measuring) -> Document:
    """Return the settings that the rows of one table share."""
    own = dump(settings)
    inference = {
        name: own["inference"][name] for name in ("rows", "lengths", "seconds", "warmup", "turns")
    }
    return {"inference": inference, "arrivals": own["arrivals"], "seed": own["seed"]}


def model_of(manifest: Manifest) -> str:
    """Return what people call the model of an artifact."""
    parts = [part for part in Path(manifest.origin.path).parts if part not in GENERIC_NAMES]
    return parts[-1] if parts else manifest.origin.path


def computed_by(manifest: Manifest) -> str:
    """Return by what and in which type an artifact is computed."""
    compiled = manifest.compiled
    integers = f" {compiled.quantized}" if compiled.quantized != "no" else ""
    return f"{compiled.backend.kind} {compiled.precision}{integers}"


def _artifact(
    settings: Measuring, name: str, manifest: Manifest, turns: Sequence[Turn]
) -> Document:
    """Return what was found of an artifact as a whole."""
    starts = [told for turn in turns for told in turn if "ready" in told]
    ends = [told for turn in turns for told in turn if "chip" in told]
    memory = [told["memory_bytes"] for told in ends if told["memory_bytes"] is not None]
    peaks = [told for told in ends if told["peak_flops_per_second"] is not None]
    best = max(peaks, key=lambda told: told["peak_flops_per_second"], default=ends[-1])
    chip = chip_of(settings.execution.price)
    return {
        "name": name,
        "path": settings.inference.artifacts[name],
        "model": model_of(manifest),
        "computed_by": computed_by(manifest),
        "precision": manifest.compiled.precision,
        "quantized": manifest.compiled.quantized,
        "backend": manifest.compiled.backend.kind,
        "versions": manifest.compiled.versions,
        "origin": dump(manifest.origin),
        "accelerator": manifest.target.accelerator,
        "chip": best["chip"],
        "machine": starts[-1]["machine"],
        "date": today().isoformat(),
        "price": _price(rate(settings.execution.price), settings.execution.price.instance),
        "tdp_watts": chip.tdp_watts if chip else None,
        "tdp_source": f"{chip.name}: {chip.source}" if chip else None,
        "ready": {
            each: statistics.median(told["ready"][each] for told in starts)
            for each in starts[0]["ready"]
        },
        "memory_bytes": max(memory, default=None),
        "peak_flops_per_second": best["peak_flops_per_second"],
        "peak_source": best["peak_source"],
    }


def _price(found: Rate | None, kind: str | None) -> Document | None:
    if found is None:
        return None
    return {
        "usd_per_hour": found.usd_per_hour,
        "source": found.source,
        "as_of": found.as_of.isoformat() if found.as_of else None,
        "instance": kind,
        "remark": found.remark(today()),
    }


def _share_peaks(every: Iterable[Document]) -> None:
    """Give artifacts that compute alike on a chip one peak: each turn has timed its own."""
    best: dict[tuple[Any, ...], tuple[float, str]] = {}
    for each in every:
        key = (each["chip"], each["precision"], each["quantized"], each["machine"]["threads"])
        if each["peak_flops_per_second"] is not None:
            own = each["peak_flops_per_second"], each["peak_source"]
            best[key] = max(best.get(key, own), own)
    for each in every:
        key = (each["chip"], each["precision"], each["quantized"], each["machine"]["threads"])
        if key in best:
            each["peak_flops_per_second"], each["peak_source"] = best[key]


def _peak_share(closed: Document, artifact: Document) -> float | None:
    flops, peak = closed["flops_per_inference"], artifact["peak_flops_per_second"]
    if flops is None or peak is None:
        return None
    return float(flops * closed["inferences_per_second"] / peak)


def _rows(settings: Measuring, artifact: Document, turns: Sequence[Turn]) -> list[Document]:
    """Return a row for each batch and length."""
    rows = []
    for length in settings.inference.lengths:
        for count in settings.inference.rows:
            where = {"rows": count, "length": length}
            loops = [told for turn in turns for told in turn if told.get("closed") == where]
            came = [[told for told in turn if told.get("open") == where] for turn in turns]
            rows.append(
                {
                    "artifact": artifact["name"],
                    **where,
                    "shapes": loops[-1]["shapes"],
                    "closed": _closed(artifact, count, loops),
                    "open": [_open(artifact, count, each) for each in zip(*came, strict=True)],
                }
            )
    return rows


def _closed(artifact: Document, count: int, loops: Sequence[Document]) -> Document:
    """Return the figures of a closed loop; `count` is the batch, of each turn there is one loop."""
    middles = [percentile(loop["milliseconds"], 50) or 0.0 for loop in loops]
    per_second = _median(loops, lambda loop: len(loop["milliseconds"]) / loop["seconds"])
    tokens, flops = loops[-1]["tokens"], loops[-1]["flops"]
    return {
        "requests": [len(loop["milliseconds"]) for loop in loops],
        **_percentiles([loop["milliseconds"] for loop in loops]),
        "spread_p50_ms": [min(middles), max(middles)],
        "requests_per_second": per_second,
        "inferences_per_second": count * per_second,
        "tokens_per_second": tokens * per_second,
        "flops_per_inference": None if flops is None else flops / count,
        **_joules(artifact, count, loops, count * per_second),
        "usd_per_million_inferences": _usd(artifact, count * per_second),
    }


def _open(artifact: Document, count: int, turns: Sequence[Document]) -> Document:
    """Return the figures of one rate of arrivals; of each turn there is one series."""
    per_second = _median(turns, lambda turn: float(turn["rate"]))
    taken = [
        [math.inf if each is None else each for each in turn["milliseconds"]] for turn in turns
    ]
    every = sum(map(len, taken))
    lost = sum(math.isinf(each) for turn in taken for each in turn)
    return {
        "share": turns[0]["share"],
        "requests_per_second": per_second,
        "requests": [len(turn) for turn in taken],
        "not_served": lost / every if every else None,
        **_percentiles(taken),
        "usd_per_million_inferences": None if lost else _usd(artifact, count * per_second),
    }


def _percentiles(turns: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Return the median over turns of each percentile.

    None where a turn has too few requests for it: the others alone would not be in order with the
    smaller percentiles. None too where the median was not served.
    """
    found = {}
    for percent in PERCENTILES:
        each = [percentile(turn, percent) for turn in turns]
        known = [value for value in each if value is not None]
        middle = statistics.median(known) if len(known) == len(each) else math.inf
        found[f"p{percent}_ms"] = middle if math.isfinite(middle) else None
    return found


def _joules(
    artifact: Document, count: int, loops: Sequence[Document], per_second: float
) -> Document:
    """Return the joules of an inference, and whether they were measured or are a bound."""
    if all(loop["joules"] is not None for loop in loops):
        found = _median(loops, lambda loop: loop["joules"] / len(loop["milliseconds"]) / count)
        return {"joules_per_inference": found, "joules_are": "measured"}
    if artifact["tdp_watts"] is None:
        return {"joules_per_inference": None, "joules_are": None}
    return {"joules_per_inference": artifact["tdp_watts"] / per_second, "joules_are": "at most"}


def _usd(artifact: Document, per_second: float) -> float | None:
    """Return the dollars of a million inferences at so many a second."""
    price = artifact["price"]
    return None if price is None else price["usd_per_hour"] / SECONDS_PER_HOUR / per_second * 1e6


def _median(turns: Sequence[Document], value: Callable[[Document], float]) -> float:
    return statistics.median(map(value, turns))


RATIOS = {
    "latency": "p50_ms",
    "inferences_per_second": "inferences_per_second",
    "usd": "usd_per_million_inferences",
}
"""What is compared, and the figure of a closed loop that it is."""


def ratios(
    pairs: Sequence[tuple[str, str]], names: Sequence[str], rows: Sequence[Document]
) -> list[Document]:
    """Return the ratios of each pair by batch and length; without pairs of all by the first."""
    first, *others = names
    wanted = pairs or [(first, other) for other in others]
    return [each for pair in wanted for each in _of_pair(pair, rows)]


def _of_pair(pair: tuple[str, str], rows: Sequence[Document]) -> Iterator[Document]:
    first, second = (
        {(row["rows"], row["length"]): row["closed"] for row in rows if row["artifact"] == name}
        for name in pair
    )
    for (count, length), ours in first.items():
        theirs = second[count, length]
        where = {"first": pair[0], "second": pair[1], "rows": count, "length": length}
        found = {name: _ratio(theirs[key], ours[key]) for name, key in RATIOS.items()}
        yield {**where, **found, "overlap": _overlap(theirs, ours)}


def _overlap(second: Document, first: Document) -> bool | None:
    """Return whether turns of one lie among those of the other; None for a single turn of each."""
    if len(first["requests"]) == len(second["requests"]) == 1:
        return None
    (least, most), (low, high) = first["spread_p50_ms"], second["spread_p50_ms"]
    return bool(low <= most and least <= high)


def _ratio(second: float | None, first: float | None) -> float | None:
    return None if second is None or not first else second / first
