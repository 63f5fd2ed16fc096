"""Seconds until the first step of a run, without and with cached graphs.

The same command runs twice, in new processes. The seconds from its start to the metrics of its
first step include imports, weights and the evaluation before the step. A masked language model on
packed rows has one shape; an encoder of pairs has five buckets, as in the quickstart.

    python benchmarks/compile_cache.py [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from overhead import MODEL
from recording import RESULTS, write_result

from regauge.accelerators.cpu import Cpu
from regauge.commands import prepare
from regauge.config import build

LIMIT = 0.25
TASKS: dict[str, dict[str, Any]] = {
    "text": {"kind": "mlm"},
    "pairs": {"kind": "contrastive", "query": "summary", "document": "body", "max_buckets": 5},
}


def main() -> None:
    """Print and write the seconds of both starts of both runs, and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "compile_cache.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        _prepare(Path(scratch) / "data")
        runs = {rows: compare_starts(Path(scratch), rows) for rows in TASKS}
    benchmark = "seconds to the end of the first step, without and with cached graphs"
    write_result(arguments.json, benchmark, Cpu().chip_peak("bf16"), {"limit": LIMIT, "runs": runs})


def compare_starts(scratch: Path, rows: str) -> dict[str, Any]:
    """Return the seconds of a first and a second start of the same run."""
    first, second = (_time_start(scratch, rows, name) for name in ("first", "second"))
    ratio = second["seconds"] / first["seconds"]
    return {"first": first, "second": second, "ratio": ratio, "met": ratio <= LIMIT}


def _time_start(scratch: Path, rows: str, name: str) -> dict[str, float]:
    folder = scratch / f"{rows}-{name}"
    tables: dict[str, Any] = {
        "output": {"folder": str(folder), "log_every_steps": 1},
        "data": {"path": str(scratch / "data" / rows)},
        "task": TASKS[rows],
        "model": MODEL,
        "accelerator": {"kind": "cpu"},
        "batch": {"rows": 16, "microbatch_rows": 8},
        "execution": {"compile": "blocks", "compile_cache": str(scratch / "graphs")},
        "stop": {"steps": 1},
        "evaluation": {"rows": 8},
    }
    file = scratch / f"{rows}-{name}.json"
    file.write_text(json.dumps(tables))
    lines = folder / "metrics.jsonl"
    began = time.perf_counter()
    temporary = scratch / f"{rows}-tmp"  # for torch's cache of autotuning
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "regauge", "train", str(file)]
    run = subprocess.Popen(command, env=environment)
    while not (lines.exists() and "train/loss" in lines.read_text()):
        if run.poll():
            raise SystemExit(run.returncode)
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    run.wait()
    ledger = json.loads((folder / "ledger.jsonl").read_text().splitlines()[-1])
    return {"seconds": seconds, "compile_seconds": ledger["seconds"]["compile"]}


def _prepare(folder: Path) -> None:
    library = Path(json.__file__).parent.parent
    roots = (str(library / "asyncio"), str(library / "email"))
    rows = {
        "text": {"layout": "packed", "length": 128},
        "pairs": {"layout": "fields", "fields": {"summary": 24, "body": 128}},
    }
    tables = {
        "data": {"path": str(folder)},
        "source": {"kind": "python-docs", "roots": roots},
        "tokenizer": {"vocab_size": 4096},
        "rows": rows,
    }
    prepare.run(build(prepare.ROOT, tables))


if __name__ == "__main__":
    main()
