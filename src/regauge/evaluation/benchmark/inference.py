"""Artifact benchmark: alternating repeats in separate processes, summarized in one document.

The raw lines from each repeat stay in the output folder.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import dump
from regauge.config.output_files import BENCHMARK
from regauge.evaluation.benchmark import inference_summary, summary
from regauge.inference.export.artifact import read_manifest
from regauge.inference.export.manifest import ARTIFACT
from regauge.system.choices import did_you_mean
from regauge.system.errors import ChildError, NoProgressError, SettingsError, find_refusal
from regauge.system.log import logger
from regauge.system.worker import WorkerLimits, run_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.evaluation.benchmark.settings import BenchmarkSettings
    from regauge.inference.export.manifest import ArtifactManifest
    from regauge.system.worker import Line

REPEATS = "repeats"
"""Folder for raw lines, one subfolder per repeat and artifact."""
DEFAULT_FOLDER = Path("out") / "benchmark"
"""Output folder if the command line names artifacts."""
WORKER = "regauge.evaluation.benchmark.latency_worker"


def name_artifacts(folders: Sequence[Path]) -> dict[str, str]:
    """Return name -> artifact folder.

    The name is the folder name, prefixed with the parent's name if two folders share it. Raises
    SettingsError if names are still ambiguous.
    """
    short_names = [
        folder.resolve().parent.name if folder.name == ARTIFACT else folder.resolve().name
        for folder in folders
    ]
    counts = Counter(short_names)
    names = [
        name if counts[name] == 1 else f"{folder.resolve().parent.name}-{folder.name}"
        for name, folder in zip(short_names, folders, strict=True)
    ]
    if len(set(names)) < len(names):
        duplicate = max(names, key=names.count)
        remedy = f"name each one: inference.artifacts.NAME={folders[names.index(duplicate)]}"
        raise SettingsError(f"two artifacts have the name '{duplicate}'", remedy)
    return {name: str(folder) for name, folder in zip(names, folders, strict=True)}


def plan(settings: BenchmarkSettings) -> dict[str, Any]:
    """Return the measurements that `run` would make, without loading an artifact.

    A problem with the output folder is part of the result. Raises SettingsError for artifacts,
    lengths or names that cannot be measured.
    """
    settings = _limit_input_lengths(settings)
    inference, open_loop = settings.inference, settings.open_loop
    manifests = _read_manifests(settings)
    folder = Path(settings.output.folder)
    refusal = find_refusal(lambda: _read_earlier(settings))
    for name, manifest in manifests.items():
        _check_lengths(name, manifest, inference.input_lengths)
    earlier = {} if refusal else _read_earlier(settings)
    names = (*manifests, *(artifact["name"] for artifact in earlier.get("artifacts", ())))
    for name in {name for pair in inference.compare for name in pair}:
        if name not in names:
            problem = f"inference.compare names an unknown artifact '{name}'"
            raise SettingsError(problem, did_you_mean(name, names))
    shapes = [
        f"{rows} x {length}"
        for length, rows in product(inference.input_lengths, inference.batch_sizes)
    ]
    num_rates = len(summary.list_rates(open_loop, 1.0))
    shape_seconds = inference.duration_seconds + open_loop.duration_seconds * num_rates
    num_measurements = len(shapes) * inference.repeats * len(manifests)
    return {
        "output": str(folder),
        "artifacts": [_describe_artifact(name, manifest) for name, manifest in manifests.items()],
        "batch_x_length": shapes,
        "requests_per_second": [
            *(f"{fraction:g} of the closed loop" for fraction in open_loop.load_fractions),
            *(f"{per_second:g}" for per_second in open_loop.requests_per_second),
        ],
        "repeats": inference.repeats,
        "min_seconds": round(shape_seconds * num_measurements),
        "price": summary.format_price(settings.execution.price),
        **refusal,
    }


def run(settings: BenchmarkSettings) -> dict[str, Any]:
    """Measure every artifact and return the `inference_summary.build_document` document."""
    settings = _limit_input_lengths(settings)
    plan(settings)
    earlier = _read_earlier(settings)
    inference, folder = settings.inference, Path(settings.output.folder)
    (folder / REPEATS).mkdir(parents=True, exist_ok=True)
    price = summary.describe_price(settings.execution.price)
    if price and price["staleness_warning"]:
        logger.warning("%s", price["staleness_warning"])
    if (folder / BENCHMARK).exists() and not earlier:
        logger.warning("replacing %s: it was measured with other requests", folder / BENCHMARK)
    repeats = summary.repeat_alternately(
        inference.artifacts, inference.repeats, partial(_measure_once, settings)
    )
    manifests = _read_manifests(settings)
    return inference_summary.build_document(settings, manifests, repeats, _read_earlier(settings))


def _read_manifests(settings: BenchmarkSettings) -> dict[str, ArtifactManifest]:
    folders = settings.inference.artifacts
    return {name: read_manifest(Path(folder)) for name, folder in folders.items()}


def _limit_input_lengths(settings: BenchmarkSettings) -> BenchmarkSettings:
    inference = settings.inference
    if "input_lengths" in inference.model_fields_set:
        return settings
    longest = min(manifest.buckets[-1].length for manifest in _read_manifests(settings).values())
    lengths = tuple(dict.fromkeys(min(length, longest) for length in inference.input_lengths))
    limited = inference.model_copy(update={"input_lengths": lengths})
    return settings.model_copy(update={"inference": limited})


def _measure_once(settings: BenchmarkSettings, name: str, repeat: int) -> list[dict[str, Any]]:
    """Return the lines written by an artifact's worker in one repeat.

    Raises ChildError if the worker failed, and NoProgressError if it stopped writing lines.
    """
    folder = Path(settings.output.folder) / REPEATS / f"{repeat}-{name}"
    request = {"settings": dump(settings), "name": name, "repeat": repeat}
    max_silence = _max_silence_seconds(settings)
    lines: list[Line] = []
    worker_exit = run_worker(
        WORKER,
        {**request, "started_at": time.monotonic()},
        folder,
        WorkerLimits(silence=max_silence),
        quiet=False,
        on_line=lines.append,
    )
    if worker_exit.code is None:
        remedy = "raise inference.timeout_seconds or export the artifact again"
        raise NoProgressError(f"{name} made no progress for {max_silence:.0f} s", remedy)
    if code := worker_exit.code:
        error = next((line["error"] for line in lines if "error" in line), None)
        problem = error or f"its process {worker_exit.problem}; see its output above"
        raise ChildError(code if code > 0 else 128 - code, f"{name}: {problem}")
    return lines


def _max_silence_seconds(settings: BenchmarkSettings) -> float:
    """Return the longest time between two worker lines; a worker writes one after each load."""
    longest = max(settings.inference.duration_seconds, 2 * settings.open_loop.duration_seconds)
    return settings.inference.timeout_seconds + longest


def _read_earlier(settings: BenchmarkSettings) -> dict[str, Any]:
    """Return the document of an earlier benchmark in this folder, if it had the same requests.

    Raises the same errors as `summary.read_earlier`.
    """
    folder = Path(settings.output.folder)
    document = summary.read_earlier(folder, "inference", "an inference benchmark")
    shared = inference_summary.shared_settings(settings)
    return document if document.get("shared_settings") == shared else {}


def _check_lengths(name: str, manifest: ArtifactManifest, lengths: Sequence[int]) -> None:
    longest = manifest.buckets[-1].length
    if max(lengths) > longest:
        problem = (
            f"{name} accepts at most {longest} tokens, "
            f"but inference.input_lengths contains {max(lengths)}"
        )
        raise SettingsError(problem, f"set inference.input_lengths = [{longest}]")


def _describe_artifact(name: str, manifest: ArtifactManifest) -> dict[str, Any]:
    return {
        "name": name,
        "model": inference_summary.model_name(manifest),
        "backend_description": inference_summary.describe_computation(manifest),
        "chip": manifest.target.chip,
    }
