"""A benchmark's result as it is kept: what ran, when and on what, and then the figures."""

from __future__ import annotations

import datetime as dt
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regauge.accelerators import Chip

RESULTS = Path("benchmarks/results")


def keep(path: Path, benchmark: str, chip: Chip, figures: dict[str, Any], *packages: str) -> None:
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
