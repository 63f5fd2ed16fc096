"""A checkpoint belongs to no strategy and no number of processes.

Saved under each strategy by two processes, loaded under each by one and by four: every tensor is
the one that was in memory when it was saved, and training goes on with the same losses.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import lines, losses
from distributed.runs import STRATEGIES, Runs, cases, named
from regauge.checkpoint.layout import name_of

SAVED = 6
BASE: dict[str, Any] = {"output": {"checkpoint": {"every_steps": SAVED}}}
SOURCES = STRATEGIES[2]


@pytest.fixture(scope="module")
def saved(runs: Runs) -> dict[str, tuple[Path, dict[str, str]]]:
    """Return the run of two processes under each strategy, and the hashes of its tensors."""
    return {name: save(runs, {"strategy": named(name)}) for name in SOURCES}


def save(runs: Runs, changes: dict[str, Any]) -> tuple[Path, dict[str, str]]:
    folder = runs.folder("saved")
    ranks = runs.job("saved_hashes", 2, folder, "mlm", {**BASE, **changes})
    return folder, everywhere([found[SAVED] for found in ranks])


def everywhere(ranks: list[dict[str, str]]) -> dict[str, str]:
    """Return the hashes of all ranks as one; where several hold a tensor, they agree on it."""
    found: dict[str, str] = {}
    for rank in ranks:
        for name, value in rank.items():
            assert found.setdefault(name, value) == value, f"ranks disagree on {name}"
    return found


def loaded(
    runs: Runs, size: int, checkpoints: list[Path], changes: dict[str, Any]
) -> list[dict[str, str]]:
    data = str(runs.data["packed"])
    paths = [str(path) for path in checkpoints]
    arguments = (str(runs.folder("loaded")), data, "mlm", {**BASE, **changes}, paths)
    ranks = runs.world(size).run("loaded_hashes", *arguments)
    return [everywhere([rank[number] for rank in ranks]) for number in range(len(paths))]


@pytest.mark.parametrize(
    ("size", "strategy"),
    cases(
        [(size, name) for size in (1, 4) for name in STRATEGIES[size]],
        [(1, "single"), (1, "fsdp"), (4, "zero1"), (4, "hsdp")],
    ),
)
def test_every_tensor_is_the_one_that_was_saved(
    runs: Runs, saved: dict[str, tuple[Path, dict[str, str]]], size: int, strategy: str
) -> None:
    paths = [folder / "checkpoints" / name_of(SAVED) for folder, _ in saved.values()]
    found = loaded(runs, size, paths, {"strategy": named(strategy)})
    expected = [hashes for _, hashes in saved.values()]
    kinds = {name.split(".")[1] for name in expected[0] if name.startswith("optimizer.")}
    assert kinds == {"exp_avg", "exp_avg_sq"}
    assert found == expected
    assert found[0]["step"] == "6.0"


@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_so_is_the_state_of_other_optimizers(runs: Runs, kind: str) -> None:
    optimizer: dict[str, Any] = {"optimizer": {"kind": kind}}
    folder, expected = save(runs, {"strategy": "zero1", **optimizer})
    path = folder / "checkpoints" / name_of(SAVED)
    assert any(name.startswith("optimizer.") for name in expected)
    for size, strategy in ((1, "single"), (4, "ddp"), (4, "zero1")):
        assert loaded(runs, size, [path], {"strategy": strategy, **optimizer}) == [expected]


@pytest.mark.parametrize(
    ("source", "size", "strategy"),
    cases(
        [
            ("ddp", 1, "single"),
            ("zero1", 1, "ddp"),
            ("fsdp", 1, "zero1"),
            ("shard-grad-op", 1, "fsdp"),
            ("fsdp", 4, "ddp"),
            ("shard-grad-op", 4, "zero1"),
            ("ddp", 4, "fsdp"),
            ("zero1", 4, "shard-grad-op"),
            ("fsdp", 4, "hsdp"),
        ],
        [("ddp", 1, "single"), ("shard-grad-op", 1, "fsdp"), ("fsdp", 4, "hsdp")],
    ),
)
def test_training_goes_on_with_the_same_losses(
    runs: Runs,
    saved: dict[str, tuple[Path, dict[str, str]]],
    source: str,
    size: int,
    strategy: str,
    figure: Callable[[str, float], None],
) -> None:
    whole, _ = saved[source]
    folder = runs.folder("resharded")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    for name in (name_of(12), "LATEST"):
        path = folder / "checkpoints" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    runs.job("train", size, folder, "mlm", {**BASE, "strategy": named(strategy)})
    found = [line for line in lines(folder) if "train/loss" in line]
    assert [line["attempt"] for line in found] == [1] * SAVED + [2] * (12 - SAVED)
    expected = losses(lines(whole))
    error = max(abs(a - b) / a for a, b in zip(expected, losses(found), strict=True))
    figure("losses after resharding", error)
    assert error < 1e-5
