"""A benchmark's result as it is kept: what ran, when and on what, and then the figures."""

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


def train_command(folder: Path, data: Path, save_every: int, **tables: Any) -> list[str]:
    """Write the run file of a masked LM on the CPU; return the command that trains it."""
    output = {
        "folder": str(folder),
        "log_every_steps": 1,
        "trackers": ("jsonl",),
        "checkpoint": {"every_steps": save_every},
    }
    known = {"data": {"path": str(data)}, "task": "mlm", "accelerator": "cpu"}
    file = folder.with_suffix(".json")
    file.write_text(json.dumps({"output": output, **known, **tables}))
    return [sys.executable, "-m", "regauge", "train", str(file)]


def keep(
    path: Path, benchmark: str, chip: ChipPeak, figures: dict[str, Any], *packages: str
) -> None:
    """Print a result and write it; the versions are those of torch and of `packages`."""
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


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the most of some measurements."""
    found = statistics.median(values), min(values), max(values)
    return dict(zip(("median", "least", "most"), found, strict=True))
