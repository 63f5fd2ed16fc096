"""Inference benchmark worker: measures one artifact once, in a separate process.

`worker.run_worker` starts it. A fresh process shows an artifact's startup time and memory. The
worker writes one line, with every latency, per batch size, input length and rate.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge import config
from regauge.accelerators import claim_device
from regauge.data.randomness import hash_keys
from regauge.evaluation.benchmark import load_generator
from regauge.evaluation.benchmark.settings import BenchmarkSettings
from regauge.evaluation.benchmark.summary import list_rates
from regauge.inference.backends import to_array
from regauge.inference.export.artifact import open_artifact
from regauge.inference.export.engine import load_engine, warm_up
from regauge.inference.export.manifest import MODEL
from regauge.models import architectures
from regauge.models.flops import flops_per_token
from regauge.models.io_spec import LENGTH, build_example_arrays
from regauge.system import log, processes
from regauge.system.errors import describe_error
from regauge.system.worker import receive_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.buckets import BucketBatch
    from regauge.inference.export.engine import Engine

START_SECONDS = time.monotonic()
"""Time after the imports, on the monotonic clock shared by all processes on a machine."""
SINGLE_PASS_OUTPUTS = ("vectors", "classes", "values")
"""Outputs computed by a single forward pass, whose operations can be counted."""


@dataclass(frozen=True)
class LatencyRequest:
    """Records computed together, as program inputs."""

    batch_size: int
    input_length: int
    """Real tokens per text."""
    buckets: list[tuple[int, int]]
    """(rows, length) of the request's buckets."""
    batches: list[tuple[np.ndarray, ...]]
    tokens: int
    """Real tokens in all texts."""


@dataclass(frozen=True)
class LoadedArtifact:
    """A loaded artifact with the benchmark settings."""

    settings: BenchmarkSettings
    repeat: int
    """Repeat number, from 1."""
    name: str
    artifact: Artifact
    engine: Engine

    def compute(self, request: LatencyRequest) -> None:
        """Compute a request, with outputs on the host on return."""
        outputs = [self.engine.runner(*batch) for batch in request.batches]
        for output in outputs:
            to_array(output)


def main() -> None:
    """Measure the artifact named in the request file; an error becomes the last line."""
    job = receive_job()
    request = job.request
    os.dup2(2, 1)  # output of libraries must not mix with the result of the command
    log.configure()
    try:
        settings = config.build(BenchmarkSettings, request["settings"])
        for line in measure(settings, request["name"], request["repeat"], request["started_at"]):
            job.write_line(line)
    except Exception as error:  # noqa: BLE001 - the parent reports every error
        message, code = describe_error(error)
        job.write_line({"error": message, "code": code})
        sys.exit(code)


def measure(
    settings: BenchmarkSettings, name: str, repeat: int, started_at: float
) -> Iterator[dict[str, Any]]:
    """Yield measurements: startup, each load, memory and chip.

    `started_at` is the process start on the `START_SECONDS` clock.
    """
    artifact = open_artifact(settings.inference.artifacts[name])
    # The machine's threads and its peak are those of torch, also if the backend needs no torch.
    claim_device(artifact.accelerator, 0, artifact.manifest.target.threads)
    engine = load_engine(artifact, batch_invariant=False)
    loaded = LoadedArtifact(settings, repeat, name, artifact, engine)
    loaded_at = time.monotonic()
    warm_up(engine, artifact)
    startup = {
        "start_seconds": START_SECONDS - started_at,
        "load_seconds": loaded_at - START_SECONDS,
        "warmup_seconds": time.monotonic() - loaded_at,
    }
    startup["total_seconds"] = sum(startup.values())
    yield {"startup": startup, "machine": describe_machine()}
    for length in settings.inference.input_lengths:
        for batch_size in settings.inference.batch_sizes:
            yield from measure_loads(loaded, build_request(loaded, batch_size, length))
    memory = artifact.accelerator.peak_memory_bytes()  # before `_measure_peak` allocates more
    yield {"peak_memory_bytes": memory, **_measure_peak(artifact)}


def build_request(loaded: LoadedArtifact, batch_size: int, length: int) -> LatencyRequest:
    """Return a request with `batch_size` records whose texts have `length` real tokens each.

    It is padded and split into the artifact's buckets, as in production.
    """
    inputs = loaded.artifact.manifest.program.inputs
    buckets, batches = [], []
    for batch in loaded.engine.buckets.make_batches(np.full(batch_size, length, np.int64)):
        arrays = build_example_arrays(inputs, batch.num_rows, batch.length)
        for spec, array in zip(inputs, arrays, strict=True):
            if spec.name == "lengths":
                array.fill(length)
                array[len(batch.record_indices) :] = 0
            elif LENGTH in spec.shape and spec.dtype != "float32":
                vocabulary_size = _find_vocabulary_size(loaded.artifact)
                _fill_tokens(array, batch, vocabulary_size, loaded.settings.seed)
                array[..., length:] = 0
        buckets.append((batch.num_rows, batch.length))
        batches.append(arrays)
    num_tokens = batch_size * length * _count_texts(loaded.artifact)
    return LatencyRequest(batch_size, length, buckets, batches, num_tokens)


