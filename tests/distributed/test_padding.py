"""The padding of the batches of a run is little, and is the one that the dry run prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge.system import jsonl
from regauge.system.processes import World
from regauge.training import dry_run
from regauge.training.run import attempt

STEPS = 8


@pytest.mark.parametrize("kind", ["classify", "contrastive", "similarity"])
def test_the_printed_share_of_real_tokens_is_that_of_the_run(tmp_path: Path, kind: str) -> None:
    data = datasets.write_pairs(tmp_path / "data", rows=320)
    batch = {"rows": 32, "microbatch_rows": 32}
    run = settings(tmp_path / "run", data, kind, batch=batch, stop={"steps": STEPS})
    printed = dry_run.plan_run(run)["real_token_fraction"]
    attempt(run, World())
    last = jsonl.read_lines(tmp_path / "run" / "ledger.jsonl")[-1]
    measured = 1 - last["padding_fraction"]
    assert measured == pytest.approx(printed, abs=0.02)
    assert measured >= 0.9
