"""Notifies people when a batch inference job ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from regauge.monitoring.notify.events import EventSource
from regauge.monitoring.notify.notifier import open_notifier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.inference.predict.job import PredictJob
    from regauge.monitoring.notify.notifier import Notifier


@contextmanager
def notify_job_end(job: PredictJob) -> Iterator[Notifier]:
    """Send an event when the block ends; messages name the job if there are several."""
    folder, slot = job.folder.resolve(), job.slot
    name = folder.name if slot.count == 1 else f"{folder.name} (job {slot.index} of {slot.count})"
    source = EventSource("predict", name, str(folder))
    settings = job.settings.monitoring.notifications
    with open_notifier(settings, source, job.job_folder) as notifier:
        yield notifier
        notifier.send("finished", usd=notifier.read_usd(), is_final=True)
