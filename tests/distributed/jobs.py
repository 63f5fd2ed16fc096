"""What the processes of a shared world are asked to do; every function is called on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from distributed.runs import settings
from regauge import processes
from regauge.training.run import attempt


def train(folder: str, data: str, task: str, changes: dict[str, Any]) -> list[dict[str, float]]:
    """Train a tiny model in this world; return the lines of metrics that the run wrote."""
    attempt(settings(Path(folder), Path(data), task, **changes), processes.world())
    if dist.is_initialized():
        dist.barrier()
    return lines(Path(folder))


def lines(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run; of a step that two attempts wrote, the later one counts."""
    found: dict[tuple[int, bool], dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "summary" not in values:
            found[values["step"], "train/loss" in values] = values
    return [found[key] for key in sorted(found)]


def losses(rows: list[dict[str, float]]) -> list[float]:
    """Return the training losses of lines of metrics, in the order of steps."""
    return [row["train/loss"] for row in rows if "train/loss" in row]


def weights(folder: Path) -> dict[str, Any]:
    """Return the final weights of a run."""
    return load_file(folder / "model" / "model.safetensors")
