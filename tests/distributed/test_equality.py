"""Losses depend neither on the strategy nor on the number of processes.

Every run of a task starts from the same seed, has dropout on, and gives the losses of the run of
one process to 1e-5, for 20 steps, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distributed.jobs import lines, losses, max_difference
from distributed.runs import ACCELERATOR, FULL, STRATEGIES, TASKS, Runs, cases, strategy_table

CheckLosses = Callable[..., None]
STEPS = 20
LONG: dict[str, Any] = {"stop": {"steps": STEPS}, "output": {"checkpoint": {"every_steps": 12}}}
QUICK: dict[str, Any] = {"output": {"checkpoint": {"every_steps": 1000}}}
TOLERANCE = 1e-5
EVERY = [(size, name) for size in (1, 2, 3, 4) for name in STRATEGIES[size]]
FIRST = [(2, "ddp"), (2, "fsdp"), (3, "zero1"), (4, "hsdp")]
"""Cases of these tasks that `make test` runs; for most other tasks it runs the first case."""
LATER = (
    *("apart", "balanced", "classify", "distill", "frozen", "grouped", "last-layer", "llama"),
    *("multi-label", "next-sentence", "rank", "several", "sft", "similarity", "triplet"),
)
"""Tasks with unit tests; `make test-rest` runs them on several processes."""
SOME = {
    "clm": [(2, "fsdp"), (3, "zero1"), (4, "ddp"), (4, "hsdp")],
    "contrastive": [(2, "zero1"), (2, "shard-grad-op"), (3, "ddp"), (3, "fsdp"), (4, "hsdp")],
    "grouped": [(3, "ddp"), (4, "fsdp")],
    "negatives": [(2, "fsdp"), (2, "zero1"), (3, "ddp"), (4, "hsdp"), (4, "shard-grad-op")],
    "triplet": [(3, "zero1"), (2, "fsdp"), (4, "ddp"), (4, "hsdp")],
    "similarity": [(3, "ddp"), (2, "zero1"), (4, "fsdp"), (4, "hsdp")],
    "distill": [(2, "zero1"), (3, "ddp"), (4, "fsdp"), (4, "hsdp")],
    "balanced": [(2, "ddp"), (1, "fsdp"), (2, "fsdp"), (3, "zero1"), (4, "hsdp"), (4, "zero1")],
    "classify": [(3, "zero1"), (2, "fsdp"), (4, "ddp")],
    "multi-label": [(4, "hsdp"), (1, "fsdp"), (2, "fsdp"), (2, "ddp"), (3, "zero1"), (4, "zero1")],
    "rank": [(2, "fsdp"), (3, "zero1"), (4, "ddp"), (4, "hsdp")],
    "frozen": [(2, "fsdp"), (3, "zero1")],
    "last-layer": [(2, "fsdp"), (2, "zero1"), (3, "ddp"), (4, "hsdp"), (4, "shard-grad-op")],
    "apart": [(3, "zero1"), (2, "fsdp")],
    "llama": [(2, "ddp"), (4, "shard-grad-op")],
    "sft": [(3, "zero1"), (2, "fsdp")],
    "tokens": [(2, "zero1"), (1, "fsdp"), (2, "ddp"), (2, "fsdp"), (3, "zero1"), (4, "hsdp")],
    "dpo": [(2, "fsdp"), (2, "zero1"), (3, "ddp"), (4, "shard-grad-op"), (4, "hsdp")],
    "next-sentence": [(3, "zero1"), (2, "fsdp"), (4, "ddp")],
    "several": [(2, "fsdp"), (2, "zero1"), (3, "ddp"), (4, "hsdp")],
}
CASES = [("mlm", *case) for case in EVERY]
CASES += [(task, *case) for task, some in SOME.items() for case in some]
QUICKEST = [("mlm", *case) for case in FIRST]
QUICKEST += [(task, *some[0]) for task, some in SOME.items() if task not in LATER]


@pytest.fixture
def check_losses(runs: Runs, figure: Callable[[str, float], None]) -> CheckLosses:
    """Return a function that compares a run with the run of one process, step by step."""

    def check(
        name: str, size: int, task: str, changes: dict[str, Any], base: dict[str, Any] = LONG
    ) -> None:
        alone = runs.train_once(1, task, **base)
        expected = losses(lines(alone))
        assert len(expected) == base["stop"]["steps"]
        assert min(expected) > 0.1, "a loss near 0 has no relative precision"
        half = len(expected) // 2
        assert sum(expected[half:]) < sum(expected[:half]), "nothing was learnt or compared"
        difference = max_difference(alone, runs.train_once(size, task, **{**base, **changes}))
        figure(name, difference)
        assert difference < TOLERANCE

    return check


@pytest.mark.parametrize(("task", "size", "strategy"), cases(CASES, QUICKEST))
def test_every_strategy_and_size_gives_the_same_losses(
    check_losses: CheckLosses,
    size: int,
    strategy: str,
    task: str,
    supports: Callable[[str, str, str], None],
) -> None:
    """4 microbatches on 3 processes: 2, 1 and 1 per process."""
    check_losses(f"equality {task}", size, task, {"strategy": strategy_table(strategy)})
    if task != "several":
        supports(ACCELERATOR, strategy_table(strategy)["kind"], TASKS[task]["task"]["kind"])


@pytest.mark.parametrize(
    "strategy", ["zero1", *(pytest.param(s, marks=FULL) for s in ("ddp", "fsdp"))]
)
def test_five_microbatches_on_two_processes(check_losses: CheckLosses, strategy: str) -> None:
    base = {"batch": {"rows": 10}, "stop": {"steps": STEPS}, **QUICK}
    check_losses("equality 5 microbatches on 2", 2, "mlm", {"strategy": strategy}, base)


@pytest.mark.parametrize(
    ("task", "size", "rows"),
    cases(
        [
            (task, *case)
            for task in (
                *("mlm", "clm", "contrastive", "sft", "next-sentence", "dpo"),
                *("negatives", "triplet", "similarity", "distill"),
            )
            for case in ((1, 1), (1, 8), (2, 4))
        ],
        [("mlm", 1, 8), ("clm", 1, 8), ("contrastive", 1, 8), ("contrastive", 2, 4)],
    ),
)
def test_losses_do_not_depend_on_the_microbatch_size(
    check_losses: CheckLosses, size: int, rows: int, task: str
) -> None:
    changes = {**QUICK, "batch": {"microbatch_rows": rows}}
    check_losses("equality of microbatches", size, task, changes)


@pytest.mark.parametrize(
    ("task", "size", "amount"),
    cases(
        [
            *(("mlm", size, amount) for size in (1, 2) for amount in ("selective", "full")),
            *(("contrastive", size, amount) for size in (1, 2) for amount in ("selective", "full")),
            *((task, 2, "full") for task in ("negatives", "similarity", "distill")),
            ("clm", 1, "full"),
            *(("dpo", size, amount) for size in (1, 2) for amount in ("selective", "full")),
        ],
        [("mlm", 1, "selective"), ("contrastive", 1, "full")],
    ),
)
def test_activation_checkpointing_changes_no_loss(
    check_losses: CheckLosses, size: int, task: str, amount: str
) -> None:
    execution = {"execution": {"activation_checkpointing": amount}}
    changes = {**QUICK, **execution, "strategy": "single" if size == 1 else "fsdp"}
    check_losses("equality of activation checkpointing", size, task, changes)


@pytest.mark.parametrize(
    ("kind", "rate", "size", "strategy"),
    cases(
        [
            *(("sgd", 0.1, 2, strategy) for strategy in ("ddp", "zero1")),
            *(("adafactor", 0.01, 2, strategy) for strategy in ("ddp", "zero1")),
            *(("lamb", 0.01, 2, strategy) for strategy in ("ddp", "zero1", "fsdp")),
            *(("lamb", 0.01, *case) for case in ((1, "fsdp"), (3, "fsdp"), (4, "hsdp"))),
        ],
        [("adafactor", 0.01, 2, "zero1"), ("lamb", 0.01, 2, "fsdp")],
    ),
)
def test_other_optimizers(
    check_losses: CheckLosses, kind: str, rate: float, size: int, strategy: str
) -> None:
    """LAMB with the norm of a shard would change the updates from the first step on."""
    base = {**LONG, **QUICK, "optimizer": {"kind": kind, "learning_rate": rate}}
    check_losses(f"equality {kind}", size, "mlm", {"strategy": strategy}, base)