def measure_loads(loaded: LoadedArtifact, request: LatencyRequest) -> Iterator[dict[str, Any]]:
    """Yield a request's latencies in the closed loop and at each open-loop rate."""
    settings = loaded.settings
    shape = {"batch_size": request.batch_size, "input_length": request.input_length}
    for _ in range(settings.inference.warmup_requests):
        loaded.compute(request)
    meter, clock = loaded.artifact.accelerator.start_energy_meter(), load_generator.Clock()
    closed = load_generator.run_closed_loop(
        lambda: loaded.compute(request), settings.inference.duration_seconds, clock
    )
    joules = meter() if meter else None
    yield {
        "closed_loop": shape,
        "latencies_ms": [round(latency, 4) for latency in closed.milliseconds],
        "duration_seconds": closed.seconds,
        "joules": joules,
        "buckets": request.buckets,
        "tokens": request.tokens,
        "flops": count_flops(loaded.artifact, request),
    }
    per_second = len(closed.milliseconds) / closed.seconds
    throughput = f"{per_second * request.batch_size:.4g} inferences/s"
    _log_load(loaded, request, throughput, closed.milliseconds)
    duration = settings.open_loop.duration_seconds
    for index, (fraction, rate) in enumerate(list_rates(settings.open_loop, per_second)):
        key = (settings.seed, request.batch_size, request.input_length, index, loaded.repeat)
        arrivals = load_generator.draw_arrivals(rate, duration, *key).tolist()
        latencies = load_generator.run_open_loop(
            lambda: loaded.compute(request), arrivals, duration, clock
        )
        yield {
            "open_loop": shape,
            "load_fraction": fraction,
            "requests_per_second": rate,
            "arrival_seconds": [round(arrival, 6) for arrival in arrivals],
            "latencies_ms": [
                round(latency, 4) if math.isfinite(latency) else None for latency in latencies
            ],
        }
        _log_load(loaded, request, f"{rate:.4g} requests/s", latencies)


def _log_load(
    loaded: LoadedArtifact, request: LatencyRequest, load: str, latencies: list[float]
) -> None:
    median = sorted(latencies)[len(latencies) // 2] if latencies else math.nan
    p50 = f"p50 {median:.4g} ms" if math.isfinite(median) else "p50 unknown"
    repeat = f"repeat {loaded.repeat} of {loaded.settings.inference.repeats}"
    shape = f"{request.batch_size} x {request.input_length}"
    log.logger.info("%s, %s, %s: %s, %s", repeat, loaded.name, shape, load, p50)


def count_flops(artifact: Artifact, request: LatencyRequest) -> float | None:
    """Return the operations for a request's real tokens: a third of training on them.

    The forward pass takes 2 N + 4 L h S per token, see `models.flops`. Returns None if the model
    configuration does not determine the operations.
    """
    program, folder = artifact.manifest.program, artifact.folder / MODEL
    if program.output_kind not in SINGLE_PASS_OUTPUTS or not (folder / "config.json").is_file():
        return None
    model = architectures.build_template(folder)
    return request.tokens * flops_per_token(model, request.input_length) / 3


def describe_machine() -> dict[str, Any]:
    """Return this process's platform, cores, threads and versions."""
    return {
        "platform": platform.platform(),
        "cores": processes.available_cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _measure_peak(artifact: Artifact) -> dict[str, Any]:
    """Return the chip and its peak in the artifact's precision; unknown for integer models."""
    compiled = artifact.manifest.compiled
    chip = artifact.accelerator.chip_peak(compiled.precision)
    peak = (
        chip.flops_per_second.get(compiled.precision) if compiled.quantization == "none" else None
    )
    source = "unknown" if peak is None else f"{compiled.precision}: {chip.source}"
    return {"chip": chip.name, "peak_flops_per_second": peak, "peak_source": source}


def _fill_tokens(array: np.ndarray, batch: BucketBatch, vocabulary_size: int, seed: int) -> None:
    """Write keyed token ids into the record rows, [rows, …, length]."""
    count = len(batch.record_indices)
    positions = np.arange(array[:count].size, dtype=np.int64)
    token_ids = hash_keys(seed, positions) % np.uint64(vocabulary_size)
    array.fill(0)
    array[:count] = token_ids.reshape(array[:count].shape)


def _find_vocabulary_size(artifact: Artifact) -> int:
    """Return the model's vocabulary size; 2 if the configuration does not state one."""
    size = artifact.read_model_config().get("vocab_size")
    return size if isinstance(size, int) else 2


def _count_texts(artifact: Artifact) -> int:
    inputs = artifact.manifest.program.inputs
    tokens = next((spec for spec in inputs if LENGTH in spec.shape), None)
    return math.prod(size for size in tokens.shape if isinstance(size, int)) if tokens else 0


if __name__ == "__main__":
    main()
