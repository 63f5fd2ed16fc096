"""The event that people are notified of at the end of a job of batch inference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.monitoring.notify.events import EventSource
from regauge.monitoring.notify.notifier import notify_end

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from regauge.inference.predict.job import PredictJob
    from regauge.monitoring.notify.notifier import EndReport


def notify_job_end(job: PredictJob) -> AbstractContextManager[EndReport]:
    """Return a block that sends an event at its end; the messages name the job of several."""
    folder, slot = job.folder.resolve(), job.slot
    name = folder.name if slot.count == 1 else f"{folder.name} (job {slot.index} of {slot.count})"
    source = EventSource("predict", name, str(folder))
    return notify_end(job.settings.monitoring.notifications, source, job.job_folder)
