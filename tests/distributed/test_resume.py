"""A run that goes on from its checkpoint is the run that was never stopped, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distributed.jobs import lines, losses, weights
from distributed.runs import STRATEGIES, Runs, cases, named
from distributed.test_equality import LONG, STEPS
from regauge.checkpoint.layout import LATEST, name_of

SAVED = 12


def interrupted(runs: Runs, whole: Path) -> Path:
    """Return a copy of a finished run as it was after its first checkpoint and some steps more."""
    folder = runs.folder("interrupted")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "checkpoints" / name_of(STEPS))
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()
    (folder / "checkpoints" / LATEST).write_text(name_of(SAVED) + "\n")
    kept = [
        line
        for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        if json.loads(line)["step"] <= SAVED + 2
    ]
    (folder / "metrics.jsonl").write_text("".join(kept))
    return folder


def assert_same(whole: Path, resumed: Path) -> None:
    """Assert that two finished runs have the same losses, metrics and weights, bit for bit."""
    expected, found = lines(whole), lines(resumed)
    assert losses(found) == losses(expected)
    told = [
        {name: value for name, value in line.items() if name.startswith("heldout/")}
        for line in (expected[-1], found[-1])
    ]
    assert told[0] == told[1]
    assert [line["train/gradient_norm"] for line in found if "train/loss" in line] == [
        line["train/gradient_norm"] for line in expected if "train/loss" in line
    ]
    before, after = weights(whole), weights(resumed)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


FIRST = [("mlm", 2, "fsdp"), ("mlm", 3, "zero1"), ("mlm", 4, "hsdp")]
FIRST += [("contrastive", 3, "ddp"), ("several", 2, "fsdp")]
"""What `make test` proves of every change."""
CASES = [("mlm", size, name) for size in (1, 2, 3, 4) for name in STRATEGIES[size]] + FIRST[3:]
CASES += [("classify", 3, "zero1"), ("frozen", 2, "fsdp"), ("sft", 3, "zero1")]
CASES += [("contrastive", 4, "hsdp"), ("clm", 4, "ddp"), ("rank", 4, "ddp"), ("apart", 2, "fsdp")]
CASES += [("next-sentence", 3, "ddp"), ("sft", 2, "fsdp"), ("several", 3, "zero1")]


@pytest.mark.parametrize(("task", "size", "strategy"), cases(CASES, FIRST))
def test_the_resumed_run_is_the_uninterrupted_one(
    runs: Runs, size: int, strategy: str, task: str
) -> None:
    changes = {"strategy": named(strategy), **LONG}
    whole = runs.trained(size, task, **changes)
    resumed = interrupted(runs, whole)
    runs.job("train", size, resumed, task, changes)
    assert_same(whole, resumed)
    attempts = {line["attempt"] for line in lines(resumed) if line["step"] > SAVED}
    assert attempts == {2}, "the steps after the checkpoint were not computed again"


@pytest.mark.parametrize(
    ("kind", "size", "strategy"),
    cases(
        [
            *((kind, 3, "zero1") for kind in ("sgd", "adafactor", "lamb")),
            *(("lamb", *case) for case in ((1, "single"), (3, "ddp"), (3, "fsdp"), (4, "hsdp"))),
        ],
        [("lamb", 3, "zero1")],
    ),
)
def test_so_it_is_with_other_optimizers(runs: Runs, kind: str, size: int, strategy: str) -> None:
    changes: dict[str, Any] = {"optimizer": {"kind": kind}, "strategy": strategy, **LONG}
    whole = runs.trained(size, "mlm", **changes)
    resumed = interrupted(runs, whole)
    runs.job("train", size, resumed, "mlm", changes)
    assert_same(whole, resumed)


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
        [("mlm", 2, "none"), ("contrastive", 1, "selective")],
    ),
)
def test_native_dropout_is_the_same_after_a_resume_in_the_same_place(
    runs: Runs, size: int, amount: str, task: str
) -> None:
    """The framework's dropout promises this much; other sizes and microbatches may differ."""
    changes: dict[str, Any] = {
        "model": {"dropout_kind": "native"},
        "execution": {"activation_checkpointing": amount},
        **LONG,
    }
    whole = runs.trained(size, task, **changes)
    resumed = interrupted(runs, whole)
    runs.job("train", size, resumed, task, changes)
    assert_same(whole, resumed)
    assert losses(lines(whole)) != losses(lines(runs.trained(1, task, **LONG)))


def test_native_dropout_is_the_same_when_activations_are_computed_again(runs: Runs) -> None:
    native: dict[str, Any] = {"model": {"dropout_kind": "native"}, **LONG}
    found = [
        losses(
            lines(runs.trained(1, "mlm", execution={"activation_checkpointing": amount}, **native))
        )
        for amount in ("none", "full", "selective")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(
    ("task", "size"), cases([("mlm", 1), ("mlm", 2), ("contrastive", 2)], [("mlm", 2)])
)
def test_a_background_save_holds_what_a_blocking_one_does(runs: Runs, size: int, task: str) -> None:
    background = {"checkpoint": {"every_steps": 12, "writing": "background"}}
    whole = runs.trained(size, task, **LONG)
    folder = runs.trained(size, task, stop=LONG["stop"], output=background)
    for step in (SAVED, STEPS):
        blocking, beside = (
            tensors_of(path / "checkpoints" / name_of(step)) for path in (whole, folder)
        )
        assert blocking.keys() == beside.keys()
        assert blocking
        for name, value in blocking.items():
            assert torch.equal(value, beside[name]), name


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint that replicas wrote: each one whole, in some file."""
    found: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        found |= load_file(path)
    return found
