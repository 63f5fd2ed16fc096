"""Texts answered by `regauge predict`: a program that does so in turns.

Each turn is a job of its own, files in and files out, from the moment that its worker is ready.

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
from regauge.prediction.job import collect_facts, sum_shards
from regauge.prediction.predict import plan_predict
from regauge.prediction.settings import PredictSettings
from regauge.prediction.shard_queue import ShardQueue


def main() -> None:
    """Answer all texts in each turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rows", type=int, default=32768)
    own = parser.parse_args()
    turn, number = Turn(own.folder, Cpu()), 0
    turn.wait()
    while True:
        number += 1
        turn.end(**_answered(turn, own, own.folder / f"job-{number}"))


def _answered(turn: Turn, own: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what a job says of itself; the turn's clock runs while its worker has work."""
    tables = {
        "artifact": str(own.artifact),
        "source": {"kind": "jsonl", "files": (str(own.texts),)},
        "output": {"folder": str(folder)},
        "predict": {"shard_records": own.rows},
    }
    found = plan_predict(build(PredictSettings, tables))
    job = found.job
    job.claim_folder(
        collect_facts(job.settings, found.artifact, job.pieces, found.worker_spec.kept_fields)
    )
    (job.job_folder / "aside").mkdir()
    ready = 0.0
    for event in job.settings.execution.executor.run(
        found.worker_spec, ShardQueue(job.piece_numbers, {})
    ):
        if event["event"] == "ready":
            ready = event["seconds"]
            turn.start()
        elif event["event"] == "shard":
            job.commit_shard({name: value for name, value in event.items() if name != "event"})
    turn.stop()
    told = sum_shards(job.read_finished_shards())
    useful = {"useful_token_share": told["useful_token_share"], "rates": told["rows_per_second"]}
    return {"count": told["rows"], "ready_seconds": ready, **json.loads(json.dumps(useful))}


if __name__ == "__main__":
    main()
