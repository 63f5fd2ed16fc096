"""A later attempt sends the values that a service lacks, and none twice."""

from __future__ import annotations

import math
from pathlib import Path

from regauge.trackers import RunInfo, start_trackers
from regauge.trackers._recorded import deliver_once, read_metrics
from regauge.trackers._sender import MetricsLine
from regauge.trackers.jsonl import FILE, Jsonl


def write_attempts(folder: Path) -> None:
    """Write an attempt that was killed after step 8, and one that resumed after step 5."""
    for attempt, resumed, steps in ((1, 0, range(1, 9)), (2, 5, range(6, 8))):
        with start_trackers([Jsonl()], RunInfo("x", "a", folder, attempt, 20, resumed)) as group:
            for step in steps:
                group.log(step, {"train/loss": float(10 * attempt + step)})


def test_the_last_attempt_of_a_step_is_valid(tmp_path: Path) -> None:
    write_attempts(tmp_path)
    lines = {line.step: line.values["train/loss"] for line in read_metrics(tmp_path / FILE, 7)}
    assert lines == {1: 11, 2: 12, 3: 13, 4: 14, 5: 15, 6: 26, 7: 27}


def test_texts_are_left_out_and_nan_is_a_number(tmp_path: Path) -> None:
    with start_trackers([Jsonl()], RunInfo("x", "a", tmp_path)) as group:
        group.log(1, {"train/loss": math.nan, "train/mfu": math.inf})
        group.finish({"stop_reason": "finished", "steps": 1})
    [line] = read_metrics(tmp_path / FILE, 10)
    assert math.isnan(line.values["train/loss"])
    assert line.values["train/mfu"] == math.inf
    assert set(line.values) == {"train/loss", "train/mfu"}


def test_missing_values_are_sent_first_and_recorded_ones_are_skipped(tmp_path: Path) -> None:
    write_attempts(tmp_path)
    sent: list[MetricsLine] = []
    recorded = {("loss_at_train", step) for step in (1, 2, 3, 6, 7, 8)}
    run = RunInfo("x", "a", tmp_path, 3, 20, 7)
    deliver = deliver_once(
        sent.extend, recorded, lambda name: name.replace("train/loss", "loss_at_train"), run
    )
    assert [line.step for line in sent] == [4, 5]
    deliver([MetricsLine(8, {"train/loss": 1.0}), MetricsLine(9, {"train/loss": 1.0})])
    deliver([MetricsLine(9, {"train/loss": 1.0}, final_status="FINISHED")])
    assert [(line.step, line.final_status) for line in sent[2:]] == [(9, ""), (9, "FINISHED")]
    deliver([MetricsLine(8, {"train/loss": 1.0}, final_status="FAILED")])
    assert (sent[-1].values, sent[-1].final_status) == ({}, "FAILED")
