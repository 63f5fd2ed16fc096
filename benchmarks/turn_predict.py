"""Runs `regauge predict` on texts, as an alternating program.

Each turn is a separate job that reads and writes files. Its clock starts when the worker is ready.

    python benchmarks/turn_predict.py FOLDER ARTIFACT TEXTS [--rows N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from turns import Turn

from regauge.accelerators.cpu import Cpu
from regauge.config import build
from regauge.inference.predict.job import collect_facts, sum_shards
from regauge.inference.predict.predict import plan_predict
from regauge.inference.predict.settings import PredictSettings
from regauge.inference.predict.shard_queue import ShardQueue


def main() -> None:
    """Run one job over all texts in each turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rows", type=int, default=32768)
    options = parser.parse_args()
    turn, number = Turn(options.folder, Cpu()), 0
    turn.wait()
    while True:
        number += 1
        turn.end(**_run_job(turn, options, options.folder / f"job-{number}"))


def _run_job(turn: Turn, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a job; return its figures. The clock of the turn runs while its worker has work."""
    tables = {
        "artifact": str(options.artifact),
        "source": {"kind": "jsonl", "files": (str(options.texts),)},
        "output": {"folder": str(folder)},
        "predict": {"shard_records": options.rows},
    }
    plan = plan_predict(build(PredictSettings, tables))
    job = plan.job
    job.claim_folder(
        collect_facts(job.settings, plan.artifact, job.pieces, plan.worker_spec.kept_fields)
    )
    (job.job_folder / "scratch").mkdir()
    ready = 0.0
    for event in job.settings.execution.executor.run(
        plan.worker_spec, ShardQueue(job.piece_numbers, {})
    ):
        if event["event"] == "ready":
            ready = event["seconds"]
            turn.start()
        elif event["event"] == "shard":
            job.commit_shard({name: value for name, value in event.items() if name != "event"})
    turn.stop()
    totals = sum_shards(job.read_finished_shards())
    figures = {
        "useful_token_fraction": totals["useful_token_fraction"],
        "rates": totals["rows_per_second"],
    }
    return {"count": totals["rows"], "ready_seconds": ready, **json.loads(json.dumps(figures))}


if __name__ == "__main__":
    main()
