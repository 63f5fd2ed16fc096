"""A mixture of datasets gives the same run on any world, and after a stop."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.jobs import lines, max_difference
from distributed.runs import Runs, cases, strategy_table
from distributed.test_equality import TOLERANCE
from distributed.test_resume import assert_same
from regauge.run_folders.checkpoint_files import LATEST, checkpoint_name

STEPS = 12


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings of a run with three of ten rows from a second dataset."""
    old = datasets.write_packed(tmp_path_factory.mktemp("mix") / "old", 9, 6, seed=5)
    return {"data": {"mix": [{"path": str(old), "fraction": 0.3}]}, "stop": {"steps": STEPS}}


@pytest.mark.parametrize(("size", "strategy"), cases([(2, "fsdp"), (3, "zero1")], [(3, "zero1")]))
def test_a_mixture_trains_equally_on_any_world(
    runs: Runs, mix: dict[str, Any], size: int, strategy: str
) -> None:
    alone = runs.train_once(1, "mlm", **mix)
    folder = runs.train_once(size, "mlm", strategy=strategy_table(strategy), **mix)
    assert max_difference(alone, folder) < TOLERANCE
    assert max_difference(alone, runs.train_once(1, "mlm", stop={"steps": STEPS})) > 0
    run_lines = lines(folder)
    loss_names = [{name for name in line if name.endswith("/loss")} for line in run_lines]
    assert {"heldout/loss", "heldout.old/loss"} in loss_names
    counts = [line["heldout.old/items"] for line in run_lines if "heldout.old/items" in line]
    assert counts
    assert counts[0] != run_lines[0]["heldout/items"]


def test_a_resumed_mixture_equals_an_uninterrupted_one(runs: Runs, mix: dict[str, Any]) -> None:
    whole = runs.train_once(2, "mlm", strategy="ddp", **mix)
    folder = runs.folder("stopped")
    _until(whole, folder, 4)
    runs.job("train", 2, folder, "mlm", {"strategy": "ddp", **mix})
    assert_same(whole, folder)


def _until(whole: Path, folder: Path, step: int) -> None:
    """Copy a finished run without the files after an earlier checkpoint."""
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(folder / "checkpoints" / checkpoint_name(later), ignore_errors=True)
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()
    (folder / "checkpoints" / LATEST).write_text(checkpoint_name(step) + "\n")
