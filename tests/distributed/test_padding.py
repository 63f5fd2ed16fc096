"""The padding of the batches of a run is little, and is the one that the dry run prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge.config import dump
from regauge.planner.run_plans.run_request import read_request
from regauge.system import jsonl
from regauge.system.processes import World
from regauge.training import dry_run
from regauge.training.run import attempt

WRITERS = {"rank": datasets.write_groups, "dpo": datasets.write_preferences}
WRITERS["next-sentence"] = datasets.write_halves


@pytest.mark.parametrize("kind", ["classify", "contrastive", "rank", "dpo", "next-sentence"])
def test_the_planned_share_of_real_tokens_is_that_of_the_run(tmp_path: Path, kind: str) -> None:
    """Of 3 batches of 32 rows, the last one lacks 6."""
    data = WRITERS.get(kind, datasets.write_pairs)(tmp_path / "data", rows=90)
    batch = {"rows": 32, "microbatch_rows": 16}
    run = settings(tmp_path / "run", data, kind, batch=batch, stop={"steps": 6})
    printed = dry_run.plan_run(run)["real_token_fraction"]
    planned = read_request(dump(run), tmp_path / "run.toml").lengths.real_fraction
    attempt(run, World())
    last = jsonl.read_lines(tmp_path / "run" / "ledger.jsonl")[-1]
    measured = 1 - last["padding_fraction"]
    assert (printed, planned) == pytest.approx((measured, measured), abs=1e-4)
    if kind in {"classify", "contrastive"}:
        assert measured >= 0.9
