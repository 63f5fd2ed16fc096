"""Exports a trained model as an artifact: builds, compares and times candidates; keeps the best."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge import accelerators
from regauge.config import FORMAT, dump
from regauge.config.output_files import BENCHMARK
from regauge.inference.export.artifact import hash_files
from regauge.inference.export.batch_invariance import check_batch_invariance
from regauge.inference.export.batch_timing import measure_bucket_times
from regauge.inference.export.bucket_times import write_bucket_times
from regauge.inference.export.buckets import resolve_buckets
from regauge.inference.export.candidates import (
    Candidate,
    ExportContext,
    LoadedCandidate,
    build_candidate,
    build_reference_engine,
    list_candidates,
    measure_candidate,
    race_candidate,
    retime_finalists,
)
from regauge.inference.export.manifest import (
    MANIFEST,
    PARITY,
    PAYLOAD,
    WEIGHTS,
    ArtifactManifest,
    BatchInvariance,
    Compilation,
    TargetMachine,
    WeightsOrigin,
)
from regauge.inference.export.parity_rows import build_parity_rows, write_parity_rows
from regauge.inference.export.phase_log import log_phase
from regauge.run_folders.run_folder import locate_run, read_run_id
from regauge.system import safetensors_io, stop_signals
from regauge.system.errors import DataError, RegaugeError, first_line
from regauge.system.files import stage_output, write_json
from regauge.system.json_files import write_sealed
from regauge.system.log import logger
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator
    from regauge.inference.export.candidates import ComputeMetrics
    from regauge.inference.export.export_settings import ExportSettings, Goal
    from regauge.inference.export.probe_texts import ProbeTexts
    from regauge.inference.export.sources import ExportSource

Row = dict[str, Any]
LOST = "lost"
"""Row key for why a candidate was not selected."""
RACE_RATIO = 0.6
"""Minimum speed, relative to the best one so far, to measure a candidate after the race."""
MAX_FINALISTS, FINALIST_RATIO = 3, 0.75
"""How many of the best candidates are timed again, and how close to the best they must be."""
GOAL_FIGURES: dict[Goal, tuple[str, bool]] = {
    "throughput": ("texts_per_second", True),
    "cost": ("texts_per_second", True),  # on one machine the fastest is the cheapest
    "latency": ("single_text_ms", False),
}
"""Goal -> the deciding figure, and whether higher is better."""


class Trial(NamedTuple):
    """A built and measured candidate."""

    candidate: Candidate
    folder: Path
    """Folder with the compiled payload."""
    row: Row
    """Measurements, or the compiler's error."""
    race: Row | None = None
    """Short timing; None if it failed."""

    def keeps_quality(self, max_loss: float) -> bool:
        loss: float = self.row.get("quality_loss", math.inf)
        return loss <= max_loss


