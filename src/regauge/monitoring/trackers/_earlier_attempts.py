"""Each step once after a resume: which lines from earlier attempts a destination lacks.

A resumed attempt repeats the steps since its checkpoint, and a killed attempt may have lost lines
that were still queued. `metrics.jsonl` has all of them, because every call writes it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from regauge.config.output_files import METRICS
from regauge.monitoring.trackers import is_train_metric
from regauge.monitoring.trackers._service import MetricsLine
from regauge.system import jsonl

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from regauge.monitoring.trackers import RunInfo
    from regauge.monitoring.trackers._service import Deliver

    Recorded = Collection[tuple[str, int]]
    """Names of metrics, as the destination writes them, with their steps."""

_OTHER_KEYS = {"attempt", "step", "seconds"}


def has_train_metrics(line: MetricsLine) -> bool:
    """Return whether a line has training metrics, not only evaluation metrics."""
    return any(map(is_train_metric, line.values))


def read_earlier_lines(run: RunInfo) -> list[MetricsLine]:
    """Return lines from earlier attempts up to the checkpoint step, in order.

    For a repeated step the last attempt is valid, as in reports. Empty without the tracker `jsonl`.
    """
    documents = [
        document
        for document in jsonl.read_lines(run.folder / METRICS, jsonl.StepLine)
        if document["attempt"] < run.attempt and "summary" not in document
    ]
    documents.sort(key=lambda document: int(document["attempt"]))
    lines: dict[tuple[int, bool], MetricsLine] = {}
    for _, attempt in groupby(documents, key=lambda document: int(document["attempt"])):
        new = [_parse_line(document) for document in attempt]
        first_step = min(line.step for line in new)
        lines = {key: line for key, line in lines.items() if key[0] <= first_step}
        lines |= {(line.step, has_train_metrics(line)): line for line in new}
    in_order = sorted(lines.items(), key=lambda item: (item[0][0], not item[0][1]))
    return [line for (step, _), line in in_order if step <= run.resumed_step]


def deliver_once(
    deliver: Deliver, recorded: Recorded, format_name: Callable[[str], str], run: RunInfo
) -> Deliver:
    """Deliver unrecorded lines from earlier attempts; return a filtering function.

    It delivers lines without the recorded values.
    """

    def deliver_new(lines: list[MetricsLine]) -> None:
        new_lines = [_drop_recorded(line, recorded, format_name) for line in lines]
        if kept := [line for line in new_lines if len(line) or line.final_status]:
            deliver(kept)

    deliver_new(read_earlier_lines(run))
    return deliver_new


def _drop_recorded(
    line: MetricsLine, recorded: Recorded, format_name: Callable[[str], str]
) -> MetricsLine:
    values = {
        name: value
        for name, value in line.values.items()
        if (format_name(name), line.step) not in recorded
    }
    return replace(line, values=values)


def _parse_line(document: dict[str, object]) -> MetricsLine:
    values = {
        name: number
        for name, value in document.items()
        if name not in _OTHER_KEYS and (number := jsonl.parse_number(value)) is not None
    }
    return MetricsLine(int(str(document["step"])), values)
