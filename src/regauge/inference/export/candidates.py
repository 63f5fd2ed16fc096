"""Export candidates: each compiled, compared with fp32 and timed."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge.inference.backends import (
    Calibration,
    CompileJob,
    ExecutionContext,
    Payload,
    Runner,
    Shape,
    check_usable,
    list_usable,
)
from regauge.inference.export.buckets import Buckets, build_buckets
from regauge.inference.export.engine import Engine
from regauge.inference.export.engine_module import EngineModule
from regauge.inference.export.quality import metrics_loss, quality_loss
from regauge.models.inference_modules import cast_program, named_tensors
from regauge.models.tensors import precision_dtype
from regauge.system import stop_signals
from regauge.system.errors import SettingsError
from regauge.system.files import stage_output
from regauge.system.processes import available_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from regauge.accelerators import Accelerator, Precision
    from regauge.inference.backends import Backend, Quantization
    from regauge.inference.export.export_settings import Candidates, ExportSettings
    from regauge.inference.export.manifest import Bucket
    from regauge.inference.export.programs import ProgramSpec
    from regauge.inference.export.records import Records

    ComputeMetrics = Callable[[nn.Module], dict[str, float]]

RACE_RECORDS, RACE_SECONDS = 32, 0.2
"""Records per length, and seconds, for each candidate's short timing."""
MIN_LATENCY_RUNS = 5
"""Minimum timings for a single text."""
FINAL_ROUNDS = 3
"""Rounds for timing the finalists again, alternating."""
MAX_FINAL_SECONDS = 10.0
"""No such round begins after this time."""
MAX_CALIBRATION_TEXTS = 256
"""Texts for calibrating int8 scales; parity is measured on at least as many others."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a program."""

    backend: Backend
    precision: Precision
    quantization: Quantization
    threads: int
    is_fallback: bool = False
    """Whether to try it only if the faster precision loses too much quality, since it takes long to
    compile or the export is `fast`."""

    @property
    def group(self) -> tuple[Backend, Quantization, int]:
        """Fields shared with other precisions."""
        return self.backend, self.quantization, self.threads

    @property
    def payload_key(self) -> tuple[Any, ...]:
        """Fields with an effect on the payload; candidates with equal fields share it."""
        if self.backend.shares_payload:
            return self.backend, self.quantization
        return *self.group, self.precision

    @property
    def description(self) -> dict[str, Any]:
        """Fields to distinguish candidates, for `benchmark.json`."""
        options = self.backend.model_dump(mode="json", exclude_defaults=True)
        changed = {name: value for name, value in options.items() if name != "kind"}
        return {
            "backend": self.backend.kind,
            **({"backend_options": changed} if changed else {}),
            "precision": self.precision,
            "quantization": self.quantization,
            "threads": self.threads,
        }


@dataclass(frozen=True)
class ExportContext:
    """What all candidates in an export share."""

    settings: ExportSettings
    spec: ProgramSpec
    accelerator: Accelerator
    records: Records
    """Records for parity and timing."""
    reference_outputs: np.ndarray
    """The fp32 reference's outputs for these records, [records, width]."""
    compute_metrics: ComputeMetrics | None = None
    """Computes a module's metrics on the run's held-out rows."""
    reference_metrics: dict[str, float] = field(default_factory=dict)
    """The fp32 reference's held-out metrics."""

    @cached_property
    def calibration(self) -> Calibration:
        """Records with which backends calibrate int8 scales."""
        count = min(MAX_CALIBRATION_TEXTS, -(-len(self.records) // 2))
        records = self.records.select(np.arange(count))
        shapes = build_buckets(self.settings.buckets, self.spec.max_tokens, has_dynamic_shapes=True)
        batches = Buckets(shapes, needs_row_padding=False).make_batches(records.lengths)
        samples = [tuple(map(torch.as_tensor, records.build_inputs(batch))) for batch in batches]
        return Calibration(self.spec.program, samples, self.settings.parity.max_loss)

    @cached_property
    def race_records(self) -> Records:
        """Records with three lengths, for a short timing; neighbors in length fill batches."""
        order = np.argsort(self.records.lengths, kind="stable")
        count = min(RACE_RECORDS, len(order))
        starts = (np.array([0.25, 0.5, 0.75]) * (len(order) - count)).astype(int)
        chosen = [order[start : start + count] for start in starts]
        return self.records.select(np.unique(np.concatenate(chosen)))

    def measure_metrics(self, engine: Engine) -> dict[str, float]:
        """Return a program's held-out metrics; empty if the model is not from a run."""
        if self.compute_metrics is None:
            return {}
        return self.compute_metrics(
            EngineModule(engine, self.spec.entry.output_kind, self.spec.entry.fields)
        )


@dataclass(frozen=True)
class LoadedCandidate:
    """A compiled candidate on its device."""

    candidate: Candidate
    folder: Path
    """Payload folder."""
    buckets: tuple[Bucket, ...]
    weights: Mapping[str, Tensor]
    execution_context: ExecutionContext
    runner: Runner

    def build_engine(self, context: ExportContext) -> Engine:
        """Return an engine for batches in the candidate's buckets."""
        needs_padding = not self.candidate.backend.has_dynamic_shapes
        buckets = Buckets(self.buckets, needs_row_padding=needs_padding)
        return Engine(self.runner, buckets, context.spec.entry.output_size)


def list_candidates(
    options: Candidates, accelerator: Accelerator, spec: ProgramSpec
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates requested in the settings, the most promising backend first.

    The second value is why the other usable backends are left out, by kind. Raises SettingsError if
    a named backend is not usable, or if no candidate is left.
    """
    for backend in options.backends:
        check_usable(backend, accelerator)
    usable = (backend for backend in list_usable(accelerator) if backend.kind != "torch-compile")
    backends = list(options.backends or usable)
    if options.portable is not None:
        backends = _filter_backends(
            backends, "compile for an instruction set", lambda backend: backend.is_ahead_of_time
        )
    if spec.entry.output_kind == "text":
        backends = _filter_backends(
            backends, "generate text", lambda backend: backend.supports_loops
        )
    left_out: list[Backend] = []
    if accelerator.on_host and not options.backends:
        backends, left_out = _prefer_graphs(backends)
    backends.sort(key=lambda backend: -backend.available().fitness)
    candidates = _combine_options(options, accelerator, backends)
    if not candidates:
        formats = (
            f"{backend.kind}: {_describe_formats(backend, accelerator)}" for backend in backends
        )
        problem = "no backend supports these candidates.precisions and candidates.quantization"
        raise SettingsError(problem, f"choose from {'; '.join(formats)}")
    if options.fast:
        return _select_fast(candidates)
    reason = "compiles machine code; name it in candidates.backends"
    return candidates, {backend.kind: reason for backend in left_out}


def _combine_options(
    options: Candidates, accelerator: Accelerator, backends: Sequence[Backend]
) -> list[Candidate]:
    """Combine backends, threads and formats, the fastest precision first."""
    candidates: list[Candidate] = []
    precisions = options.precisions or _default_precisions(accelerator)
    for backend in backends:
        for threads in options.threads or (available_threads(),):
            for precision, quantization in backend.supported_formats(accelerator):
                is_asked_for = not options.quantization or quantization in options.quantization
                if is_asked_for and precision in precisions:
                    candidate = Candidate(backend, precision, quantization, threads)
                    is_first = all(other.group != candidate.group for other in candidates)
                    is_slow_compiler = not (backend.compiles_in_seconds or options.precisions)
                    candidates.append(
                        replace(candidate, is_fallback=is_slow_compiler and not is_first)
                    )
    return candidates


def _prefer_graphs(backends: list[Backend]) -> tuple[list[Backend], list[Backend]]:
    """Return the backends to try, and those left out because others write graphs.

    On a CPU, machine code is rarely faster than a graph, and compiling it takes most of an export.
    """
    if not any(backend.compiles_in_seconds and backend.is_ahead_of_time for backend in backends):
        return backends, []
    quick = [backend for backend in backends if backend.compiles_in_seconds]
    return quick, [backend for backend in backends if not backend.compiles_in_seconds]


def _select_fast(candidates: list[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidate expected to be fastest that compiles within seconds, and its fallbacks.

    Also returns why the other backends are left out.
    """
    quick = [candidate for candidate in candidates if candidate.backend.compiles_in_seconds]
    unquantized = [item for item in quick or candidates if item.quantization == "none"]
    best = max(
        unquantized or quick or candidates, key=lambda item: item.backend.available().fitness
    )
    fallbacks = [
        replace(item, is_fallback=True)
        for item in candidates
        if item.group == best.group and item != best
    ]
    others = {item.backend.kind for item in candidates} - {best.backend.kind}
    return [best, *fallbacks], dict.fromkeys(sorted(others), "the export is fast")


def _filter_backends(
    backends: Sequence[Backend], capability: str, is_capable: Callable[[Backend], bool]
) -> list[Backend]:
    """Return the backends with a capability; raises SettingsError if there are none."""
    capable = [backend for backend in backends if is_capable(backend)]
    if not capable:
        kinds = ", ".join(backend.kind for backend in backends)
        problem = f"no candidate backend can {capability}: {kinds}"
        raise SettingsError(problem, "name other candidates.backends")
    return capable


def _describe_formats(backend: Backend, accelerator: Accelerator) -> str:
    return ", ".join(
        precision if quantization == "none" else f"{precision} with {quantization}"
        for precision, quantization in backend.supported_formats(accelerator)
    )


def build_reference_engine(spec: ProgramSpec, settings: ExportSettings) -> Engine:
    """Return the reference: the program in fp32 on the CPU, without compilation.

    It has all lengths of a dynamic graph, because padding takes time and changes no output.
    """
    bucket_settings = settings.buckets.model_copy(update={"lengths": ()})
    shapes = build_buckets(bucket_settings, spec.max_tokens, has_dynamic_shapes=True)
    buckets = Buckets(shapes, needs_row_padding=False)
    return Engine(_UncompiledRunner(spec.program), buckets, spec.entry.output_size)


def build_candidate(context: ExportContext, candidate: Candidate, folder: Path) -> LoadedCandidate:
    """Load a candidate's payload from a folder; compile it first if the folder does not exist."""
    backend, spec = candidate.backend, context.spec
    buckets = build_buckets(
        context.settings.buckets,
        spec.max_tokens,
        has_dynamic_shapes=backend.has_dynamic_shapes and spec.entry.output_kind != "text",
    )
    shapes = [Shape(bucket.batch_sizes[0], bucket.length) for bucket in buckets]
    context.accelerator.claim(0, candidate.threads)  # torch calibrates, whatever the backend
    execution_context = ExecutionContext(context.accelerator, 0, candidate.threads)
    program = copy.deepcopy(spec.program)
    cast_program(program, precision_dtype(candidate.precision))
    level = context.settings.candidates.portable
    weights = {name: value.detach() for name, value in named_tensors(program).items()}
    job = CompileJob(
        program,
        spec.entry.inputs,
        shapes,
        candidate.precision,
        candidate.quantization,
        level,
        context.calibration,
    )
    if not folder.exists():
        with stage_output(folder) as staging:
            staging.mkdir()
            backend.export(job, execution_context, staging)
    payload = Payload(
        folder, spec.entry.inputs, shapes, candidate.precision, lambda: weights, lambda: program
    )
    return LoadedCandidate(
        candidate,
        folder,
        buckets,
        weights,
        execution_context,
        backend.load(payload, execution_context),
    )


def race_candidate(context: ExportContext, loaded: LoadedCandidate) -> dict[str, float]:
    """Time a candidate briefly, to see whether further measurements are worthwhile."""
    engine, records = loaded.build_engine(context), context.race_records
    engine.compute(records)  # the first run prepares the weights
    return _time_engine(engine, records, RACE_SECONDS, [])


def measure_candidate(
    context: ExportContext, loaded: LoadedCandidate, on_batch: Callable[[int], None]
) -> dict[str, Any]:
    """Return a candidate's row: quality loss, throughput and latency.

    `on_batch` gets the number of records in each compared batch.
    """
    counting = replace(loaded.build_engine(context), on_batch=on_batch)
    start = time.perf_counter()
    outputs = counting.compute(context.records)
    duration = time.perf_counter() - start
    engine = replace(loaded.build_engine(context), halvings=counting.halvings)
    row = quality_loss(outputs, context.reference_outputs, context.spec.entry.output_kind)
    if metrics := context.measure_metrics(engine):
        loss = metrics_loss(metrics, context.reference_metrics)
        row |= {f"heldout/{name}": value for name, value in metrics.items()}
        row["quality_loss"] = max(row["quality_loss"], loss)
    seconds = context.settings.candidates.timing_seconds
    is_slow = duration >= seconds  # then the first run is precise enough, warm-up included
    timing = _time_engine(engine, context.records, seconds, [duration] if is_slow else [])
    return {**loaded.candidate.description, **timing, **row}


def retime_finalists(
    context: ExportContext, finalists: Sequence[LoadedCandidate]
) -> list[dict[str, float]]:
    """Return the finalists' median timings over several alternating rounds.

    A machine's speed changes from minute to minute; alternating exposes all to the same changes.
    """
    engines = [loaded.build_engine(context) for loaded in finalists]
    seconds = context.settings.candidates.timing_seconds / FINAL_ROUNDS
    rounds: list[list[dict[str, float]]] = []
    deadline = time.perf_counter() + MAX_FINAL_SECONDS
    while not rounds or (len(rounds) < FINAL_ROUNDS and time.perf_counter() < deadline):
        stop_signals.check_stop()
        rounds.append([_time_engine(engine, context.records, seconds, []) for engine in engines])
    return [
        {name: statistics.median(timing[name] for timing in timings) for name in timings[0]}
        for timings in zip(*rounds, strict=True)
    ]


def _default_precisions(accelerator: Accelerator) -> tuple[Precision, ...]:
    precisions = accelerator.precisions()
    return precisions[: precisions.index("fp32") + 1] if "fp32" in precisions else precisions


def _time_engine(
    engine: Engine, records: Records, seconds: float, durations: list[float]
) -> dict[str, float]:
    """Return texts and real tokens per second, and the median latency for a single text.

    The single text has the median length. `durations` are the seconds of earlier runs; if there are
    any, only the single text is timed.
    """
    deadline = time.perf_counter() + (0 if durations else seconds)
    while not durations or time.perf_counter() < deadline:
        start = time.perf_counter()
        engine.compute(records)
        durations.append(time.perf_counter() - start)
    duration = statistics.median(durations)
    by_length = np.argsort(records.lengths, kind="stable")
    single = records.select(by_length[[len(records) // 2]])
    latencies: list[float] = []
    deadline = time.perf_counter() + seconds / 4
    while len(latencies) < MIN_LATENCY_RUNS or time.perf_counter() < deadline:
        start = time.perf_counter()
        engine.compute(single)
        latencies.append(time.perf_counter() - start)
    return {
        "texts_per_second": len(records) / duration,
        "tokens_per_second": records.num_tokens / duration,
        "single_text_ms": 1e3 * statistics.median(latencies),
    }


class _UncompiledRunner(Runner):
    def __init__(self, program: nn.Module) -> None:
        self._program = program

    @torch.no_grad()
    def __call__(self, *inputs: np.ndarray) -> Tensor:
        output: Tensor = self._program(*map(torch.as_tensor, inputs))
        return output
