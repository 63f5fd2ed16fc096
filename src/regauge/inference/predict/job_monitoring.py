"""Prediction job metrics for Prometheus, and the notification that a job has ended."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import regauge
from regauge.config.run_names import hash_folder, name_run
from regauge.monitoring import vocabulary
from regauge.monitoring.exporter import export_metrics
from regauge.monitoring.notify.events import EventSource
from regauge.monitoring.notify.notifier import open_notifier
from regauge.monitoring.vocabulary import Sample
from regauge.supervision.run_metrics import watch_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.inference.predict.job import PredictJob
    from regauge.inference.predict.progress import ProgressBar
    from regauge.inference.predict.shard_queue import ShardQueue
    from regauge.monitoring.notify.notifier import Notifier
    from regauge.monitoring.vocabulary import RunLabels


@contextmanager
def export_job(job: PredictJob, shard_queue: ShardQueue, progress: ProgressBar) -> Iterator[None]:
    """Serve a job's metrics for the duration of the block, if `monitoring.port` is set.

    Several jobs on one machine need a port each; the job index is added to the port.
    """
    settings = job.settings.monitoring
    if settings.port is None:
        yield
        return
    slot = f"{job.slot.index}-of-{job.slot.count}"
    run = name_run(job.folder), f"{hash_folder(job.folder)}-{slot}"
    with watch_devices(None) as read_devices:

        def read_samples() -> Iterator[Sample]:
            yield from read_devices()
            yield from _describe_job(job, run)
            yield from _describe_progress(run, shard_queue, progress)

        index = job.slot.index
        with export_metrics(
            settings, job.job_folder, read_samples, port_offset=index, find_run=lambda: run
        ):
            yield


def _describe_job(job: PredictJob, run: RunLabels) -> Iterator[Sample]:
    """Yield a job's identity and budget."""
    yield Sample(vocabulary.RUN_INFO, 1, (*run, "predict", regauge.__version__))
    if job.settings.predict.max_usd is not None:
        yield Sample(vocabulary.RUN_BUDGET, job.settings.predict.max_usd, run)


def _describe_progress(
    run: RunLabels, shard_queue: ShardQueue, progress: ProgressBar
) -> Iterator[Sample]:
    counts = progress.counts
    yield Sample(vocabulary.PREDICT_RECORDS, counts["rows"] + counts["quarantined"], run)
    yield Sample(vocabulary.PREDICT_FAILED_RECORDS, counts["quarantined"], run)
    yield Sample(vocabulary.PREDICT_WORKERS, progress.num_workers, run)
    if progress.usd is not None:
        yield Sample(vocabulary.RUN_COST, progress.usd, run)
    shards = (counts["shards"], shard_queue.num_claimed, shard_queue.num_requeued)
    for state, count in zip(vocabulary.PREDICT_STATES, shards, strict=True):
        yield Sample(vocabulary.PREDICT_SHARDS, count, (*run, state))


@contextmanager
def notify_job_end(job: PredictJob) -> Iterator[Notifier]:
    """Send an event when the block ends; messages name the job if there are several."""
    folder, slot = job.folder.resolve(), job.slot
    name = name_run(folder)
    name += f" (job {slot.index} of {slot.count})" if slot.count > 1 else ""
    source = EventSource("predict", name, str(folder))
    settings = job.settings.monitoring.notifications
    with open_notifier(settings, source, job.job_folder) as notifier:
        yield notifier
        notifier.send("finished", usd=notifier.read_usd(), is_final=True)
