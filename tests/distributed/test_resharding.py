"""A checkpoint does not depend on the strategy and the number of processes.

Two processes save with each strategy; one and four processes load with each strategy. Every loaded
tensor equals the tensor in memory at the save, and training continues with the same losses.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import lines, max_difference
from distributed.runs import STRATEGIES, Runs, cases, strategy_table
from regauge.run_folders.checkpoint_files import checkpoint_name

SAVED = 6
BASE: dict[str, Any] = {"output": {"checkpoint": {"every_steps": SAVED}}}
SOURCES = STRATEGIES[2]


@pytest.fixture(scope="module")
def save_run(runs: Runs) -> dict[str, tuple[Path, dict[str, str]]]:
    """Return a run of two processes with each strategy, and the hashes of its tensors."""
    return {name: save(runs, {"strategy": strategy_table(name)}) for name in SOURCES}


def save(runs: Runs, changes: dict[str, Any]) -> tuple[Path, dict[str, str]]:
    folder = runs.folder("saved")
    ranks = runs.job("hash_saved_states", 2, folder, "mlm", {**BASE, **changes})
    return folder, merge_ranks([hashes[SAVED] for hashes in ranks])


def merge_ranks(ranks: list[dict[str, str]]) -> dict[str, str]:
    """Merge the hashes of all ranks; ranks that hold the same tensor must agree."""
    merged: dict[str, str] = {}
    for rank in ranks:
        for name, value in rank.items():
            assert merged.setdefault(name, value) == value, f"ranks disagree on {name}"
    return merged


def load_run(
    runs: Runs, size: int, checkpoints: list[Path], changes: dict[str, Any]
) -> list[dict[str, str]]:
    data = str(runs.data["packed"])
    paths = [str(path) for path in checkpoints]
    arguments = (str(runs.folder("loaded")), data, "mlm", {**BASE, **changes}, paths)
    ranks = runs.world(size).run("hash_loaded_states", *arguments)
    return [merge_ranks([rank[number] for rank in ranks]) for number in range(len(paths))]


@pytest.mark.parametrize(
    ("size", "strategy"),
    cases(
        [(size, name) for size in (1, 4) for name in STRATEGIES[size]],
        [(1, "single"), (4, "hsdp")],
    ),
)
def test_every_loaded_tensor_equals_the_saved_one(
    runs: Runs, save_run: dict[str, tuple[Path, dict[str, str]]], size: int, strategy: str
) -> None:
    paths = [folder / "checkpoints" / checkpoint_name(SAVED) for folder, _ in save_run.values()]
    loaded_hashes = load_run(runs, size, paths, {"strategy": strategy_table(strategy)})
    expected = [hashes for _, hashes in save_run.values()]
    kinds = {name.split(".")[1] for name in expected[0] if name.startswith("optimizer.")}
    assert kinds == {"exp_avg", "exp_avg_sq"}
    assert loaded_hashes == expected
    assert loaded_hashes[0]["step"] == "6.0"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_the_state_of_other_optimizers_is_restored(runs: Runs, kind: str) -> None:
    optimizer: dict[str, Any] = {"optimizer": {"kind": kind}}
    folder, expected = save(runs, {"strategy": "zero1", **optimizer})
    path = folder / "checkpoints" / checkpoint_name(SAVED)
    assert any(name.startswith("optimizer.") for name in expected)
    for size, strategy in ((1, "single"), (4, "ddp"), (4, "zero1")):
        assert load_run(runs, size, [path], {"strategy": strategy, **optimizer}) == [expected]


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
def test_training_continues_with_the_same_losses(
    runs: Runs,
    save_run: dict[str, tuple[Path, dict[str, str]]],
    source: str,
    size: int,
    strategy: str,
    figure: Callable[[str, float], None],
) -> None:
    whole, _ = save_run[source]
    folder = runs.folder("resharded")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    for name in (checkpoint_name(12), "LATEST"):
        path = folder / "checkpoints" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    runs.job("train", size, folder, "mlm", {**BASE, "strategy": strategy_table(strategy)})
    step_lines = [line for line in lines(folder) if "train/loss" in line]
    assert [line["attempt"] for line in step_lines] == [1] * SAVED + [2] * (12 - SAVED)
    error = max_difference(whole, folder)
    figure("losses after resharding", error)
    assert error < 1e-5
