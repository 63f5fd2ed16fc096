"""A run with an automatic microbatch size equals a run with that size in its settings."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.jobs import lines, losses
from distributed.runs import FULL, Runs
from distributed.test_resume import assert_same
from regauge.config import read

AUTOMATIC: dict[str, Any] = {"batch": {"microbatch_rows": "auto"}}


@FULL
@pytest.mark.parametrize("size", [1, 2])
def test_an_automatic_microbatch_size_changes_no_result_and_is_kept_on_resume(
    runs: Runs, size: int
) -> None:
    folder = runs.train_once(size, "mlm", **AUTOMATIC)
    rows = read(folder / "run.json")["batch"]["microbatch_rows"]
    assert rows in (1, 2, 4, 8)
    assert rows * size <= 8
    assert_same(runs.train_once(size, "mlm", batch={"microbatch_rows": rows}), folder)
    other = 1 if rows > 1 else 2
    other_losses = losses(lines(runs.train_once(size, "mlm", batch={"microbatch_rows": other})))
    assert other_losses == pytest.approx(losses(lines(folder)), rel=1e-5)

    decision = (folder / "probe" / "microbatch.json").read_text()
    (folder / "probe" / "lines.jsonl").unlink()
    runs.job("train", size, folder, "mlm", {**AUTOMATIC, "stop": {"steps": 14}})
    assert (
        losses(lines(folder))[:12] == losses(lines(runs.train_once(size, "mlm", **AUTOMATIC)))[:12]
    )
    assert len(losses(lines(folder))) == 14
    assert read(folder / "run.json")["batch"]["microbatch_rows"] == rows
    assert (folder / "probe" / "microbatch.json").read_text() == decision
    assert not (folder / "probe" / "lines.jsonl").exists()
