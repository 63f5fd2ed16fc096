"""In bf16 the masters stay fp32, and strategies agree as far as bf16 goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors import safe_open

from distributed.jobs import lines, losses
from distributed.runs import Runs, cases, named
from regauge.checkpoint.layout import name_of
from regauge.config import read

BF16: dict[str, Any] = {"execution": {"precision": "bf16"}}
TOLERANCE = 1e-3
"""A value of bf16 has 8 bits (0.4 %); a loss is a mean of many, so it is nearer than that."""


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
        [("mlm", 2, "zero1"), ("contrastive", 2, "fsdp")],
    ),
)
def test_strategies_agree_and_masters_are_fp32(
    runs: Runs, size: int, strategy: str, task: str, figure: Callable[[str, float], None]
) -> None:
    expected = losses(lines(runs.trained(1, task, **BF16)))
    folder = runs.trained(size, task, strategy=named(strategy), **BF16)
    found = losses(lines(folder))
    error = max(abs(a - b) / a for a, b in zip(expected, found, strict=True))
    figure(f"bf16 {task}", error)
    assert error < TOLERANCE
    assert expected != losses(lines(runs.trained(1, task))), "this is fp32"
    types = set()
    for path in (folder / "checkpoints" / name_of(12)).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            types |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert types == {"F32"}


def test_all_processes_of_a_run_compute_in_what_the_first_has_measured(runs: Runs) -> None:
    folder = runs.trained(2, "mlm", execution={"precision": "auto"})
    decided = read(folder / "probe" / "precision.json")["precision"]
    assert read(folder / "run.json")["execution"]["precision"] == decided
    same = runs.trained(2, "mlm", execution={"precision": decided})
    assert losses(lines(folder)) == losses(lines(same))
