"""Writes the result of a benchmark: its name, date, machine and versions, then its figures."""

from __future__ import annotations

import datetime as dt
import json
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regauge.accelerators import ChipPeak

RESULTS = Path("benchmarks/results")


def write_train_command(folder: Path, data: Path, save_every: int, **tables: Any) -> list[str]:
    """Write the run file of a masked LM on the CPU; return the command that trains it."""
    output = {
        "folder": str(folder),
        "log_every_steps": 1,
        "trackers": ("jsonl",),
        "checkpoint": {"every_steps": save_every},
    }
    defaults = {"data": {"path": str(data)}, "task": "mlm", "accelerator": "cpu"}
    file = folder.with_suffix(".json")
    file.write_text(json.dumps({"output": output, **defaults, **tables}))
    return [sys.executable, "-m", "regauge", "train", str(file)]


def write_result(
    path: Path, benchmark: str, chip: ChipPeak, figures: dict[str, Any], *packages: str
) -> None:
    """Print a result and write it, with the versions of torch and of `packages`."""
    result = {
        "benchmark": benchmark,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{chip.name}, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", *packages)},
        **figures,
    }
    text = json.dumps(result, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    sys.stdout.write(text)


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum of measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
