"""How soon a run's first step is done: with no kept graphs, and when it finds them.

The same command twice, in processes of its own, from its start to the line of its first step:
imports, weights and the evaluation before it included.

    python benchmarks/compile_cache.py [--json OUT]
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from overhead import MODEL, corpus

from regauge.accelerators.cpu import Cpu

LIMIT = 0.25


def main() -> None:
    """Print and write the seconds of both starts, and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/compile_cache.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        first, second = starts(Path(scratch))
    result = {
        "benchmark": "seconds to the end of the first step, without and with kept graphs",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{Cpu().chip('bf16').name}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "first": first,
        "second": second,
        "ratio": second["seconds"] / first["seconds"],
        "limit": LIMIT,
        "met": second["seconds"] <= LIMIT * first["seconds"],
    }
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def starts(scratch: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a first and a second start of the same run took."""
    data = corpus(scratch / "data")
    found = []
    for name in ("first", "second"):
        tables: dict[str, Any] = {
            "output": {"folder": str(scratch / name), "every_steps": 1},
            "data": {"path": str(data)},
            "task": {"kind": "mlm"},
            "model": MODEL,
            "accelerator": {"kind": "cpu"},
            "batch": {"rows": 16, "microbatch_rows": 8},
            "execution": {"compile": "blocks", "compile_cache": str(scratch / "graphs")},
            "stop": {"steps": 1},
            "evaluation": {"rows": 8},
        }
        file = scratch / f"{name}.json"
        file.write_text(json.dumps(tables))
        lines = scratch / name / "metrics.jsonl"
        began = time.perf_counter()
        run = subprocess.Popen([sys.executable, "-m", "regauge", "train", str(file)])
        while not (lines.exists() and "train/loss" in lines.read_text()):
            time.sleep(0.02)
        took = time.perf_counter() - began
        run.wait()
        ledger = json.loads((scratch / name / "ledger.jsonl").read_text().splitlines()[-1])
        found.append({"seconds": took, "compiling": ledger["seconds"]["compile"]})
    return found[0], found[1]


if __name__ == "__main__":
    main()