def export_artifact(
    settings: ExportSettings, source: ExportSource, compute_metrics: ComputeMetrics | None
) -> dict[str, Any]:
    """Write a model's artifact; return a summary with a row for each candidate.

    `compute_metrics` returns a module's metrics on the run's held-out rows. Raises DataError if no
    candidate keeps the quality.
    """
    accelerator = accelerators.resolve(settings.accelerator, quiet=True)
    candidates, left_out = list_candidates(settings.candidates, accelerator, source.spec)
    buckets = resolve_buckets(
        settings.buckets,
        source.spec.max_tokens,
        on_host=accelerator.on_host,
        is_fast=settings.candidates.fast,
    )
    settings = settings.model_copy(update={"buckets": buckets})
    with (
        stop_signals.record_signals(),
        stage_output(Path(settings.export.to)) as folder,
        tempfile.TemporaryDirectory() as scratch,
    ):
        folder.mkdir()
        source.copy_files(folder)
        context, probe = _compute_reference(settings, source, accelerator, compute_metrics)
        trials = _try_candidates(context, candidates, Path(scratch))
        selected, loaded = _select_best(context, trials)
        _explain_losses(context, selected, trials)
        stop_signals.check_stop()
        with log_phase(f"write: {settings.export.to}"):
            shutil.move(selected.folder, folder / PAYLOAD)
            best = loaded or build_candidate(context, selected.candidate, folder / PAYLOAD)
            safetensors_io.write_tensors(folder / WEIGHTS, best.weights)
            parity = {
                "num_records": len(context.records),
                "records_origin": probe.origin,
                "max_loss": settings.parity.max_loss,
            }
            rows = [trial.row for trial in trials]
            write_json(folder / PARITY, {"format": FORMAT, **parity, **selected.row})
            write_json(folder / BENCHMARK, {"format": FORMAT, "candidates": rows})
        best, proof = _check_invariance(context, best, source)
        _write_parity_rows(context, best, probe, folder)
        _write_bucket_times(context, best, folder)
        manifest = _build_manifest(context, best, source, folder, proof)
        stop_signals.check_stop()
        write_sealed(folder / MANIFEST, dump(manifest))
    return {
        "path": settings.export.to,
        "candidates": [_summarize_row(row) for row in rows],
        "selected": _format_name_and_threads(selected.row),
        "not_selected": [
            *(f"{_format_name(row)}: {row[LOST]}" for row in rows if LOST in row),
            *(f"{kind}: not tried, {reason}" for kind, reason in left_out.items()),
        ],
        "batch_invariant": manifest.batch_invariance is not None,
    }


def _compute_reference(
    settings: ExportSettings,
    source: ExportSource,
    accelerator: Accelerator,
    compute_metrics: ComputeMetrics | None,
) -> tuple[ExportContext, ProbeTexts]:
    """Return the context for all candidates with the fp32 outputs, and the records' texts."""
    records, probe = source.build_parity_records(settings)
    engine = build_reference_engine(source.spec, settings)
    with log_phase("reference: fp32, not compiled", len(records), "records") as phase:
        outputs = replace(engine, on_batch=phase.advance).compute(records)
    context = ExportContext(settings, source.spec, accelerator, records, outputs, compute_metrics)
    if compute_metrics is None:
        return context, probe
    with log_phase("reference: held-out metrics in fp32"):
        return replace(context, reference_metrics=context.measure_metrics(engine)), probe


def _try_candidates(
    context: ExportContext, candidates: list[Candidate], scratch: Path
) -> list[Trial]:
    """Build and measure the candidates; a fallback is tried only if needed.

    A shared payload is compiled once.
    """
    trials: list[Trial] = []
    folders: dict[tuple[Any, ...], Path] = {}
    for index, candidate in enumerate(candidates):
        stop_signals.check_stop()
        title = (
            f"{index + 1} of {len(candidates)}, {_format_name_and_threads(candidate.description)}"
        )
        if candidate.is_fallback and (faster := _find_eligible(context, trials, candidate)):
            name = _format_name(faster.row)
            logger.info("skip %s: %s is faster and keeps the quality", title, name)
            continue
        folder = folders.setdefault(candidate.payload_key, scratch / str(index))
        trials.append(_measure(context, candidate, folder, title, _find_leader(context, trials)))
    return trials


def _find_leader(context: ExportContext, trials: list[Trial]) -> Row | None:
    """Return the best short timing so far among trials with sufficient quality."""
    figure, higher_is_better = GOAL_FIGURES[context.settings.candidates.optimize_for]
    races = [
        trial.race
        for trial in trials
        if trial.race is not None and trial.keeps_quality(context.settings.parity.max_loss)
    ]
    select = max if higher_is_better else min
    return select(races, key=lambda race: race[figure], default=None)


def _find_eligible(
    context: ExportContext, trials: list[Trial], candidate: Candidate
) -> Trial | None:
    """Return a trial with sufficient quality that differs from a candidate only by precision."""
    eligible = (trial for trial in trials if trial.keeps_quality(context.settings.parity.max_loss))
    return next((trial for trial in eligible if trial.candidate.group == candidate.group), None)


