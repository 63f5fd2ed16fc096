"""Summary of an artifact benchmark: medians over repeats, ratios, costs and formulas.

An unknown value is None, never zero. This module measures nothing.
"""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import FORMAT, dump
from regauge.evaluation.benchmark import summary
from regauge.evaluation.benchmark.load_generator import MAX_DURATION_FACTOR, percentile
from regauge.inference.export.manifest import ARTIFACT, MODEL
from regauge.machines.catalog import find_chip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from regauge.evaluation.benchmark.settings import BenchmarkSettings
    from regauge.evaluation.benchmark.summary import Document
    from regauge.inference.export.manifest import ArtifactManifest

Repeat = list[dict[str, Any]]
"""Lines written by a worker in one repeat."""

GENERIC_NAMES = (MODEL, ARTIFACT)
"""Folder names that do not identify a model."""
RATIO_FORMULA = (
    "candidate / baseline, for p50_ms, inferences_per_second and usd_per_million_inferences; "
    "ranges_overlap: the ranges of p50_ms over the repeats overlap"
)
FORMULAS = {
    "inference": "one record; a request has batch-size records",
    "percentiles_ms": "nearest rank in each repeat, then the median over repeats; unknown if a "
    "repeat has too few requests",
    "closed_loop": "each request starts when the previous one is answered",
    "open_loop": "Poisson arrivals; latency counts from the arrival, queueing included; "
    f"dropped: not started within {MAX_DURATION_FACTOR} times the duration",
    "inferences_per_second": "batch size x requests / seconds of the closed loop",
    "tokens_per_second": "real tokens of the requests / seconds of the closed loop",
    "flops_per_inference": "(2 N + 4 L h S) per token x real tokens: a third of training's "
    "6 N + 12 L h S (Chowdhery et al., 2022, appendix B), without embeddings, pooling and heads",
    "peak_fraction": "flops_per_inference x inferences_per_second / peak_flops_per_second",
    "joules_per_inference": "measured: energy counter of the chip (of all packages of a CPU, "
    "other load included) / inferences; upper bound: the chip's thermal design power / "
    "inferences_per_second",
    "usd_per_million_inferences": "USD per hour of the whole machine / 3600 / "
    "inferences_per_second x 1e6",
    "startup_seconds": "from the start of the process until the artifact is loaded and each shape "
    "with a separate graph was computed once",
    "peak_memory_bytes": "largest peak of the repeats: of the device, or of the process on a CPU",
    "ratios": RATIO_FORMULA,
}
"""Figure -> formula, as recorded in the benchmark document."""


def build_document(
    settings: BenchmarkSettings,
    manifests: Mapping[str, ArtifactManifest],
    repeats: Mapping[str, Sequence[Repeat]],
    earlier: Document,
) -> Document:
    """Return the benchmark document; `repeats` maps artifact names to worker lines.

    Artifacts from an `earlier` document with the same requests are kept with their chip, date and
    price, so that jobs on several machines share one table.
    """
    artifacts = {
        artifact["name"]: artifact
        for artifact in earlier.get("artifacts", ())
        if artifact["name"] not in repeats
    }
    rows = [row for row in earlier.get("rows", ()) if row["artifact"] in artifacts]
    for name, lines in repeats.items():
        artifacts[name] = _summarize_artifact(settings, name, manifests[name], lines)
    _share_peaks(artifacts.values())
    for name, lines in repeats.items():
        rows += _build_rows(settings, artifacts[name], lines)
    for row in rows:
        loop = row["closed_loop"]
        loop["peak_fraction"] = _compute_peak_fraction(loop, artifacts[row["artifact"]])
    return {
        "format": FORMAT,
        "kind": "inference",
        "date": summary.today().isoformat(),
        "repeats": settings.inference.repeats,
        "duration_seconds": settings.inference.duration_seconds,
        "formulas": FORMULAS,
        "artifacts": list(artifacts.values()),
        "rows": rows,
        "ratios": build_ratios(settings.inference.compare, list(artifacts), rows),
        "shared_settings": shared_settings(settings),
        "settings": dump(settings),
    }


def shared_settings(settings: BenchmarkSettings) -> Document:
    """Return the settings shared by all rows in a table."""
    tables = dump(settings)
    keys = ("batch_sizes", "input_lengths", "duration_seconds", "warmup_requests", "repeats")
    inference = {key: tables["inference"][key] for key in keys}
    return {"inference": inference, "open_loop": tables["open_loop"], "seed": tables["seed"]}


