"""A resumed run equals the uninterrupted run, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distributed.jobs import lines, losses, max_difference, weights
from distributed.runs import STRATEGIES, Runs, cases, strategy_table
from distributed.test_equality import LONG, STEPS
from regauge.run_folders.checkpoint_files import LATEST, checkpoint_name

SAVED = 12


def interrupt_run(runs: Runs, whole: Path) -> Path:
    """Return a copy of a finished run that ends some steps after its first checkpoint."""
    folder = runs.folder("interrupted")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "checkpoints" / checkpoint_name(STEPS))
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()
    (folder / "checkpoints" / LATEST).write_text(checkpoint_name(SAVED) + "\n")
    kept_lines = [
        line
        for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        if json.loads(line)["step"] <= SAVED + 2
    ]
    (folder / "metrics.jsonl").write_text("".join(kept_lines))
    return folder


def assert_same(whole: Path, resumed: Path) -> None:
    """Assert that two finished runs have the same losses, metrics and weights, bit for bit."""
    expected, resumed_lines = lines(whole), lines(resumed)
    assert losses(resumed_lines) == losses(expected)
    checkpoints_by_run = [
        {name: value for name, value in line.items() if name.startswith("heldout/")}
        for line in (expected[-1], resumed_lines[-1])
    ]
    assert checkpoints_by_run[0] == checkpoints_by_run[1]
    assert [line["train/grad_norm"] for line in resumed_lines if "train/loss" in line] == [
        line["train/grad_norm"] for line in expected if "train/loss" in line
    ]
    before, after = weights(whole), weights(resumed)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def check_resume(
    runs: Runs, size: int, task: str, *, job: str = "train", **changes: Any
) -> tuple[Path, Path]:
    """Interrupt and resume a run; assert that it equals the whole one, and return both."""
    whole = runs.train_once(size, task, job=job, **changes)
    resumed = interrupt_run(runs, whole)
    runs.job(job, size, resumed, task, changes)
    assert_same(whole, resumed)
    return whole, resumed


FIRST = [("mlm", 2, "fsdp"), ("mlm", 3, "zero1"), ("mlm", 4, "hsdp")]
FIRST += [("contrastive", 3, "ddp"), ("dpo", 2, "zero1")]
"""The cases that `make test` runs."""
SOME = {
    "mlm": [(size, name) for size in (1, 2, 3, 4) for name in STRATEGIES[size]],
    "contrastive": [(3, "ddp"), (4, "hsdp")],
    "several": [(2, "fsdp"), (3, "zero1")],
    "balanced": [(2, "fsdp"), (4, "hsdp")],
    "multi-label": [(1, "single"), (2, "fsdp"), (4, "zero1")],
    "tokens": [(1, "single"), (2, "zero1"), (4, "hsdp")],
    "classify": [(3, "zero1")],
    "frozen": [(2, "fsdp")],
    "sft": [(3, "zero1"), (2, "fsdp")],
    "last-layer": [(1, "single"), (2, "fsdp"), (3, "zero1"), (4, "hsdp")],
    "clm": [(4, "ddp")],
    "rank": [(4, "ddp")],
    "apart": [(2, "fsdp")],
    "dpo": [(2, "zero1"), (1, "single"), (2, "fsdp"), (4, "hsdp"), (3, "zero1")],
    "next-sentence": [(3, "ddp")],
    "negatives": [(4, "hsdp"), (3, "zero1")],
    "triplet": [(3, "ddp")],
    "similarity": [(2, "zero1"), (4, "hsdp")],
    "distill": [(2, "fsdp"), (4, "ddp")],
}
CASES = [(task, *case) for task, some in SOME.items() for case in some]


@pytest.mark.parametrize(("task", "size", "strategy"), cases(CASES, FIRST))
def test_a_resumed_run_equals_the_uninterrupted_one(
    runs: Runs, size: int, strategy: str, task: str
) -> None:
    _, resumed = check_resume(runs, size, task, strategy=strategy_table(strategy), **LONG)
    attempts = {line["attempt"] for line in lines(resumed) if line["step"] > SAVED}
    assert attempts == {2}, "the steps after the checkpoint were not computed again"


@pytest.mark.parametrize(
    ("kind", "size", "strategy"),
    cases(
        [
            *((kind, 3, "zero1") for kind in ("sgd", "adafactor", "lamb")),
            *(("lamb", *case) for case in ((1, "single"), (3, "ddp"), (3, "fsdp"), (4, "hsdp"))),
        ],
        [],
    ),
)
def test_a_resume_is_exact_with_other_optimizers(
    runs: Runs, kind: str, size: int, strategy: str
) -> None:
    check_resume(runs, size, "mlm", optimizer={"kind": kind}, strategy=strategy, **LONG)


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "size", "amount"),
    cases(
        [
            ("mlm", 1, "none"),
            ("contrastive", 1, "none"),
            ("mlm", 1, "full"),
            ("contrastive", 1, "selective"),
            ("mlm", 2, "none"),
        ],
        [("contrastive", 1, "selective")],
    ),
)
def test_native_dropout_is_exact_after_a_resume_on_the_same_device(
    runs: Runs, size: int, amount: str, task: str
) -> None:
    """Native dropout is exact only with the same world size and microbatches."""
    changes: dict[str, Any] = {
        "model": {"dropout_kind": "native"},
        "execution": {"activation_checkpointing": amount},
        **LONG,
    }
    whole, _ = check_resume(runs, size, task, **changes)
    assert losses(lines(whole)) != losses(lines(runs.train_once(1, task, **LONG)))


@pytest.mark.full
def test_native_dropout_is_exact_with_activation_checkpointing(runs: Runs) -> None:
    native: dict[str, Any] = {"model": {"dropout_kind": "native"}, **LONG}
    whole, *others = (
        runs.train_once(1, "mlm", execution={"activation_checkpointing": amount}, **native)
        for amount in ("none", "full", "selective")
    )
    assert all(max_difference(whole, other) < 1e-5 for other in others)


@pytest.mark.parametrize(
    ("task", "size"), cases([("mlm", 1), ("mlm", 2), ("contrastive", 2)], [("mlm", 2)])
)
def test_a_background_save_equals_a_blocking_one(runs: Runs, size: int, task: str) -> None:
    background = {"checkpoint": {"every_steps": 12, "async_save": True}}
    whole = runs.train_once(size, task, **LONG)
    folder = runs.train_once(size, task, stop=LONG["stop"], output=background)
    for step in (SAVED, STEPS):
        blocking, in_background = (
            tensors_of(path / "checkpoints" / checkpoint_name(step)) for path in (whole, folder)
        )
        assert blocking.keys() == in_background.keys()
        assert blocking
        for name, value in blocking.items():
            assert torch.equal(value, in_background[name]), name


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint of replicas; each is complete in one of the files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors
