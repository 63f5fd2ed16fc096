"""Runs a prediction job: plans it, computes the remaining shards, writes totals and cost."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.config.output_files import ATTEMPTS, JOB, JOBS
from regauge.data.input_hashes import InputHashes
from regauge.inference.export.uncompiled import open_model, recommend_export
from regauge.inference.predict.fields import (
    check_columns,
    infer_fields,
    list_named_fields,
    select_inputs,
    select_kept_fields,
)
from regauge.inference.predict.job import (
    PredictJob,
    collect_facts,
    collect_portable_facts,
    find_summary,
    resolve_slot,
    sum_shards,
    write_result,
)
from regauge.inference.predict.job_monitoring import export_job, notify_job_end
from regauge.inference.predict.progress import ProgressBar, report_losses
from regauge.inference.predict.provenance import resolve_version, write_lineage
from regauge.inference.predict.worker import SCRATCH, WorkerResources, WorkerSpec
from regauge.machines.catalog import find_price
from regauge.run_folders.cost_meter import (
    CostMeter,
    read_last_seen,
    read_paid,
    read_time,
    write_last_seen,
)
from regauge.run_folders.folder_lock import FolderLock
from regauge.system import choices, jsonl, stop_signals
from regauge.system.errors import LimitReachedError, SettingsError, StopSignalError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.manifest import ProgramEntry
    from regauge.inference.predict.settings import PredictSettings
    from regauge.inference.predict.shard_queue import ShardQueue
    from regauge.machines.catalog import MachinePrice
    from regauge.registry.registered_version import RegisteredVersion

SHARD_RECORDS, SHARD_TEXTS = 32768, 1024
"""Default records per shard; a generated text takes much longer than any other output."""
INPUT_HASHES = "input_hashes.json"
"""Known hashes of the input files, in each job's folder."""
MIN_LOGGED_BYTES = 10 * 2**30
"""Minimum input file bytes to log hashing, because it takes a while."""


@dataclass(frozen=True)
class PredictPlan:
    """A job that is ready to start."""

    artifact: Artifact
    job: PredictJob
    worker_spec: WorkerSpec
    version: RegisteredVersion | None = None
    """Model registry version; None for any other model."""


def plan_predict(settings: PredictSettings) -> PredictPlan:
    """Plan a job: its pieces, and the fields to read and to keep.

    Raises SettingsError if a field does not exist or the model does not read texts, and the errors
    from the source and from `open_model`.
    """
    version = resolve_version(settings.artifact)
    if version is not None:  # all workers use this version, also after another promotion
        settings = settings.model_copy(update={"artifact": version.reference})
    artifact = open_model(settings.artifact, settings.generation, keep_weights=False)
    program = artifact.program
    if program.tokenization is None:
        problem = f"{settings.artifact} does not read texts"
        raise SettingsError(problem, "call it in Python with regauge.load")
    program.tokenization.prompt_text(settings.predict.prompt_name)
    settings = _resolve_shard_records(settings, program)
    pieces = settings.source.list_pieces()
    kinds = infer_fields(settings.source, pieces, list_named_fields(settings))
    inputs = select_inputs(settings, program, kinds)
    kept_fields = select_kept_fields(settings, program, inputs.read_fields, kinds)
    check_columns(program, settings.output, list(kept_fields))
    job = PredictJob(settings, pieces, resolve_slot(settings, os.environ))
    _check_limit(settings)
    target, num_devices = artifact.manifest.target, artifact.manifest.compiled.backend.num_devices
    spec = WorkerSpec(
        config.dump(settings),
        pieces,
        inputs,
        kept_fields,
        job.slot,
        WorkerResources(target.accelerator, num_devices, target.threads),
        choices.list_allowed_paths(),
    )
    return PredictPlan(artifact, job, spec, version)


def _resolve_shard_records(settings: PredictSettings, program: ProgramEntry) -> PredictSettings:
    if settings.predict.shard_records != "auto":
        return settings
    is_text = program.output_kind == "text"
    count = SHARD_TEXTS if is_text else SHARD_RECORDS
    options = settings.predict.model_copy(update={"shard_records": count})
    return settings.model_copy(update={"predict": options})


def check_output_folder(plan: PredictPlan) -> None:
    """Raise DataError if the output folder has another job's output, or other files."""
    job, spec = plan.job, plan.worker_spec
    stamps = {piece.name: [piece.bytes, piece.stamp] for piece in job.pieces}
    pieces = _identify_pieces(job, _open_hashes(job)) if (job.folder / JOB).exists() else stamps
    facts = collect_portable_facts(job.settings, plan.artifact, pieces, spec.kept_fields)
    job.check_folder({**facts, **spec.inputs._asdict()})


def _open_hashes(job: PredictJob) -> InputHashes:
    return InputHashes(sorted((job.folder / JOBS).glob(f"*/{INPUT_HASHES}")))


def _identify_pieces(job: PredictJob, hashes: InputHashes) -> dict[str, list[Any]]:
    """Return each piece's size and hash, so that an equal copy continues a job."""
    if (num_bytes := sum(piece.bytes for piece in job.pieces)) > MIN_LOGGED_BYTES:
        logger.info("Hashing the input files: %.0f GiB", num_bytes / 2**30)
    identities = hashes.hash_pieces(job.pieces)
    return {piece.name: [piece.bytes, identities[piece.name]] for piece in job.pieces}


