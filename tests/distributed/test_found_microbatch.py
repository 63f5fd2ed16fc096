"""A run whose microbatch was found is the run that has the same size by hand."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.jobs import lines, losses
from distributed.runs import FULL, Runs
from distributed.test_resume import assert_same
from regauge.config import read

LEFT: dict[str, Any] = {"batch": {"microbatch_rows": "auto"}}


@FULL
@pytest.mark.parametrize("size", [1, 2])
def test_a_found_microbatch_changes_nothing_but_itself_and_a_resume_keeps_it(
    runs: Runs, size: int
) -> None:
    found = runs.trained(size, "mlm", **LEFT)
    rows = read(found / "run.json")["batch"]["microbatch_rows"]
    assert rows in (1, 2, 4, 8)
    assert rows * size <= 8
    assert_same(runs.trained(size, "mlm", batch={"microbatch_rows": rows}), found)
    other = 1 if rows > 1 else 2
    by_another = losses(lines(runs.trained(size, "mlm", batch={"microbatch_rows": other})))
    assert by_another == pytest.approx(losses(lines(found)), rel=1e-5)

    decided = (found / "probe" / "decided.json").read_text()
    (found / "probe" / "lines.jsonl").unlink()
    runs.job("train", size, found, "mlm", {**LEFT, "stop": {"steps": 14}})
    assert losses(lines(found))[:12] == losses(lines(runs.trained(size, "mlm", **LEFT)))[:12]
    assert len(losses(lines(found))) == 14
    assert read(found / "run.json")["batch"]["microbatch_rows"] == rows
    assert (found / "probe" / "decided.json").read_text() == decided
    assert not (found / "probe" / "lines.jsonl").exists()