def _select_best(
    context: ExportContext, trials: list[Trial]
) -> tuple[Trial, LoadedCandidate | None]:
    """Return the best trial with sufficient quality, and the candidate if still loaded."""
    figure, higher_is_better = GOAL_FIGURES[context.settings.candidates.optimize_for]
    ranking = sorted(
        _list_eligible(trials, context.settings.parity.max_loss),
        key=lambda trial: trial.row[figure],
        reverse=higher_is_better,
    )
    finalists = [
        trial
        for trial in ranking
        if _slowdown(context, trial.row, ranking[0].row) * FINALIST_RATIO < 1
    ]
    finalists = finalists[:MAX_FINALISTS]
    if len(finalists) == 1:
        return finalists[0], None
    with log_phase(f"re-time: {len(finalists)} finalists, alternating"):
        loaded = [build_candidate(context, trial.candidate, trial.folder) for trial in finalists]
        timings = retime_finalists(context, loaded)
    for trial, timing in zip(finalists, timings, strict=True):
        trial.row.update(timing)
        logger.info("Re-timed (final): %s", _format_result(trial.row))
    select = max if higher_is_better else min
    index = select(range(len(finalists)), key=lambda index: finalists[index].row[figure])
    return finalists[index], loaded[index]


def _measure(
    context: ExportContext, candidate: Candidate, folder: Path, title: str, leader: Row | None
) -> Trial:
    """Build and measure a candidate; return a failure row if compilation fails.

    The quality is not measured if the short timing is far behind the `leader`'s.
    """
    race: Row | None = None
    try:
        with log_phase(f"compile {title}"):
            loaded = build_candidate(context, candidate, folder)
        with log_phase(f"measure {title}", len(context.records), "records") as phase:
            race = race_candidate(context, loaded)
            slowdown = _slowdown(context, race, leader) if leader else 1.0
            if slowdown * RACE_RATIO > 1:
                row = {**candidate.description, **race, LOST: f"{slowdown:.1f} x slower"}
            else:
                row = measure_candidate(context, loaded, phase.advance)
    except RegaugeError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers raise any kind of exception
        row = {**candidate.description, "error": first_line(error)[:200]}
    logger.info("%s", _format_result(row))
    return Trial(candidate, folder, row, race)


def _explain_losses(context: ExportContext, selected: Trial, trials: list[Trial]) -> None:
    max_loss = context.settings.parity.max_loss
    for trial in trials:
        if trial is selected or LOST in trial.row:
            continue
        if "error" in trial.row:
            trial.row[LOST] = f"failed: {trial.row['error']}"
        elif not trial.keeps_quality(max_loss):
            trial.row[LOST] = f"quality loss {trial.row['quality_loss']:.2g} > {max_loss:g}"
        else:
            trial.row[LOST] = f"{_slowdown(context, trial.row, selected.row):.2f} x slower"


def _slowdown(context: ExportContext, timing: Row, best: Row) -> float:
    figure, higher_is_better = GOAL_FIGURES[context.settings.candidates.optimize_for]
    ratio: float = best[figure] / timing[figure]
    return ratio if higher_is_better else 1 / ratio


def _list_eligible(trials: list[Trial], max_loss: float) -> list[Trial]:
    """Return the trials within the loss; raises DataError if there are none."""
    eligible = [trial for trial in trials if trial.keeps_quality(max_loss)]
    if not eligible:
        rows = [trial.row for trial in trials]
        failure = next((row["error"] for row in rows if "error" in row), None)
        smallest = min((row["quality_loss"] for row in rows if "quality_loss" in row), default=None)
        reason = f"it fails: {failure}" if smallest is None else f"the smallest is {smallest:.2g}"
        raise DataError(
            f"no candidate has a quality loss within {max_loss:g}: {reason}",
            "name other candidates, or raise parity.max_loss",
        )
    return eligible


def _check_invariance(
    context: ExportContext, best: LoadedCandidate, source: ExportSource
) -> tuple[LoadedCandidate, BatchInvariance | None]:
    """Return a candidate with batch-invariant buckets and the proof, or unchanged with None."""
    if not context.settings.parity.batch_invariance:
        return best, None
    with log_phase("verify: batch invariance") as phase:
        invariant = check_batch_invariance(
            best.runner, best.buckets, source.synthetic_records, phase.advance
        )
    if invariant is None:
        return best, None
    proof = BatchInvariance(chip=_chip_name(best), num_texts=invariant.num_texts)
    return replace(best, buckets=invariant.buckets), proof