def model_name(manifest: ArtifactManifest) -> str:
    """Return the model name: the last specific part of the artifact's model path."""
    parts = [part for part in Path(manifest.origin.path).parts if part not in GENERIC_NAMES]
    return parts[-1] if parts else manifest.origin.path


def describe_computation(manifest: ArtifactManifest) -> str:
    compiled = manifest.compiled
    quantization = f" {compiled.quantization}" if compiled.quantization != "none" else ""
    return f"{compiled.backend.kind} {compiled.precision}{quantization}"


def _summarize_artifact(
    settings: BenchmarkSettings, name: str, manifest: ArtifactManifest, repeats: Sequence[Repeat]
) -> Document:
    starts = [line for repeat in repeats for line in repeat if "startup" in line]
    ends = [line for repeat in repeats for line in repeat if "chip" in line]
    memory = [line["peak_memory_bytes"] for line in ends if line["peak_memory_bytes"] is not None]
    peaks = [line for line in ends if line["peak_flops_per_second"] is not None]
    best = max(peaks, key=lambda line: line["peak_flops_per_second"], default=ends[-1])
    price = settings.execution.price
    chip = find_chip(price)
    return {
        "name": name,
        "path": settings.inference.artifacts[name],
        "model": model_name(manifest),
        "backend_description": describe_computation(manifest),
        "precision": manifest.compiled.precision,
        "quantization": manifest.compiled.quantization,
        "backend": manifest.compiled.backend.kind,
        "versions": manifest.compiled.versions,
        "origin": dump(manifest.origin),
        "accelerator": manifest.target.accelerator,
        "chip": best["chip"],
        "machine": starts[-1]["machine"],
        "date": summary.today().isoformat(),
        "price": summary.describe_price(price),
        "tdp_watts": chip.tdp_watts if chip else None,
        "tdp_source": f"{chip.name}: {chip.source}" if chip else None,
        "startup": {
            key: statistics.median(line["startup"][key] for line in starts)
            for key in starts[0]["startup"]
        },
        "peak_memory_bytes": max(memory, default=None),
        "peak_flops_per_second": best["peak_flops_per_second"],
        "peak_source": best["peak_source"],
    }


def _share_peaks(artifacts: Collection[Document]) -> None:
    """Set the best measured peak on all artifacts with equal chip, precision and threads."""
    best: dict[tuple[Any, ...], tuple[float, str]] = {}
    for artifact in artifacts:
        if artifact["peak_flops_per_second"] is not None:
            key = _peak_key(artifact)
            peak = artifact["peak_flops_per_second"], artifact["peak_source"]
            best[key] = max(best.get(key, peak), peak)
    for artifact in artifacts:
        key = _peak_key(artifact)
        if key in best:
            artifact["peak_flops_per_second"], artifact["peak_source"] = best[key]


def _peak_key(artifact: Document) -> tuple[Any, ...]:
    threads = artifact["machine"]["threads"]
    return artifact["chip"], artifact["precision"], artifact["quantization"], threads


def _compute_peak_fraction(closed: Document, artifact: Document) -> float | None:
    flops, peak = closed["flops_per_inference"], artifact["peak_flops_per_second"]
    if flops is None or peak is None:
        return None
    return float(flops * closed["inferences_per_second"] / peak)


def _build_rows(
    settings: BenchmarkSettings, artifact: Document, repeats: Sequence[Repeat]
) -> list[Document]:
    rows = []
    inference = settings.inference
    for length, batch_size in product(inference.input_lengths, inference.batch_sizes):
        shape = {"batch_size": batch_size, "input_length": length}
        closed, loads = (
            [[line for line in repeat if line.get(loop) == shape] for repeat in repeats]
            for loop in ("closed_loop", "open_loop")
        )
        closed_lines = [line for lines in closed for line in lines]
        rows.append(
            {
                "artifact": artifact["name"],
                **shape,
                "buckets": closed_lines[-1]["buckets"],
                "closed_loop": _summarize_closed_loop(artifact, batch_size, closed_lines),
                "open_loop": [
                    _summarize_open_loop(artifact, batch_size, load)
                    for load in zip(*loads, strict=True)
                ],
            }
        )
    return rows


