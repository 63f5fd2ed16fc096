"""What the processes of a shared world are asked to do; every function is called on all ranks.

In the test's own process they are the run of one process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from distributed.runs import settings
from regauge import processes
from regauge.checkpoint.saver import load
from regauge.data.shards import Dataset
from regauge.errors import RegaugeError
from regauge.training import optimizer as optimizers
from regauge.training.decisions import decide
from regauge.training.run import attempt
from regauge.training.session import Session, open_session
from regauge.training.settings import Training
from regauge.training.step import Gradients

Lines = list[dict[str, float]]
Step = tuple[int, list[list[tuple[int, int]]]]
"""The number of a step, and (row, part) of every text in every microbatch of one process."""


def train(folder: str, data: str, task: str, changes: dict[str, Any]) -> Lines:
    """Train a tiny model in this world; return the lines of metrics that the run wrote."""
    attempt(settings(Path(folder), Path(data), task, **changes), processes.world())
    _meet()
    return lines(Path(folder))


def stopped(folder: str, data: str, task: str, changes: dict[str, Any]) -> tuple[int, str]:
    """Train to a limit; return the exit code and the message of the error that says so."""
    try:
        attempt(settings(Path(folder), Path(data), task, **changes), processes.world())
    except RegaugeError as error:
        return error.exit_code, str(error)
    return 0, ""


def watched(folder: str, data: str, task: str, changes: dict[str, Any]) -> list[Step]:
    """Train; return the rows that this process really computed, by step."""
    run = settings(Path(folder), Path(data), task, **changes)
    with _watching(run) as seen:
        attempt(run, processes.world())
    _meet()
    return seen


@contextmanager
def _watching(run: Training) -> Iterator[list[Step]]:
    kind, seen = type(run.task), []
    built, computed = kind.batch, Gradients.of

    def batch(self: Any, rows: Any, piece: Any, draw: Any, facts: Any) -> dict[str, np.ndarray]:
        named = {"rows": piece.rows, "parts": piece.parts, "step": np.array([draw.step])}
        return {**built(self, rows, piece, draw, facts), **named}

    def of(self: Gradients, batches: list[Any], *rest: Any) -> torch.Tensor:
        texts = [list(zip(b["rows"].tolist(), b["parts"].tolist(), strict=True)) for b in batches]
        seen.append((int(batches[0]["step"]), texts))
        return computed(self, batches, *rest)

    with patch.object(kind, "batch", batch), patch.object(Gradients, "of", of):
        yield seen


def saved_hashes(
    folder: str, data: str, task: str, changes: dict[str, Any]
) -> dict[int, dict[str, str]]:
    """Train; return the hash of every whole tensor in memory, at each step that was saved."""
    found: dict[int, dict[str, str]] = {}
    save = Session.save

    def hashed(self: Session, metrics: dict[str, float]) -> None:
        found[self.step] = _hashes(self)
        save(self, metrics)

    with patch.object(Session, "save", hashed):
        attempt(settings(Path(folder), Path(data), task, **changes), processes.world())
    return found


def loaded_hashes(
    folder: str, data: str, task: str, changes: dict[str, Any], checkpoints: list[str]
) -> list[dict[str, str]]:
    """Load checkpoints one after the other into one session; return the hashes after each."""
    world, joined = processes.world(), dist.is_initialized()
    run = decide(settings(Path(folder), Path(data), task, **changes), world)
    session = open_session(run, world, Dataset(Path(data)))
    optimizers.prime(session.optimizer)
    found = []
    for checkpoint in checkpoints:
        state = load(Path(checkpoint), session.values())
        count = state["optimizer_step"]
        optimizers.set_steps_taken(session.optimizer, session.prepared.masters(), count)
        found.append(_hashes(session))
    if dist.is_initialized() and not joined:
        dist.destroy_process_group()
    return found


def _hashes(session: Session) -> dict[str, str]:
    """Return the hash of every tensor that this process holds, whole, and the optimizer's step."""
    found = {}
    for name, value in session.values().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        data = whole.detach().cpu().contiguous().numpy().tobytes()
        found[name] = f"{tuple(whole.shape)} {hashlib.sha256(data).hexdigest()}"
    found["step"] = str(session.state()["optimizer_step"])
    return found


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def lines(folder: Path) -> Lines:
    """Return the metrics of a run; of a step that two attempts wrote, the later one counts."""
    found: dict[tuple[int, bool], dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if "summary" not in values:
            found[values["step"], "train/loss" in values] = values
    return [found[key] for key in sorted(found)]


def losses(rows: Lines) -> list[float]:
    """Return the training losses of lines of metrics, in the order of steps."""
    return [row["train/loss"] for row in rows if "train/loss" in row]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run."""
    return load_file(folder / "model" / "model.safetensors")
