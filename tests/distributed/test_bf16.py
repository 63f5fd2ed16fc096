"""In bf16 master weights stay fp32, and strategies agree to the precision of bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors import safe_open

from distributed.jobs import lines, losses, max_difference
from distributed.runs import Runs, cases, strategy_table
from regauge.config import read
from regauge.run_folders.checkpoint_files import checkpoint_name

BF16: dict[str, Any] = {"execution": {"precision": "bf16"}}
TOLERANCE = 1e-3
"""A bf16 value has 8 bits (0.4 %); a loss is a mean of many values, so its error is smaller."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "size", "strategy"),
    cases(
        [
            ("mlm", 1, "fsdp"),
            ("mlm", 2, "ddp"),
            ("mlm", 2, "zero1"),
            ("mlm", 2, "fsdp"),
            ("mlm", 4, "hsdp"),
            ("clm", 2, "fsdp"),
            ("contrastive", 2, "fsdp"),
        ],
        [("contrastive", 2, "fsdp")],
    ),
)
def test_strategies_agree_and_masters_are_fp32(
    runs: Runs, size: int, strategy: str, task: str, figure: Callable[[str, float], None]
) -> None:
    alone = runs.train_once(1, task, **BF16)
    folder = runs.train_once(size, task, strategy=strategy_table(strategy), **BF16)
    error = max_difference(alone, folder)
    figure(f"bf16 {task}", error)
    assert error < TOLERANCE
    assert max_difference(alone, runs.train_once(1, task)) > 0, "this is fp32"
    types = set()
    for path in (folder / "checkpoints" / checkpoint_name(12)).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            types |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert types == {"F32"}


def test_all_processes_use_the_precision_measured_by_process_0(runs: Runs) -> None:
    folder = runs.train_once(2, "mlm", execution={"precision": "auto"})
    decided = read(folder / "probe" / "precision.json")["precision"]
    assert read(folder / "run.json")["execution"]["precision"] == decided
    same = runs.train_once(2, "mlm", execution={"precision": decided})
    assert losses(lines(folder)) == losses(lines(same))