def predict(settings: PredictSettings) -> dict[str, Any]:
    """Compute this job's unfinished shards; return the totals.

    Raises LimitReachedError at `predict.max_usd`, StopSignalError after a stop signal, and workers'
    errors.
    """
    started_at = read_time()
    plan = plan_predict(settings)
    recommend_export(plan.artifact)
    job, spec = plan.job, plan.worker_spec
    hashes = _open_hashes(job)
    pieces = _identify_pieces(job, hashes)
    facts = collect_facts(job.settings, plan.artifact, pieces, spec.kept_fields)
    facts |= spec.inputs._asdict()
    job.check_folder(facts)
    if totals := find_summary(job):
        logger.info("%s is finished; nothing is changed", job.folder)
        return report_losses(job, {"output": settings.output.folder, **totals})
    job.claim_folder(facts)
    hashes.save(job.job_folder / INPUT_HASHES)
    write_lineage(job, plan.artifact, plan.version)
    with ExitStack() as stack:
        stack.enter_context(FolderLock(job.job_folder))
        notifier = stack.enter_context(notify_job_end(job))
        _clear_scratch(job)
        finished = job.find_finished_shards()
        shard_queue = job.build_queue(finished)
        meter = _start_meter(job, started_at)
        start = {"started_at": started_at, **meter.start_fields}
        progress = ProgressBar(job, finished, meter)
        notifier.read_usd = lambda: progress.usd
        stack.enter_context(stop_signals.record_signals())
        _log_slot(job)
        if shard_queue.num_unfinished:
            with _record_failure(job, start, progress), export_job(job, shard_queue, progress):
                _compute_shards(plan, shard_queue, progress)
        cost = progress.cost_record()
        jsonl.append_line(job.job_folder / ATTEMPTS, {**start, "ended_at": read_time(), **cost})
        summary = {
            "output": settings.output.folder,
            **sum_shards(job.read_finished_shards()),
            **progress.summarize_record(cost),
        }
        write_result(job)
        return report_losses(job, summary)


def _log_slot(job: PredictJob) -> None:
    slot, num_pieces = job.slot, len(job.pieces)
    if slot.count == 1 and int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1")) > 1:
        message = "This task of a Slurm array computes all records; to share them, set %s"
        logger.info(message, 'predict.job_count = "auto"')
    if slot.count > 1:
        logger.info("Job %d of %d: %d pieces.", slot.index, slot.count, len(job.piece_numbers))
    if slot.count > num_pieces:
        message = "%d jobs share %d pieces, so some jobs have none; lower source.chunk_mib"
        logger.warning(message, slot.count, num_pieces)


def _compute_shards(plan: PredictPlan, shard_queue: ShardQueue, progress: ProgressBar) -> None:
    """Run the executor and commit shards, until none is left, a signal or the limit."""
    job, spec = plan.job, plan.worker_spec
    limit = job.settings.predict.max_usd
    executor = job.settings.execution.executor
    with progress:
        for event in executor.run(spec, shard_queue):
            if event["event"] == "ready" and not progress.has_ready_worker:
                texts = ", ".join(spec.inputs.text_fields)
                kept = ", ".join(spec.kept_fields) or "none"
                logger.info("Text fields: %s; kept fields: %s", texts, kept)
            if event["event"] == "shard":
                job.commit_shard({name: value for name, value in event.items() if name != "event"})
            progress.handle_event(event)
            write_last_seen(job.job_folder)
            stop_signals.check_stop()
            if limit is not None and (progress.usd or 0) >= limit:
                problem = f"{progress.usd:.4f} USD are spent, predict.max_usd is {limit:g}"
                raise LimitReachedError(problem, "raise predict.max_usd to resume")


def _start_meter(job: PredictJob, started_at: float) -> CostMeter:
    """Return a meter that continues after earlier commands; record when this one started."""
    price = _find_price(job.settings)
    paid, paid_until = read_paid(job.job_folder, started_at, read_last_seen(job.job_folder))
    elapsed = max(0.0, read_time() - paid_until)
    meter = CostMeter(
        paid,
        time.monotonic() - elapsed,
        machines=1,
        devices=1,
        usd_per_hour=None if price is None else price.usd_per_hour,
    )
    jsonl.append_line(job.job_folder / ATTEMPTS, {"started_at": paid_until, **meter.start_fields})
    return meter


@contextmanager
def _record_failure(
    job: PredictJob, start: dict[str, Any], progress: ProgressBar
) -> Iterator[None]:
    """Record when an error or a signal in the block ends the command."""
    try:
        yield
    except BaseException as error:
        outcome = "preempted" if isinstance(error, StopSignalError) else "failed"
        end = {"ended_at": read_time(), "outcome": outcome, **progress.cost_record()}
        with suppress(OSError):  # a full disk must not hide the error
            jsonl.append_line(job.job_folder / ATTEMPTS, {**start, **end})
        raise


def _find_price(settings: PredictSettings) -> MachinePrice | None:
    price = settings.execution.price
    return find_price(price) if price is not None else None


def _check_limit(settings: PredictSettings) -> None:
    if settings.predict.max_usd is not None and _find_price(settings) is None:
        problem = "predict.max_usd needs the price of this machine, which is unknown"
        raise SettingsError(problem, "set execution.price.usd_per_hour or execution.price.instance")


def _clear_scratch(job: PredictJob) -> None:
    shutil.rmtree(job.job_folder / SCRATCH, ignore_errors=True)
    (job.job_folder / SCRATCH).mkdir()