def _write_parity_rows(
    context: ExportContext, best: LoadedCandidate, probe: ProbeTexts, folder: Path
) -> None:
    count = context.settings.parity.stored_rows
    if not count:
        return
    rows = build_parity_rows(
        context.records,
        probe,
        best.build_engine(context),
        output_kind=context.spec.entry.output_kind,
        precision=best.candidate.precision,
        count=count,
    )
    write_parity_rows(folder, rows)


def _write_bucket_times(context: ExportContext, best: LoadedCandidate, folder: Path) -> None:
    """Store a candidate's batch times.

    A text generator has none: its batch times depend on the answers.
    """
    if context.spec.entry.output_kind == "text":
        return
    with log_phase("measure: times of the batches"):
        times = measure_bucket_times(
            best.runner,
            best.buckets,
            context.spec.entry.inputs,
            seconds=context.settings.candidates.timing_seconds,
            has_dynamic_shapes=best.candidate.backend.has_dynamic_shapes,
            threads=best.candidate.threads,
            chip=_chip_name(best),
        )
    write_bucket_times(folder, times)


def _build_manifest(
    context: ExportContext,
    best: LoadedCandidate,
    source: ExportSource,
    folder: Path,
    proof: BatchInvariance | None,
) -> ArtifactManifest:
    settings, candidate = context.settings, best.candidate
    backend, level = candidate.backend, settings.candidates.portable
    target = settings.export
    origin = target.run or target.model or target.module or ""
    located = locate_run(origin, folder)
    return ArtifactManifest(
        format=FORMAT,
        program=context.spec.entry,
        compiled=Compilation(
            precision=candidate.precision,
            quantization=candidate.quantization,
            backend=backend,
            versions=backend.versions(),
        ),
        target=TargetMachine(
            accelerator=context.accelerator.kind,
            required_features=tuple(
                sorted(backend.required_features(best.execution_context, level))
            ),
            chip=_chip_name(best),
            threads=candidate.threads,
        ),
        buckets=best.buckets,
        batch_invariance=proof,
        origin=WeightsOrigin(
            path=origin,
            step=str(settings.export.step),
            sha256=source.weights_sha256,
            run_id=read_run_id(located[0]) if located else None,
        ),
        files=hash_files(folder),
    )


def _chip_name(best: LoadedCandidate) -> str:
    return best.execution_context.accelerator.model_name()


def _summarize_row(row: Row) -> Row:
    """Shorten a candidate's row to fit a terminal; the artifact has all of it."""
    if "error" in row:
        return {"name": _format_name(row), "threads": row["threads"], "error": row["error"]}
    names = (
        "threads",
        "texts_per_second",
        "single_text_ms",
        "min_cosine",
        "class_agreement",
        "quality_loss",
    )
    summary = {name: row[name] for name in names if name in row}
    texts_per_second = round(row["texts_per_second"], 1)
    return {"name": _format_name(row), **summary, "texts_per_second": texts_per_second}


def _format_name(row: Row) -> str:
    """Format a candidate's backend, precision and quantization, such as `onnx fp32 int8`."""
    quantization = "" if row["quantization"] == "none" else f" {row['quantization']}"
    return f"{row['backend']} {row['precision']}{quantization}"


def _format_name_and_threads(row: Row) -> str:
    return f"{_format_name(row)} {format_count(row['threads'], 'thread')}"


def _format_result(row: Row) -> str:
    name = _format_name_and_threads(row)
    if "error" in row:
        return f"{name}: failed: {row['error']}"
    throughput = f"{row['texts_per_second']:.0f} texts/s"
    result = row.get(LOST) or f"quality loss {row['quality_loss']:.2g}"
    return f"{name}: {throughput}, {result}"