def _summarize_closed_loop(
    artifact: Document, batch_size: int, loops: Sequence[Document]
) -> Document:
    medians = [percentile(loop["latencies_ms"], 50) or 0.0 for loop in loops]
    counts = [len(loop["latencies_ms"]) for loop in loops]
    rates = [count / loop["duration_seconds"] for count, loop in zip(counts, loops, strict=True)]
    per_second = statistics.median(rates)
    tokens, flops = loops[-1]["tokens"], loops[-1]["flops"]
    return {
        "num_requests": counts,
        **summary.find_percentiles([loop["latencies_ms"] for loop in loops]),
        "p50_range_ms": [min(medians), max(medians)],
        "requests_per_second": per_second,
        "inferences_per_second": batch_size * per_second,
        "tokens_per_second": tokens * per_second,
        "flops_per_inference": None if flops is None else flops / batch_size,
        **_compute_joules(artifact, batch_size, loops, batch_size * per_second),
        "usd_per_million_inferences": _compute_usd_per_million(artifact, batch_size * per_second),
    }


def _summarize_open_loop(
    artifact: Document, batch_size: int, loads: Sequence[Document]
) -> Document:
    per_second = statistics.median(float(load["requests_per_second"]) for load in loads)
    latencies = [load["latencies_ms"] for load in loads]
    dropped_fraction = summary.find_dropped_fraction(latencies)
    usd = None if dropped_fraction else _compute_usd_per_million(artifact, batch_size * per_second)
    return {
        "load_fraction": loads[0]["load_fraction"],
        "requests_per_second": per_second,
        "num_requests": [len(repeat) for repeat in latencies],
        "dropped_fraction": dropped_fraction,
        **summary.find_percentiles(latencies),
        "usd_per_million_inferences": usd,
    }


def _compute_joules(
    artifact: Document, batch_size: int, loops: Sequence[Document], per_second: float
) -> Document:
    """Return the joules per inference, and whether they are measured or an upper bound."""
    if all(loop["joules"] is not None for loop in loops):
        joules = (loop["joules"] / len(loop["latencies_ms"]) / batch_size for loop in loops)
        return {"joules_per_inference": statistics.median(joules), "joules_method": "measured"}
    if artifact["tdp_watts"] is None:
        return {"joules_per_inference": None, "joules_method": None}
    return {
        "joules_per_inference": artifact["tdp_watts"] / per_second,
        "joules_method": "upper_bound",
    }


def _compute_usd_per_million(artifact: Document, per_second: float) -> float | None:
    price = artifact["price"] or {"usd_per_hour": None}
    return summary.compute_usd_per_million(price["usd_per_hour"], per_second)


RATIOS = {
    "latency_ratio": "p50_ms",
    "throughput_ratio": "inferences_per_second",
    "cost_ratio": "usd_per_million_inferences",
}
"""Ratio name -> closed-loop metric it divides."""


def build_ratios(
    pairs: Sequence[tuple[str, str]], names: Sequence[str], rows: Sequence[Document]
) -> list[Document]:
    """Return each pair's ratios, one per batch size and input length.

    Without pairs, all artifacts are compared with the first one.
    """
    baseline, *candidates = names
    compared = pairs or [(baseline, candidate) for candidate in candidates]
    return [ratios for pair in compared for ratios in _compare_pair(pair, rows)]


def _compare_pair(pair: tuple[str, str], rows: Sequence[Document]) -> Iterator[Document]:
    baselines, candidates = (
        {
            (row["batch_size"], row["input_length"]): row["closed_loop"]
            for row in rows
            if row["artifact"] == name
        }
        for name in pair
    )
    for shape, baseline in baselines.items():
        candidate = candidates[shape]
        yield {
            "baseline": pair[0],
            "candidate": pair[1],
            "batch_size": shape[0],
            "input_length": shape[1],
            **{name: _divide(candidate[key], baseline[key]) for name, key in RATIOS.items()},
            "ranges_overlap": _do_repeats_overlap(candidate, baseline),
        }


def _do_repeats_overlap(candidate: Document, baseline: Document) -> bool | None:
    """Return whether two artifacts' p50 ranges overlap; None if both have one repeat."""
    if len(baseline["num_requests"]) == len(candidate["num_requests"]) == 1:
        return None
    baseline_min, baseline_max = baseline["p50_range_ms"]
    candidate_min, candidate_max = candidate["p50_range_ms"]
    return bool(candidate_min <= baseline_max and baseline_min <= candidate_max)


def _divide(candidate: float | None, baseline: float | None) -> float | None:
    return None if candidate is None or not baseline else candidate / baseline
