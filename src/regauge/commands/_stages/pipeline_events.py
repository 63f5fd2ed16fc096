"""Pipeline events for people: the end, a refused model, a late round."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from regauge import config
from regauge.monitoring.notify.events import EventSource
from regauge.monitoring.notify.notifier import open_notifier
from regauge.monitoring.settings import Monitoring
from regauge.system.errors import DifferenceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.monitoring.notify.notifier import Notifier


@contextmanager
def send_pipeline_events(
    shared: config.Tables, run_file: Path, folder: Path, *, is_last: bool
) -> Iterator[Notifier]:
    """Yield a notifier for the shared table `monitoring`; send an event at the end of the block.

    A success is an event only if the block runs the last stage (`is_last`).

    Raises SettingsError if a sink's secret cannot be read.
    """
    monitoring = config.build(Monitoring, shared.get("monitoring", {}), source=str(run_file))
    path = folder.resolve()
    source = EventSource("pipeline", path.name, str(path))
    with open_notifier(monitoring.notifications, source) as notifier:
        try:
            yield notifier
        except DifferenceError as error:
            notifier.send(
                "gate_refused", problem=error.problem, next_action=error.remedy, is_final=True
            )
            raise
        if is_last:
            notifier.send("finished", is_final=True)


def send_deadline(notifier: Notifier, problem: str) -> None:
    """Send an event for a late round, or one projected to be late."""
    action = "look at the running stage, or raise repeat.deadline_hours"
    notifier.send("deadline_at_risk", problem=problem, next_action=action)
